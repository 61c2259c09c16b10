/* Vectors of codes of 8 bits, and integers: WIDTH elements at a time. */
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

/* Return the larger elements, as signed numbers. */
INLINE Words larger(Words a, Words b) {
#if WIDTH == 16
    return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif WIDTH == 8 && defined(__AVX2__)
    return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return words_where((Ints)a > (Ints)b, a, b);
#endif
}

/* Return the largest element of signed numbers. */
INLINE uint32_t largest(Words x) {
#if WIDTH == 16 || (WIDTH == 8 && defined(__AVX2__))
#if WIDTH == 16
    __m256i half = _mm256_max_epi32(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
    __m256i half = (__m256i)x;
#endif
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
#else
    int32_t most = (int32_t)x[0];
    for (int j = 1; j < WIDTH; j++) most = (int32_t)x[j] > most ? (int32_t)x[j] : most;
    return (uint32_t)most;
#endif
}

/* Write the largest element of each of 16 vectors of signed numbers. */
INLINE void largest_of_16(const Words *x, uint32_t *out) {
#if WIDTH == 16
#define MAX(a, b) _mm512_max_epi32(a, b)
    __m512i pairs[8], fours[4];
    for (int i = 0; i < 8; i++) {
        __m512i a = (__m512i)x[2 * i], b = (__m512i)x[2 * i + 1];
        pairs[i] = MAX(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    for (int i = 0; i < 4; i++) {
        __m512i a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = MAX(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    __m512i low = MAX(_mm512_shuffle_i32x4(fours[0], fours[1], 0x44), _mm512_shuffle_i32x4(fours[0], fours[1], 0xee));
    __m512i high = MAX(_mm512_shuffle_i32x4(fours[2], fours[3], 0x44), _mm512_shuffle_i32x4(fours[2], fours[3], 0xee));
    _mm512_storeu_si512(out, MAX(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd)));
#undef MAX
#else
    for (int i = 0; i < 16; i++) out[i] = largest(x[i]);
#endif
}

#endif
