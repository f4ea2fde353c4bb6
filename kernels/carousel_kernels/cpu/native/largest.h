/* The largest of each row, for kernels.h. */

#define RUN_OF_MAXIMA 1024 /* values whose maximum is found before it is asked where it is */

/* The maximum of x[first, end), which holds no NaN; bad is told of NaN. */
INLINE float NAME(maximum)(const float *x, int first, int end, ivec *bad) {
    vec top[4];
    int i = first;
    UNROLL
    for (int v = 0; v < 4; v++) top[v] = (vec){0} - INFINITY;
    for (; i + 4 * VL <= end; i += 4 * VL)
        UNROLL
        for (int v = 0; v < 4; v++) {
            const vec values = NAME(load)(x + i + v * VL);
            *bad |= values != values;
            top[v] = MAXIMUM(values, top[v]);
        }
    vec best = MAXIMUM(MAXIMUM(top[0], top[1]), MAXIMUM(top[2], top[3]));
    FOLD(best, MAXIMUM)
    float most = best[0];
    for (; i < end; i++) {
        if (x[i] != x[i]) (*bad)[0] = -1;
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

/* See carousel_largest. */
FN void NAME(largest)(const void *arguments, int64_t first, int64_t last) {
    const struct maxima *job = arguments;
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * job->stride;
        float best = -INFINITY;
        int32_t any = 0;
        int at = 0;
        ivec bad = {0};
        for (int begin = 0; begin < job->width; begin += RUN_OF_MAXIMA) {
            const int end = begin + RUN_OF_MAXIMA < job->width ? begin + RUN_OF_MAXIMA : job->width;
            const float most = NAME(maximum)(x, begin, end, &bad);
            if (most > best) best = most, at = begin;
        }
        for (int i = 0; i < VL; i++) any |= bad[i];
        const int usable = !any && best > -INFINITY && best < INFINITY;
        while (usable && x[at] < best) at++;
        job->tokens[row] = usable ? at : -1;
    }
}

#undef RUN_OF_MAXIMA
