/* Main params held as remainders, which remainders.py specifies: decoded before an update, encoded after it.
 *
 * Included by native.c.
 */
#ifndef MEGASCALE_REMAINDER_H
#define MEGASCALE_REMAINDER_H

#include "codes.h"

#define FIXED_POINT_END 0x0100 /* 2**-16 as fp16 bits: smaller magnitudes have remainders in units of 2**-40 */
#define HALF_INFINITY 0x7c00   /* inf as fp16 bits */
#define MOST_REMAINDER 32767
#define WEIGHT_STRIDE 0x9E3779B1u /* of an element's weight in the fingerprint */
#define WEIGHT_START 0x85EBCA77u
#define DECODED 4096 /* elements that a thread decodes at a time: they stay in the first-level cache */

/* The tensors of a parameter: main param (fp32), model param (fp16 or bf16: type), remainder (int16), fingerprint. */
typedef struct {
    char *main, *model, *remainder;
    int64_t *fingerprint, type;
} HeldRow;

INLINE Halves load_halves(const void *at, int64_t n) {
    Halves h = {0};
    copy_first(&h, at, 2, n);
    return h;
}

INLINE Ints sign_extended(Halves h) { return (Ints)(widened(h) << 16) >> 16; }

/* Return the main params that model params and remainders stand for. */
INLINE Floats decoded(Halves model, Halves remainder, int64_t type) {
    Words half = widened(model), offset = (Words)sign_extended(remainder);
    if (type == BF16) return (Floats)((half << 16) + offset);
    Floats magnitude = from_half(model & 0x7fff), fixed = magnitude + floats_of((Ints)offset) * 0x1p-40f;
    Words bits = words_where((Ints)(half & 0x7fffu) < FIXED_POINT_END, (Words)fixed, (Words)magnitude + offset);
    return (Floats)(bits | (half & 0x8000u) << 16);
}

/* Return the remainders, in the low 16 bits, of main params whose rounding is `model`. */
INLINE Words remainder_of(Floats main, Halves model, int64_t type) {
    Words bits = (Words)magnitude_of(main), half = widened(model) & 0x7fffu;
    if (type == BF16) {
        Words offset = bits - (half << 16);
        offset = words_where((Ints)offset > MOST_REMAINDER, (Words){0} + MOST_REMAINDER, offset);
        return words_where(main == main, offset, (Words){0});
    }
    Floats magnitude = from_half(model & 0x7fff);
    Words exact = bits - (Words)magnitude, most = (Words){0} + MOST_REMAINDER;
    Words fixed = (Words)rounded((magnitude_of(main) - magnitude) * 0x1p40f);
    fixed = words_where((Ints)fixed > MOST_REMAINDER, most, fixed);
    fixed = words_where((Ints)fixed < -MOST_REMAINDER, -most, fixed);
    Words offset = words_where((Ints)half < FIXED_POINT_END, fixed, exact);
    return words_where((Ints)half >= HALF_INFINITY, (Words){0}, offset);
}

/* Decode n <= WIDTH elements, from element i on. */
INLINE void decode_some(const HeldRow *row, int64_t i, int64_t n, int64_t type) {
    Halves model = load_halves(row->model + 2 * i, n), remainder = load_halves(row->remainder + 2 * i, n);
    store(row->main + 4 * i, decoded(model, remainder, type), F32, n);
}

INLINE void decode_as(const HeldRow *row, Chunk chunk, int64_t type) {
    int64_t i = chunk.start;
    for (; i + WIDTH <= chunk.end; i += WIDTH) {
        __builtin_prefetch(row->model + 2 * i + AHEAD);
        __builtin_prefetch(row->remainder + 2 * i + AHEAD);
        decode_some(row, i, WIDTH, type);
    }
    if (i < chunk.end) decode_some(row, i, chunk.end - i, type);
}

/* Return what each element adds to the fingerprint. i: the index of the first. */
INLINE Words marks_of(Halves model, int64_t i) {
    Words index;
    for (int j = 0; j < WIDTH; j++) index[j] = (uint32_t)j;
    return widened(model) * (((index + (uint32_t)i) * WEIGHT_STRIDE + WEIGHT_START) | 1u);
}

INLINE uint32_t sum_of_marks(Words marks) {
    uint32_t sum = 0;
    for (int j = 0; j < WIDTH; j++) sum += marks[j];
    return sum;
}

/* Encode n <= WIDTH elements, from element i on. Returns what each adds to the fingerprint. */
INLINE Words encode_some(const HeldRow *row, int64_t i, int64_t n, int64_t type) {
    Floats main = load(row->main + 4 * i, F32, n);
    Halves model = to_16_bits(main, type), remainder = narrowed(remainder_of(main, model, type) & 0xffffu);
    copy_first(row->model + 2 * i, &model, 2, n);
    copy_first(row->remainder + 2 * i, &remainder, 2, n);
    return marks_of(model, i);
}

/* Encode into fp16 like encode_some, but finite main params that would round to inf change nothing. Returns the sum. */
static __attribute__((noinline)) uint32_t encode_large(const HeldRow *row, int64_t i, int64_t n) {
    char *at_model = row->model + 2 * i, *at_remainder = row->remainder + 2 * i;
    Halves old_model = load_halves(at_model, n), old_remainder = load_halves(at_remainder, n);
    Floats main = load(row->main + 4 * i, F32, n);
    Ints kept = rounds_beyond(main) & (magnitude_of(main) < (Floats){0} + INFINITY);
    encode_some(row, i, n, F16);
    Halves model = narrowed(words_where(kept, widened(old_model), widened(load_halves(at_model, n))));
    Halves remainder = narrowed(words_where(kept, widened(old_remainder), widened(load_halves(at_remainder, n))));
    copy_first(at_model, &model, 2, n);
    copy_first(at_remainder, &remainder, 2, n);
    return sum_of_marks(marks_of(model, i));
}

/* Encode a chunk, and add to *mark, its fingerprint. Returns whether any rounding into fp16 is not finite. */
INLINE int encode_as(const HeldRow *row, Chunk chunk, int64_t type, uint32_t *mark) {
    const Row plain = {.main = row->main};
    Words marks = {0};
    int64_t i = chunk.start;
    if (type == F16 && chunk_rounds_beyond(&plain, chunk)) {
        for (; i < chunk.end; i += WIDTH) *mark += encode_large(row, i, chunk.end - i);
        return 1;
    }
    for (; i + WIDTH <= chunk.end; i += WIDTH) marks += encode_some(row, i, WIDTH, type);
    if (i < chunk.end) marks += encode_some(row, i, chunk.end - i, type);
    *mark += sum_of_marks(marks);
    return 0;
}

static void decode_chunk(const HeldRow *row, Chunk chunk) {
    if (row->type == F16) decode_as(row, chunk, F16);
    else decode_as(row, chunk, BF16);
}

/* Encode a chunk, and add to the row's fingerprint, which was 0 before its first chunk. Returns as encode_as does. */
static int encode_chunk(const HeldRow *row, Chunk chunk) {
    uint32_t mark = 0;
    int beyond = row->type == F16 ? encode_as(row, chunk, F16, &mark) : encode_as(row, chunk, BF16, &mark);
    __atomic_fetch_add((uint32_t *)row->fingerprint, mark, __ATOMIC_RELAXED); /* modulo 2**32, little-endian */
    return beyond;
}

/* Decode all rows' main params or, with `encode`, encode them. overflowed: shape [rows], written only with `encode`. */
void hold(const Lengths *all, const HeldRow *rows, int encode, uint8_t *overflowed, int threads) {
    Share shares[MOST_THREADS];
    if (encode) memset(overflowed, 0, (size_t)all->num_rows);
    for (int64_t r = 0; r < all->num_rows && encode; r++) *rows[r].fingerprint = 0;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    share_out(all->num_chunks, shares, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (all->num_chunks > 1)
    for (int part = 0; part < threads; part++) {
        int64_t first, last;
        while (take_next(shares, part, threads, all->num_chunks, encode, &first, &last)) {
            Chunk chunk = {row_of(all, first), 0, 0};
            for (int64_t c = first; c < last; c++) {
                chunk = chunk_after(all, chunk.row, c);
                const HeldRow *row = rows + chunk.row;
                int beyond = 0;
                if (encode) beyond = encode_chunk(row, chunk);
                else decode_chunk(row, chunk);
                if (beyond) {
#pragma omp atomic write
                    overflowed[chunk.row] = 1;
                }
            }
        }
    }
}

#endif
