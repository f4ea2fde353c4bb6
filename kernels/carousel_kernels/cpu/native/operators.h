/* The operators of carousel_native.c but for linear layers, for layers.c and itself. */
#ifndef CAROUSEL_OPERATORS_H
#define CAROUSEL_OPERATORS_H

#include <stdint.h>

#include "linear.h"
#include "parallel.h"

#define BLOCK 16    /* tokens per block of the cache: BLOCK_SIZE of layout.py */
#define KEYS 64     /* tokens per tile of attention */
#define TILE_BLOCKS (KEYS / BLOCK)
#define MAX_ROWS 96 /* query rows that go through the keys together */
#define SMALL_JOB 65536 /* floats below which waking threads costs about what they save */
#define LOG2_E 1.44269504089f

/* Rows of a norm or an activation. */
struct rows {
    const float *x;
    int64_t x_stride; /* floats from one outer row to the next; inner rows are adjacent */
    int64_t inner;
    float *residual;
    const float *weight;
    float *out;
    int64_t out_stride; /* as x_stride; the sum with a residual is dense, like its norm */
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

/* Rows of which the largest is wanted. */
struct maxima {
    const float *x;
    int64_t stride; /* floats from one row to the next */
    int64_t *tokens;
    int width;
};

/* The part of an attention's arguments that a step's layers share; mirrored in native.py. */
struct carousel_batch {
    const int32_t *query_start, *context_lens, *block_tables;
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

struct item;
struct parts;

/* An attention cut into items, which depends on the batch and the window only. */
struct attention_plan {
    struct item *items;
    struct parts *parts; /* of each decode */
    int32_t *sharers;    /* decodes that share a prefix, group after group */
    float *partials;
    void *memory, *sharing; /* of all that */
    int64_t count;
    int window, threads; /* more than 1 only if that many pay */
};

/* The rows of rows_operator are those of a struct rows or maxima, or tokens of a struct rope. */
struct operators {
    rows_operator rms_norm, add_rms_norm, silu_mul, gelu_tanh_mul, rope_write, largest;
    void (*decode)(const struct attention *, int, int64_t, int64_t, float *);
    void (*combine)(const struct attention *, int, const float *, int);
    void (*chunk)(const struct attention *, int, int, int, int);
    void (*shared)(const struct attention *, const int32_t *, int, int64_t, int64_t, int, float *const *);
    carousel_gate silu_gate, gelu_gate;
};

/* Those for this CPU. */
extern const struct operators *carousel_operators;

/* A phase of the team, over rows. */
void carousel_rows(struct carousel_member *member, rows_operator operator, const void *arguments, int64_t rows);

/* out [T, heads, dim] dense; q [T, heads, dim] with q_stride floats between tokens; caches dense. */
struct attention carousel_attention_of(const struct carousel_batch *batch, const struct carousel_heads *heads,
                                       const float *q, int64_t q_stride, const void *k_cache, const void *v_cache,
                                       float *out);

/* Returns 0, or -1 without memory; to be freed by carousel_forget. */
int carousel_plan(struct attention_plan *plan, const struct carousel_batch *batch, const struct carousel_heads *heads);

void carousel_forget(struct attention_plan *plan);

/* A phase of the team: the plan's items. */
void carousel_attend(struct carousel_member *member, const struct attention *a, const struct attention_plan *plan);

#endif
