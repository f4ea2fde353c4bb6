/* Linear layers as quant.c computes them, for layers.c and itself. */
#ifndef CAROUSEL_LINEAR_H
#define CAROUSEL_LINEAR_H

#include <stdint.h>

#include "parallel.h"

#define GROUP 12 /* rows: with the 2 vectors of a block, 24 of 32 vector registers are sums */
#define STRIDE(rows) ((rows) < 4 ? (rows) : ((rows) + 3) / 4 * 4) /* of a group's codes, in rows */
#define PANEL 32 /* output columns of a block of weights */

/* Mirrored in native_layer.py. */
struct carousel_quant_layer {
    const int8_t *weights; /* [blocks][depth][PANEL][4], zero beyond the layer's columns and inputs */
    const float *scales;   /* [blocks * PANEL] */
    const int32_t *shifts; /* [blocks * PANEL]: 128 times the sum of a column's weights */
    const float *bias;     /* [blocks * PANEL], or NULL */
    int64_t columns, inputs, format;
    int64_t runs; /* above 1: rows are turned before they are quantised, see turn_ */
};

/* Weights that are called into the cache while others are used: at the k-th step of a product, the lines at
 * from + k * step. */
struct ahead {
    const char *from;
    int64_t step;
};

struct epilogue {
    const float *scales, *row_scales, *bias;
    const int32_t *shifts;
    int64_t wide;
};

typedef void (*product)(const uint8_t *codes, int rows, const int8_t *weights, int64_t depth, int32_t *sums,
                        struct ahead ahead);

/* The sums of a group from `row` on and of `width` columns from `column` on become numbers, out [rows, stride]. */
typedef void (*finisher)(const int32_t *sums, const struct epilogue *e, int64_t row, int rows, int64_t column,
                         int64_t width, float *out, int64_t stride);

/* Rows [first, last) of what its arguments describe. */
typedef void (*rows_operator)(const void *arguments, int64_t first, int64_t last);

/* out[rows, width] of the activation of x[rows, 2 PANEL], gates before what they gate. */
typedef void (*carousel_gate)(const float *x, int rows, float *out, int64_t stride);

/* A layer's product with some rows. */
struct carousel_linear {
    const struct carousel_quant_layer *layer;
    const float *x;
    float *out; /* [rows, out_stride] */
    int64_t x_stride, out_stride, rows, codes_per_row, depth, groups, blocks;
    product product;
    finisher finish;
    uint8_t *codes;    /* [groups][depth * GROUP][4], of which a group takes [depth][STRIDE(its rows)][4] */
    char *scratch;     /* [groups][depth * SCRATCH] */
    float *row_scales; /* [rows] */
    struct epilogue epilogue;
};

/* Bytes of memory, at a multiple of 64, for the activations of so many rows. */
int64_t carousel_linear_bytes(const struct carousel_quant_layer *layer, int64_t rows);

/* out [rows, columns] = x [rows, inputs], each with its stride in floats between rows, times the layer's weights, plus
 * its bias; computed by first encoding all groups, then multiplying all blocks. x may still be written until then. */
void carousel_linear_begin(struct carousel_linear *linear, const struct carousel_quant_layer *layer, const float *x,
                           int64_t x_stride, int64_t rows, float *out, int64_t out_stride, void *memory);

/* A phase of the team that encodes everything, and a wait; before: what is done to the rows first (NULL: nothing). */
void carousel_encode_all(struct carousel_member *member, const struct carousel_linear *linear, rows_operator before,
                         const void *arguments);

/* A phase of the team that multiplies everything; with a gate, of which the output is what it makes of the columns of the
 * layer's two halves. */
void carousel_multiply_all(struct carousel_member *member, const struct carousel_linear *linear, carousel_gate gate);

#endif
