/* Operators of the CPU backend on float32 tensors, behind a plain C interface of pointers, strides and integers.
 *
 * Threads are those of the OpenMP runtime that PyTorch runs on: a second pool would fight with the first, whose workers
 * spin for a while after each job. The library links against no OpenMP; it is handed that runtime's GOMP_parallel, and
 * splits the work itself, by a counter from which every thread takes the next item.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "compiler.h"
#include "operators.h"

#define ABI_VERSION 6

#define LINE 16          /* floats of a cache line */
#define AHEAD 192        /* floats of each token of a block that a decode calls for ahead of its reading; measured */
#define SLACK 8.0f       /* by how much, in base 2, scores may exceed the maximum that they are taken off; see weigh_row */
#define MAX_DIM 256      /* head size; a multiple of 16 */
#define SOON 3           /* tokens ahead of which the cache's lines are called for, to be written */
#define MAX_GROUP 32     /* query heads per KV head */
#define MAX_DECODE 8192  /* floats of the queries that a decode handles together; >= MAX_GROUP * MAX_DIM */

_Static_assert(MAX_GROUP * MAX_DIM <= MAX_DECODE && MAX_GROUP <= MAX_ROWS, "a group fits a tile and a decode");

#if defined(__x86_64__)
#if defined(__clang__)
#define FULL_WIDTH ""
#else
#define FULL_WIDTH ",prefer-vector-width=512"
#endif
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma" FULL_WIDTH)))
#define VL 16
#define MAXIMUM _mm512_max_ps
#define ANY_ABOVE(a, b) (_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0)
#define WIDE 4
#include "kernels.h"
#define NAME(x) x##_dots
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512bf16,avx2,fma" FULL_WIDTH)))
#define VL 16
#define MAXIMUM _mm512_max_ps
#define ANY_ABOVE(a, b) (_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0)
#define WIDE 4
#define DOTS
#include "kernels.h"
#undef DOTS
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define VL 8
#define MAXIMUM _mm256_max_ps
#define ANY_ABOVE(a, b) (_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0)
#define WIDE 2
#include "kernels.h"
#else
#include <arm_neon.h>
#endif
#define NAME(x) x##_base
#define TARGET
#define VL 4
#if defined(__aarch64__)
#define WIDE 4
#define MAXIMUM vmaxq_f32
#define ANY_ABOVE(a, b) (vmaxvq_u32(vcgtq_f32(a, b)) != 0)
#else
#define WIDE 2
#define MAXIMUM _mm_max_ps
#define ANY_ABOVE(a, b) (_mm_movemask_ps(_mm_cmpgt_ps(a, b)) != 0)
#endif
#include "kernels.h"

const struct operators *carousel_operators = &operators_base;
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_threads)(void);

/* Give the addresses of GOMP_parallel and omp_get_num_threads (NULL: run on the calling thread alone), the widest
 * vectors to use, in bits (0: as wide as the CPU has them), and whether dot products of bfloat16 may be used where it has
 * them. Returns the width that is used. */
EXPORT int carousel_init(void *parallel, void *threads, int max_bits, int dots) {
    const int both = parallel != NULL && threads != NULL;
    gomp_parallel = both ? (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel : NULL;
    omp_threads = both ? (int (*)(void))threads : NULL;
    carousel_operators = &operators_base;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int limit = max_bits > 0 ? max_bits : 512;
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512cd");
    if (limit >= 512 && avx512) {
        carousel_operators = dots && carousel_cpu_has(CPU_AVX512_BF16) ? &operators_dots : &operators_avx512;
        return 512;
    }
    if (limit >= 256 && avx2) {
        carousel_operators = &operators_avx2;
        return 256;
    }
#endif
    (void)max_bits, (void)dots;
    return 128;
}

/* Whether carousel_init has chosen dot products of bfloat16. */
EXPORT int carousel_has_dots(void) {
#if defined(__x86_64__)
    return carousel_operators == &operators_dots;
#else
    return 0;
#endif
}

EXPORT int carousel_abi(void) { return ABI_VERSION; }

struct team_job {
    void (*work)(struct carousel_member *, void *);
    void *job;
    struct carousel_team team;
    int32_t members;
};

static void join_team(void *data) {
    struct team_job *job = data;
    struct carousel_member member = {.team = &job->team, .threads = omp_threads != NULL ? omp_threads() : 1};
    member.index = __atomic_fetch_add(&job->members, 1, __ATOMIC_RELAXED);
    job->work(&member, job->job);
}

void carousel_run(void (*work)(struct carousel_member *, void *), void *job, int threads) {
    struct team_job all = {.work = work, .job = job};
    if (threads > 1 && gomp_parallel != NULL) {
        gomp_parallel(join_team, &all, (unsigned)threads, 0);
    } else {
        struct carousel_member alone = {.team = &all.team, .threads = 1};
        work(&alone, job);
    }
}

/* ---- operators on rows ---- */

void carousel_rows(struct carousel_member *member, rows_operator operator, const void *arguments, int64_t rows) {
    const int64_t least = (rows + 8 * member->threads - 1) / (8 * member->threads);
    int64_t first, count;
    carousel_phase(member, rows);
    while ((count = carousel_take(member, least, INT64_MAX, &first)) > 0) operator(arguments, first, first + count);
}

struct rows_job {
    rows_operator operator;
    const void *arguments;
    int64_t rows;
};

static void rows_work(struct carousel_member *member, void *data) {
    const struct rows_job *job = data;
    carousel_rows(member, job->operator, job->arguments, job->rows);
}

static void run_rows(rows_operator operator, const void *arguments, int64_t rows, int64_t width, int threads) {
    struct rows_job job = {operator, arguments, rows};
    if (rows > 0) carousel_run(rows_work, &job, rows * width < SMALL_JOB ? 1 : threads);
}

/* x [rows / inner, inner, width], inner rows adjacent, -> out, dense. */
EXPORT void carousel_rms_norm(const float *x, int64_t stride, int64_t inner, const float *weight, float *out,
                              int64_t rows, int width, float eps, int threads) {
    const struct rows a = {.x = x, .x_stride = stride, .inner = inner, .weight = weight, .out = out,
                           .out_stride = inner * width, .width = width, .eps = eps};
    run_rows(carousel_operators->rms_norm, &a, rows, width, threads);
}

/* residual += x, out = its norm; both dense. */
EXPORT void carousel_add_rms_norm(const float *x, int64_t stride, float *residual, const float *weight, float *out,
                                  int64_t rows, int width, float eps, int threads) {
    const struct rows a = {.x = x, .x_stride = stride, .residual = residual, .weight = weight, .out = out,
                           .width = width, .eps = eps};
    run_rows(carousel_operators->add_rms_norm, &a, rows, width, threads);
}

/* x [rows, 2 width] -> out [rows, width]. gelu: the tanh approximation instead of SiLU. */
EXPORT void carousel_gated(const float *x, int64_t stride, float *out, int64_t rows, int width, int gelu, int threads) {
    const struct rows a = {.x = x, .x_stride = stride, .out = out, .out_stride = width, .width = width};
    const rows_operator operator = gelu ? carousel_operators->gelu_tanh_mul : carousel_operators->silu_mul;
    run_rows(operator, &a, rows, 4 * (int64_t)width, threads);
}

/* tokens [rows]: where in x [rows, width], stride floats between rows, the first of the largest is; -1 for a row with NaN,
 * positive infinity, or nothing finite. */
EXPORT void carousel_largest(const float *x, int64_t stride, int64_t *tokens, int64_t rows, int width, int threads) {
    const struct maxima a = {.x = x, .stride = stride, .tokens = tokens, .width = width};
    run_rows(carousel_operators->largest, &a, rows, width, rows > 1 ? threads : 1);
}

/* Rotates q [tokens, heads, dim] in place, writes k, rotated, and v [tokens, kv_heads, dim] to their slots. Strides are
 * of tokens, in floats; heads are adjacent. */
EXPORT void carousel_rope_write(float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
                                int64_t v_stride, const float *cos_sin, const int64_t *positions, void *k_cache,
                                void *v_cache, const int64_t *slots, int64_t tokens, int heads, int kv_heads, int dim,
                                int rotary, int half, int threads) {
    const struct rope a = {.q = q, .k = k, .v = v, .cos_sin = cos_sin, .positions = positions, .slots = slots,
                           .k_cache = k_cache, .v_cache = v_cache, .q_stride = q_stride, .k_stride = k_stride,
                           .v_stride = v_stride, .heads = heads, .kv_heads = kv_heads, .dim = dim, .rotary = rotary,
                           .half = half};
    const int64_t width = (int64_t)(heads + 2 * kv_heads) * dim * 4; /* writing to the cache waits for memory */
    run_rows(carousel_operators->rope_write, &a, tokens, width, threads);
}
