/* Attention of a batch: cut into items, which the threads of a team take. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compiler.h"
#include "operators.h"

#define PARTS 8           /* work items per thread that long sequences are split into */
#define SHARERS 2         /* decodes that share a prefix from which on it is read for all of them together; measured */
#define SHARED_BLOCKS 4   /* blocks of such a prefix, at least */

/* Blocks [first, end): of a decode's keys; or, for decodes that share them, of a KV head; or, of a prompt chunk, new
 * tokens [first, end) and a KV head. */
struct item {
    enum { DECODE, SHARED, CHUNK } kind;
    int32_t which; /* sequence, or the place of the first sharer in `sharers` */
    int32_t count; /* of sharers */
    int32_t head, first, end;
    int32_t part; /* of the partial results of each sequence */
};

/* A decode's partial results. */
struct parts {
    int32_t first, count;     /* in attention_plan.partials; 0: none, the only item writes the result */
    int32_t missing, waiting; /* items that have not left theirs, now and before each attention */
    int32_t shared;           /* blocks that it shares with others, which SHARED items see to */
};

/* Decodes that share a prefix. */
struct group {
    int32_t first, count; /* in `sharers` */
    int32_t blocks, parts;
};

static int64_t first_block(const struct attention *a, int sequence) {
    const int64_t unseen = a->window > 0 ? (int64_t)a->context_lens[sequence] - a->window : 0;
    return unseen > 0 ? unseen / BLOCK : 0;
}

static int64_t end_block(const struct attention *a, int sequence) {
    return ((int64_t)a->context_lens[sequence] + BLOCK - 1) / BLOCK;
}

static const int32_t *table_of(const struct attention *a, int sequence) {
    return a->block_tables + (int64_t)sequence * a->table_stride;
}

/* Keys of a sort: the first block of a sequence above its number. */
static int by_key(const void *left, const void *right) {
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

/* Blocks that all these sequences begin with, all of whose tokens all of them see; each has at least one more. */
static int32_t common_blocks(const struct attention *a, const int32_t *sequences, int count) {
    const int32_t *table = table_of(a, sequences[0]);
    int32_t common = (a->context_lens[sequences[0]] - 1) / BLOCK;
    for (int i = 1; i < count; i++) {
        const int32_t *other = table_of(a, sequences[i]), most = (a->context_lens[sequences[i]] - 1) / BLOCK;
        int32_t same = 0;
        while (same < common && same < most && table[same] == other[same]) same++;
        common = same;
    }
    return common;
}

/* Groups of decodes that begin with the same blocks, as a cache of prefixes leaves them. Returns how many, or -1 without
 * memory. sharers [decodes], groups [decodes / SHARERS]. */
static int64_t find_groups(const struct attention *a, int decodes, int threads, int32_t *sharers,
                           struct group *groups) {
    int64_t found = 0;
    if (a->window > 0 || decodes < SHARERS) return 0;
    uint64_t *keys = malloc((size_t)decodes * sizeof(uint64_t));
    if (keys == NULL) return -1;
    for (int s = 0; s < decodes; s++) keys[s] = (uint64_t)(uint32_t)table_of(a, s)[0] << 32 | (uint32_t)s;
    qsort(keys, (size_t)decodes, sizeof(uint64_t), by_key);
    for (int first = 0, next; first < decodes; first = next) {
        for (next = first; next < decodes && keys[next] >> 32 == keys[first] >> 32; next++)
            sharers[next] = (int32_t)(uint32_t)keys[next];
        if (next - first < SHARERS) continue;
        struct group group = {.first = first, .count = next - first,
                              .blocks = common_blocks(a, sharers + first, next - first)};
        if (group.blocks < SHARED_BLOCKS) continue;
        const int at_once = MAX_ROWS / (a->heads / a->kv_heads);
        const int rounds = (group.count + at_once - 1) / at_once * a->kv_heads;
        group.parts = threads > 1 ? (4 * threads + rounds - 1) / rounds : 1;
        const int most = (group.blocks + TILE_BLOCKS - 1) / TILE_BLOCKS;
        if (group.parts > most) group.parts = most;
        groups[found++] = group;
    }
    free(keys);
    return found;
}

static int64_t plan_shared(const struct attention *a, const struct group *groups, int64_t count, struct item *items) {
    const int most = MAX_ROWS / (a->heads / a->kv_heads);
    int64_t made = 0;
    for (const struct group *group = groups; group < groups + count; group++) {
        const int rounds = (group->count + most - 1) / most;
        for (int round = 0; round < rounds; round++)
            for (int part = 0; part < group->parts; part++)
                for (int head = 0; head < a->kv_heads; head++) {
                    const int32_t from = group->count * round / rounds, to = group->count * (round + 1) / rounds;
                    const int32_t tiles = (group->blocks + TILE_BLOCKS - 1) / TILE_BLOCKS;
                    const int32_t first = tiles * part / group->parts * TILE_BLOCKS;
                    const int32_t end = tiles * (part + 1) / group->parts * TILE_BLOCKS;
                    if (items != NULL)
                        items[made] = (struct item){SHARED, group->first + from, to - from, head, first,
                                                    end < group->blocks ? end : group->blocks, part};
                    made++;
                }
    }
    return made;
}

/* Decodes as items, but for what they share; the longest are split so that no thread is left with one at the end. */
static int64_t plan_decodes(const struct attention *a, int decodes, int threads, struct parts *parts,
                            struct item *items) {
    int64_t total = 0, count = 0, partial = 0;
    for (int s = 0; s < decodes; s++) total += end_block(a, s) - first_block(a, s) - parts[s].shared;
    int64_t most = threads > 1 ? total / (PARTS * threads) + 1 : total;
    if (most < TILE_BLOCKS) most = TILE_BLOCKS;
    for (int s = 0; s < decodes; s++) {
        const int64_t first = first_block(a, s) + parts[s].shared, end = end_block(a, s);
        int64_t step = end - first;
        if (threads > 1 && step > most + most / 2) {
            const int64_t pieces = (step + most - 1) / most;
            step = (step + pieces - 1) / pieces;
            step = (step + TILE_BLOCKS - 1) / TILE_BLOCKS * TILE_BLOCKS;
        }
        const int32_t pieces = (int32_t)((end - first + step - 1) / step), before = parts[s].count;
        for (int32_t p = 0; p < pieces; p++) {
            const int64_t from = first + p * step, to = from + step < end ? from + step : end;
            items[count++] = (struct item){DECODE, s, 1, 0, (int32_t)from, (int32_t)to, before + p};
        }
        if (before + pieces == 1) continue;
        parts[s].first = (int32_t)partial;
        parts[s].count = before + pieces;
        parts[s].waiting = parts[s].missing = before * a->kv_heads + pieces;
        partial += parts[s].count;
    }
    return count;
}

/* Prompt chunks as items: tiles of tokens times KV heads, the last tiles, which see most, first. */
static int64_t plan_chunks(const struct attention *a, int first, int end, int threads, struct item *items) {
    const int group = a->heads / a->kv_heads, most = MAX_ROWS / group;
    const int64_t tokens = a->query_start[end] - a->query_start[first];
    const int64_t even = (tokens * a->kv_heads + 4 * threads - 1) / (4 * threads);
    const int step = threads > 1 && even < most ? (even > 1 ? (int)even : 1) : most;
    int64_t count = 0;
    for (int s = end - 1; s >= first; s--) {
        const int new = a->query_start[s + 1] - a->query_start[s], tiles = (new + step - 1) / step;
        for (int tile = tiles - 1; tile >= 0; tile--)
            for (int head = 0; head < a->kv_heads; head++)
                items[count++] = (struct item){CHUNK, s, 1, head, new * tile / tiles, new * (tile + 1) / tiles, 0};
    }
    return count;
}

struct attention carousel_attention_of(const struct carousel_batch *batch, const struct carousel_heads *heads,
                                       const float *q, int64_t q_stride, const void *k_cache, const void *v_cache,
                                       float *out) {
    const float cap = heads->softcap;
    return (struct attention){
        .q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .q_stride = q_stride,
        .query_start = batch->query_start, .context_lens = batch->context_lens, .block_tables = batch->block_tables,
        .table_stride = batch->table_stride, .heads = heads->heads, .kv_heads = heads->kv_heads, .dim = heads->dim,
        .window = heads->window, .half = heads->half,
        .scale = cap > 0 ? heads->scale / cap : heads->scale * LOG2_E, .cap = cap * LOG2_E,
    };
}

/* Memory of one kind behind another. */
static void *cut(char **at, int64_t count, size_t size) {
    char *begin = *at;
    *at += carousel_lines(count * (int64_t)size);
    return begin;
}

int carousel_plan(struct attention_plan *plan, const struct carousel_batch *batch, const struct carousel_heads *heads) {
    const struct attention a = carousel_attention_of(batch, heads, NULL, 0, NULL, NULL, NULL);
    const int decodes = batch->decodes;
    int threads = batch->threads;
    int64_t seen = 0, shared_parts = 0;
    for (int s = 0; s < batch->sequences; s++) {
        const int64_t new = batch->query_start[s + 1] - batch->query_start[s];
        seen += new * (end_block(&a, s) - first_block(&a, s)) * BLOCK;
    }
    if (seen * heads->kv_heads * heads->dim < SMALL_JOB) threads = 1;
    *plan = (struct attention_plan){.window = heads->window};
    char *at = malloc((size_t)decodes * (sizeof(int32_t) + sizeof(struct group)) + 128);
    if (at == NULL) return -1;
    plan->sharing = at;
    plan->sharers = cut(&at, decodes, sizeof(int32_t));
    struct group *groups = (struct group *)at;
    const int64_t found = find_groups(&a, decodes, threads, plan->sharers, groups);
    for (int64_t g = 0; g < found; g++) shared_parts += (int64_t)groups[g].count * groups[g].parts;
    const int64_t shared_items = found > 0 ? plan_shared(&a, groups, found, NULL) : 0;
    const int64_t own = decodes + 2 * PARTS * threads, chunks = batch->query_start[batch->sequences] - decodes;
    const int64_t items = shared_items + own + chunks * heads->kv_heads;
    const int64_t floats = (threads > 1 || found > 0 ? own + shared_parts : 0) * heads->heads * (heads->dim + 2);
    plan->memory = found < 0 ? NULL
                             : malloc((size_t)items * sizeof(struct item) + (size_t)decodes * sizeof(struct parts) +
                                      (size_t)floats * sizeof(float) + 256);
    if (plan->memory == NULL) {
        free(plan->sharing);
        return -1;
    }
    at = plan->memory;
    plan->parts = cut(&at, decodes, sizeof(struct parts));
    plan->items = cut(&at, items, sizeof(struct item));
    plan->partials = (float *)at;
    if (decodes > 0) memset(plan->parts, 0, (size_t)decodes * sizeof(struct parts));
    for (int64_t g = 0; g < found; g++)
        for (int i = groups[g].first; i < groups[g].first + groups[g].count; i++)
            plan->parts[plan->sharers[i]] = (struct parts){.count = groups[g].parts, .shared = groups[g].blocks};
    if (decodes < batch->sequences)
        plan->count = plan_chunks(&a, decodes, batch->sequences, threads, plan->items);
    if (found > 0) plan->count += plan_shared(&a, groups, found, plan->items + plan->count);
    plan->count += plan_decodes(&a, decodes, threads, plan->parts, plan->items + plan->count);
    plan->threads = plan->count > 1 ? threads : 1;
    return 0;
}

void carousel_forget(struct attention_plan *plan) {
    free(plan->sharing);
    free(plan->memory);
}

/* Where part `part` of a decode's partial results goes: [heads] m, [heads] l, [heads, dim] o. */
static float *partial_of(const struct attention *a, const struct attention_plan *plan, int sequence, int part) {
    return plan->partials + (plan->parts[sequence].first + part) * (int64_t)a->heads * (a->dim + 2);
}

/* One more item has left its part of a decode's results; the last one adds them up. */
static void leave(const struct attention *a, const struct attention_plan *plan, int sequence) {
    struct parts *parts = plan->parts + sequence;
    if (__atomic_sub_fetch(&parts->missing, 1, __ATOMIC_ACQ_REL) > 0) return;
    carousel_operators->combine(a, sequence, partial_of(a, plan, sequence, 0), parts->count);
    __atomic_store_n(&parts->missing, parts->waiting, __ATOMIC_RELAXED);
}

static void do_item(const struct attention *a, const struct attention_plan *plan, const struct item *item) {
    if (item->kind == CHUNK) {
        carousel_operators->chunk(a, item->which, item->first, item->end, item->head);
    } else if (item->kind == SHARED) {
        const int32_t *sharers = plan->sharers + item->which;
        float *partials[MAX_ROWS];
        for (int i = 0; i < item->count; i++) partials[i] = partial_of(a, plan, sharers[i], item->part);
        carousel_operators->shared(a, sharers, item->count, item->first, item->end, item->head, partials);
        for (int i = 0; i < item->count; i++) leave(a, plan, sharers[i]);
    } else if (plan->parts[item->which].count == 0) {
        carousel_operators->decode(a, item->which, item->first, item->end, NULL);
    } else {
        carousel_operators->decode(a, item->which, item->first, item->end, partial_of(a, plan, item->which, item->part));
        leave(a, plan, item->which);
    }
}

void carousel_attend(struct carousel_member *member, const struct attention *a, const struct attention_plan *plan) {
    int64_t first, count;
    carousel_phase(member, plan->count);
    while ((count = carousel_take(member, 1, 1, &first)) > 0)
        for (int64_t i = first; i < first + count; i++) do_item(a, plan, plan->items + i);
}

struct attention_job {
    struct attention arguments;
    struct attention_plan plan;
};

static void attention_work(struct carousel_member *member, void *data) {
    const struct attention_job *job = data;
    carousel_attend(member, &job->arguments, &job->plan);
}

/* See carousel_attention_of. Returns 0, or -1 without memory for the plan. */
EXPORT int carousel_attention(const struct carousel_batch *batch, const struct carousel_heads *heads, const float *q,
                              int64_t q_stride, const void *k_cache, const void *v_cache, float *out) {
    struct attention_job job = {carousel_attention_of(batch, heads, q, q_stride, k_cache, v_cache, out), {0}};
    if (carousel_plan(&job.plan, batch, heads)) return -1;
    carousel_run(attention_work, &job, job.plan.threads);
    carousel_forget(&job.plan);
    return 0;
}
