/* The products of 8-bit integers, one function per instruction set, and the choice between them; for quant.c alone.
 *
 * A product takes a group of up to GROUP rows of activations and one block of PANEL output columns:
 *   codes    uint8 [depth][STRIDE(rows)][4]: of depth * 4 inputs, four adjacent ones of each row; activation + 128
 *   weights  int8 [depth][PANEL][4]
 *   sums     int32 [rows][PANEL]: sum of code * weight, exactly
 * The dot-product instructions multiply unsigned bytes by signed ones, hence the 128, which the caller takes off again.
 */
#define RESTS 254.0f
#define RUN 16 /* values that a turn keeps together */
#define ROUNDER 12582912.0f /* 1.5 * 2^23: added to a small number, it leaves an integer */
#define AHEAD 16384 /* bytes of weights that are called into the cache ahead of their use; measured */

typedef void (*encoder)(const float *x, float inverse, uint8_t *codes, int64_t count);
typedef void (*splitter)(const float *x, float inverse, uint8_t *codes, uint8_t *rests, float *scratch, int64_t count);
typedef void (*turner)(const float *x, float *out, int64_t count, int64_t runs);

/* What all instruction sets do alike; vectorised for each of them. */
#define COMMON(NAME, TARGET)                                                                                          \
    /* The largest magnitude's bits, as an integer: above 0x7f800000 if anything is not a number. */                  \
    static TARGET uint32_t largest_##NAME(const float *x, int64_t count) {                                            \
        uint32_t most = 0;                                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                                         \
            uint32_t bits;                                                                                            \
            memcpy(&bits, x + i, 4);                                                                                  \
            bits &= 0x7fffffffu;                                                                                      \
            most = bits > most ? bits : most;                                                                         \
        }                                                                                                             \
        return most;                                                                                                  \
    }                                                                                                                 \
    /* Every RUN * runs adjacent values, as [runs, RUN], times the Hadamard matrix of runs, without its scale. */       \
    static TARGET void turn_##NAME(const float *x, float *out, int64_t count, int64_t runs) {                         \
        memcpy(out, x, (size_t)count * sizeof(float));                                                                \
        for (float *end = out + count; out < end; out += RUN * runs)                                                  \
            for (int64_t step = RUN; step < RUN * runs; step *= 2)                                                    \
                for (int64_t i = 0; i < RUN * runs; i += 2 * step)                                                    \
                    for (float *low = out + i, *high = low + step; high < out + i + 2 * step; low += RUN, high += RUN) { \
                        float sum[RUN], difference[RUN];                                                              \
                        for (int l = 0; l < RUN; l++) sum[l] = low[l] + high[l], difference[l] = low[l] - high[l];    \
                        memcpy(low, sum, sizeof(sum));                                                                \
                        memcpy(high, difference, sizeof(difference));                                                 \
                    }                                                                                                 \
    }                                                                                                                 \
    /* codes and rests [count]: x * inverse, rounded, and what that left, in units of 1 / RESTS. */                    \
    static TARGET void split_##NAME(const float *x, float inverse, uint8_t *codes, uint8_t *rests, float *scratch,    \
                                    int64_t count) {                                                                  \
        for (int64_t i = 0; i < count; i++) scratch[i] = x[i] * inverse;                                              \
        for (int64_t i = 0; i < count; i++) {                                                                         \
            const float whole = (scratch[i] + ROUNDER) - ROUNDER;                                                     \
            codes[i] = (uint8_t)((int)whole + 128);                                                                   \
            scratch[i] = (scratch[i] - whole) * RESTS; /* by way of memory: not to be fused with the next addition */ \
        }                                                                                                             \
        for (int64_t i = 0; i < count; i++)                                                                           \
            rests[i] = (uint8_t)((int)((scratch[i] + ROUNDER) - ROUNDER) + 128);                                      \
    }                                                                                                                 \
    static TARGET void finish_##NAME(const int32_t *sums, const struct epilogue *e, int64_t row, int rows,            \
                                     int64_t column, int64_t width, float *out, int64_t stride) {                     \
        const int32_t *shift = e->shifts + column;                                                                    \
        const float *scale = e->scales + column;                                                                      \
        for (int r = 0; r < rows; r++, sums += PANEL, out += stride) {                                                \
            const float row_scale = e->row_scales[row + r];                                                           \
            float scaled[PANEL];                                                                                      \
            if (e->wide) {                                                                                            \
                const int32_t *rests = sums + PANEL;                                                                  \
                for (int i = 0; i < PANEL; i++)                                                                       \
                    scaled[i] = ((float)(sums[i] - shift[i]) + (float)(rests[i] - shift[i]) * (1.0f / RESTS)) *       \
                                scale[i] * row_scale;                                                                 \
                sums = rests;                                                                                         \
            } else {                                                                                                  \
                for (int i = 0; i < PANEL; i++) scaled[i] = (float)(sums[i] - shift[i]) * scale[i] * row_scale;       \
            }                                                                                                         \
            if (e->bias != NULL)                                                                                      \
                for (int i = 0; i < PANEL; i++) scaled[i] += e->bias[column + i];                                     \
            if (width == PANEL)                                                                                       \
                memcpy(out, scaled, sizeof(scaled));                                                                  \
            else                                                                                                      \
                memcpy(out, scaled, (size_t)width * sizeof(float));                                                   \
        }                                                                                                             \
    }

COMMON(base, )

static void encode_base(const float *x, float inverse, uint8_t *codes, int64_t count) {
    for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)((int)lrintf(x[i] * inverse) + 128);
}

static void product_base(const uint8_t *codes, int rows, const int8_t *weights, int64_t depth, int32_t *sums,
                         struct ahead ahead) {
    (void)ahead;
    for (int r = 0; r < rows; r++) {
        int32_t sum[PANEL] = {0};
        const int8_t *w = weights;
        for (int64_t k = 0; k < depth; k++, w += PANEL * 4) {
            const uint8_t *a = codes + (k * STRIDE(rows) + r) * 4;
            const int32_t a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
            for (int i = 0; i < PANEL; i++)
                sum[i] += a0 * w[4 * i] + a1 * w[4 * i + 1] + a2 * w[4 * i + 2] + a3 * w[4 * i + 3];
        }
        memcpy(sums + r * PANEL, sum, sizeof(sum));
    }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
#define VNNI256 __attribute__((target("avx2,fma,avxvnni")))
#define VNNI512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,prefer-vector-width=512")))
#define INLINE static inline __attribute__((always_inline))

COMMON(avx2, AVX2)
COMMON(avx512, VNNI512)

static AVX2 void encode_avx2(const float *x, float inverse, uint8_t *codes, int64_t count) {
    const __m256 factor = _mm256_set1_ps(inverse);
    const __m128i offset = _mm_set1_epi8((char)0x80);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor));
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128((__m128i *)(codes + i), _mm_xor_si128(bytes, offset));
    }
    encode_base(x + i, inverse, codes + i, count - i);
}

static VNNI512 void encode_avx512(const float *x, float inverse, uint8_t *codes, int64_t count) {
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m128i offset = _mm_set1_epi8((char)0x80);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
        _mm_storeu_si128((__m128i *)(codes + i), _mm_xor_si128(_mm512_cvtepi32_epi8(a), offset));
    }
    encode_base(x + i, inverse, codes + i, count - i);
}

INLINE int32_t four(const uint8_t *codes) {
    int32_t value;
    memcpy(&value, codes, 4);
    return value;
}

/* Without a dot-product instruction: pairs of 16-bit products, eight sums of half a column each. */
static AVX2 void product_avx2(const uint8_t *codes, int rows, const int8_t *weights, int64_t depth, int32_t *sums,
                              struct ahead ahead) {
    (void)ahead;
    for (int r = 0; r < rows; r++) {
        __m256i sum[8];
        const int8_t *w = weights;
        UNROLL
        for (int i = 0; i < 8; i++) sum[i] = _mm256_setzero_si256();
        for (int64_t k = 0; k < depth; k++, w += PANEL * 4) {
            const __m128i bytes = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(four(codes + (k * STRIDE(rows) + r) * 4)));
            const __m256i a = _mm256_broadcastq_epi64(bytes);
            UNROLL
            for (int i = 0; i < 8; i++) {
                const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * i)));
                sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(a, wide));
            }
        }
        UNROLL
        for (int i = 0; i < 8; i += 2) {
            const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[i], sum[i + 1]), 0xd8);
            _mm256_storeu_si256((__m256i *)(sums + r * PANEL + 4 * i), both);
        }
    }
}

#define VNNI256_ROWS 2 /* with 4 vectors of columns, 8 of 16 registers are sums */

/* Call for what this step of a product shall: two lines if they are all to be fetched while there is one group. */
INLINE void call_ahead(struct ahead *ahead) {
    _mm_prefetch(ahead->from, _MM_HINT_T0);
    if (ahead->step > 64) _mm_prefetch(ahead->from + 64, _MM_HINT_T0);
    ahead->from += ahead->step;
}

INLINE VNNI256 void tile_256(const int ROWS, const uint8_t *codes, int64_t stride, const int8_t *w, int64_t depth,
                             int32_t *sums, struct ahead ahead) {
    __m256i sum[VNNI256_ROWS][4];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int i = 0; i < 4; i++) sum[r][i] = _mm256_setzero_si256();
    for (int64_t k = 0; k < depth; k++, codes += stride, w += PANEL * 4) {
        __m256i a[VNNI256_ROWS];
        UNROLL
        for (int r = 0; r < ROWS; r++) a[r] = _mm256_set1_epi32(four(codes + 4 * r));
        UNROLL
        for (int i = 0; i < 4; i++) {
            const __m256i right = _mm256_loadu_si256((const __m256i *)(w + 32 * i));
            UNROLL
            for (int r = 0; r < ROWS; r++) sum[r][i] = _mm256_dpbusd_avx_epi32(sum[r][i], a[r], right);
        }
        call_ahead(&ahead);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)(sums + r * PANEL + 8 * i), sum[r][i]);
}

static VNNI256 void product_vnni256(const uint8_t *codes, int rows, const int8_t *w, int64_t depth, int32_t *sums,
                                    struct ahead ahead) {
    int r = 0;
    for (; r + VNNI256_ROWS <= rows; r += VNNI256_ROWS)
        tile_256(VNNI256_ROWS, codes + 4 * r, 4 * (int64_t)STRIDE(rows), w, depth, sums + r * PANEL, ahead);
    if (r < rows) tile_256(1, codes + 4 * r, 4 * (int64_t)STRIDE(rows), w, depth, sums + r * PANEL, ahead);
}

INLINE VNNI512 void tile_512(const int ROWS, const uint8_t *codes, const int8_t *w, int64_t depth, int32_t *sums,
                             struct ahead ahead) {
    __m512i sum[GROUP][2];
    UNROLL
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k++, codes += 4 * STRIDE(ROWS), w += PANEL * 4) {
        const __m512i low = _mm512_loadu_si512(w), high = _mm512_loadu_si512(w + 64);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const __m512i a = _mm512_set1_epi32(four(codes + 4 * r));
            sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a, low);
            sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], a, high);
        }
        call_ahead(&ahead);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_si512(sums + r * PANEL, sum[r][0]);
        _mm512_storeu_si512(sums + r * PANEL + 16, sum[r][1]);
    }
}

static VNNI512 void product_vnni512(const uint8_t *codes, int rows, const int8_t *w, int64_t depth, int32_t *sums,
                                    struct ahead ahead) {
#define CASE(n)                                    \
    case n:                                        \
        tile_512(n, codes, w, depth, sums, ahead); \
        return;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}
#endif

struct quant_operators {
    int kind;
    uint32_t (*largest)(const float *, int64_t);
    encoder encode;
    splitter split;
    turner turn;
    product multiply;
    finisher finish;
};

/* By kind, slowest first; what this CPU lacks is left out by carousel_quant_init. */
static const struct quant_operators quant_kinds[] = {
    {1, largest_base, encode_base, split_base, turn_base, product_base, finish_base},
#if defined(__x86_64__)
    {2, largest_avx2, encode_avx2, split_avx2, turn_avx2, product_avx2, finish_avx2},
    {3, largest_avx2, encode_avx2, split_avx2, turn_avx2, product_vnni256, finish_avx2},
    {4, largest_avx512, encode_avx512, split_avx512, turn_avx512, product_vnni512, finish_avx512},
#endif
};

static int cpu_has(int kind) {
    if (kind == 1) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (kind == 2) return avx2;
    if (kind == 3) return avx2 && carousel_cpu_has(CPU_AVX_VNNI);
    if (kind == 4)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return 0;
}
