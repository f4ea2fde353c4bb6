/* What compilers and CPUs call by different names. */
#ifndef CAROUSEL_COMPILER_H
#define CAROUSEL_COMPILER_H

#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

#if defined(__clang__)
#define UNROLL _Pragma("unroll") /* loops of constant length, so that their arrays become registers */
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define APART __attribute__((noinline)) /* of functions whose registers are not to be shared with their callers' */

#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) \
    __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(sizeof(type))))){__VA_ARGS__})
#endif

#if defined(__x86_64__)
enum { CPU_AVX_VNNI = 4, CPU_AVX512_BF16 = 5 };

/* Whether the CPU has one of these, which not every compiler's __builtin_cpu_supports knows: CPUID leaf 7, subleaf 1. */
static inline int carousel_cpu_has(int bit) {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}
#endif

#endif
