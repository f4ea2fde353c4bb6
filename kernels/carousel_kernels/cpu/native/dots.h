/* Attention over a cache of bfloat16 by dot products of it (AVX512-BF16), for kernels.h where it is compiled for them.
 *
 * Queries and weights are rounded to bfloat16, sums are in float32. A dot product takes pairs: of head dimensions for
 * the scores, of keys for the outputs. Heads must be of a multiple of 32; the cache is read as it lies.
 */

INLINE vec NAME(dots)(vec sum, vec a, vec b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}

INLINE vec NAME(load_pairs)(const uint16_t *p) { return _mm512_loadu_ps((const float *)(const void *)p); }

/* count (a multiple of 16) floats to the nearest bfloat16. */
INLINE void NAME(round_row)(const float *x, uint16_t *out, int count) {
    for (int i = 0; i < count; i += VL) NAME(store_half)(out + i, NAME(load)(x + i));
}

/* As online_softmax, with pairs of weights for dot products. */
APART FN void NAME(online_softmax_half)(const struct attention *job, float *scores, uint16_t *pairs, int rows, int group,
                                        int count, int64_t first, int64_t position, float *m, float *l, float *o) {
    NAME(weigh_rows)(job, scores, pairs, rows, group, count, first, position, m, l, o);
}

/* As dot_scores: of q [rows, dim] against the keys of one block, token elements apart. */
INLINE void NAME(dot_scores_half)(const uint16_t *q, int rows, int dim, const uint16_t *keys, int64_t token,
                                  const uint16_t *ahead, float *scores) {
    for (int r = 0; r < rows; r++) {
        vec v[BLOCK];
        UNROLL
        for (int i = 0; i < BLOCK; i++) v[i] = (vec){0};
        for (int d = 0; d < dim; d += 2 * VL) {
            const vec query = NAME(load_pairs)(q + r * dim + d);
            UNROLL
            for (int i = 0; i < BLOCK; i++) v[i] = NAME(dots)(v[i], query, NAME(load_pairs)(keys + i * token + d));
            if (r == 0 && ahead != NULL)
                for (int i = 0; i < BLOCK; i++) __builtin_prefetch(ahead + i * token + d);
        }
        NAME(store)(scores + r * KEYS, NAME(lane_sums)(v));
    }
}

/* out [count / 2, dim] pairs of adjacent keys' values, of rows token elements apart; beyond count they are zero: what
 * lies there may be no number. ahead (NULL: nothing): as many further rows that are called into the cache. */
INLINE void NAME(pair_values)(const uint16_t *values, int64_t token, int count, int dim, const uint16_t *ahead,
                              float *out) {
    static const uint16_t order[64] __attribute__((aligned(64))) = {
        0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62,
        31, 63};
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (int j = 0; j < count; j += 2, values += 2 * token, out += dim) {
        for (int d = 0; d < dim; d += 2 * VL) {
            const __m512i a = _mm512_loadu_si512(values + d);
            const __m512i b = j + 1 < count ? _mm512_loadu_si512(values + token + d) : _mm512_setzero_si512();
            _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(out + d + VL, _mm512_permutex2var_epi16(a, high, b));
            if (ahead != NULL) {
                __builtin_prefetch(ahead + j * token + d);
                __builtin_prefetch(ahead + (j + 1) * token + d);
            }
        }
    }
}

/* c[ROWS, COLS vectors] (+)= a[ROWS, n] b[n, columns], all of pairs but c. */
INLINE void NAME(tile_half)(const int ROWS, const int COLS, float *c, int64_t ldc, const uint16_t *a, int64_t lda,
                            const float *b, int64_t ldb, int n, const int accumulate) {
    vec sum[6][4];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int v = 0; v < COLS; v++) sum[r][v] = accumulate ? NAME(load)(c + r * ldc + v * VL) : (vec){0};
    for (int j = 0; j < n; j++) {
        vec right[4];
        UNROLL
        for (int v = 0; v < COLS; v++) right[v] = NAME(load)(b + j * ldb + v * VL);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            memcpy(&pair, a + r * lda + 2 * j, 4);
            const vec left = _mm512_castsi512_ps(_mm512_set1_epi32(pair));
            UNROLL
            for (int v = 0; v < COLS; v++) sum[r][v] = NAME(dots)(sum[r][v], left, right[v]);
        }
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int v = 0; v < COLS; v++) NAME(store)(c + r * ldc + v * VL, sum[r][v]);
}

INLINE void NAME(columns_half)(const int COLS, float *c, int64_t ldc, const uint16_t *a, int64_t lda, const float *b,
                               int64_t ldb, int n, int rows, const int accumulate) {
    int r = 0;
    for (; r + 6 <= rows; r += 6)
        NAME(tile_half)(6, COLS, c + r * ldc, ldc, a + r * lda, lda, b, ldb, n, accumulate);
    for (; r + 3 <= rows; r += 3)
        NAME(tile_half)(3, COLS, c + r * ldc, ldc, a + r * lda, lda, b, ldb, n, accumulate);
    for (; r < rows; r++) NAME(tile_half)(1, COLS, c + r * ldc, ldc, a + r * lda, lda, b, ldb, n, accumulate);
}

/* c[rows, cols] (+)= a[rows, n] b[n, cols], all of pairs but c; cols a multiple of VL. */
INLINE void NAME(multiply_half)(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const float *b, int64_t ldb,
                                int n, int rows, int cols, const int accumulate) {
    int col = 0;
    for (; col + 4 * VL <= cols; col += 4 * VL)
        NAME(columns_half)(4, c + col, ldc, a, lda, b + col, ldb, n, rows, accumulate);
    for (; col + 2 * VL <= cols; col += 2 * VL)
        NAME(columns_half)(2, c + col, ldc, a, lda, b + col, ldb, n, rows, accumulate);
    for (; col < cols; col += VL) NAME(columns_half)(1, c + col, ldc, a, lda, b + col, ldb, n, rows, accumulate);
}

APART FN void NAME(product_half)(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const float *b, int64_t ldb,
                                 int n, int rows, int cols) {
    NAME(multiply_half)(c, ldc, a, lda, b, ldb, n, rows, cols, 0);
}

APART FN void NAME(add_product_half)(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const float *b, int64_t ldb,
                                     int n, int rows, int cols) {
    NAME(multiply_half)(c, ldc, a, lda, b, ldb, n, rows, cols, 1);
}

/* Keys of one tile, by the address of each, into columns of out [dim / 2, KEYS] pairs. */
INLINE void NAME(transpose_pairs)(const uint16_t *const *keys, int count, int dim, float *out) {
    for (int k = 0; k < count; k += VL)
        for (int d = 0; d < dim; d += 2 * VL) {
            vec v[VL];
            UNROLL
            for (int i = 0; i < VL; i++) v[i] = NAME(load_pairs)(keys[k + i] + d);
            TRANSPOSE_STEP(v, 8)
            TRANSPOSE_STEP(v, 4)
            TRANSPOSE_STEP(v, 2)
            TRANSPOSE_STEP(v, 1)
            UNROLL
            for (int i = 0; i < VL; i++) NAME(store)(out + (d / 2 + i) * KEYS + k, v[i]);
        }
}

/* See decode: all that is done with a tile of `blocks` blocks and heads [head, head + heads). */
INLINE void NAME(decode_tile_half)(const struct attention *job, const int32_t *table, int64_t end, int64_t tile,
                                   int blocks, int count, int head, int heads, int64_t context, const uint16_t *q,
                                   float *scores, float *m, float *l, float *o) {
    const int dim = job->dim, group = job->heads / job->kv_heads, rows = heads * group;
    const int distance = AHEAD / dim > 1 ? AHEAD / dim : 1;
    const int64_t token = (int64_t)job->kv_heads * dim;
    uint16_t weights[MAX_DECODE / BLOCK * KEYS] __attribute__((aligned(64)));
    float pairs[BLOCK / 2 * MAX_DIM] __attribute__((aligned(64)));
    for (int i = 0; i < blocks * heads; i++) {
        const int b = i / heads, h = i % heads;
        const int64_t at = table[tile + b] * BLOCK * token + (int64_t)(head + h) * dim;
        NAME(dot_scores_half)(q + h * group * dim, group, dim, (const uint16_t *)job->k_cache + at, token,
                              NAME(later)(job, table, end, tile, 0, i, distance, head, heads),
                              scores + h * group * KEYS + b * BLOCK);
    }
    NAME(online_softmax_half)(job, scores, weights, rows, rows, count, tile * BLOCK, context - 1, m, l, o);
    for (int i = 0; i < blocks * heads; i++) {
        const int b = i / heads, h = i % heads, known = count - b * BLOCK < BLOCK ? count - b * BLOCK : BLOCK;
        const int64_t at = table[tile + b] * BLOCK * token + (int64_t)(head + h) * dim;
        NAME(pair_values)((const uint16_t *)job->v_cache + at, token, known, dim,
                          NAME(later)(job, table, end, tile, 1, i, distance, head, heads), pairs);
        NAME(multiply_half)(o + h * group * dim, dim, weights + h * group * KEYS + b * BLOCK, KEYS, pairs, dim,
                            (known + 1) / 2, group, dim, 1);
    }
}

/* See many_rows: all that is done with a tile of keys, the first of `block`, for rows `skip` and later ones. */
INLINE void NAME(many_rows_half)(const struct attention *job, const int32_t *table, int64_t block, int64_t end_block,
                                 int count, int head, int group, int skip, int rows, int64_t position,
                                 const uint16_t *q, float *scores, float *m, float *l, float *o) {
    const int dim = job->dim, live = rows - skip;
    const int64_t token = (int64_t)job->kv_heads * dim;
    float transposed[MAX_DIM / 2 * KEYS] __attribute__((aligned(64)));
    float pairs[KEYS / 2 * MAX_DIM] __attribute__((aligned(64)));
    uint16_t weights[MAX_ROWS * KEYS] __attribute__((aligned(64)));
    const uint16_t *keys[KEYS];
    int found = 0;
    for (int64_t b = block; b < end_block && found < KEYS; b++)
        for (int i = 0; i < BLOCK; i++, found++)
            keys[found] = (const uint16_t *)job->k_cache + (table[b] * BLOCK + i) * token + (int64_t)head * dim;
    NAME(transpose_pairs)(keys, found, dim, transposed);
    for (int k = 0; k < count; k += BLOCK)
        NAME(pair_values)((const uint16_t *)job->v_cache + (keys[k] - (const uint16_t *)job->k_cache), token,
                          count - k < BLOCK ? count - k : BLOCK, dim, NULL, pairs + k / 2 * dim);
    NAME(product_half)(scores, KEYS, q + skip * dim, dim, transposed, KEYS, dim / 2, live, found);
    NAME(online_softmax_half)(job, scores, weights, live, group, count, block * BLOCK, position + skip / group, m + skip,
                              l + skip * VL, o + skip * dim);
    NAME(add_product_half)(o + skip * dim, dim, weights, KEYS, pairs, dim, (count + 1) / 2, live, dim);
}
