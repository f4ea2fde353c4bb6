/* Linear layers of 8-bit integers: weights quantised per output column when the model was prepared, activations per row
 * as they come, sums exact in 32 bits, so that a row's result depends neither on the other rows nor on their number.
 *
 * The scheme is dynamic symmetric quantisation: code = round(x * 127 / max |x|), of each row; a row with anything that
 * is not finite becomes NaN as a whole. A wide layer takes activations of 16 bits instead, as two codes, the second one
 * for what rounding the first has left: each row is two rows of the product.
 *
 * Layers of bfloat16 and float32 go the same way, activations of the former rounded as they come; summed in float32.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "linear.h"
#include "parallel.h"

#define EXPORT __attribute__((visibility("default")))
#define TINY 1e-30f          /* a row below this everywhere counts as zero: its inverse would overflow */
#define SMALL_PRODUCT 131072 /* multiplications below which waking threads costs about what they save */
#define SMALL_ROWS 32768     /* activations below which one thread quantises them all */

/* Formats: 8-bit weights with activations of 8 or 16 bits; bfloat16; float32. The latter two have weights
 * [blocks][depth][BLOCK][2 or 1], and neither scales nor shifts. */
enum { NARROW, WIDE, HALF, FLOAT };

struct epilogue {
    const float *scales, *row_scales, *bias;
    const int32_t *shifts;
    float *out; /* [rows, columns] */
    int64_t columns, wide;
};

#include "quant_kernels.h"
#include "half_kernels.h"

static const struct quant_operators *quant = &quant_kinds[0];
static const struct half_operators *half = &half_kinds[0];

/* Use the kind of instructions with this number, or the best of this CPU for 0. Returns the one that is used; 0 where
 * the CPU does not have it, and nothing changes. */
EXPORT int carousel_quant_init(int kind) {
    const int count = (int)(sizeof(quant_kinds) / sizeof(quant_kinds[0]));
    for (int i = 0; i < (int)(sizeof(half_kinds) / sizeof(half_kinds[0])); i++)
        if ((kind == 0 || half_kinds[i].kind <= kind) && cpu_has_half(&half_kinds[i])) half = &half_kinds[i];
    for (int i = count - 1; i >= 0; i--)
        if ((kind == 0 || quant_kinds[i].kind == kind) && cpu_has(quant_kinds[i].kind)) {
            quant = &quant_kinds[i];
            return quant->kind;
        }
    return 0;
}

/* Whether bfloat16 is multiplied by instructions for it. */
EXPORT int carousel_half_products(void) { return half->dots; }

struct linear_job {
    const struct carousel_quant_layer *layer;
    const float *x;
    int64_t x_stride, rows, codes_per_row, depth, groups, blocks;
    product product;
    finisher finish;
    uint8_t *codes;    /* groups one after another; GROUP rows of codes at most in each */
    char *scratch;     /* [groups][depth * SCRATCH] */
    float *row_scales; /* [rows] */
    struct epilogue epilogue;
    int64_t parts; /* of the groups; an item is a block of columns times a part */
    int64_t items, threads, next, next_group;
};

/* Groups are as even as can be, the larger ones first: a group of one row costs about as much as one of four. */
static int64_t first_row(const struct linear_job *job, int64_t group) {
    const int64_t most = job->rows % job->groups;
    return group * (job->rows / job->groups) + (group < most ? group : most);
}

#define SCRATCH 24 /* bytes per 4 inputs: two rows of codes and one of floats */

/* Codes of one row, 128 for nothing, to [depth * 4] at to, and with wide the second ones to rests. */
static float encode_row(const struct linear_job *job, const float *x, uint8_t *to, uint8_t *rests, float *scratch) {
    const int64_t inputs = job->layer->inputs, all = job->depth * 4;
    if (job->layer->runs > 1) {
        quant->turn(x, scratch, inputs, job->layer->runs);
        x = scratch;
    }
    if (job->layer->format == FLOAT) {
        memcpy(to, x, (size_t)all);
        return 1.0f;
    }
    if (job->layer->format == HALF) {
        half->halve(x, (uint16_t *)to, inputs);
        memset(to + 2 * inputs, 0, (size_t)(all - 2 * inputs));
        return 1.0f;
    }
    const uint32_t bits = quant->largest(x, inputs);
    float largest, inverse = 0.0f, scale = 0.0f;
    memcpy(&largest, &bits, 4);
    if (bits >= 0x7f800000u) {
        scale = NAN;
    } else if (largest >= TINY) {
        inverse = 127.0f / largest;
        scale = largest / 127.0f;
    }
    const int64_t coded = inverse > 0.0f ? inputs : 0;
    if (rests != NULL) {
        quant->split(x, inverse, to, rests, scratch, coded);
        memset(rests + coded, 128, (size_t)(all - coded));
    } else {
        quant->encode(x, inverse, to, coded);
    }
    memset(to + coded, 128, (size_t)(all - coded));
    return scale;
}

static void encode_group(const struct linear_job *job, int64_t group) {
    const int64_t first = first_row(job, group), depth = job->depth, each = job->codes_per_row;
    const int rows = (int)(first_row(job, group + 1) - first), code_rows = rows * (int)each;
    uint8_t *codes = job->codes + first * each * depth * 4;
    float *floats = (float *)(job->scratch + group * depth * SCRATCH);
    uint8_t *line = (uint8_t *)(floats + depth * 4);
    for (int r = 0; r < rows; r++) {
        const float *x = job->x + (first + r) * job->x_stride;
        uint8_t *to = code_rows == 1 ? codes : line;
        job->row_scales[first + r] = encode_row(job, x, to, each == 2 ? line + depth * 4 : NULL, floats);
        if (code_rows == 1) return;
        for (int64_t c = 0; c < each; c++)
            for (int64_t k = 0; k < depth; k++)
                memcpy(codes + (k * code_rows + r * each + c) * 4, line + (c * depth + k) * 4, 4);
    }
}

static void take_groups(void *data) {
    struct linear_job *job = data;
    for (;;) {
        const int64_t group = __atomic_fetch_add(&job->next_group, 1, __ATOMIC_RELAXED);
        if (group >= job->groups) return;
        encode_group(job, group);
    }
}

static void multiply(const struct linear_job *job, int64_t item) {
    const int64_t block = item % job->blocks, part = item / job->blocks;
    const int64_t end = (part + 1) * job->groups / job->parts;
    const int8_t *weights = job->layer->weights + block * job->depth * BLOCK * 4;
    for (int64_t group = part * job->groups / job->parts; group < end; group++) {
        const int64_t row = first_row(job, group);
        const int rows = (int)(first_row(job, group + 1) - row);
        int32_t sums[GROUP * BLOCK] __attribute__((aligned(64)));
        const int64_t each = job->codes_per_row;
        job->product(job->codes + row * each * job->depth * 4, rows * (int)each, weights, job->depth, sums);
        job->finish(sums, &job->epilogue, row, rows, block * BLOCK);
    }
}

/* Each thread takes a share of what is left, smaller and smaller ones: few long runs through the weights, which the CPU
 * fetches ahead, and no thread that waits long for another in the end. */
static void take_blocks(void *data) {
    struct linear_job *job = data;
    int64_t first = __atomic_load_n(&job->next, __ATOMIC_RELAXED);
    for (;;) {
        int64_t count;
        do {
            if (first >= job->items) return;
            count = (job->items - first) / (2 * job->threads);
            if (count < 1) count = 1;
        } while (!__atomic_compare_exchange_n(&job->next, &first, first + count, 0, __ATOMIC_RELAXED,
                                              __ATOMIC_RELAXED));
        for (int64_t item = first; item < first + count; item++) multiply(job, item);
        first = __atomic_load_n(&job->next, __ATOMIC_RELAXED);
    }
}

EXPORT int carousel_quant_linear(const struct carousel_quant_layer *layer, const float *x, int64_t x_stride, int64_t rows,
                                 float *out, int threads) {
    if (rows <= 0) return 0;
    const int64_t each = layer->format == WIDE ? 2 : 1, most = GROUP / each;
    const int64_t together = layer->format == FLOAT ? 1 : layer->format == HALF ? 2 : 4;
    struct linear_job job = {
        .layer = layer, .x = x, .x_stride = x_stride, .rows = rows, .codes_per_row = each,
        .depth = (layer->inputs + together - 1) / together, .groups = (rows + most - 1) / most,
        .blocks = (layer->columns + BLOCK - 1) / BLOCK, .parts = 1,
        .product = layer->format == FLOAT  ? half->multiply_floats
                   : layer->format == HALF ? half->multiply
                                           : quant->multiply,
        .finish = layer->format >= HALF ? half->finish : quant->finish,
    };
    const int64_t scratch = (rows * each * job.depth * 4 + 63) / 64 * 64;
    const int64_t bytes = scratch + job.groups * job.depth * SCRATCH;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)bytes + (size_t)rows * sizeof(float) + 64) != 0) return -1;
    job.codes = memory;
    job.scratch = (char *)memory + scratch;
    job.row_scales = (float *)((char *)memory + (bytes + 63) / 64 * 64);
    job.epilogue = (struct epilogue){.scales = layer->scales, .row_scales = job.row_scales, .bias = layer->bias,
                                     .shifts = layer->shifts, .out = out, .columns = layer->columns,
                                     .wide = layer->format == WIDE};
    if (rows * layer->columns * layer->inputs < SMALL_PRODUCT) threads = 1;
    if (threads > 1 && job.blocks < 4 * threads) {
        job.parts = (4 * threads + job.blocks - 1) / job.blocks;
        if (job.parts > job.groups) job.parts = job.groups;
    }
    job.items = job.blocks * job.parts;
    job.threads = threads;
    carousel_run(take_groups, &job, rows * layer->inputs < SMALL_ROWS ? 1 : threads);
    carousel_run(take_blocks, &job, threads);
    free(memory);
    return 0;
}
