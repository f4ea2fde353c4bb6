/* All layers of a decoder in one job of the team: the operators of carousel_native.c and quant.c one after another, to
 * the same last bit, without the time that Python and the runtime take between them.
 *
 * A batch of few tokens is bound by reading the weights: the threads share each product's columns, so that weights are
 * read once. A batch of many is bound by arithmetic: each thread takes tiles of rows through everything between two
 * attentions alone, so that what one product leaves is in its cache when the next one wants it.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "compiler.h"
#include "operators.h"

#define MOST_TILE 144   /* rows of a tile, whose gated activations shall fit a core's own cache; measured */
#define MANY_GROUPS 4   /* groups per thread from which on tiles pay; measured */

/* Mirrored in fused.py. */
struct carousel_layer {
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm; /* NULL: none */
    const struct carousel_quant_layer *qkv, *output, *gate_up, *down;
    struct carousel_heads heads;
    int32_t gelu;
    float eps;
};

/* A pass of a batch through all layers; mirrored in fused.py. */
struct carousel_pass {
    const struct carousel_layer *const *layers;
    const float *const *cos_sin; /* each layer's table; NULL: no rotary embedding */
    void *const *k_caches, *const *v_caches;
    const struct carousel_batch *batch;
    const int64_t *positions, *slots; /* of each token */
    const int64_t *wanted;            /* rows that go on after the last attention */
    float *residual;                  /* [tokens, hidden]: the embedding; brought up to date */
    float *x;                         /* [tokens, hidden]: what the last layer adds to it; [wanted, hidden] */
    float *wanted_residual;           /* [wanted, hidden] */
    const int32_t *rotary;            /* values of each head that the layer's table turns */
    char *memory;                     /* carousel_pass_bytes(...) */
    int64_t count, wanted_count; /* of layers, and of wanted rows; -1: all of them */
    int32_t half; /* the caches are bfloat16 */
};

/* Memory that the rows of a span need on their way, one span after another. */
struct space {
    float *narrow, *wide, *gated; /* [rows, hidden], [rows, 2 inner], [rows, inner] */
    char *codes;                  /* of any layer's activations */
};

/* Some rows of the pass. */
struct span {
    int64_t rows;
    float *x, *residual, *qkv;
    const float *attention; /* what it gave */
    const int64_t *positions, *slots;
    struct space space;
};

struct stack_job {
    const struct carousel_pass *pass;
    struct attention_plan *plans; /* one for each window that there is */
    float *qkv, *attention;       /* of all tokens, [tokens, columns] and [tokens, width] */
    float *x;                     /* [tokens, hidden] */
    float *wanted_attention;      /* [wanted, width] */
    char *memory;                 /* for spans */
    int64_t tokens, hidden, width, columns, inner, span_bytes; /* what one thread's span takes at most */
};

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Bytes of a span's memory; as is struct space cut from it. */
static int64_t space_of(const struct stack_job *job, int64_t rows, char *memory, struct space *space) {
    const struct carousel_layer *l = job->pass->layers[0];
    int64_t at = 0, codes = 0;
    const int64_t narrow = at;
    at += carousel_lines(rows * job->hidden * (int64_t)sizeof(float));
    const int64_t wide = at;
    if (job->inner % PANEL) at += carousel_lines(rows * 2 * job->inner * (int64_t)sizeof(float));
    const int64_t gated = at;
    at += carousel_lines(rows * job->inner * (int64_t)sizeof(float));
    const struct carousel_quant_layer *const all[] = {l->qkv, l->output, l->gate_up, l->down};
    for (int i = 0; i < 4; i++) codes = larger(codes, carousel_linear_bytes(all[i], rows));
    if (space != NULL)
        *space = (struct space){(float *)(memory + narrow), (float *)(memory + wide), (float *)(memory + gated),
                                memory + at};
    return at + codes;
}

static struct span span_of(const struct stack_job *job, int64_t first, int64_t rows, char *memory) {
    const struct carousel_pass *pass = job->pass;
    struct span span = {
        .rows = rows, .x = job->x + first * job->hidden, .residual = pass->residual + first * job->hidden,
        .qkv = job->qkv + first * job->columns, .attention = job->attention + first * job->width,
        .positions = pass->positions + first, .slots = pass->slots + first,
    };
    space_of(job, rows, memory, &span.space);
    return span;
}

/* Norms of each query's and key's head, where the layer has them, and the rotary embedding with the KV write. */
struct heads_job {
    struct rows q_norm, k_norm;
    struct rope rope;
};

static void finish_heads(const void *arguments, int64_t first, int64_t last) {
    const struct heads_job *job = arguments;
    const struct rows *const norms[] = {&job->q_norm, &job->k_norm};
    for (int i = 0; i < 2; i++)
        if (norms[i]->weight != NULL)
            carousel_operators->rms_norm(norms[i], first * norms[i]->inner, last * norms[i]->inner);
    carousel_operators->rope_write(&job->rope, first, last);
}

static struct rows heads_norm(float *x, int64_t stride, int64_t heads, const float *weight, int width, float eps) {
    return (struct rows){.x = x, .x_stride = stride, .inner = heads, .weight = weight, .out = x, .out_stride = stride,
                         .width = width, .eps = eps};
}

/* Norm, projections, rotary embedding; K and V to the cache, Q stays. */
static void before_attention(struct carousel_member *member, const struct stack_job *job, int64_t index,
                             const struct span *span) {
    const struct carousel_pass *pass = job->pass;
    const struct carousel_layer *l = pass->layers[index];
    const int64_t columns = job->columns, keys = (columns - job->width) / 2;
    struct carousel_linear linear;
    const struct rows norm = {.x = index ? span->x : span->residual, .x_stride = job->hidden, .inner = 1,
                              .residual = span->residual, .weight = l->attention_norm, .out = span->space.narrow,
                              .out_stride = job->hidden, .width = (int)job->hidden, .eps = l->eps};
    carousel_linear_begin(&linear, l->qkv, span->space.narrow, job->hidden, span->rows, span->qkv, columns,
                          span->space.codes);
    carousel_encode_all(member, &linear, index ? carousel_operators->add_rms_norm : carousel_operators->rms_norm, &norm);
    carousel_multiply_all(member, &linear, NULL);
    carousel_wait(member);
    float *const q = span->qkv, *const k = q + job->width;
    const struct carousel_heads *heads = &l->heads;
    const struct heads_job finish = {
        .q_norm = heads_norm(q, columns, heads->heads, l->q_norm, heads->dim, l->eps),
        .k_norm = heads_norm(k, columns, heads->kv_heads, l->k_norm, heads->dim, l->eps),
        .rope = {.q = q, .k = k, .v = k + keys, .cos_sin = pass->cos_sin[index], .positions = span->positions,
                 .slots = span->slots, .k_cache = pass->k_caches[index], .v_cache = pass->v_caches[index],
                 .q_stride = columns, .k_stride = columns, .v_stride = columns, .heads = heads->heads,
                 .kv_heads = heads->kv_heads, .dim = heads->dim, .rotary = pass->rotary[index], .half = pass->half},
    };
    carousel_rows(member, finish_heads, &finish, span->rows);
    carousel_wait(member);
}

/* A phase that norms x in place; nothing without a weight. */
static void norm_in_place(struct carousel_member *member, const struct span *span, const float *weight, int64_t width,
                          float eps) {
    const struct rows norm = {.x = span->x, .x_stride = width, .inner = 1, .weight = weight, .out = span->x,
                              .out_stride = width, .width = (int)width, .eps = eps};
    if (weight == NULL) return;
    carousel_rows(member, carousel_operators->rms_norm, &norm, span->rows);
    carousel_wait(member);
}

/* Output projection, norm and MLP; x is what they add to the residual. */
static void after_attention(struct carousel_member *member, const struct stack_job *job, int64_t index,
                            const struct span *span) {
    const struct carousel_layer *l = job->pass->layers[index];
    const int64_t hidden = job->hidden, inner = job->inner;
    const struct space *space = &span->space;
    struct carousel_linear linear;
    carousel_linear_begin(&linear, l->output, span->attention, job->width, span->rows, span->x, hidden, space->codes);
    carousel_encode_all(member, &linear, NULL, NULL);
    carousel_multiply_all(member, &linear, NULL);
    carousel_wait(member);
    norm_in_place(member, span, l->post_attention_norm, hidden, l->eps);

    const struct rows norm = {.x = span->x, .x_stride = hidden, .residual = span->residual, .weight = l->mlp_norm,
                              .out = space->narrow, .width = (int)hidden, .eps = l->eps};
    const int gates = inner % PANEL == 0; /* else halves of a block of columns meet */
    carousel_linear_begin(&linear, l->gate_up, space->narrow, hidden, span->rows, gates ? space->gated : space->wide,
                          gates ? inner : 2 * inner, space->codes);
    carousel_encode_all(member, &linear, carousel_operators->add_rms_norm, &norm);
    if (gates) {
        carousel_multiply_all(member, &linear, l->gelu ? carousel_operators->gelu_gate : carousel_operators->silu_gate);
    } else {
        const struct rows gate = {.x = space->wide, .x_stride = 2 * inner, .out = space->gated, .out_stride = inner,
                                  .width = (int)inner};
        carousel_multiply_all(member, &linear, NULL);
        carousel_wait(member);
        carousel_rows(member, l->gelu ? carousel_operators->gelu_tanh_mul : carousel_operators->silu_mul, &gate,
                      span->rows);
    }
    carousel_wait(member);

    carousel_linear_begin(&linear, l->down, space->gated, inner, span->rows, span->x, hidden, space->codes);
    carousel_encode_all(member, &linear, NULL, NULL);
    carousel_multiply_all(member, &linear, NULL);
    carousel_wait(member);
    norm_in_place(member, span, l->post_mlp_norm, hidden, l->eps);
}

static void attend(struct carousel_member *member, const struct stack_job *job, int64_t index) {
    const struct carousel_pass *pass = job->pass;
    const struct attention_plan *plan = job->plans;
    struct carousel_heads heads = pass->layers[index]->heads;
    heads.half = pass->half;
    const struct attention attention = carousel_attention_of(pass->batch, &heads, job->qkv, job->columns,
                                                             pass->k_caches[index], pass->v_caches[index],
                                                             job->attention);
    while (plan->window != heads.window) plan++;
    carousel_attend(member, &attention, plan);
    carousel_wait(member);
}

/* What only the wanted rows go on with. */
static struct span wanted_span(struct carousel_member *member, const struct stack_job *job) {
    const struct carousel_pass *pass = job->pass;
    struct span span = {.rows = pass->wanted_count, .x = pass->x, .residual = pass->wanted_residual,
                        .attention = job->wanted_attention};
    int64_t first, count;
    carousel_phase(member, span.rows);
    while ((count = carousel_take(member, 1, INT64_MAX, &first)) > 0)
        for (int64_t i = first; i < first + count; i++) {
            const int64_t row = pass->wanted[i];
            memcpy(job->wanted_attention + i * job->width, job->attention + row * job->width,
                   (size_t)job->width * sizeof(float));
            memcpy(span.residual + i * job->hidden, pass->residual + row * job->hidden,
                   (size_t)job->hidden * sizeof(float));
        }
    carousel_wait(member);
    space_of(job, span.rows, job->memory, &span.space);
    return span;
}

/* A phase in which each thread takes tiles through all that lies between the attentions of two layers, the first of
 * them -1: nothing. */
static void tiles_between(struct carousel_member *member, const struct stack_job *job, int64_t before, int64_t after) {
    int64_t tiles = (job->tokens + MOST_TILE - 1) / MOST_TILE, first_tile, count;
    tiles = (tiles + member->threads - 1) / member->threads * member->threads;
    carousel_phase(member, tiles);
    while ((count = carousel_take(member, 1, 1, &first_tile)) > 0)
        for (int64_t tile = first_tile; tile < first_tile + count; tile++) {
            const int64_t first = tile * job->tokens / tiles, rows = (tile + 1) * job->tokens / tiles - first;
            struct carousel_team own = {0};
            struct carousel_member alone = {.team = &own, .threads = 1};
            const struct span span = span_of(job, first, rows, job->memory + member->index * job->span_bytes);
            if (rows <= 0) continue;
            if (before >= 0) after_attention(&alone, job, before, &span);
            before_attention(&alone, job, after, &span);
        }
    carousel_wait(member);
}

static void stack_work(struct carousel_member *member, void *data) {
    const struct stack_job *job = data;
    const struct carousel_pass *pass = job->pass;
    const int many = job->tokens >= MANY_GROUPS * GROUP * member->threads;
    const struct span all = span_of(job, 0, job->tokens, job->memory);
    for (int64_t index = 0; index < pass->count; index++) {
        if (many)
            tiles_between(member, job, index - 1, index);
        else
            before_attention(member, job, index, &all);
        const int last = index == pass->count - 1;
        if (last && pass->wanted_count == 0) return;
        attend(member, job, index);
        if (last && pass->wanted_count > 0) {
            const struct span wanted = wanted_span(member, job);
            after_attention(member, job, index, &wanted);
        } else if (last || !many) {
            after_attention(member, job, index, &all);
        }
    }
}

/* A plan for each window; returns how many, or -1 without memory. */
static int64_t make_plans(const struct carousel_pass *pass, struct attention_plan *plans) {
    int64_t made = 0;
    for (int64_t i = 0; i < pass->count; i++) {
        int64_t known = 0;
        while (known < made && plans[known].window != pass->layers[i]->heads.window) known++;
        if (known < made) continue;
        if (carousel_plan(plans + made, pass->batch, &pass->layers[i]->heads)) {
            while (made > 0) carousel_forget(&plans[--made]);
            return -1;
        }
        made++;
    }
    return made;
}

/* Cuts the memory of a pass into its parts. Returns the bytes that it takes. */
static int64_t lay_out(struct stack_job *job, const struct carousel_pass *pass) {
    const struct carousel_layer *l = pass->layers[0];
    *job = (struct stack_job){
        .pass = pass, .tokens = pass->batch->query_start[pass->batch->sequences], .hidden = l->qkv->inputs,
        .width = l->output->inputs, .columns = l->qkv->columns, .inner = l->down->inputs, .x = pass->x,
    };
    const int64_t rows = larger(job->tokens, pass->wanted_count);
    int64_t at = 0;
    job->span_bytes = space_of(job, MOST_TILE < job->tokens ? MOST_TILE : job->tokens, NULL, NULL);
    job->qkv = (float *)(pass->memory + at);
    at += carousel_lines(job->tokens * job->columns * (int64_t)sizeof(float));
    job->attention = (float *)(pass->memory + at);
    at += carousel_lines(job->tokens * job->width * (int64_t)sizeof(float));
    if (pass->wanted_count >= 0) {
        job->x = (float *)(pass->memory + at);
        at += carousel_lines(job->tokens * job->hidden * (int64_t)sizeof(float));
        job->wanted_attention = (float *)(pass->memory + at);
        at += carousel_lines(pass->wanted_count * job->width * (int64_t)sizeof(float));
    }
    job->memory = pass->memory + at;
    return at + larger(pass->batch->threads * job->span_bytes, space_of(job, rows, NULL, NULL));
}

/* Bytes of memory, at a multiple of 64, that a pass needs, whose own memory may still be missing. */
EXPORT int64_t carousel_pass_bytes(const struct carousel_pass *pass) {
    struct stack_job job;
    return lay_out(&job, pass);
}

/* All layers, which are alike in their sizes. Returns 0, or -1 without memory for the plan of the attention. */
EXPORT int carousel_layers(const struct carousel_pass *pass) {
    struct stack_job job;
    lay_out(&job, pass);
    job.plans = calloc((size_t)pass->count, sizeof(struct attention_plan));
    const int64_t plans = job.plans == NULL ? -1 : make_plans(pass, job.plans);
    if (plans >= 0) carousel_run(stack_work, &job, pass->batch->threads);
    for (int64_t i = 0; i < plans; i++) carousel_forget(&job.plans[i]);
    free(job.plans);
    return plans < 0 ? -1 : 0;
}
