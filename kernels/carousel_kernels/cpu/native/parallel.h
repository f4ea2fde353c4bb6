/* How the operators of this library run on several threads: on PyTorch's own OpenMP runtime, see carousel_native.c.
 *
 * The threads of a team go through phases together. In each they take items from one counter, which never goes back: a
 * phase has the numbers from where the one before ended. Whatever depends on another thread's items has a wait between.
 */
#ifndef CAROUSEL_PARALLEL_H
#define CAROUSEL_PARALLEL_H

#include <sched.h>
#include <stdint.h>

/* Bytes of whole cache lines. */
static inline int64_t carousel_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

#define SPINS 4000 /* looks at a barrier before the CPU is offered to others; some 50 us */

struct carousel_team {
    int64_t next __attribute__((aligned(64)));
    int32_t arrived __attribute__((aligned(64)));
    int32_t waits __attribute__((aligned(64)));
};

/* One thread's place in the phases. */
struct carousel_member {
    struct carousel_team *team;
    int32_t threads, index;
    int64_t begin, end; /* of the phase */
};

/* work(member, job) on so many threads at once, or fewer, where the runtime has no more; on the calling one alone if
 * there is no runtime. Returns when all are done. */
void carousel_run(void (*work)(struct carousel_member *, void *), void *job, int threads);

static inline void carousel_phase(struct carousel_member *member, int64_t items) {
    member->begin = member->end;
    member->end += items;
}

/* Takes items of the phase, numbered from 0: how many, from *first on; 0 when none are left. A thread takes a share of
 * what is left, no fewer than least nor more than most: long runs first, and in the end no long wait for another. */
static inline int64_t carousel_take(struct carousel_member *member, int64_t least, int64_t most, int64_t *first) {
    int64_t next = __atomic_load_n(&member->team->next, __ATOMIC_RELAXED), count;
    do {
        const int64_t left = member->end - next;
        if (left <= 0) return 0;
        count = left / (2 * member->threads);
        if (count > most) count = most;
        if (count < least) count = least;
        if (count > left || member->threads == 1) count = left;
    } while (!__atomic_compare_exchange_n(&member->team->next, &next, next + count, 0, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    *first = next - member->begin;
    return count;
}

/* Until all threads of the team are here. */
static inline void carousel_wait(const struct carousel_member *member) {
    struct carousel_team *team = member->team;
    if (member->threads == 1) return;
    const int32_t waits = __atomic_load_n(&team->waits, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == member->threads) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->waits, waits + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&team->waits, __ATOMIC_ACQUIRE) == waits; spins++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (spins >= SPINS) sched_yield();
    }
}

#endif
