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

#include "linear.h"
#include "parallel.h"

#define EXPORT __attribute__((visibility("default")))
#define ABI_VERSION 4

#define BLOCK 16         /* tokens per block of the cache: BLOCK_SIZE of layout.py */
#define KEYS 64          /* tokens per tile of attention */
#define TILE_BLOCKS (KEYS / BLOCK)
#define LINE 16          /* floats of a cache line */
#define AHEAD 192        /* floats of each token of a block that a decode calls for ahead of its reading; measured */
#define MAX_DIM 256      /* head size; a multiple of 16 */
#define SOON 3           /* tokens ahead of which the cache's lines are called for, to be written */
#define MAX_GROUP 32     /* query heads per KV head */
#define MAX_ROWS 48      /* query rows of a tile of a prompt chunk */
#define MAX_DECODE 8192  /* floats of the queries that a decode handles together; >= MAX_GROUP * MAX_DIM */
#define PARTS 8          /* work items per thread that long sequences are split into */
#define SMALL_JOB 65536  /* floats below which waking threads costs about what they save */
#define LOG2_E 1.44269504089f

#if defined(__clang__)
#define UNROLL _Pragma("unroll") /* loops of constant length, so that their arrays become registers */
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) \
    __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(sizeof(type))))){__VA_ARGS__})
#endif

/* Rows of a norm or an activation. */
struct rows {
    const float *x;
    int64_t x_stride; /* floats from one outer row to the next; inner rows are adjacent */
    int64_t inner;
    float *residual;
    const float *weight;
    float *out; /* dense */
    int width;
    float eps;
};

struct rope {
    float *q;
    const float *k, *v, *cos_sin;
    const int64_t *positions, *slots;
    void *k_cache, *v_cache;
    int64_t q_stride, k_stride, v_stride;
    int heads, kv_heads, dim, rotary;
    int half; /* the cache is bfloat16 */
};

/* The part of an attention's arguments that a step's layers share; mirrored in native.py. */
struct carousel_batch {
    const int32_t *query_start, *context_lens, *block_tables;
    float *partials; /* carousel_partials(...) floats */
    int64_t table_stride;
    int32_t sequences, decodes, threads;
};

struct carousel_heads {
    int32_t heads, kv_heads, dim, window; /* window 0: none */
    float scale, softcap;                 /* softcap 0: none */
    int32_t half;                         /* the cache is bfloat16, not float32 */
};

struct attention {
    const float *q;
    const void *k_cache, *v_cache;
    float *out;
    int64_t q_stride;
    const int32_t *query_start, *context_lens, *block_tables;
    int64_t table_stride;
    int heads, kv_heads, dim, window, half;
    float scale; /* what queries are multiplied by: scores are in base 2, or, with a cap, divided by it */
    float cap;   /* softcap in base 2; 0: none */
};

/* Rows [first, last) of a struct rows, or tokens of a struct rope. */
typedef void (*rows_operator)(const void *arguments, int64_t first, int64_t last);

struct operators {
    rows_operator rms_norm, add_rms_norm, silu_mul, gelu_tanh_mul, rope_write;
    void (*decode)(const struct attention *, int, int64_t, int64_t, float *);
    void (*combine)(const struct attention *, int, const float *, int);
    void (*chunk)(const struct attention *, int, int, int, int);
};

_Static_assert(MAX_GROUP * MAX_DIM <= MAX_DECODE && MAX_GROUP <= MAX_ROWS, "a group fits a tile and a decode");

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#define FULL_WIDTH ""
#else
#define FULL_WIDTH ",prefer-vector-width=512"
#endif
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma" FULL_WIDTH)))
#define VL 16
#define MAXIMUM _mm512_max_ps
#define WIDE 4
#include "kernels.h"
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define VL 8
#define MAXIMUM _mm256_max_ps
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
#else
#define WIDE 2
#define MAXIMUM _mm_max_ps
#endif
#include "kernels.h"

static const struct operators *operators = &operators_base;
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Give the address of GOMP_parallel (NULL: run on the calling thread alone) and the widest vectors to use, in bits (0:
 * as wide as the CPU has them). Returns the width that is used. */
EXPORT int carousel_init(void *parallel, int max_bits) {
    gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    operators = &operators_base;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int limit = max_bits > 0 ? max_bits : 512;
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512cd");
    if (limit >= 512 && avx512) {
        operators = &operators_avx512;
        return 512;
    }
    if (limit >= 256 && avx2) {
        operators = &operators_avx2;
        return 256;
    }
#endif
    (void)max_bits;
    return 128;
}

EXPORT int carousel_abi(void) { return ABI_VERSION; }

void carousel_run(void (*work)(void *), void *job, int threads) {
    if (threads > 1 && gomp_parallel != NULL)
        gomp_parallel(work, job, (unsigned)threads, 0);
    else
        work(job);
}

/* ---- operators on rows ---- */

struct rows_job {
    rows_operator operator;
    const void *arguments;
    int64_t rows, step, next;
};

static void take_rows(void *data) {
    struct rows_job *job = data;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&job->next, job->step, __ATOMIC_RELAXED);
        if (first >= job->rows) return;
        const int64_t last = first + job->step < job->rows ? first + job->step : job->rows;
        job->operator(job->arguments, first, last);
    }
}

static void run_rows(rows_operator operator, const void *arguments, int64_t rows, int64_t width, int threads) {
    if (rows * width < SMALL_JOB) threads = 1;
    const int64_t step = threads > 1 ? (rows + 4 * threads - 1) / (4 * threads) : rows;
    struct rows_job job = {operator, arguments, rows, step, 0};
    if (rows > 0) carousel_run(take_rows, &job, threads);
}

/* x [rows / inner, inner, width], inner rows adjacent, -> out, dense. */
EXPORT void carousel_rms_norm(const float *x, int64_t stride, int64_t inner, const float *weight, float *out,
                              int64_t rows, int width, float eps, int threads) {
    const struct rows a = {.x = x, .x_stride = stride, .inner = inner, .weight = weight, .out = out, .width = width,
                           .eps = eps};
    run_rows(operators->rms_norm, &a, rows, width, threads);
}

/* residual += x, out = its norm; both dense. */
EXPORT void carousel_add_rms_norm(const float *x, int64_t stride, float *residual, const float *weight, float *out,
                                  int64_t rows, int width, float eps, int threads) {
    const struct rows a = {.x = x, .x_stride = stride, .residual = residual, .weight = weight, .out = out,
                           .width = width, .eps = eps};
    run_rows(operators->add_rms_norm, &a, rows, width, threads);
}

/* x [rows, 2 width] -> out [rows, width]. gelu: the tanh approximation instead of SiLU. */
EXPORT void carousel_gated(const float *x, int64_t stride, float *out, int64_t rows, int width, int gelu, int threads) {
    const struct rows a = {.x = x, .x_stride = stride, .out = out, .width = width};
    const rows_operator operator = gelu ? operators->gelu_tanh_mul : operators->silu_mul;
    run_rows(operator, &a, rows, 4 * (int64_t)width, threads);
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
    run_rows(operators->rope_write, &a, tokens, width, threads);
}

/* ---- attention ---- */

/* Blocks [first, end) of a decode, or, with head >= 0, new tokens [first, end) of a chunk. */
struct item {
    int32_t sequence, head, first, end;
    int32_t parts, part; /* of a decode */
    int32_t partial;     /* where the partial results of its sequence begin */
};

struct attention_job {
    struct attention arguments;
    struct item *items;
    float *partials;
    int32_t *finished; /* parts that are done, by index of the first part's partial result */
    int64_t count, next;
};

static void take_items(void *data) {
    struct attention_job *job = data;
    const struct attention *a = &job->arguments;
    const int64_t stride = (int64_t)a->heads * (a->dim + 2);
    for (;;) {
        const int64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (index >= job->count) return;
        const struct item *item = job->items + index;
        if (item->head >= 0) {
            operators->chunk(a, item->sequence, item->first, item->end, item->head);
        } else if (item->parts == 1) {
            operators->decode(a, item->sequence, item->first, item->end, NULL);
        } else {
            float *partials = job->partials + item->partial * stride;
            operators->decode(a, item->sequence, item->first, item->end, partials + item->part * stride);
            int32_t *finished = job->finished + item->partial;
            if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) == item->parts)
                operators->combine(a, item->sequence, partials, item->parts);
        }
    }
}

/* Floats of scratch memory that an attention on so many threads may need. */
EXPORT int64_t carousel_partials(int heads, int dim, int threads) {
    return threads > 1 ? (int64_t)heads * (dim + 2) * 2 * PARTS * threads : 0;
}

static int64_t first_block(const struct attention *a, int sequence) {
    const int64_t unseen = a->window > 0 ? (int64_t)a->context_lens[sequence] - a->window : 0;
    return unseen > 0 ? unseen / BLOCK : 0;
}

static int64_t end_block(const struct attention *a, int sequence) {
    return ((int64_t)a->context_lens[sequence] + BLOCK - 1) / BLOCK;
}

/* Decodes as items; the longest are split so that no thread is left with one at the end. */
static int64_t plan_decodes(const struct attention *a, int decodes, int threads, struct item *items) {
    int64_t total = 0, count = 0, partial = 0;
    for (int s = 0; s < decodes; s++) total += end_block(a, s) - first_block(a, s);
    int64_t most = threads > 1 ? total / (PARTS * threads) + 1 : total;
    if (most < TILE_BLOCKS) most = TILE_BLOCKS;
    for (int s = 0; s < decodes; s++) {
        const int64_t first = first_block(a, s), end = end_block(a, s);
        int64_t step = end - first;
        if (threads > 1 && step > most + most / 2) {
            const int64_t parts = (step + most - 1) / most;
            step = (step + parts - 1) / parts;
            step = (step + TILE_BLOCKS - 1) / TILE_BLOCKS * TILE_BLOCKS;
        }
        const int32_t parts = (int32_t)((end - first + step - 1) / step);
        for (int32_t p = 0; p < parts; p++) {
            const int64_t from = first + p * step, to = from + step < end ? from + step : end;
            items[count++] = (struct item){s, -1, (int32_t)from, (int32_t)to, parts, p, (int32_t)partial};
        }
        if (parts > 1) partial += parts;
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
        const int new = a->query_start[s + 1] - a->query_start[s];
        for (int to = new; to > 0; to -= step)
            for (int head = 0; head < a->kv_heads; head++)
                items[count++] = (struct item){s, head, to > step ? to - step : 0, to, 1, 0, 0};
    }
    return count;
}

/* out [T, heads, dim] dense; q [T, heads, dim] with q_stride floats between tokens; caches dense. Returns 0, or -1
 * without memory for the plan. */
EXPORT int carousel_attention(const struct carousel_batch *batch, const struct carousel_heads *heads, const float *q,
                              int64_t q_stride, const void *k_cache, const void *v_cache, float *out) {
    const float cap = heads->softcap;
    struct attention_job job = {
        .arguments = {.q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .q_stride = q_stride,
                      .query_start = batch->query_start, .context_lens = batch->context_lens,
                      .block_tables = batch->block_tables, .table_stride = batch->table_stride, .heads = heads->heads,
                      .kv_heads = heads->kv_heads, .dim = heads->dim, .window = heads->window, .half = heads->half,
                      .scale = cap > 0 ? heads->scale / cap : heads->scale * LOG2_E, .cap = cap * LOG2_E},
        .partials = batch->partials,
    };
    const struct attention *a = &job.arguments;
    int threads = batch->threads;
    const int64_t tokens = batch->query_start[batch->sequences];
    int64_t seen = 0;
    for (int s = 0; s < batch->sequences; s++) {
        const int64_t new = batch->query_start[s + 1] - batch->query_start[s];
        seen += new * (end_block(a, s) - first_block(a, s)) * BLOCK;
    }
    if (seen * heads->kv_heads * heads->dim < SMALL_JOB) threads = 1;
    const int64_t most_parts = batch->decodes + 2 * PARTS * threads;
    const int64_t most_items = most_parts + (tokens - batch->decodes) * heads->kv_heads;
    job.items = malloc((size_t)most_items * sizeof(struct item) + (size_t)most_parts * sizeof(int32_t));
    if (job.items == NULL) return -1;
    job.finished = memset(job.items + most_items, 0, (size_t)most_parts * sizeof(int32_t));
    if (batch->decodes < batch->sequences)
        job.count = plan_chunks(a, batch->decodes, batch->sequences, threads, job.items);
    job.count += plan_decodes(a, batch->decodes, threads, job.items + job.count);
    carousel_run(take_items, &job, job.count > 1 ? threads : 1);
    free(job.items);
    return 0;
}

/* ---- a whole layer of a decoder ---- */

/* Mirrored in fused.py. */
struct carousel_layer {
    const float *attention_norm, *mlp_norm;
    const struct carousel_quant_layer *qkv, *output, *gate_up, *down;
    struct carousel_heads heads;
    int32_t rotary, gelu;
    float eps;
};

/* Floats of scratch memory for each token of a layer. */
EXPORT int64_t carousel_layer_floats(const struct carousel_layer *l) {
    const int64_t narrow = l->qkv->inputs > l->output->inputs ? l->qkv->inputs : l->output->inputs;
    const int64_t wide = l->qkv->columns > l->gate_up->columns ? l->qkv->columns : l->gate_up->columns;
    return narrow + wide + l->down->inputs;
}

/* x [tokens, hidden], what the layer before added, becomes what this one adds; residual [tokens, hidden] is brought up to
 * date. Just the operators above one after another: what it saves is the time between them. Returns 0, or -1 without
 * memory. */
EXPORT int carousel_layer(const struct carousel_layer *l, const struct carousel_batch *batch, float *x, float *residual,
                          const float *cos_sin, const int64_t *positions, const int64_t *slots, void *k_cache,
                          void *v_cache, float *scratch) {
    const int64_t tokens = batch->query_start[batch->sequences], hidden = l->qkv->inputs, width = l->output->inputs;
    const int64_t qkv = l->qkv->columns, keys = (qkv - width) / 2, inner = l->down->inputs;
    const int threads = batch->threads;
    float *narrow = scratch, *wide = narrow + tokens * (hidden > width ? hidden : width);
    float *gated = wide + tokens * (qkv > 2 * inner ? qkv : 2 * inner);
    carousel_add_rms_norm(x, hidden, residual, l->attention_norm, narrow, tokens, (int)hidden, l->eps, threads);
    if (carousel_quant_linear(l->qkv, narrow, hidden, tokens, wide, threads)) return -1;
    carousel_rope_write(wide, qkv, wide + width, qkv, wide + width + keys, qkv, cos_sin, positions, k_cache, v_cache,
                        slots, tokens, l->heads.heads, l->heads.kv_heads, l->heads.dim, l->rotary, l->heads.half,
                        threads);
    if (carousel_attention(batch, &l->heads, wide, qkv, k_cache, v_cache, narrow)) return -1;
    if (carousel_quant_linear(l->output, narrow, width, tokens, x, threads)) return -1;
    carousel_add_rms_norm(x, hidden, residual, l->mlp_norm, narrow, tokens, (int)hidden, l->eps, threads);
    if (carousel_quant_linear(l->gate_up, narrow, hidden, tokens, wide, threads)) return -1;
    carousel_gated(wide, 2 * inner, gated, tokens, (int)inner, l->gelu, threads);
    return carousel_quant_linear(l->down, gated, inner, tokens, x, threads);
}
