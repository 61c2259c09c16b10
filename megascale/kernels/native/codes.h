/* Vectors of 8-bit codes, and integers: WIDTH elements at a time. */
#ifndef MEGASCALE_CODES_H
#define MEGASCALE_CODES_H

#include "vector.h"

typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(WIDTH)));

INLINE Floats floats_of(Ints x) { return __builtin_convertvector(x, Floats); }

INLINE Ints load_i8(const void *at) {
#if WIDTH == 16
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(at));
#elif WIDTH == 8 && defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(at));
#else
    Bytes bytes;
    memcpy(&bytes, at, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
#endif
}

INLINE Ints load_u8(const void *at) {
#if WIDTH == 16
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(at));
#elif WIDTH == 8 && defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
#else
    UnsignedBytes bytes;
    memcpy(&bytes, at, sizeof bytes);
    return __builtin_convertvector(bytes, Ints);
#endif
}

/* Shift all elements by n bits. */
INLINE Words shifted_left(Words x, uint32_t n) {
#if WIDTH == 16
    return (Words)_mm512_sllv_epi32((__m512i)x, _mm512_set1_epi32((int)n)); /* not on the ports of products */
#else
    return x << ((Words){0} + n);
#endif
}

/* Store the lowest 8 bits of each element. */
INLINE void store_8(void *at, Ints x) {
#if WIDTH == 16
    _mm_storeu_si128(at, _mm512_cvtepi32_epi8((__m512i)x));
#elif WIDTH == 8 && defined(__AVX2__)
    __m256i low = (__m256i)(x & 255);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(at, _mm_packus_epi16(words, words));
#else
    UnsignedBytes bytes = __builtin_convertvector(x & 255, UnsignedBytes);
    memcpy(at, &bytes, sizeof bytes);
#endif
}

/* Round to the nearest integer, ties to even; NaN has 0 in its lowest 8 bits. Magnitudes must be below 2**22. */
INLINE Ints rounded(Floats x) {
#if WIDTH == 16
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif WIDTH == 8
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (Ints)_mm_cvtps_epi32((__m128)x);
#else
    const Floats magic = (Floats){0} + 0x1.8p23f;
    Ints found = (Ints)(x + magic) - (Ints)magic;
    return (Ints)words_where(x == x, (Words)found, (Words){0});
#endif
}

/* Return the larger elements, or the smaller ones, as signed numbers; the largest or the smallest one of a vector; and
 * that of each of 16 vectors, into out. name: of the processors' instructions.
 */
#if WIDTH == 16
#define EXTREMES(larger, largest, largest_of_16, name, before)                                                      \
    INLINE Words larger(Words a, Words b) { return (Words)_mm512_##name##_epi32((__m512i)a, (__m512i)b); }           \
    INLINE uint32_t largest(Words x) { return (uint32_t)_mm512_reduce_##name##_epi32((__m512i)x); }                  \
    INLINE void largest_of_16(const Words *x, uint32_t *out) {                                                      \
        __m512i pairs[8], fours[4];                                                                                 \
        for (int i = 0; i < 8; i++) {                                                                               \
            __m512i a = (__m512i)x[2 * i], b = (__m512i)x[2 * i + 1];                                               \
            pairs[i] = _mm512_##name##_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));              \
        }                                                                                                           \
        for (int i = 0; i < 4; i++) {                                                                               \
            __m512i a = pairs[2 * i], b = pairs[2 * i + 1];                                                         \
            fours[i] = _mm512_##name##_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));              \
        }                                                                                                           \
        __m512i low = _mm512_##name##_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], 0x44),                          \
                                            _mm512_shuffle_i32x4(fours[0], fours[1], 0xee));                        \
        __m512i high = _mm512_##name##_epi32(_mm512_shuffle_i32x4(fours[2], fours[3], 0x44),                         \
                                             _mm512_shuffle_i32x4(fours[2], fours[3], 0xee));                       \
        __m512i found = _mm512_##name##_epi32(_mm512_shuffle_i32x4(low, high, 0x88),                                 \
                                              _mm512_shuffle_i32x4(low, high, 0xdd));                               \
        _mm512_storeu_si512(out, found);                                                                            \
    }
#elif WIDTH == 8 && defined(__AVX2__)
#define EXTREMES(larger, largest, largest_of_16, name, before)                                                      \
    INLINE Words larger(Words a, Words b) { return (Words)_mm256_##name##_epi32((__m256i)a, (__m256i)b); }           \
    INLINE uint32_t largest(Words x) {                                                                              \
        __m128i y = _mm256_castsi256_si128((__m256i)x);                                                             \
        y = _mm_##name##_epi32(y, _mm256_extracti128_si256((__m256i)x, 1));                                          \
        y = _mm_##name##_epi32(y, _mm_shuffle_epi32(y, 0x4e));                                                       \
        return (uint32_t)_mm_cvtsi128_si32(_mm_##name##_epi32(y, _mm_shuffle_epi32(y, 0xb1)));                       \
    }                                                                                                               \
    INLINE void largest_of_16(const Words *x, uint32_t *out) {                                                      \
        for (int i = 0; i < 16; i++) out[i] = largest(x[i]);                                                        \
    }
#else
#define EXTREMES(larger, largest, largest_of_16, name, before)                                                      \
    INLINE Words larger(Words a, Words b) { return words_where((Ints)a before (Ints)b, a, b); }                     \
    INLINE uint32_t largest(Words x) {                                                                              \
        int32_t found = (int32_t)x[0];                                                                              \
        for (int j = 1; j < WIDTH; j++) found = (int32_t)x[j] before found ? (int32_t)x[j] : found;                  \
        return (uint32_t)found;                                                                                     \
    }                                                                                                               \
    INLINE void largest_of_16(const Words *x, uint32_t *out) {                                                      \
        for (int i = 0; i < 16; i++) out[i] = largest(x[i]);                                                        \
    }
#endif
EXTREMES(larger, largest, largest_of_16, max, >)
EXTREMES(smaller, smallest, smallest_of_16, min, <)
#undef EXTREMES

#endif
