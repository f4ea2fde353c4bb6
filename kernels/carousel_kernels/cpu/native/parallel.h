/* How the operators of this library run on several threads: on PyTorch's own OpenMP runtime, see carousel_native.c. */
#ifndef CAROUSEL_PARALLEL_H
#define CAROUSEL_PARALLEL_H

/* work(job) on so many threads at once, or on the calling one alone if there is no runtime. Returns when all are done. */
void carousel_run(void (*work)(void *), void *job, int threads);

#endif
