/* The products of bfloat16 and of float32 numbers, one function per instruction set, and the choice between them; for
 * quant.c alone.
 *
 * As in quant_kernels.h, a group of up to GROUP rows meets a block of PANEL output columns:
 *   codes    bfloat16 [depth][STRIDE(rows)][2]: of depth * 2 inputs, two adjacent ones of each row; or float [depth][STRIDE(rows)]
 *   weights  bfloat16 [depth][PANEL][2], or float [depth][PANEL]
 *   sums     float [rows][PANEL]
 * A sum goes through the depth in order, whatever the number of rows: a row's result does not depend on the others.
 */

/* What all instruction sets do alike; vectorised for each of them. */
#define COMMON_HALF(NAME, TARGET)                                                                                     \
    /* codes [count]: x rounded to the nearest bfloat16, ties to even; what is no number stays none. */               \
    static TARGET void halve_##NAME(const float *x, uint16_t *codes, int64_t count) {                                 \
        for (int64_t i = 0; i < count; i++) {                                                                         \
            uint32_t bits;                                                                                            \
            memcpy(&bits, x + i, 4);                                                                                  \
            const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;                                    \
            codes[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);               \
        }                                                                                                             \
    }                                                                                                                 \
    static TARGET void finish_half_##NAME(const int32_t *sums, const struct epilogue *e, int64_t row, int rows,       \
                                          int64_t column, int64_t width, float *out, int64_t stride) {                \
        (void)row;                                                                                                    \
        for (int r = 0; r < rows; r++, sums += PANEL, out += stride) {                                                \
            float sum[PANEL];                                                                                         \
            memcpy(sum, sums, sizeof(sum));                                                                           \
            if (e->bias != NULL)                                                                                      \
                for (int i = 0; i < PANEL; i++) sum[i] += e->bias[column + i];                                        \
            if (width == PANEL)                                                                                       \
                memcpy(out, sum, sizeof(sum));                                                                        \
            else                                                                                                      \
                memcpy(out, sum, (size_t)width * sizeof(float));                                                      \
        }                                                                                                             \
    }                                                                                                                 \
    __attribute__((unused)) static TARGET void product_float_##NAME(const uint8_t *codes, int rows,                   \
                                                                   const int8_t *weights, int64_t depth,              \
                                                                   int32_t *sums, struct ahead ahead) {               \
        (void)ahead;                                                                                                  \
        for (int r = 0; r < rows; r++) {                                                                              \
            float sum[PANEL] = {0};                                                                                   \
            const int8_t *w = weights;                                                                                \
            for (int64_t k = 0; k < depth; k++, w += PANEL * 4) {                                                     \
                float a, columns[PANEL];                                                                              \
                memcpy(&a, codes + (k * STRIDE(rows) + r) * 4, 4);                                                            \
                memcpy(columns, w, sizeof(columns));                                                                  \
                for (int i = 0; i < PANEL; i++) sum[i] += a * columns[i];                                             \
            }                                                                                                         \
            memcpy(sums + r * PANEL, sum, sizeof(sum));                                                               \
        }                                                                                                             \
    }                                                                                                                 \
    /* Without a dot product of bfloat16: widened, two sums a column. */                                              \
    static TARGET void product_half_##NAME(const uint8_t *codes, int rows, const int8_t *weights, int64_t depth,      \
                                           int32_t *sums, struct ahead ahead) {                                       \
        (void)ahead;                                                                                                  \
        for (int r = 0; r < rows; r++) {                                                                              \
            float sum[PANEL] = {0};                                                                                   \
            const int8_t *w = weights;                                                                                \
            for (int64_t k = 0; k < depth; k++, w += PANEL * 4) {                                                     \
                uint32_t pair, columns[PANEL];                                                                        \
                memcpy(&pair, codes + (k * STRIDE(rows) + r) * 4, 4);                                                         \
                memcpy(columns, w, sizeof(columns));                                                                  \
                const uint32_t low = pair << 16, high = pair & 0xffff0000u;                                           \
                float a0, a1;                                                                                         \
                memcpy(&a0, &low, 4);                                                                                 \
                memcpy(&a1, &high, 4);                                                                                \
                for (int i = 0; i < PANEL; i++) {                                                                     \
                    const uint32_t even = columns[i] << 16, odd = columns[i] & 0xffff0000u;                           \
                    float w0, w1;                                                                                     \
                    memcpy(&w0, &even, 4);                                                                            \
                    memcpy(&w1, &odd, 4);                                                                             \
                    sum[i] += a0 * w0;                                                                                \
                    sum[i] += a1 * w1;                                                                                \
                }                                                                                                     \
            }                                                                                                         \
            memcpy(sums + r * PANEL, sum, sizeof(sum));                                                               \
        }                                                                                                             \
    }

COMMON_HALF(base, )

#if defined(__x86_64__)
#define HALF512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")))

COMMON_HALF(avx2, AVX2)
COMMON_HALF(avx512, VNNI512)

INLINE HALF512 void tile_half(const int ROWS, const uint8_t *codes, const int8_t *w, int64_t depth, int32_t *sums,
                        struct ahead ahead) {
    __m512 sum[GROUP][2];
    UNROLL
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++, codes += 4 * STRIDE(ROWS), w += PANEL * 4) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 64);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(four(codes + 4 * r));
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], a, low);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], a, high);
        }
        call_ahead(&ahead);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(sums + r * PANEL, sum[r][0]);
        _mm512_storeu_ps(sums + r * PANEL + 16, sum[r][1]);
    }
}

INLINE VNNI512 void tile_float(const int ROWS, const uint8_t *codes, const int8_t *w, int64_t depth, int32_t *sums,
                         struct ahead ahead) {
    __m512 sum[GROUP][2];
    UNROLL
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++, codes += 4 * STRIDE(ROWS), w += PANEL * 4) {
        const __m512 low = _mm512_loadu_ps(w), high = _mm512_loadu_ps(w + 64);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const __m512 a = _mm512_castsi512_ps(_mm512_set1_epi32(four(codes + 4 * r)));
            sum[r][0] = _mm512_fmadd_ps(a, low, sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(a, high, sum[r][1]);
        }
        call_ahead(&ahead);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(sums + r * PANEL, sum[r][0]);
        _mm512_storeu_ps(sums + r * PANEL + 16, sum[r][1]);
    }
}

#define BY_ROWS(NAME, TARGET, TILE)                                                                                   \
    static TARGET void NAME(const uint8_t *codes, int rows, const int8_t *w, int64_t depth, int32_t *sums,            \
                            struct ahead ahead) {                                                                     \
        switch (rows) {                                                                                               \
            CASE(TILE, 1)                                                                                             \
            CASE(TILE, 2)                                                                                             \
            CASE(TILE, 3)                                                                                             \
            CASE(TILE, 4)                                                                                             \
            CASE(TILE, 5)                                                                                             \
            CASE(TILE, 6)                                                                                             \
            CASE(TILE, 7)                                                                                             \
            CASE(TILE, 8)                                                                                             \
            CASE(TILE, 9)                                                                                             \
            CASE(TILE, 10)                                                                                            \
            CASE(TILE, 11)                                                                                            \
            CASE(TILE, 12)                                                                                            \
        }                                                                                                             \
    }
#define CASE(TILE, n)                          \
    case n:                                    \
        TILE(n, codes, w, depth, sums, ahead); \
        return;

BY_ROWS(product_half512, HALF512, tile_half)
BY_ROWS(product_float512, VNNI512, tile_float)
#endif

struct half_operators {
    int kind, dots; /* of quant_kinds, and whether it needs dot products of bfloat16 beside */
    void (*halve)(const float *, uint16_t *, int64_t);
    product multiply, multiply_floats;
    finisher finish;
};

/* Slowest first. */
static const struct half_operators half_kinds[] = {
    {1, 0, halve_base, product_half_base, product_float_base, finish_half_base},
#if defined(__x86_64__)
    {2, 0, halve_avx2, product_half_avx2, product_float_avx2, finish_half_avx2},
    {4, 0, halve_avx512, product_half_avx512, product_float512, finish_half_avx512},
    {4, 1, halve_avx512, product_half512, product_float512, finish_half_avx512},
#endif
};

static int cpu_has_half(const struct half_operators *operators) {
#if defined(__x86_64__)
    if (operators->dots) return cpu_has(operators->kind) && carousel_cpu_has(CPU_AVX512_BF16);
#endif
    return cpu_has(operators->kind);
}
