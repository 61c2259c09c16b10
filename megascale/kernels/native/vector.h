/* Vectors of fp32 values, as wide as this CPU's registers, from memory of 16 or 32 bits per element and back.
 *
 * GCC's and clang's vector types: arithmetic is element by element, comparisons give -1 where true. Each element
 * is computed as by scalar code, so that results have the same bits on every CPU.
 */
#ifndef MEGASCALE_VECTOR_H
#define MEGASCALE_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

enum { F32 = 0, F16 = 1, BF16 = 2 };

INLINE int64_t size_of(int64_t type) { return type == F32 ? 4 : 2; }

INLINE Floats where(Ints holds, Floats yes, Floats no) {
#if WIDTH == 8
    return (Floats)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)holds);
#else
    return (Floats)(((Words)holds & (Words)yes) | (~(Words)holds & (Words)no));
#endif
}

INLINE Words words_where(Ints holds, Words yes, Words no) { return (Words)where(holds, (Floats)yes, (Floats)no); }

INLINE int any(Ints holds) {
#if WIDTH == 16
    return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif WIDTH == 8
    return _mm256_movemask_ps((__m256)holds) != 0;
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)holds) != 0;
#else
    int found = 0;
    for (int j = 0; j < WIDTH; j++) found |= holds[j];
    return found != 0;
#endif
}

/* Return -1 for the first n elements, 0 after them. */
INLINE Ints before(int64_t n) {
    Ints holds;
    for (int j = 0; j < WIDTH; j++) holds[j] = -(j < n);
    return holds;
}

/* Return the count in `counters`, to which comparisons (0 or -1) were added. */
INLINE int64_t times(Ints counters) {
    int64_t sum = 0;
    for (int j = 0; j < WIDTH; j++) sum -= counters[j];
    return sum;
}

INLINE Floats magnitude_of(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

INLINE Floats root(Floats x) {
#if WIDTH == 16
    return (Floats)_mm512_sqrt_ps((__m512)x);
#elif WIDTH == 8
    return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (Floats)_mm_sqrt_ps((__m128)x);
#else
    for (int j = 0; j < WIDTH; j++) x[j] = sqrtf(x[j]);
    return x;
#endif
}

/* ---- 16-bit types ---- */

INLINE Words widened(Halves h) {
#if WIDTH == 16
    return (Words)_mm512_cvtepu16_epi32((__m256i)h);
#elif WIDTH == 8 && defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)h);
#elif WIDTH == 4 && defined(__x86_64__)
    return (Words)_mm_unpacklo_epi16(_mm_cvtsi64_si128((long long)h), _mm_setzero_si128());
#else
    return __builtin_convertvector(h, Words);
#endif
}

/* Words must be below 2**16. */
INLINE Halves narrowed(Words w) {
#if WIDTH == 16
    return (Halves)_mm512_cvtepi32_epi16((__m512i)w);
#elif WIDTH == 8 && defined(__SSE4_1__)
    return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)w), _mm256_extractf128_si256((__m256i)w, 1));
#elif WIDTH == 4 && defined(__x86_64__)
    Ints x = (Ints)(w << 16) >> 16; /* the instruction saturates signed numbers */
    return (Halves)_mm_cvtsi128_si64(_mm_packs_epi32((__m128i)x, (__m128i)x));
#else
    return __builtin_convertvector(w, Halves);
#endif
}

INLINE Floats from_half(Halves h) {
#if WIDTH == 16
    return (Floats)_mm512_cvtph_ps((__m256i)h);
#elif WIDTH == 8 && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)h);
#else
    const Words step = (Words){0} + 0x3f000000u;
    Words w = widened(h), sign = (w & 0x8000u) << 16, magnitude = w & 0x7fffu;
    /* No operand is subnormal in fp32: those may be flushed. The product of a NaN is a quiet one, as the CPU's. */
    Words normal = (Words)((Floats)((magnitude << 13) + 0x70000000u) * 0x1p-112f);
    Words subnormal = (Words)((Floats)(magnitude | step) - (Floats)step);
    return (Floats)(sign | words_where((Ints)magnitude < 0x400, subnormal, normal));
#endif
}

INLINE Halves to_half(Floats x) {
#if WIDTH == 16
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif WIDTH == 8 && defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const Words infinity = (Words){0} + 0x7c00u;
    Words u = (Words)x, sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u; /* the addition rounds to their step */
    Words rounded = words_where((Ints)magnitude < 0x38800000, subnormal, normal);
    rounded = words_where((Ints)magnitude >= 0x477ff000, infinity, rounded);
    rounded = words_where((Ints)magnitude > 0x7f800000, 0x7e00u | ((magnitude >> 13) & 0x3ffu), rounded);
    return narrowed(sign | rounded);
#endif
}

INLINE Floats from_bfloat(Halves h) { return (Floats)(widened(h) << 16); }

/* Return the bits of the nearest bf16 values in the upper halves; the lower ones may hold anything. */
INLINE Words rounded_to_bfloat(Floats x) {
    const Words nan = (Words){0} + 0x7fc00000u;
    Words u = (Words)x, rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return words_where(x != x, nan, rounded);
}

INLINE Halves to_bfloat(Floats x) { return narrowed(rounded_to_bfloat(x) >> 16); }

/* ---- memory: the first n of WIDTH elements; n may be below 0 or above WIDTH ---- */

#if WIDTH == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MASKED
INLINE __mmask16 first(int64_t n) { return (__mmask16)(n <= 0 ? 0 : (1u << n) - 1); }
#endif

INLINE Floats from_16_bits(Halves h, int64_t type) { return type == F16 ? from_half(h) : from_bfloat(h); }

INLINE Halves to_16_bits(Floats x, int64_t type) { return type == F16 ? to_half(x) : to_bfloat(x); }

/* `size`, of an element, must be a compile-time constant: else the compiler emits calls of memcpy. */
INLINE void copy_first(void *to, const void *from, int64_t size, int64_t n) {
    if (n >= WIDTH) memcpy(to, from, (size_t)(WIDTH * size));
    else
        for (int64_t j = 0; j < n; j++) memcpy((char *)to + j * size, (const char *)from + j * size, (size_t)size);
}

/* Elements from the n-th on are 0. */
INLINE Floats load(const void *at, int64_t type, int64_t n) {
    Floats x = {0};
    Halves h = {0};
#ifdef MASKED
    if (n < WIDTH) {
        if (type == F32) return (Floats)_mm512_maskz_loadu_ps(first(n), at);
        return from_16_bits((Halves)_mm256_maskz_loadu_epi16(first(n), at), type);
    }
#endif
    if (type == F32) {
        copy_first(&x, at, 4, n);
        return x;
    }
    copy_first(&h, at, 2, n);
    return from_16_bits(h, type);
}

INLINE void store(void *at, Floats x, int64_t type, int64_t n) {
    Halves h = {0};
    if (type != F32) h = to_16_bits(x, type);
#ifdef MASKED
    if (n < WIDTH) {
        if (type == F32) _mm512_mask_storeu_ps(at, first(n), (__m512)x);
        else _mm256_mask_storeu_epi16(at, first(n), (__m256i)h);
        return;
    }
#endif
    if (type == F32) copy_first(at, &x, 4, n);
    else copy_first(at, &h, 2, n);
}

/* Round WIDTH elements to 16 bits and store them past the caches, so that old values are not read. `at`: aligned. */
INLINE void stream(void *at, Floats x, int64_t type) {
#if defined(__SSE2__) && defined(__x86_64__)
    Halves h = to_16_bits(x, type);
#if WIDTH == 16
    _mm256_stream_si256(at, (__m256i)h);
#elif WIDTH == 8
    _mm_stream_si128(at, (__m128i)h);
#else
    long long bits;
    memcpy(&bits, &h, sizeof bits);
    _mm_stream_si64(at, bits);
#endif
#else
    store(at, x, type, WIDTH);
#endif
}

/* Make this thread's streamed stores visible to other threads. */
INLINE void finish_streams(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#endif
