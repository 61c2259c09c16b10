/* Main params held as remainders, which remainders.py specifies: in registers.
 *
 * Included by native.c.
 */
#ifndef MEGASCALE_REMAINDER_H
#define MEGASCALE_REMAINDER_H

#include "codes.h"

#define FIXED_POINT_END 0x0100 /* 2**-16 as fp16 bits: smaller magnitudes have remainders in units of 2**-40 */
#define HALF_INFINITY 0x7c00   /* inf as fp16 bits */
#define BRAIN_INFINITY 0x7f80  /* inf as bf16 bits */
#define MOST_REMAINDER 32767
#define MOST_OF_NORMAL 4095 /* the largest remainder of any normal number in fp16; others may be larger */

INLINE Halves load_halves(const void *at, int64_t n) {
    Halves h = {0};
    copy_first(&h, at, 2, n);
    return h;
}

INLINE Ints sign_extended(Halves h) {
#if WIDTH == 16
    return (Ints)_mm512_cvtepi16_epi32((__m256i)h);
#elif WIDTH == 8 && defined(__AVX2__)
    return (Ints)_mm256_cvtepi16_epi32((__m128i)h);
#else
    return (Ints)(widened(h) << 16) >> 16;
#endif
}

/* Narrow signed numbers; those beyond 16 bits become the nearest that are not. */
INLINE Halves saturated(Ints x) {
#if WIDTH == 16
    return (Halves)_mm512_cvtsepi32_epi16((__m512i)x);
#elif WIDTH == 8
    return (Halves)_mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extractf128_si256((__m256i)x, 1));
#elif defined(__x86_64__)
    return (Halves)_mm_cvtsi128_si64(_mm_packs_epi32((__m128i)x, (__m128i)x));
#else
    const Words most = (Words){0} + 32767, least = (Words){0} - 32768;
    Words low = words_where(x > 32767, most, (Words)x);
    return narrowed(words_where((Ints)low < -32768, least, low) & 0xffffu);
#endif
}

/* Return the main params that model params and remainders stand for, whatever they are. Of pairs that no encoding
 * produces these are the model params.
 */
INLINE Floats decoded_bf16(Halves model, Halves remainder) {
    Words alone = widened(model) << 16, left = (Words)sign_extended(remainder), bits = alone + left;
    Ints foreign = ((Ints)left < -MOST_REMAINDER) & ((alone & 0x10000u) != 0);
    foreign |= (Floats)bits != (Floats)bits; /* beyond 0 or inf */
    return (Floats)words_where(foreign, alone, bits);
}

INLINE Floats decoded_fp16(Halves model, Halves remainder) {
    Words half = widened(model), left = (Words)sign_extended(remainder), size = half & 0x7fffu;
    Floats magnitude = from_half(model & 0x7fff), fixed = magnitude + floats_of((Ints)left) * 0x1p-40f;
    Ints is_fixed = (Ints)size < FIXED_POINT_END;
    Words bits = words_where(is_fixed, (Words)fixed, (Words)magnitude + left);
    Ints foreign = widened(to_half((Floats)bits)) != size;
    foreign |= ((Ints)size >= HALF_INFINITY) | (is_fixed & ((Ints)left < -MOST_REMAINDER));
    bits = words_where(foreign, (Words)magnitude, bits);
    return (Floats)(bits | (half & 0x8000u) << 16);
}

/* Return the remainders, in the low 16 bits, of any main params in fp16 whose rounding is `model`. */
INLINE Words remainder_of_fp16(Floats main, Halves model) {
    Words bits = (Words)magnitude_of(main), half = widened(model) & 0x7fffu;
    Floats magnitude = from_half(model & 0x7fff);
    Words exact = bits - (Words)magnitude, most = (Words){0} + MOST_REMAINDER;
    Words fixed = (Words)rounded((magnitude_of(main) - magnitude) * 0x1p40f);
    fixed = words_where((Ints)fixed > MOST_REMAINDER, most, fixed);
    fixed = words_where((Ints)fixed < -MOST_REMAINDER, -most, fixed);
    Words left = words_where((Ints)half < FIXED_POINT_END, fixed, exact);
    return words_where((Ints)half >= HALF_INFINITY, (Words){0}, left);
}

/* Whether a model param in fp16, widened, is below 2**-16, inf or NaN. Of others remainders are differences of bits. */
INLINE int any_rare(Floats model) {
    const uint32_t least = 0x37800000u, range = 0x7f800000u - least;
    Words above = ((Words)model & 0x7fffffffu) - least;
#if WIDTH == 16
    return _mm512_cmpge_epu32_mask((__m512i)above, _mm512_set1_epi32((int)range)) != 0;
#else
    return any((Ints)(above >= range));
#endif
}

/* As many 16-bit elements as fill a register: those of two vectors. */
typedef uint16_t Pair __attribute__((vector_size(4 * WIDTH)));
typedef int16_t SignedPair __attribute__((vector_size(4 * WIDTH)));

INLINE Pair load_pair(const char *at) {
    Pair pair;
    memcpy(&pair, at, sizeof pair);
    return pair;
}

INLINE Pair joined(Halves first, Halves second) {
#if WIDTH == 16
    return (Pair)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
#elif WIDTH == 8
    return (Pair)_mm256_insertf128_si256(_mm256_castsi128_si256((__m128i)first), (__m128i)second, 1);
#elif defined(__x86_64__)
    return (Pair)_mm_set_epi64x((long long)second, (long long)first);
#else
    Pair pair;
    memcpy(&pair, &first, sizeof first);
    memcpy((char *)&pair + sizeof first, &second, sizeof second);
    return pair;
#endif
}

/* Narrow two vectors as saturated() does. */
INLINE Pair saturated_pair(Ints first, Ints second) {
#ifdef MASKED
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return (Pair)_mm512_permutexvar_epi64(order, _mm512_packs_epi32((__m512i)first, (__m512i)second));
#elif WIDTH == 8 && defined(__AVX2__)
    return (Pair)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)first, (__m256i)second), 0xd8);
#elif WIDTH == 4 && defined(__SSE2__)
    return (Pair)_mm_packs_epi32((__m128i)first, (__m128i)second);
#else
    return joined(saturated(first), saturated(second));
#endif
}

/* Whether any main param may be another than the sum of the bits of its model param and remainder: whether a model param
 * is 0, inf or NaN, or in fp16 below 2**-16, or a remainder is too large for most model params.
 */
INLINE int any_rare_pair(Pair model, Pair remainder, int64_t type) {
    const uint16_t least = type == BF16 ? 1 : FIXED_POINT_END, end = type == BF16 ? BRAIN_INFINITY : HALF_INFINITY;
    const uint16_t most = type == BF16 ? MOST_REMAINDER : MOST_OF_NORMAL;
    const int16_t last_model = (int16_t)(2 * (end - least) - 0x8000 - 1), last_remainder = (int16_t)(2 * most - 0x8000);
    SignedPair ordered = (SignedPair)(model + model + (uint16_t)(0x8000 - 2 * least)); /* without the sign */
    SignedPair left = (SignedPair)(remainder + (uint16_t)(most + 0x8000));
#ifdef MASKED
    return (_mm512_cmpgt_epi16_mask((__m512i)ordered, _mm512_set1_epi16(last_model)) |
            _mm512_cmpgt_epi16_mask((__m512i)left, _mm512_set1_epi16(last_remainder))) != 0;
#else
    SignedPair rare = (ordered > last_model) | (left > last_remainder);
#if WIDTH == 8
    return !_mm256_testz_si256((__m256i)rare, (__m256i)rare);
#elif defined(__SSE2__) && WIDTH == 4
    return _mm_movemask_epi8((__m128i)rare) != 0;
#else
    return any((Ints)rare != 0);
#endif
#endif
}

/* Return main params. rare: whether any_rare_pair() tells so of these. */
INLINE Floats decoded(Halves model, Halves remainder, int64_t type, int rare) {
    Words left = (Words)sign_extended(remainder);
    if (__builtin_expect(rare, 0)) return type == BF16 ? decoded_bf16(model, remainder) : decoded_fp16(model, remainder);
    return (Floats)((type == BF16 ? widened(model) << 16 : (Words)from_half(model)) + left);
}

/* Return the main params of n <= WIDTH elements. */
INLINE Floats held_value(const char *at_model, const char *at_remainder, int64_t type, int64_t n) {
    Halves model = load_halves(at_model, n), remainder = load_halves(at_remainder, n);
    return decoded(model, remainder, type, any_rare_pair(joined(model, model), joined(remainder, remainder), type));
}

/* Hold main params in fp16 of which some are rare. Finite ones that would be inf keep what is there. */
static __attribute__((noinline)) int hold_rare(const Floats *main, char *at_model, char *at_remainder, int64_t n) {
    Halves old_model = load_halves(at_model, n), old_remainder = load_halves(at_remainder, n), model = to_half(*main);
    Ints beyond = rounds_beyond(*main) & before(n), kept = beyond & (magnitude_of(*main) < (Floats){0} + INFINITY);
    Halves remainder = narrowed(remainder_of_fp16(*main, model) & 0xffffu);
    model = narrowed(words_where(kept, widened(old_model), widened(model)));
    remainder = narrowed(words_where(kept, widened(old_remainder), widened(remainder)));
    copy_first(at_model, &model, 2, n);
    copy_first(at_remainder, &remainder, 2, n);
    return any(beyond);
}

/* Hold main params as model params and remainders. Returns whether a rounding into fp16 is not finite. */
INLINE int hold_value(Floats main, char *at_model, char *at_remainder, int64_t type, int64_t n) {
    Halves model = to_16_bits(main, type);
    Words left = (Words)main;
    if (type == BF16) {
        left -= widened(model) << 16;
        left = words_where((Ints)left > MOST_REMAINDER, (Words){0} + MOST_REMAINDER, left);
        left = words_where(main == main, left, (Words){0});
    } else {
        Floats rounded = from_half(model);
        left -= (Words)rounded;
        if (__builtin_expect(any_rare(rounded), 0)) {
            const Floats copy = main;
            return hold_rare(&copy, at_model, at_remainder, n);
        }
    }
    Halves remainder = narrowed(left & 0xffffu);
    copy_first(at_model, &model, 2, n);
    copy_first(at_remainder, &remainder, 2, n);
    return 0;
}

#endif
