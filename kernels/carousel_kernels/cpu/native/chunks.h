/* Attention of many rows of queries over the same keys, for kernels.h: of prompt chunks, and of decodes that share a
 * prefix. Both are matrix products; the group of query heads of a KV head are further rows of them.
 */

/* Rows of queries of one KV head, by the address of each, over the keys from block `first` to position `context`. Row r
 * stands at position + r / group, and sees what is there and before it. m, l and o as in weigh_row, zero at first. */
INLINE void NAME(many_rows)(const struct attention *job, const float *const *queries, int rows, int group,
                            const int32_t *table, int64_t first, int64_t position, int64_t context, int head, float *m,
                            float *l, float *o) {
    const int dim = job->dim;
    float q[MAX_ROWS * MAX_DIM], scores[MAX_ROWS * KEYS], transposed[MAX_DIM * KEYS], buffer[KEYS * MAX_DIM];
    const float *keys[KEYS], *values[KEYS], *by_dim[MAX_DIM];
#ifdef DOTS
    uint16_t q_half[MAX_ROWS * MAX_DIM];
#endif
    for (int d = 0; d < dim; d++) by_dim[d] = transposed + d * KEYS;
    for (int r = 0; r < rows; r++) {
        for (int d = 0; d < dim; d++) q[r * dim + d] = queries[r][d] * job->scale;
        m[r] = -INFINITY;
#ifdef DOTS
        if (job->half) NAME(round_row)(q + r * dim, q_half + r * dim, dim);
#endif
    }
    memset(o, 0, sizeof(float) * (size_t)(rows * dim));
    memset(l, 0, sizeof(float) * (size_t)(rows * VL));
    const int64_t end_block = (context + BLOCK - 1) / BLOCK;
    for (int64_t block = first; block < end_block; block += TILE_BLOCKS) {
        const int64_t start = block * BLOCK;
        const int most = (int)(end_block - block < TILE_BLOCKS ? end_block - block : TILE_BLOCKS) * BLOCK;
        const int count = (int)(context - start < most ? context - start : most);
        const int skip = start > position ? (int)(start - position) * group : 0; /* rows that see none of these keys */
        const int live = rows - skip;
#ifdef DOTS
        if (job->half && dim % 32 == 0) {
            NAME(many_rows_half)(job, table, block, end_block, count, head, group, skip, rows, position, q_half, scores,
                                 m, l, o);
            continue;
        }
#endif
        const int found = NAME(addresses)(job, job->k_cache, table, block, end_block, head, buffer, keys);
        NAME(transpose_keys)(keys, found, dim, transposed);
        NAME(product)(scores, KEYS, q + skip * dim, dim, by_dim, dim, live, found);
        NAME(online_softmax)(job, scores, live, group, count, start, position + skip / group, m + skip, l + skip * VL,
                             o + skip * dim);
        NAME(addresses)(job, job->v_cache, table, block, end_block, head, buffer, values);
        NAME(add_product)(o + skip * dim, dim, scores, KEYS, values, count, live, dim, NULL, 0);
    }
}

/* New tokens [first, end) of a sequence, one KV head. */
FN void NAME(chunk)(const struct attention *job, int sequence, int first, int end, int head) {
    const int dim = job->dim, group = job->heads / job->kv_heads, rows = (end - first) * group;
    const int64_t row = job->query_start[sequence] + first;
    const int64_t position = job->context_lens[sequence] - (job->query_start[sequence + 1] - row);
    const int64_t unseen = job->window > 0 ? position + 1 - job->window : 0;
    float o[MAX_ROWS * MAX_DIM], m[MAX_ROWS], l[MAX_ROWS * VL];
    const float *queries[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        queries[r] = job->q + (row + r / group) * job->q_stride + (int64_t)(head * group + r % group) * dim;
    NAME(many_rows)(job, queries, rows, group, job->block_tables + (int64_t)sequence * job->table_stride,
                    unseen > 0 ? unseen / BLOCK : 0, position, position + (end - first), head, m, l, o);
    for (int r = 0; r < rows; r++)
        NAME(finish_rows)(l + r * VL, o + r * dim, 1, dim,
                          job->out + ((row + r / group) * job->heads + head * group + r % group) * dim);
}

/* Decodes that share blocks [first, end), one KV head; each sequence's results go to its place in partials, as those of
 * decode. (Shared prefixes taken apart from the rest, as in Hydragen, Juravsky et al. 2024.) */
FN void NAME(shared)(const struct attention *job, const int32_t *sequences, int count, int64_t first, int64_t end,
                     int head, float *const *partials) {
    const int dim = job->dim, group = job->heads / job->kv_heads, rows = count * group;
    float o[MAX_ROWS * MAX_DIM], m[MAX_ROWS], l[MAX_ROWS * VL];
    const float *queries[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        queries[r] = job->q + job->query_start[sequences[r / group]] * job->q_stride +
                     (int64_t)(head * group + r % group) * dim;
    NAME(many_rows)(job, queries, rows, rows, job->block_tables + (int64_t)sequences[0] * job->table_stride, first,
                    end * BLOCK - 1, end * BLOCK, head, m, l, o);
    for (int r = 0; r < rows; r++) {
        float *partial = partials[r / group];
        const int at = head * group + r % group;
        partial[at] = m[r];
        partial[job->heads + at] = NAME(total)(l + r * VL);
        memcpy(partial + 2 * job->heads + (int64_t)at * dim, o + r * dim, sizeof(float) * (size_t)dim);
    }
}
