/* Updates of moments held as 8-bit codes: Adam's, which compact_moments.py specifies.
 *
 * A block of some groups goes through short loops whose values stay in the first-level cache: a group's scales depend on
 * all its elements, and work on the scales of many groups at once hides how long each takes. Included by native.c.
 */
#ifndef MEGASCALE_COMPACT_H
#define MEGASCALE_COMPACT_H

#include "codes.h"

#define GROUP 32 /* elements that share a scale */
#define BLOCK 16 /* groups */
#define VECTORS (GROUP / WIDTH)
#define PAIRS (VECTORS / 2)
#define FINEST 16 /* the smallest shift */
#define TOP_CODE 255
#define NAN_BITS 0x7fc00000u
#define LEAST_SCALED 0x1p-100f /* a group of smaller numbers has scale 0 */
#define INDEX_STRIDE 0x9E3779B1u
#define STEP_STRIDE 0x85EBCA77u
#define TO_MANTISSA 7 /* by so many bits a dither is shifted: those that count for quotients begin a mantissa */
#define MANTISSA_BITS 0x7ffc00u
#define ABOVE_ONE 0x3f800200u

/* The tensors of a parameter, where a Row has them. Scales are 0 where a moment is fp32. */
typedef struct {
    char *main, *model, *first, *second;
    int64_t start; /* the index of the first element in the whole parameter */
    float *step;
    int64_t model_type;
    float *first_scale, *second_scale, *no_third;
    char *remainder; /* 0 where main has memory */
} CompactRow;

/* What the branches of a loop ask for. held: whether main params are remainders. first, second: whether a moment is
 * codes. l2: whether decay goes through the gradient. cut: whether the last group is not whole.
 */
typedef struct { int64_t held, grad, model; int first, second, l2, cut; } CompactKind;

/* The addresses of up to BLOCK groups, n elements. dither: of the first one. */
typedef struct {
    const char *grad;
    char *main, *model, *remainder, *first, *second;
    float *first_scale, *second_scale;
    uint32_t dither;
    int64_t n;
} GroupRun;

typedef union { uint32_t bits[BLOCK]; float values[BLOCK]; Words words[BLOCK / WIDTH]; } PerGroup;

/* Offsets of pairs of vectors whose rounding is rare. They are held after the others. */
typedef struct { int64_t n, offset[BLOCK * PAIRS]; } DeferredStores;

/* What is known of a block's elements and groups between the loops. */
typedef struct {
    Floats first[BLOCK * VECTORS], root[BLOCK * VECTORS]; /* the new moments; then quotients */
    Floats value[BLOCK * VECTORS]; /* the new main params that are to be held */
    Words high[BLOCK], low[BLOCK]; /* of each group: maxima and minima of roots; then maxima of quotients */
    PerGroup floor, shift, kept; /* of the roots' codes: as they were before the update, then as they are after it */
} BlockBuffers;

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Return the bits of x >= +0. NaN's are NAN_BITS. */
INLINE Words bits_of_root(Floats x) {
#if WIDTH == 16
    return (Words)_mm512_min_epu32((__m512i)x, _mm512_set1_epi32(NAN_BITS)); /* larger numbers are NaNs */
#else
    return words_where(x == x, (Words)x, (Words){0} + NAN_BITS);
#endif
}

/* Read group t's main params. */
INLINE void read_main(GroupRun at, CompactKind kind, int64_t t, Floats *value) {
    int rare = 0;
    for (int k = 0; k < VECTORS; k++) {
        int64_t o = t * GROUP + k * WIDTH;
        if (!kind.held) {
            value[k] = load(at.main + 4 * o, F32, WIDTH);
            continue;
        }
        if (k % 2 == 0) rare = any_rare_pair(load_pair(at.model + 2 * o), load_pair(at.remainder + 2 * o), kind.model);
        Halves model = load_halves(at.model + 2 * o, WIDTH), remainder = load_halves(at.remainder + 2 * o, WIDTH);
        value[k] = decoded(model, remainder, kind.model, rare);
    }
}

/* Read floor and shift of each group's roots. Codes that are all 0 are those of roots that were set to 0. */
INLINE void old_floors(GroupRun at, BlockBuffers *work, int64_t groups) {
    PerGroup scale = {{0}};
    memcpy(scale.bits, at.second_scale, (size_t)groups * sizeof(uint32_t));
    for (int v = 0; v < BLOCK / WIDTH; v++) {
        work->floor.words[v] = scale.words[v] & ~3u;
        work->shift.words[v] = (scale.words[v] & 3u) + FINEST;
    }
    for (int64_t t = 0; t < groups; t++) {
        uint64_t codes[GROUP / 8];
        memcpy(codes, at.second + t * GROUP, sizeof codes);
        if ((codes[0] | codes[1] | codes[2] | codes[3]) == 0) work->floor.bits[t] = 0;
    }
}

/* Compute the new moments of group t, and its highest and lowest root. fp32 moments are stored. */
INLINE void new_moments(GroupRun at, CompactKind kind, AdamScalars s, float coefficient, BlockBuffers *work, int64_t t) {
    Words high = {0}, low = {0}, floor = {0};
    Floats value[VECTORS] = {{0}};
    uint32_t shift = 0;
    if (kind.second) floor += work->floor.bits[t], shift = work->shift.bits[t];
    if (kind.l2) read_main(at, kind, t, value);
    for (int k = 0; k < VECTORS; k++) {
        int64_t o = t * GROUP + k * WIDTH;
        Floats gradient = load(at.grad + o * size_of(kind.grad), kind.grad, WIDTH) * coefficient, root_before = {0};
        if (kind.l2) gradient = gradient + s.wd * value[k];
        Floats square, average;
        if (kind.second) {
            root_before = (Floats)(shifted_left((Words)load_u8(at.second + o), shift) + floor);
            square = root_before * root_before;
        } else {
            square = load(at.second + 4 * o, F32, WIDTH);
            if (kind.first) root_before = root(square);
        }
        if (kind.first) average = floats_of(load_i8(at.first + o)) * at.first_scale[t] * root_before;
        else average = load(at.first + 4 * o, F32, WIDTH);
        average = s.beta1 * average + s.one_beta1 * gradient;
        square = s.beta2 * square + s.one_beta2 * gradient * gradient;
        if (!kind.first) store(at.first + 4 * o, average, F32, WIDTH);
        if (!kind.second) store(at.second + 4 * o, square, F32, WIDTH);
        Floats now = root(square);
        Words bits = bits_of_root(kind.second ? now : magnitude_of(now)), above = bits, below = bits;
        if (kind.cut) above &= (Words)before(at.n - o), below |= ~(Words)before(at.n - o) & 0x7fffffffu;
        high = k ? larger(high, above) : above;
        low = k ? smaller(low, below) : below;
        work->first[t * VECTORS + k] = average;
        work->root[t * VECTORS + k] = (Floats)bits;
    }
    work->high[t] = high;
    work->low[t] = low;
}

/* Store two vectors' main params as model params and remainders. The rare ones wait. */
INLINE void hold_pair(GroupRun at, CompactKind kind, const Floats *value, DeferredStores *rare, int64_t o) {
    char *at_model = at.model + 2 * o, *at_remainder = at.remainder + 2 * o;
    Pair model, remainder;
    Words left[2];
    if (kind.model == BF16) {
        Words rounded[2];
        for (int k = 0; k < 2; k++) {
            rounded[k] = rounded_to_bfloat(value[k]);
            left[k] = words_where(value[k] == value[k], (Words)value[k] - (rounded[k] & 0xffff0000u), (Words){0});
        }
        model = saturated_pair((Ints)rounded[0] >> 16, (Ints)rounded[1] >> 16);
    } else {
        Halves halves[2] = {to_half(value[0]), to_half(value[1])};
        for (int k = 0; k < 2; k++) left[k] = (Words)value[k] - (Words)from_half(halves[k]);
        model = joined(halves[0], halves[1]);
    }
    remainder = saturated_pair((Ints)left[0], (Ints)left[1]);
    if (kind.model == F16 && __builtin_expect(any_rare_pair(model, (Pair){0}, F16), 0)) {
        rare->offset[rare->n++] = o;
        model = load_pair(at_model);
        remainder = load_pair(at_remainder);
    }
    memcpy(at_model, &model, sizeof model);
    memcpy(at_remainder, &remainder, sizeof remainder);
}

/* Store a block's main params as model params and remainders. The rare ones wait. */
INLINE void hold_block(GroupRun at, CompactKind kind, const BlockBuffers *work, DeferredStores *rare, int64_t groups) {
    rare->n = 0;
    for (int64_t p = 0; p < groups * PAIRS; p++) hold_pair(at, kind, work->value + 2 * p, rare, 2 * WIDTH * p);
}

/* Store the rare ones. Returns whether a rounding into fp16 is not finite. */
static __attribute__((noinline)) int hold_rare_pairs(GroupRun at, const DeferredStores *rare, const Floats *value) {
    int beyond = 0;
    for (int64_t v = 0; v < 2 * rare->n; v++) {
        int64_t o = rare->offset[v / 2] + v % 2 * WIDTH, n = at.n - o < WIDTH ? at.n - o : WIDTH;
        if (n > 0) beyond |= hold_rare(value + o / WIDTH, at.model + 2 * o, at.remainder + 2 * o, n);
    }
    return beyond;
}

/* Store main params and model params. Returns -1 for elements whose rounding into fp16 is not finite. */
INLINE Ints store_params(GroupRun at, CompactKind kind, Floats value, int64_t o, int streamed) {
    store(at.main + 4 * o, value, F32, WIDTH);
    if (kind.model == NONE) return (Ints){0};
    if (streamed) stream(at.model + 2 * o, value, kind.model);
    else store(at.model + 2 * o, value, kind.model, WIDTH);
    if (kind.model != F16) return (Ints){0};
    return kind.cut ? rounds_beyond(value) & before(at.n - o) : rounds_beyond(value);
}

/* Update group t's main params and, unless they are to be held, store them and model params. Returns -1 for elements
 * whose rounding into fp16 is not finite.
 */
INLINE Ints new_params(GroupRun at, CompactKind kind, AdamScalars s, BlockBuffers *work, int64_t t, int streamed) {
    Ints beyond = {0};
    Floats value[VECTORS];
    read_main(at, kind, t, value);
    for (int k = 0; k < VECTORS; k++) {
        Floats now = kind.l2 ? value[k] : value[k] * s.lr_wd;
        Floats denominator = work->root[t * VECTORS + k] * s.inv_correction2_sqrt + s.eps;
        now = now - s.step_size * work->first[t * VECTORS + k] / denominator;
        if (kind.held) work->value[t * VECTORS + k] = now;
        else beyond |= store_params(at, kind, now, t * GROUP + k * WIDTH, streamed);
    }
    return beyond;
}

INLINE void largest_of_each(const Words *x, int64_t groups, uint32_t *out) {
    if (groups == BLOCK) largest_of_16(x, out);
    else
        for (int64_t t = 0; t < groups; t++) out[t] = largest(x[t]);
}

INLINE void smallest_of_each(const Words *x, int64_t groups, uint32_t *out) {
    if (groups == BLOCK) smallest_of_16(x, out);
    else
        for (int64_t t = 0; t < groups; t++) out[t] = smallest(x[t]);
}

/* Choose the codes' shift and floor, and store them as scales. */
INLINE void new_floors(GroupRun at, BlockBuffers *work, int64_t groups) {
    PerGroup highest = {{0}}, least = {{0}}, scale; /* what is beyond the groups is computed with, not stored */
    largest_of_each(work->high, groups, highest.bits);
    smallest_of_each(work->low, groups, least.bits);
    for (int v = 0; v < BLOCK / WIDTH; v++) {
        Ints high = (Ints)highest.words[v], low = (Ints)least.words[v], shift = (Ints){0} + FINEST;
        for (int finer = FINEST; finer < FINEST + 3; finer++) shift -= (high >> finer) - (low >> finer) > TOP_CODE - 1;
        Words lowest = larger((Words)((high >> shift) + (1 - TOP_CODE)), (Words){0});
        work->shift.words[v] = (Words)shift;
        work->kept.words[v] = ((Words){0} - 1) << (Words)shift;
        work->floor.words[v] = lowest << (Words)shift;
        scale.words[v] = work->floor.words[v] + (Words)(shift - FINEST);
    }
    memcpy(at.second_scale, scale.bits, (size_t)groups * sizeof(uint32_t));
}

/* Store the codes of group t's roots, and compute the quotients by the roots as held. weyl: of its first vector.
 * may_be_zero: whether a root may be.
 */
INLINE void new_roots(GroupRun at, CompactKind kind, BlockBuffers *work, int64_t t, Words weyl, int may_be_zero) {
    Words most = {0}, shift = {0}, floor = {0}, kept = {0};
    if (kind.second) shift += work->shift.bits[t], floor += work->floor.bits[t], kept += work->kept.bits[t];
    for (int k = 0; k < VECTORS; k++) {
        int64_t o = t * GROUP + k * WIDTH;
        Floats held = work->root[t * VECTORS + k];
        if (kind.second) {
            Words dither = (weyl + (uint32_t)(k * WIDTH) * INDEX_STRIDE) >> (32 - shift);
            Words dithered = larger((Words)held + dither, floor);
            store_8(at.second + o, (Ints)((dithered - floor) >> shift));
            held = (Floats)(dithered & kept);
        }
        if (!kind.first) continue;
        Floats quotient = work->first[t * VECTORS + k] / held;
        if (may_be_zero) quotient = where(held == 0, (Floats){0}, quotient);
        Words magnitude = (Words)magnitude_of(quotient);
        if (kind.cut) magnitude &= (Words)before(at.n - o);
        most = k ? larger(most, magnitude) : magnitude;
        work->first[t * VECTORS + k] = quotient;
    }
    work->high[t] = most;
}

/* Store the scales of quotients. inverse: their reciprocals, 0 of 0. */
INLINE void new_scales(GroupRun at, const BlockBuffers *work, int64_t groups, PerGroup *inverse) {
    PerGroup most = {{0}}, scale;
    largest_of_each(work->high, groups, most.bits);
    for (int v = 0; v < BLOCK / WIDTH; v++) {
        Floats largest = (Floats)most.words[v];
        Floats of_code = where(largest < LEAST_SCALED, (Floats){0}, largest / 127);
        scale.words[v] = (Words)of_code;
        inverse->words[v] = (Words)where(of_code == 0, (Floats){0}, 1 / of_code);
    }
    memcpy(at.first_scale, scale.bits, (size_t)groups * sizeof(uint32_t));
}

/* Store the codes of group t's quotients. shifted: the dithers of its first vector. */
INLINE void new_quotients(GroupRun at, const BlockBuffers *work, int64_t t, float inverse, Words shifted) {
    for (int k = 0; k < VECTORS; k++) {
        Words dither = shifted + (uint32_t)(k * WIDTH) * (INDEX_STRIDE << TO_MANTISSA);
        Floats from_1_to_2 = (Floats)((dither & MANTISSA_BITS) | ABOVE_ONE);
        Floats code = work->first[t * VECTORS + k] * inverse + (from_1_to_2 - 1.5f);
        store_8(at.first + t * GROUP + k * WIDTH, rounded(code));
    }
}

/* Prefetch a group's main params. */
INLINE void fetch_main(GroupRun at, CompactKind kind, int64_t o) {
    for (int64_t line = 0; !kind.held && line < 4 * GROUP; line += 64) __builtin_prefetch(at.main + 4 * o + line);
    if (!kind.held) return;
    __builtin_prefetch(at.model + 2 * o);
    __builtin_prefetch(at.remainder + 2 * o);
}

/* Return the dither of a parameter's first element. */
static inline uint32_t dither_of_step(int64_t step) {
    uint32_t mixed = (uint32_t)(step >> 4) * INDEX_STRIDE;
    mixed = (mixed ^ mixed >> 15) * STEP_STRIDE;
    return (uint32_t)step * STEP_STRIDE + (mixed ^ mixed >> 13);
}

/* Return the dithers of a block's first vector. */
INLINE Words first_dithers(GroupRun at) {
    static const uint32_t index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Words weyl;
    memcpy(&weyl, index, sizeof weyl);
    return weyl * INDEX_STRIDE + at.dither;
}

/* Loops that wait for few results come between a reduction over groups and the loop that needs it. */
INLINE int update_block(GroupRun at, CompactKind kind, AdamScalars s, float coefficient, int64_t groups,
                        int streamed) {
    BlockBuffers work;
    PerGroup inverse;
    Ints beyond = {0};
    DeferredStores rare;
    Words weyl = first_dithers(at);
    if (kind.second) old_floors(at, &work, groups);
#pragma GCC unroll 2
    for (int64_t t = 0; t < groups; t++) {
        if (groups == BLOCK) {
            const int64_t ahead = t * GROUP + BLOCK * GROUP;
            __builtin_prefetch(at.grad + ahead * size_of(kind.grad));
            __builtin_prefetch(at.first + (kind.first ? ahead : 4 * ahead));
            __builtin_prefetch(at.second + (kind.second ? ahead : 4 * ahead));
        }
        new_moments(at, kind, s, coefficient, &work, t);
    }
    if (kind.second) new_floors(at, &work, groups);
#pragma GCC unroll 2
    for (int64_t t = 0; t < groups; t++) {
        if (groups == BLOCK) fetch_main(at, kind, (t + BLOCK) * GROUP);
        beyond |= new_params(at, kind, s, &work, t, streamed);
    }
#pragma GCC unroll 2
    for (int64_t t = 0; t < groups; t++, weyl += GROUP * INDEX_STRIDE) {
        if (kind.second && work.floor.bits[t]) new_roots(at, kind, &work, t, weyl, 0);
        else new_roots(at, kind, &work, t, weyl, 1);
    }
    if (kind.first) new_scales(at, &work, groups, &inverse);
    if (kind.held) hold_block(at, kind, &work, &rare, groups);
    Words shifted = first_dithers(at) << TO_MANTISSA;
    for (int64_t t = 0; kind.first && t < groups; t++, shifted += GROUP * (INDEX_STRIDE << TO_MANTISSA))
        new_quotients(at, &work, t, inverse.values[t], shifted);
    if (kind.held && __builtin_expect(rare.n != 0, 0)) return hold_rare_pairs(at, &rare, work.value);
    return any(beyond);
}

INLINE GroupRun span_of(const CompactRow *row, const char *grad, CompactKind kind, uint32_t dither, int64_t i, int64_t n) {
    GroupRun at = {grad + i * size_of(kind.grad), row->main + 4 * i, row->model + 2 * i, row->remainder + 2 * i,
               row->first + (kind.first ? i : 4 * i), row->second + (kind.second ? i : 4 * i),
               row->first_scale + i / GROUP, row->second_scale + i / GROUP, dither + (uint32_t)i * INDEX_STRIDE, n};
    return at;
}

/* Update a last group that is not whole, for all kinds, in a copy that is. */
static __attribute__((noinline)) int update_last_group(GroupRun at, CompactKind kind, const Scalars *s) {
    char grad[4 * GROUP] = {0}, main[4 * GROUP] = {0}, model[4 * GROUP] = {0}, remainder[2 * GROUP] = {0};
    char first[4 * GROUP] = {0}, second[4 * GROUP] = {0};
    size_t n = (size_t)at.n, first_bytes = kind.first ? n : 4 * n, second_bytes = kind.second ? n : 4 * n;
    memcpy(grad, at.grad, n * (size_t)size_of(kind.grad));
    if (!kind.held) memcpy(main, at.main, 4 * n);
    if (kind.held) memcpy(model, at.model, 2 * n);
    if (kind.held) memcpy(remainder, at.remainder, 2 * n);
    memcpy(first, at.first, first_bytes);
    memcpy(second, at.second, second_bytes);
    kind.cut = 1;
    GroupRun copy = {grad,           main,      model, remainder, first,   second, at.first_scale,
                 at.second_scale, at.dither, at.n};
    int beyond = update_block(copy, kind, s->adam, s->coefficient, (at.n + GROUP - 1) / GROUP, 0);
    if (!kind.held) memcpy(at.main, main, 4 * n);
    if (kind.held) memcpy(at.remainder, remainder, 2 * n);
    if (kind.model != NONE) memcpy(at.model, model, 2 * n);
    memcpy(at.first, first, first_bytes);
    memcpy(at.second, second, second_bytes);
    return beyond;
}

INLINE int update_groups(const CompactRow *row, const char *grad, CompactKind kind, const Scalars *s, uint32_t dither,
                         Chunk chunk, int streamed) {
    int beyond = 0;
    int64_t i = chunk.start, whole = chunk.end - (chunk.end - i) % GROUP;
#define SPAN(n) span_of(row, grad, kind, dither, i, n)
    for (; i + BLOCK * GROUP <= whole; i += BLOCK * GROUP)
        beyond |= update_block(SPAN(BLOCK * GROUP), kind, s->adam, s->coefficient, BLOCK, streamed);
    if (i < whole)
        beyond |= update_block(SPAN(whole - i), kind, s->adam, s->coefficient, (whole - i) / GROUP, streamed);
    i = whole;
    if (i < chunk.end) beyond |= update_last_group(SPAN(chunk.end - i), kind, s);
#undef SPAN
    return beyond;
}

/* Update a chunk of a row. The usual kinds, all moments codes and 16-bit columns of one type, have a loop each. */
static int update_compact_chunk(const CompactRow *row, const char *grad, CompactKind kind, const Scalars *s,
                                Chunk chunk, int streamed) {
    uint32_t dither = (uint32_t)row->start * INDEX_STRIDE + dither_of_step((int64_t)(*row->step + 1.0f));
    int usual = !kind.l2 && kind.grad == kind.model && kind.first && kind.second;
    if (((uintptr_t)row->model & 63) || kind.model == NONE || kind.held) streamed = 0;
#define GROUPS(...) update_groups(row, grad, (CompactKind){__VA_ARGS__, 0}, s, dither, chunk, streamed)
    if (usual && kind.grad == F16 && kind.held) return GROUPS(1, F16, F16, 1, 1, 0);
    if (usual && kind.grad == F16) return GROUPS(0, F16, F16, 1, 1, 0);
    if (usual && kind.grad == BF16 && kind.held) return GROUPS(1, BF16, BF16, 1, 1, 0);
    if (usual && kind.grad == BF16) return GROUPS(0, BF16, BF16, 1, 1, 0);
    return GROUPS(kind.held, kind.grad, kind.model, kind.first, kind.second, kind.l2);
#undef GROUPS
}

/* Update all rows. If *found_inf is set only `overflowed`, shape [rows], is written. */
void update_compact(const Lengths *all, const Grads *grads, const CompactRow *rows, const Hyper *hyper,
                    const float *found_inf, const float *coefficient, uint8_t *overflowed, int threads) {
    int64_t n = all->num_rows, total = 0;
    int skip = *found_inf != 0, l2 = (options_of(ADAM, hyper) & L2) != 0;
    float factor = hyper->maximize ? -*coefficient : *coefficient;
    if (n <= 0) return;
    Share shares[MOST_THREADS];
    for (int64_t r = 0; r < n; r++) total += all->numels[r];
    memset(overflowed, 0, (size_t)n);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    share_out(all->num_chunks, shares, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (all->num_chunks > 1)
    for (int part = 0; part < threads; part++) {
        int64_t first, last;
        Scalars scalars = {.coefficient = factor};
        while (take_next(shares, part, threads, all->num_chunks, 1, &first, &last)) {
            Chunk chunk = {row_of(all, first), 0, 0};
            for (int64_t c = first; c < last; c++) {
                chunk = chunk_after(all, chunk.row, c);
                const CompactRow *row = rows + chunk.row;
                const char *grad = grads->addresses[chunk.row];
                if (!grad) continue;
                const Row plain = {.main = row->main, .step = row->step};
                CompactKind kind = {row->remainder != 0, grads->types[chunk.row], row->model ? row->model_type : NONE,
                                    row->first_scale != 0, row->second_scale != 0, l2, 0};
                scalars_of(&plain, ADAM, hyper, &scalars);
                int beyond = skip ? !kind.held && kind.model == F16 && chunk_rounds_beyond(&plain, chunk)
                                  : update_compact_chunk(row, grad, kind, &scalars, chunk, total > STREAMED);
                if (beyond) {
#pragma omp atomic write
                    overflowed[chunk.row] = 1;
                }
            }
        }
        finish_streams();
    }
    if (skip) return;
    for (int64_t r = 0; r < n; r++)
        if (grads->addresses[r]) *rows[r].step += 1.0f;
}

#endif
