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

#include "compiler.h"
#include "linear.h"
#include "parallel.h"

#define TINY 1e-30f          /* a row below this everywhere counts as zero: its inverse would overflow */
#define SMALL_PRODUCT 131072 /* multiplications below which waking threads costs about what they save */

/* Formats: 8-bit weights with activations of 8 or 16 bits; bfloat16; float32. The latter two have weights
 * [blocks][depth][BLOCK][2 or 1], and neither scales nor shifts. */
enum { NARROW, WIDE, HALF, FLOAT };

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

#define SCRATCH (4 * GROUP + 16) /* bytes per unit of depth: lines of codes, and one of floats for a turn or a split */

typedef int32_t four_codes __attribute__((vector_size(16), aligned(4), may_alias));

/* Groups are as even as can be, the larger ones first: a group of one row costs about as much as one of four. */
static int64_t first_row(const struct carousel_linear *linear, int64_t group) {
    const int64_t most = linear->rows % linear->groups;
    return group * (linear->rows / linear->groups) + (group < most ? group : most);
}

/* Codes of one row, 128 for nothing, to [depth * 4] at to, and with wide the second ones to rests. */
static float encode_row(const struct carousel_linear *linear, const float *x, uint8_t *to, uint8_t *rests,
                        float *scratch) {
    const int64_t inputs = linear->layer->inputs, all = linear->depth * 4;
    if (linear->layer->runs > 1) {
        quant->turn(x, scratch, inputs, linear->layer->runs);
        x = scratch;
    }
    if (linear->layer->format == HALF) {
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

/* codes [depth][STRIDE(rows)][4] of lines [rows], each [depth][4]. */
static void interleave(const uint8_t *const *lines, int rows, int64_t depth, uint8_t *codes) {
    const int64_t stride = STRIDE(rows) * 4;
    for (int r = 0; r < rows; r += 4) {
        const uint8_t *from[4];
        for (int i = 0; i < 4; i++) from[i] = lines[r + i < rows ? r + i : rows - 1];
        uint8_t *to = codes + 4 * r;
        int64_t k = 0;
        for (; rows >= 4 && k + 4 <= depth; k += 4, to += 4 * stride) {
            const four_codes a = *(const four_codes *)(from[0] + 4 * k), b = *(const four_codes *)(from[1] + 4 * k);
            const four_codes c = *(const four_codes *)(from[2] + 4 * k), d = *(const four_codes *)(from[3] + 4 * k);
            const four_codes ab = SHUFFLE(four_codes, a, b, 0, 4, 1, 5), cd = SHUFFLE(four_codes, c, d, 0, 4, 1, 5);
            const four_codes ab2 = SHUFFLE(four_codes, a, b, 2, 6, 3, 7), cd2 = SHUFFLE(four_codes, c, d, 2, 6, 3, 7);
            *(four_codes *)to = SHUFFLE(four_codes, ab, cd, 0, 1, 4, 5);
            *(four_codes *)(to + stride) = SHUFFLE(four_codes, ab, cd, 2, 3, 6, 7);
            *(four_codes *)(to + 2 * stride) = SHUFFLE(four_codes, ab2, cd2, 0, 1, 4, 5);
            *(four_codes *)(to + 3 * stride) = SHUFFLE(four_codes, ab2, cd2, 2, 3, 6, 7);
        }
        for (; k < depth; k++, to += stride)
            for (int i = 0; i < 4 && r + i < rows; i++) memcpy(to + 4 * i, from[i] + 4 * k, 4);
    }
}

static void encode(const struct carousel_linear *linear, int64_t group) {
    const int64_t first = first_row(linear, group), depth = linear->depth, each = linear->codes_per_row;
    const int rows = (int)(first_row(linear, group + 1) - first), code_rows = rows * (int)each;
    uint8_t *codes = linear->codes + group * GROUP * depth * 4;
    float *floats = (float *)(linear->scratch + group * depth * SCRATCH);
    uint8_t *line = (uint8_t *)(floats + depth * 4);
    const uint8_t *lines[GROUP];
    for (int r = 0; r < rows; r++, line += each * depth * 4) {
        const float *x = linear->x + (first + r) * linear->x_stride;
        if (linear->layer->format == FLOAT) { /* is its own code */
            lines[r] = (const uint8_t *)x;
            continue;
        }
        uint8_t *to = code_rows == 1 ? codes : line;
        for (int64_t c = 0; c < each; c++) lines[r * each + c] = line + c * depth * 4;
        linear->row_scales[first + r] = encode_row(linear, x, to, each == 2 ? line + depth * 4 : NULL, floats);
        if (code_rows == 1) return;
    }
    interleave(lines, code_rows, depth, codes);
}

/* The product of one group with one block, as numbers. turn of turns: which part of the weights after these, that the
 * thread will want next, is called for on the way. */
static void multiply_group(const struct carousel_linear *linear, int64_t block, int64_t group, int64_t turn,
                           int64_t turns, float *out, int64_t stride, int64_t width) {
    const int64_t row = first_row(linear, group), bytes = linear->depth * PANEL * 4;
    const int rows = (int)(first_row(linear, group + 1) - row);
    const int8_t *weights = linear->layer->weights + block * bytes;
    const int64_t each = linear->codes_per_row, distance = turns > 1 ? bytes + turn * bytes / turns : AHEAD;
    const struct ahead ahead = {(const char *)weights + distance, (PANEL * 4 + turns - 1) / turns};
    int32_t sums[GROUP * PANEL] __attribute__((aligned(64)));
    linear->product(linear->codes + group * GROUP * linear->depth * 4, rows * (int)each, weights, linear->depth, sums,
                    ahead);
    linear->finish(sums, &linear->epilogue, row, rows, block * PANEL, width, out, stride);
}

/* A block of columns, or, with a gate, of what it makes of the columns of the layer's two halves; groups [first, end). */
static void multiply(const struct carousel_linear *linear, int64_t block, int64_t first, int64_t end,
                       carousel_gate gate) {
    const int64_t column = block * PANEL, left = linear->layer->columns - column;
    const int64_t width = left < PANEL ? left : PANEL, half_way = linear->blocks / 2;
    for (int64_t group = first; group < end; group++) {
        float *out = linear->out + first_row(linear, group) * linear->out_stride + column;
        if (gate == NULL) {
            multiply_group(linear, block, group, group - first, end - first, out, linear->out_stride, width);
            continue;
        }
        float both[GROUP * 2 * PANEL] __attribute__((aligned(64)));
        for (int i = 0; i < 2; i++)
            multiply_group(linear, block + i * half_way, group, group - first, end - first, both + i * PANEL,
                           2 * PANEL, PANEL);
        const int rows = (int)(first_row(linear, group + 1) - first_row(linear, group));
        gate(both, rows, out, linear->out_stride);
    }
}

void carousel_multiply_all(struct carousel_member *member, const struct carousel_linear *linear, carousel_gate gate) {
    const int64_t blocks = gate == NULL ? linear->blocks : linear->blocks / 2;
    int64_t parts = 1, first, count;
    if (member->threads > 1 && blocks < 4 * member->threads) {
        parts = (4 * member->threads + blocks - 1) / blocks;
        if (parts > linear->groups) parts = linear->groups;
    }
    carousel_phase(member, blocks * parts);
    while ((count = carousel_take(member, 1, INT64_MAX, &first)) > 0)
        for (int64_t item = first; item < first + count; item++) {
            const int64_t part = item / blocks;
            multiply(linear, item % blocks, part * linear->groups / parts, (part + 1) * linear->groups / parts,
                              gate);
        }
}

static int64_t codes_per_row(const struct carousel_quant_layer *layer) { return layer->format == WIDE ? 2 : 1; }

static int64_t depth_of(const struct carousel_quant_layer *layer) {
    const int64_t together = layer->format == FLOAT ? 1 : layer->format == HALF ? 2 : 4;
    return (layer->inputs + together - 1) / together;
}

static int64_t groups_of(const struct carousel_quant_layer *layer, int64_t rows) {
    const int64_t most = GROUP / codes_per_row(layer);
    return (rows + most - 1) / most;
}

int64_t carousel_linear_bytes(const struct carousel_quant_layer *layer, int64_t rows) {
    const int64_t depth = depth_of(layer), groups = groups_of(layer, rows);
    return carousel_lines(groups * GROUP * depth * 4) + carousel_lines(groups * depth * SCRATCH) + carousel_lines(rows * (int64_t)sizeof(float));
}

void carousel_linear_begin(struct carousel_linear *linear, const struct carousel_quant_layer *layer, const float *x,
                           int64_t x_stride, int64_t rows, float *out, int64_t out_stride, void *memory) {
    *linear = (struct carousel_linear){
        .layer = layer, .x = x, .out = out, .x_stride = x_stride, .out_stride = out_stride, .rows = rows,
        .codes_per_row = codes_per_row(layer), .depth = depth_of(layer), .groups = groups_of(layer, rows),
        .blocks = (layer->columns + PANEL - 1) / PANEL,
        .product = layer->format == FLOAT  ? half->multiply_floats
                   : layer->format == HALF ? half->multiply
                                           : quant->multiply,
        .finish = layer->format >= HALF ? half->finish : quant->finish,
        .codes = memory,
    };
    linear->scratch = (char *)memory + carousel_lines(linear->groups * GROUP * linear->depth * 4);
    linear->row_scales = (float *)(linear->scratch + carousel_lines(linear->groups * linear->depth * SCRATCH));
    linear->epilogue = (struct epilogue){.scales = layer->scales, .row_scales = linear->row_scales, .bias = layer->bias,
                                         .shifts = layer->shifts, .wide = layer->format == WIDE};
}

void carousel_encode_all(struct carousel_member *member, const struct carousel_linear *linear, rows_operator before,
                         const void *arguments) {
    int64_t first, count;
    carousel_phase(member, linear->groups);
    while ((count = carousel_take(member, 1, INT64_MAX, &first)) > 0)
        for (int64_t group = first; group < first + count; group++) {
            if (before != NULL)
                before(arguments, first_row(linear, group), first_row(linear, group + 1));
            encode(linear, group);
        }
    carousel_wait(member);
}

static void encode_and_multiply(struct carousel_member *member, void *job) {
    const struct carousel_linear *linear = job;
    carousel_encode_all(member, linear, NULL, NULL);
    carousel_multiply_all(member, linear, NULL);
}

/* out [rows, columns], dense, = x [rows, inputs] (x_stride floats between rows) times the layer's weights, plus its bias.
 * Returns 0, or -1 without memory for the encoded activations. */
EXPORT int carousel_quant_linear(const struct carousel_quant_layer *layer, const float *x, int64_t x_stride, int64_t rows,
                                 float *out, int threads) {
    struct carousel_linear linear;
    void *memory = NULL;
    if (rows <= 0) return 0;
    if (posix_memalign(&memory, 64, (size_t)carousel_linear_bytes(layer, rows)) != 0) return -1;
    carousel_linear_begin(&linear, layer, x, x_stride, rows, out, layer->columns, memory);
    carousel_run(encode_and_multiply, &linear, rows * layer->columns * layer->inputs < SMALL_PRODUCT ? 1 : threads);
    free(memory);
    return 0;
}
