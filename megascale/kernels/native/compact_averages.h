/* SGD and Lion on a momentum held as 8-bit codes, which compact_averages.py specifies. Included by compact.h. */
#ifndef MEGASCALE_COMPACT_AVERAGES_H
#define MEGASCALE_COMPACT_AVERAGES_H

#define TOP_LEVEL 127
#define LEVEL_UNIT (1.0f / 260144640.0f) /* the reciprocal of 127**4 */

INLINE Floats level_of(Floats code) {
    Floats square = code * code;
    return square * square * LEVEL_UNIT;
}

INLINE Floats decoded_average(const char *at, float scale) {
    Ints code = load_i8(at);
    Floats level = level_of(floats_of(code));
    return (Floats)((Words)level | ((Words)code & 0x80000000u)) * scale;
}

/* Return x >= 0, and 0 for NaN. */
INLINE Floats number_or_zero(Floats x) {
#if WIDTH == 16
    return (Floats)_mm512_max_ps((__m512)x, _mm512_setzero_ps()); /* the second operand where one is NaN */
#else
    return (Floats)((Words)x & (Words)(x == x));
#endif
}

/* Compute vector v's ratios to their scale, with signs, and of each the largest code below: a slow chain of roots. */
INLINE void codes_below(BlockBuffers *work, int64_t v, float inverse) {
    Floats ratio = work->first[v] * inverse, magnitude = number_or_zero(magnitude_of(ratio));
    Ints below = __builtin_convertvector(root(root(magnitude)) * TOP_LEVEL, Ints);
    work->first[v] = (Floats)((Words)magnitude | ((Words)ratio & 0x80000000u));
    work->root[v] = (Floats)smaller((Words)below, (Words){0} + (TOP_LEVEL - 1));
}

/* Return the codes of vector v's averages. dither: of each element. */
INLINE Ints codes_of_averages(const BlockBuffers *work, int64_t v, Words dither) {
    Floats ratio = magnitude_of(work->first[v]);
    Ints lower = (Ints)work->root[v], sign = (Ints)work->first[v] >> 31;
    Floats from = floats_of(lower), below = level_of(from), distance = level_of(from + 1) - below;
    Floats threshold = floats_of((Ints)(dither >> 16)) * 0x1p-16f * distance;
    Ints code = lower - (ratio - below > threshold);
    return (code ^ sign) - sign;
}

INLINE void group_codes_below(BlockBuffers *work, int64_t t, const PerGroup *inverse) {
    for (int k = 0; k < VECTORS; k++) codes_below(work, t * VECTORS + k, inverse->values[t]);
}

INLINE void store_group_codes(GroupRun at, const BlockBuffers *work, int64_t t, Words weyl) {
    for (int k = 0; k < VECTORS; k++) {
        int64_t o = t * GROUP + k * WIDTH;
        store_8(at.first + o, codes_of_averages(work, o / WIDTH, weyl + (uint32_t)o * INDEX_STRIDE));
    }
}

/* Store the codes of averages, of one group while the roots of the next are computed. */
INLINE void new_average_codes(GroupRun at, BlockBuffers *work, const PerGroup *inverse, int64_t groups) {
    const Words weyl = first_dithers(at);
    int64_t t = 0;
    group_codes_below(work, 0, inverse);
    for (; t + 1 < groups; t++) {
        group_codes_below(work, t + 1, inverse);
        store_group_codes(at, work, t, weyl);
    }
    store_group_codes(at, work, t, weyl);
}

/* Update group t: main params as new_params() does, and averages, which are stored as codes later. Returns as new_params(). */
INLINE Ints new_averages(GroupRun at, CompactKind kind, const Scalars *s, BlockBuffers *work, int64_t t, int streamed) {
    Words high = {0};
    Ints beyond = {0};
    Floats values[VECTORS];
    read_main(at, kind, t, values);
    for (int k = 0; k < VECTORS; k++) {
        int64_t o = t * GROUP + k * WIDTH;
        Floats gradient = load(at.grad + o * size_of(kind.grad), kind.grad, WIDTH) * s->coefficient;
        Floats value = values[k], average = decoded_average(at.first + o, at.first_scale[t]);
        if (kind.rule == SGD) {
            if (kind.l2) gradient = gradient + s->sgd.wd * value;
            average = s->sgd.momentum * average + s->sgd.kept * gradient;
            value = value - s->sgd.lr * (s->sgd.nesterov ? gradient + s->sgd.momentum * average : average);
        } else {
            value = value * s->lion.lr_wd - s->lion.lr * lion_direction(average, gradient, s->lion);
            average = s->lion.beta2 * average + s->lion.one_beta2 * gradient;
        }
        Words bits = (Words)magnitude_of(average);
        if (kind.cut) bits &= (Words)before(at.n - o);
        high = k ? larger(high, bits) : bits;
        work->first[t * VECTORS + k] = average;
        if (kind.held) work->value[t * VECTORS + k] = value;
        else beyond |= store_params(at, kind, value, o, streamed);
    }
    work->high[t] = high;
    return beyond;
}

INLINE int update_average_block(GroupRun at, CompactKind kind, const Scalars *s, int64_t groups, int streamed) {
    BlockBuffers work;
    PerGroup most = {{0}}, inverse;
    Ints beyond = {0};
    DeferredStores rare;
    for (int64_t t = 0; t < groups; t++) {
        if (groups == BLOCK) {
            const int64_t ahead = (t + BLOCK) * GROUP;
            fetch_main(at, kind, ahead);
            __builtin_prefetch(at.grad + ahead * size_of(kind.grad));
            __builtin_prefetch(at.first + ahead);
        }
        beyond |= new_averages(at, kind, s, &work, t, streamed);
    }
    if (kind.held) hold_block(at, kind, &work, &rare, groups);
    largest_of_each(work.high, groups, most.bits);
    for (int v = 0; v < BLOCK / WIDTH; v++) {
        Floats largest = (Floats)most.words[v];
        Floats scale = where(largest < LEAST_SCALED, (Floats){0}, largest);
        most.words[v] = (Words)scale;
        inverse.words[v] = (Words)where(scale == 0, (Floats){0}, 1 / scale);
    }
    memcpy(at.first_scale, most.bits, (size_t)groups * sizeof(uint32_t));
    new_average_codes(at, &work, &inverse, groups);
    if (kind.held && __builtin_expect(rare.n != 0, 0)) return hold_rare_pairs(at, &rare, work.value);
    return any(beyond);
}

#endif
