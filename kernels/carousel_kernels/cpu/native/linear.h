/* A linear layer as quant.c computes it; mirrored in native_layer.py. */
#ifndef CAROUSEL_LINEAR_H
#define CAROUSEL_LINEAR_H

#include <stdint.h>

struct carousel_quant_layer {
    const int8_t *weights; /* [blocks][depth][BLOCK][4], zero beyond the layer's columns and inputs */
    const float *scales;   /* [blocks * BLOCK] */
    const int32_t *shifts; /* [blocks * BLOCK]: 128 times the sum of a column's weights */
    const float *bias;     /* [blocks * BLOCK], or NULL */
    int64_t columns, inputs, format;
    int64_t runs; /* above 1: rows are turned before they are quantised, see turn_ */
};

/* out [rows, columns] = x [rows, inputs] (x_stride floats between rows) times the layer's weights, plus its bias.
 * Returns 0, or -1 without memory for the encoded activations. */
int carousel_quant_linear(const struct carousel_quant_layer *layer, const float *x, int64_t x_stride, int64_t rows,
                          float *out, int threads);

#endif
