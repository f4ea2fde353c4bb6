/* The loops of the operators, included once per instruction set by carousel_native.c, which defines
 *   NAME(x)  the name of x for this instruction set
 *   TARGET   the function attribute that selects it
 *   VL       floats per vector: 16, 8 or 4
 *   MAXIMUM  of two vectors, lane by lane
 *   ANY_ABOVE  whether any lane of the first is greater than that of the second
 *   WIDE     vectors per row of a register tile: 4 where there are 32 vector registers, else 2
 *
 * Attention goes over tiles of keys with the online softmax (Milakov and Gimelshein 2018; Dao et al., FlashAttention,
 * 2022): a running maximum m, sum l and unnormalised output o per query row, in base 2.
 */
#define FN static TARGET
#define INLINE static inline __attribute__((always_inline)) TARGET

#define vec NAME(vec)
typedef float vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
#define ivec NAME(ivec)
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4), may_alias));

INLINE vec NAME(load)(const float *p) { return *(const vec *)p; }
INLINE void NAME(store)(float *p, vec v) { *(vec *)p = v; }
#ifdef DOTS
/* Rounded to the nearest bfloat16. */
INLINE void NAME(store_half)(uint16_t *p, vec v) {
    _mm256_storeu_si256((__m256i *)(void *)p, (__m256i)_mm512_cvtneps_pbh(v));
}
#endif

/* 2^x for x clamped to [-126, 127], within 2e-7 of it relatively; NaN stays NaN. The polynomial is a minimax fit of 2^r
 * over |r| <= 1/2 with value 1 at 0. Scalar code: the loops that call it are vectorised. */
INLINE float NAME(exp2)(float x) {
    x = x < -126.0f ? -126.0f : x;
    x = x > 127.0f ? 127.0f : x;
    float shifted = x + 12582912.0f; /* 1.5 * 2^23: the integer part, rounded, ends up in the low bits */
    float r = x - (shifted - 12582912.0f);
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (int32_t)((uint32_t)bits << 23) + 0x3f800000;
    float power;
    memcpy(&power, &bits, 4);
    float p = 0.00132647272f;
    p = p * r + 0.00967151264f;
    p = p * r + 0.0555073374f;
    p = p * r + 0.240222421f;
    p = p * r + 0.693146978f;
    return (p * r + 1.0f) * power;
}

INLINE float NAME(sigmoid)(float x) { return 1.0f / (1.0f + NAME(exp2)(x * -LOG2_E)); }

/* ---- norms and activations, a row at a time ---- */

INLINE void NAME(scale_row)(const float *x, const float *weight, float *out, float sum_of_squares, int n, float eps) {
    const float inverse = 1.0f / sqrtf(sum_of_squares / (float)n + eps);
#pragma omp simd
    for (int i = 0; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

FN void NAME(rms_norm)(const void *arguments, int64_t first, int64_t last) {
    const struct rows *job = arguments;
    const int n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row / job->inner * job->x_stride + row % job->inner * n;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < n; i++) sum += x[i] * x[i];
        float *out = job->out + row / job->inner * job->out_stride + row % job->inner * n;
        NAME(scale_row)(x, job->weight, out, sum, n, job->eps);
    }
}

FN void NAME(add_rms_norm)(const void *arguments, int64_t first, int64_t last) {
    const struct rows *job = arguments;
    const int n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * job->x_stride;
        float *residual = job->residual + row * n;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < n; i++) {
            float total = x[i] + residual[i];
            residual[i] = total;
            sum += total * total;
        }
        NAME(scale_row)(residual, job->weight, job->out + row * n, sum, n, job->eps);
    }
}

FN void NAME(silu_mul)(const void *arguments, int64_t first, int64_t last) {
    const struct rows *job = arguments;
    const int n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *gate = job->x + row * job->x_stride, *up = gate + n;
        float *out = job->out + row * job->out_stride;
#pragma omp simd
        for (int i = 0; i < n; i++) out[i] = gate[i] * NAME(sigmoid)(gate[i]) * up[i];
    }
}

/* (1 + tanh y) / 2 is sigmoid(2y). */
FN void NAME(gelu_tanh_mul)(const void *arguments, int64_t first, int64_t last) {
    const struct rows *job = arguments;
    const int n = job->width;
    for (int64_t row = first; row < last; row++) {
        const float *gate = job->x + row * job->x_stride, *up = gate + n;
        float *out = job->out + row * job->out_stride;
#pragma omp simd
        for (int i = 0; i < n; i++) {
            float g = gate[i], doubled = g * (1.5957691216f + 0.0713548163f * g * g);
            out[i] = g * NAME(sigmoid)(doubled) * up[i];
        }
    }
}

/* What a linear layer does with the two halves of its columns as they come. */
FN void NAME(silu_gate)(const float *x, int rows, float *out, int64_t stride) {
    const struct rows job = {.x = x, .x_stride = 2 * PANEL, .out = out, .out_stride = stride, .width = PANEL};
    NAME(silu_mul)(&job, 0, rows);
}

FN void NAME(gelu_gate)(const float *x, int rows, float *out, int64_t stride) {
    const struct rows job = {.x = x, .x_stride = 2 * PANEL, .out = out, .out_stride = stride, .width = PANEL};
    NAME(gelu_tanh_mul)(&job, 0, rows);
}

/* ---- rotary embedding with the KV write ---- */

INLINE void NAME(rotate)(const float *x, float *out, const float *cos, const float *sin, int half) {
#pragma omp simd
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
}

/* count floats, to the nearest bfloat16, ties to even; what is no number stays none. */
INLINE void NAME(halve_row)(const float *x, uint16_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
    }
}

INLINE void NAME(widen_row)(const uint16_t *x, float *out, int count) {
    for (int i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

/* The keys of one token, rotated, and its values, to a cache of bfloat16. */
INLINE void NAME(write_half)(const struct rope *job, int64_t token, const float *cos, const float *sin, int64_t slot) {
    const int dim = job->dim, half = job->rotary / 2;
    const float *k = job->k + token * job->k_stride;
    uint16_t *k_cache = (uint16_t *)job->k_cache + slot, *v_cache = (uint16_t *)job->v_cache + slot;
    float rotated[MAX_DIM];
    for (int h = 0; h < job->kv_heads * dim; h += dim) {
        NAME(rotate)(k + h, rotated, cos, sin, half);
        for (int i = 2 * half; i < dim; i++) rotated[i] = k[h + i];
        NAME(halve_row)(rotated, k_cache + h, dim);
    }
    NAME(halve_row)(job->v + token * job->v_stride, v_cache, job->kv_heads * dim);
}

/* Call for the lines of the cache that a later token is written to: they are cold, and waiting for each takes longer
 * than all the arithmetic. */
INLINE void NAME(call_for)(const struct rope *job, int64_t token) {
    const int64_t bytes = (int64_t)job->kv_heads * job->dim * (job->half ? 2 : 4), at = job->slots[token] * bytes;
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((char *)job->k_cache + at + i, 1);
        __builtin_prefetch((char *)job->v_cache + at + i, 1);
    }
}

FN void NAME(rope_write)(const void *arguments, int64_t first, int64_t last) {
    const struct rope *job = arguments;
    const int dim = job->dim, half = job->rotary / 2;
    for (int64_t t = first; t < first + SOON && t < last; t++) NAME(call_for)(job, t);
    for (int64_t t = first; t < last; t++) {
        if (t + SOON < last) NAME(call_for)(job, t + SOON);
        const float *cos = job->cos_sin + job->positions[t] * job->rotary, *sin = cos + half;
        float *q = job->q + t * job->q_stride;
        for (int h = 0; h < job->heads; h++) NAME(rotate)(q + h * dim, q + h * dim, cos, sin, half);
        const int64_t slot = job->slots[t] * job->kv_heads * dim;
        if (job->half) {
            NAME(write_half)(job, t, cos, sin, slot);
            continue;
        }
        const float *k = job->k + t * job->k_stride;
        float *k_cache = (float *)job->k_cache + slot;
        for (int h = 0; h < job->kv_heads * dim; h += dim) {
            NAME(rotate)(k + h, k_cache + h, cos, sin, half);
            for (int i = 2 * half; i < dim; i++) k_cache[h + i] = k[h + i];
        }
        memcpy((float *)job->v_cache + slot, job->v + t * job->v_stride, sizeof(float) * (size_t)(job->kv_heads * dim));
    }
}

/* ---- attention ---- */

/* c[rows, cols] (+)= a[rows, n] b[n, cols] for ROWS rows and COLS vectors of columns, held in registers. ahead (NULL:
 * nothing): the same columns of n rows, stride apart, that are called into the cache on the way. */
INLINE void NAME(tile)(const int ROWS, const int COLS, float *c, int64_t ldc, const float *a, int64_t lda,
                       const float *const *b, int col, int n, const int accumulate, const float *ahead,
                       int64_t stride) {
    vec sum[6][4];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int v = 0; v < COLS; v++)
            sum[r][v] = accumulate ? NAME(load)(c + r * ldc + col + v * VL) : (vec){0};
    for (int j = 0; j < n; j++) {
        const float *row = b[j] + col;
        vec right[4];
        UNROLL
        for (int v = 0; v < COLS; v++) right[v] = NAME(load)(row + v * VL);
        UNROLL
        for (int r = 0; r < ROWS; r++)
            UNROLL
            for (int v = 0; v < COLS; v++) sum[r][v] += a[r * lda + j] * right[v];
        if (ahead != NULL)
            for (int v = 0; v < COLS * VL; v += LINE) __builtin_prefetch(ahead + j * stride + col + v);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int v = 0; v < COLS; v++) NAME(store)(c + r * ldc + col + v * VL, sum[r][v]);
}

INLINE void NAME(columns)(const int COLS, float *c, int64_t ldc, const float *a, int64_t lda, const float *const *b,
                          int col, int n, int rows, const int accumulate, const float *ahead, int64_t stride) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) {
        NAME(tile)(6, COLS, c + r * ldc, ldc, a + r * lda, lda, b, col, n, accumulate, ahead, stride);
        ahead = NULL;
    }
    if (r + 3 <= rows) {
        NAME(tile)(3, COLS, c + r * ldc, ldc, a + r * lda, lda, b, col, n, accumulate, ahead, stride);
        ahead = NULL;
        r += 3;
    }
    for (; r < rows; r++) {
        NAME(tile)(1, COLS, c + r * ldc, ldc, a + r * lda, lda, b, col, n, accumulate, ahead, stride);
        ahead = NULL;
    }
}

/* c[rows, cols] (+)= a[rows, n] b[n, cols]; b by the address of each of its rows, cols a multiple of VL. */
INLINE void NAME(multiply)(float *c, int64_t ldc, const float *a, int64_t lda, const float *const *b, int n, int rows,
                           int cols, const int accumulate, const float *ahead, int64_t stride) {
    int col = 0;
    for (; col + WIDE * VL <= cols; col += WIDE * VL)
        NAME(columns)(WIDE, c, ldc, a, lda, b, col, n, rows, accumulate, ahead, stride);
    for (; WIDE > 2 && col + 2 * VL <= cols; col += 2 * VL)
        NAME(columns)(2, c, ldc, a, lda, b, col, n, rows, accumulate, ahead, stride);
    for (; col < cols; col += VL) NAME(columns)(1, c, ldc, a, lda, b, col, n, rows, accumulate, ahead, stride);
}

FN void NAME(product)(float *c, int64_t ldc, const float *a, int64_t lda, const float *const *b, int n, int rows,
                      int cols) {
    NAME(multiply)(c, ldc, a, lda, b, n, rows, cols, 0, NULL, 0);
}

FN void NAME(add_product)(float *c, int64_t ldc, const float *a, int64_t lda, const float *const *b, int n, int rows,
                          int cols, const float *ahead, int64_t stride) {
    NAME(multiply)(c, ldc, a, lda, b, n, rows, cols, 1, ahead, stride);
}

/* Exchange of the halves of 2h lanes between two vectors: one step of transposing VL vectors. */
#define LOW_(l, h) ((l) & (h) ? VL + (l) - (h) : (l))
#define HIGH_(l, h) ((l) & (h) ? VL + (l) : (l) + (h))
#if VL == 16
#define LANES(f, h)                                                                                              \
    f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h), f(8, h), f(9, h), f(10, h), f(11, h), \
        f(12, h), f(13, h), f(14, h), f(15, h)
#elif VL == 8
#define LANES(f, h) f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h)
#else
#define LANES(f, h) f(0, h), f(1, h), f(2, h), f(3, h)
#endif
#define LOW(a, b, h) SHUFFLE(vec, a, b, LANES(LOW_, h))
#define HIGH(a, b, h) SHUFFLE(vec, a, b, LANES(HIGH_, h))

/* v[i] becomes lane sums: lane i of v[0] is the sum of the lanes of the old v[i]. */
#define ADD_STEP(v, h)              \
    UNROLL                          \
    for (int i = 0; i < (h); i++) v[i] = LOW(v[i], v[i + (h)], h) + HIGH(v[i], v[i + (h)], h);

#define TRANSPOSE_STEP(v, h)                                           \
    UNROLL                                                             \
    for (int i = 0; i < VL; i++)                                       \
        if (!(i & (h))) {                                              \
            vec low = LOW(v[i], v[i + (h)], h);                        \
            v[i + (h)] = HIGH(v[i], v[i + (h)], h);                    \
            v[i] = low;                                                \
        }

/* Lane 0 becomes all lanes of v put together. */
#if VL >= 16
#define FOLD_16(v, op) v = op(v, HIGH(v, v, 8));
#else
#define FOLD_16(v, op)
#endif
#if VL >= 8
#define FOLD_8(v, op) v = op(v, HIGH(v, v, 4));
#else
#define FOLD_8(v, op)
#endif
#define PLUS(a, b) ((a) + (b))
#define FOLD(v, op)           \
    FOLD_16(v, op)            \
    FOLD_8(v, op)             \
    v = op(v, HIGH(v, v, 2)); \
    v = op(v, HIGH(v, v, 1));

INLINE vec NAME(lane_sums)(vec *v) {
#if VL >= 16
    ADD_STEP(v, 8)
#endif
#if VL >= 8
    ADD_STEP(v, 4)
#endif
    ADD_STEP(v, 2)
    ADD_STEP(v, 1)
    return v[0];
}

/* Keys of one tile, by the address of each, into columns of out [dim, KEYS]. */
FN void NAME(transpose_keys)(const float *const *keys, int count, int dim, float *out) {
    for (int k = 0; k < count; k += VL)
        for (int d = 0; d < dim; d += VL) {
            vec v[VL];
            UNROLL
            for (int i = 0; i < VL; i++) v[i] = NAME(load)(keys[k + i] + d);
#if VL >= 16
            TRANSPOSE_STEP(v, 8)
#endif
#if VL >= 8
            TRANSPOSE_STEP(v, 4)
#endif
            TRANSPOSE_STEP(v, 2)
            TRANSPOSE_STEP(v, 1)
            UNROLL
            for (int i = 0; i < VL; i++) NAME(store)(out + (d + i) * KEYS + k, v[i]);
        }
}

/* scores[r, i] of few rows against the keys of one block, stride apart. ahead (NULL: nothing): further ones, likewise
 * apart, that are called into the cache on the way. */
FN void NAME(dot_scores)(const float *q, int rows, int dim, const float *keys, int64_t stride, const float *ahead,
                         float *scores) {
    for (int k = 0; k < BLOCK; k += VL)
        for (int r = 0; r < rows; r++) {
            vec v[VL];
            UNROLL
            for (int i = 0; i < VL; i++) v[i] = (vec){0};
            for (int d = 0; d < dim; d += VL) {
                const vec query = NAME(load)(q + r * dim + d);
                const float *key = keys + k * stride + d;
                UNROLL
                for (int i = 0; i < VL; i += 4, key += 4 * stride) {
                    v[i] += query * NAME(load)(key);
                    v[i + 1] += query * NAME(load)(key + stride);
                    v[i + 2] += query * NAME(load)(key + 2 * stride);
                    v[i + 3] += query * NAME(load)(key + 3 * stride);
                }
                if (r == 0 && ahead != NULL && d % LINE == 0)
                    for (int i = k; i < k + VL; i++) __builtin_prefetch(ahead + i * stride + d);
            }
            NAME(store)(scores + r * KEYS + k, NAME(lane_sums)(v));
        }
}

/* Lanes of a where mask has all bits set, of b where it has none. */
INLINE vec NAME(select)(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

/* exp2 of each lane, none of which is above 127. */
INLINE vec NAME(exp2_lanes)(vec x) {
    x = MAXIMUM((vec){0} - 126.0f, x); /* in this order: NaN stays NaN */
    const vec shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);
    const vec power = (vec)(((ivec)shifted << 23) + 0x3f800000);
    vec p = r * 0.00132647272f + 0.00967151264f;
    p = p * r + 0.0555073374f;
    p = p * r + 0.240222421f;
    p = p * r + 0.693146978f;
    return (p * r + 1.0f) * power;
}

INLINE void NAME(soften)(float *x, int n, float cap) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float e = NAME(exp2)(fabsf(x[i]) * (-2.0f * LOG2_E)); /* tanh |x| = (1 - e) / (1 + e) */
        x[i] = copysignf((1.0f - e) / (1.0f + e), x[i]) * cap;
    }
}

/* Where the weights of a row go: over its scores, or, rounded, to pairs for dot products. */
INLINE void NAME(keep_weights)(float *x, uint16_t *pairs, int at, vec weights) {
#ifdef DOTS
    if (pairs != NULL) {
        NAME(store_half)(pairs + at, weights);
        return;
    }
#endif
    (void)pairs;
    NAME(store)(x + at, weights);
}

/* Scores of one row become weights; m, l [VL] (whose lanes are yet to be added up) and o are brought up to date. m is a
 * whole number, so that scaling anew is exact, and need not be the maximum: as long as no score is more than SLACK above
 * it, nothing is scaled. n is a multiple of VL, and constant where it is KEYS; what is hidden is -infinity. pairs: see
 * keep_weights. */
INLINE void NAME(weigh_row)(float *x, uint16_t *pairs, const int n, float *m, float *l, float *o, int dim) {
    vec best = NAME(load)(x), sums = NAME(load)(l);
    UNROLL
    for (int c = VL; c < n; c += VL) best = MAXIMUM(best, NAME(load)(x + c));
    if (ANY_ABOVE(best, (vec){0} + (*m + SLACK))) {
        FOLD(best, MAXIMUM)
        const float top = ceilf(best[0]), factor = *m > -INFINITY ? NAME(exp2)(*m - top) : 0.0f; /* 0: all is zero still */
        sums *= factor;
        for (int d = 0; d < dim; d += VL) NAME(store)(o + d, NAME(load)(o + d) * factor);
        *m = top;
    }
    /* Nothing seen yet: a difference of infinities would be NaN. */
    const vec whole = (vec){0} + (*m == -INFINITY ? 0.0f : *m);
    UNROLL
    for (int c = 0; c < n; c += VL) {
        const vec weights = NAME(exp2_lanes)(NAME(load)(x + c) - whole);
        NAME(keep_weights)(x, pairs, c, weights);
        sums += weights;
    }
    NAME(store)(l, sums);
}

/* See weigh_row. Keys outside [low, high) are hidden. */
INLINE void NAME(soft_max_row)(float *x, uint16_t *pairs, int n, int low, int high, float cap, float *m, float *l,
                               float *o, int dim) {
    if (cap > 0) NAME(soften)(x, n, cap);
    if (low > 0 || high < n) {
        ivec lane;
        for (int i = 0; i < VL; i++) lane[i] = i;
        for (int c = 0; c < n; c += VL)
            NAME(store)(x + c, NAME(select)((lane + c < low) | (lane + c >= high), (vec){0} - INFINITY,
                                            NAME(load)(x + c)));
    }
    if (n == KEYS)
        NAME(weigh_row)(x, pairs, KEYS, m, l, o, dim);
    else
        NAME(weigh_row)(x, pairs, n, m, l, o, dim);
}

/* One tile of count keys, the first at position `first`; row r stands at position + r / group. pairs: [rows, KEYS], see
 * keep_weights. */
INLINE void NAME(weigh_rows)(const struct attention *job, float *scores, uint16_t *pairs, int rows, int group, int count,
                             int64_t first, int64_t position, float *m, float *l, float *o) {
    const int dim = job->dim, n = (count + VL - 1) / VL * VL;
    if (count == KEYS && job->cap <= 0 && job->window <= 0 && position >= first + KEYS - 1) {
        for (int r = 0; r < rows; r++)
            NAME(weigh_row)(scores + r * KEYS, pairs == NULL ? NULL : pairs + r * KEYS, KEYS, m + r, l + r * VL,
                            o + (int64_t)r * dim, dim);
        return;
    }
    for (int r = 0; r < rows; r++) {
        const int64_t at = position + r / group;
        const int64_t high = at + 1 - first, low = job->window > 0 ? high - job->window : 0;
        NAME(soft_max_row)(scores + r * KEYS, pairs == NULL ? NULL : pairs + r * KEYS, n, (int)(low > 0 ? low : 0),
                           (int)(high < count ? high : count), job->cap, m + r, l + r * VL, o + (int64_t)r * dim, dim);
    }
}

APART FN void NAME(online_softmax)(const struct attention *job, float *scores, int rows, int group, int count,
                                   int64_t first, int64_t position, float *m, float *l, float *o) {
    NAME(weigh_rows)(job, scores, NULL, rows, group, count, first, position, m, l, o);
}

/* The addresses of up to KEYS keys (or values) of a KV head, whole blocks from the given one; of a cache of bfloat16
 * those of copies in float32, made in buffer [KEYS, dim]. */
INLINE int NAME(addresses)(const struct attention *job, const void *cache, const int32_t *table, int64_t first_block,
                           int64_t end_block, int head, float *buffer, const float **out) {
    const int64_t token = (int64_t)job->kv_heads * job->dim;
    int n = 0;
    for (int64_t b = first_block; b < end_block && n < KEYS; b++) {
        const int64_t base = table[b] * BLOCK * token + (int64_t)head * job->dim;
        for (int i = 0; i < BLOCK; i++, n++) {
            if (!job->half) {
                out[n] = (const float *)cache + base + i * token;
                continue;
            }
            NAME(widen_row)((const uint16_t *)cache + base + i * token, buffer + n * job->dim, job->dim);
            out[n] = buffer + n * job->dim;
        }
    }
    return n;
}

/* The keys (or values) of a block, the first at element `at` of the cache, token elements apart: where they lie, or,
 * of bfloat16, copies in float32 in buffer [BLOCK, dim]. ahead is what will be read later: called for here with a cache
 * of bfloat16, and then NULL, else left to whoever reads the block. */
INLINE const float *NAME(block_of)(const struct attention *job, const void *cache, int64_t at, float *buffer,
                                   int64_t *stride, const void **ahead) {
    const int64_t token = (int64_t)job->kv_heads * job->dim;
    if (!job->half) {
        *stride = token;
        return (const float *)cache + at;
    }
    const uint16_t *from = (const uint16_t *)cache + at, *later = *ahead;
    for (int i = 0; i < BLOCK; i++) {
        if (later != NULL)
            for (int d = 0; d < job->dim; d += 2 * LINE) __builtin_prefetch(later + i * token + d);
        NAME(widen_row)(from + i * token, buffer + i * job->dim, job->dim);
    }
    *stride = job->dim;
    *ahead = NULL;
    return buffer;
}

INLINE float NAME(total)(const float *lanes) {
    vec sums = NAME(load)(lanes);
    FOLD(sums, PLUS)
    return sums[0];
}

INLINE void NAME(finish_rows)(const float *l, const float *o, int rows, int dim, float *out) {
    for (int r = 0; r < rows; r++) {
        const float inverse = 1.0f / NAME(total)(l + r * VL);
#pragma omp simd
        for (int d = 0; d < dim; d++) out[r * dim + d] = o[r * dim + d] * inverse;
    }
}

/* A decode reads a tile's keys, then its values, each block by block and head by head. Here is what it will read
 * `distance` (block, head) pairs after the given pair; NULL past the end. */
INLINE const void *NAME(later)(const struct attention *job, const int32_t *table, int64_t end, int64_t tile,
                                int values, int pair, int distance, int head, int heads) {
    const int64_t next = tile + TILE_BLOCKS;
    const int pairs = (int)(next < end ? TILE_BLOCKS : end - tile) * heads;
    pair += distance;
    if (pair >= pairs) {
        pair -= pairs;
        if (values) tile = next;
        values = !values;
        if (tile + pair / heads >= end) return NULL;
    }
    const int64_t token = (int64_t)job->kv_heads * job->dim;
    const int64_t at = table[tile + pair / heads] * BLOCK * token + (int64_t)(head + pair % heads) * job->dim;
    return (const char *)(values ? job->v_cache : job->k_cache) + at * (job->half ? 2 : 4);
}

#ifdef DOTS
#include "dots.h"
#endif

/* Blocks [first, end) of a sequence with one new token, all heads. The heads go through the blocks together, because
 * their keys lie side by side. Results go to partial ([heads] m, [heads] l, [heads, dim] o), or, if NULL, finished to
 * out. */
FN void NAME(decode)(const struct attention *job, int sequence, int64_t first, int64_t end, float *partial) {
    const int dim = job->dim, group = job->heads / job->kv_heads;
    const int together = MAX_DECODE / (group * dim) < job->kv_heads ? MAX_DECODE / (group * dim) : job->kv_heads;
    const int distance = AHEAD / dim > 1 ? AHEAD / dim : 1;
    const int32_t *table = job->block_tables + (int64_t)sequence * job->table_stride;
    const int64_t context = job->context_lens[sequence], token = (int64_t)job->kv_heads * dim;
    const int32_t row = job->query_start[sequence];
    float q[MAX_DECODE], o[MAX_DECODE], m[MAX_DECODE / BLOCK], l[MAX_DECODE / BLOCK * VL];
    float scores[MAX_DECODE / BLOCK * KEYS], buffer[BLOCK * MAX_DIM];
#ifdef DOTS
    uint16_t q_half[MAX_DECODE];
#endif
    for (int head = 0; head < job->kv_heads; head += together) {
        const int heads = job->kv_heads - head < together ? job->kv_heads - head : together, rows = heads * group;
        const float *queries = job->q + row * job->q_stride + (int64_t)head * group * dim;
        for (int i = 0; i < rows * dim; i++) q[i] = queries[i] * job->scale;
#ifdef DOTS
        if (job->half) NAME(round_row)(q, q_half, rows * dim);
#endif
        memset(o, 0, sizeof(float) * (size_t)(rows * dim));
        for (int r = 0; r < rows; r++) m[r] = -INFINITY;
        memset(l, 0, sizeof(float) * (size_t)(rows * VL));
        for (int64_t tile = first; tile < end; tile += TILE_BLOCKS) {
            const int blocks = (int)(tile + TILE_BLOCKS < end ? TILE_BLOCKS : end - tile);
            const int64_t left = context - tile * BLOCK;
            const int count = (int)(left < blocks * BLOCK ? left : blocks * BLOCK);
#ifdef DOTS
            if (job->half && dim % 32 == 0) {
                NAME(decode_tile_half)(job, table, end, tile, blocks, count, head, heads, context, q_half, scores, m, l,
                                       o);
                continue;
            }
#endif
            for (int i = 0; i < blocks * heads; i++) {
                const int b = i / heads, h = i % heads;
                const void *ahead = NAME(later)(job, table, end, tile, 0, i, distance, head, heads);
                int64_t stride;
                const float *keys =
                    NAME(block_of)(job, job->k_cache, table[tile + b] * BLOCK * token + (int64_t)(head + h) * dim,
                                   buffer, &stride, &ahead);
                NAME(dot_scores)(q + h * group * dim, group, dim, keys, stride, ahead,
                                 scores + h * group * KEYS + b * BLOCK);
            }
            NAME(online_softmax)(job, scores, rows, rows, count, tile * BLOCK, context - 1, m, l, o);
            for (int i = 0; i < blocks * heads; i++) {
                const int b = i / heads, h = i % heads, known = count - b * BLOCK < BLOCK ? count - b * BLOCK : BLOCK;
                const void *ahead = NAME(later)(job, table, end, tile, 1, i, distance, head, heads);
                const float *values[BLOCK];
                int64_t stride;
                values[0] = NAME(block_of)(job, job->v_cache,
                                           table[tile + b] * BLOCK * token + (int64_t)(head + h) * dim, buffer, &stride,
                                           &ahead);
                for (int j = 1; j < BLOCK; j++) values[j] = values[0] + j * stride;
                NAME(add_product)(o + h * group * dim, dim, scores + h * group * KEYS + b * BLOCK, KEYS, values, known,
                                  group, dim, ahead, token);
            }
        }
        const int64_t at = (int64_t)head * group;
        if (partial == NULL) {
            NAME(finish_rows)(l, o, rows, dim, job->out + (row * (int64_t)job->heads + at) * dim);
            continue;
        }
        memcpy(partial + at, m, sizeof(float) * (size_t)rows);
        for (int r = 0; r < rows; r++) partial[job->heads + at + r] = NAME(total)(l + r * VL);
        memcpy(partial + 2 * job->heads + at * dim, o, sizeof(float) * (size_t)(rows * dim));
    }
}

/* Partial results of one sequence, added up (as FlashDecoding does). */
FN void NAME(combine)(const struct attention *job, int sequence, const float *partials, int parts) {
    const int dim = job->dim, heads = job->heads;
    const int64_t stride = (int64_t)heads * (dim + 2);
    for (int h = 0; h < heads; h++) {
        float *out = job->out + (job->query_start[sequence] * (int64_t)heads + h) * dim;
        float top = -INFINITY, sum = 0;
        for (int p = 0; p < parts; p++) top = partials[p * stride + h] > top ? partials[p * stride + h] : top;
        memset(out, 0, sizeof(float) * (size_t)dim);
        for (int p = 0; p < parts; p++) {
            const float *part = partials + p * stride, *o = part + 2 * heads + (int64_t)h * dim;
            const float factor = NAME(exp2)(part[h] - top);
            sum += factor * part[heads + h];
#pragma omp simd
            for (int d = 0; d < dim; d++) out[d] += factor * o[d];
        }
#pragma omp simd
        for (int d = 0; d < dim; d++) out[d] /= sum;
    }
}

#include "chunks.h"
#include "largest.h"

static const struct operators NAME(operators) = {
    .rms_norm = NAME(rms_norm),
    .add_rms_norm = NAME(add_rms_norm),
    .silu_mul = NAME(silu_mul),
    .gelu_tanh_mul = NAME(gelu_tanh_mul),
    .rope_write = NAME(rope_write),
    .decode = NAME(decode),
    .combine = NAME(combine),
    .chunk = NAME(chunk),
    .shared = NAME(shared),
    .silu_gate = NAME(silu_gate),
    .gelu_gate = NAME(gelu_gate),
    .largest = NAME(largest),
};

#undef FN
#undef INLINE
#undef vec
#undef ivec
#undef LOW_
#undef HIGH_
#undef LANES
#undef LOW
#undef HIGH
#undef FOLD_16
#undef FOLD_8
#undef FOLD
#undef PLUS
#undef MAXIMUM
#undef ANY_ABOVE
#undef ADD_STEP
#undef TRANSPOSE_STEP
#undef NAME
#undef TARGET
#undef VL
#undef WIDE
