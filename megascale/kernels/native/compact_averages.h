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
    return where(code < 0, -level, level) * scale;
}

/* Return the codes of averages. inverse: of the scale, 0 where that is. dither: of each element. */
INLINE Ints codes_of_averages(Floats average, float inverse, Words dither) {
    Floats ratio = magnitude_of(average) * inverse;
    ratio = where(ratio != ratio, (Floats){0}, ratio);
    Ints lower = __builtin_convertvector(root(root(ratio)) * TOP_LEVEL, Ints);
    lower = (Ints)words_where(lower > TOP_LEVEL - 1, (Words){0} + (TOP_LEVEL - 1), (Words)lower);
    Floats from = floats_of(lower), below = level_of(from), distance = level_of(from + 1) - below;
    Floats threshold = floats_of((Ints)(dither >> 16)) * 0x1p-16f * distance;
    Ints code = lower - (ratio - below > threshold);
    return (Ints)words_where(average < 0, (Words)-code, (Words)code);
}

/* Update group t: main params, model params and averages, which are stored as codes later. Returns as new_params(). */
INLINE Ints new_averages(Span at, CompactKind kind, const Scalars *s, Work *work, Held *held, int64_t t,
                         int streamed) {
    Words high = {0};
    Ints beyond = {0};
    for (int k = 0; k < VECTORS; k++) {
        int64_t o = t * GROUP + k * WIDTH;
        Floats gradient = load(at.grad + o * size_of(kind.grad), kind.grad, WIDTH) * s->coefficient;
        Floats value = main_at(at, kind, o), average = decoded_average(at.first + o, at.first_scale[t]);
        if (kind.rule == SGD) {
            if (kind.l2) gradient = gradient + s->sgd.wd * value;
            average = s->sgd.momentum * average + s->sgd.kept * gradient;
            value = value - s->sgd.lr * (s->sgd.nesterov ? gradient + s->sgd.momentum * average : average);
        } else {
            value = value * s->lion.lr_wd - s->lion.lr * lion_direction(average, gradient, s->lion);
            average = s->lion.beta2 * average + s->lion.one_beta2 * gradient;
        }
        Words bits = (Words)magnitude_of(average);
        high = larger(high, kind.cut ? bits & (Words)before(at.n - o) : bits);
        work->first[t * VECTORS + k] = average;
        beyond |= store_params(at, kind, held, value, o, streamed);
    }
    work->high[t] = high;
    return beyond;
}

INLINE int update_average_block(Span at, CompactKind kind, const Scalars *s, int64_t groups, int streamed) {
    Work work;
    PerGroup most = {{0}}, inverse;
    Ints beyond = {0};
    Rare rare;
    Held held = held_from(at, kind, &rare);
    for (int64_t t = 0; t < groups; t++) {
        if (groups == BLOCK) {
            const int64_t ahead = (t + BLOCK) * GROUP;
            fetch_main(at, kind, ahead);
            __builtin_prefetch(at.grad + ahead * size_of(kind.grad));
            __builtin_prefetch(at.first + ahead);
        }
        beyond |= new_averages(at, kind, s, &work, &held, t, streamed);
    }
    if (kind.held) finish_held(at, held);
    largest_of_each(work.high, groups, most.bits);
    for (int v = 0; v < BLOCK / WIDTH; v++) {
        Floats largest = (Floats)most.words[v];
        Floats scale = where(largest < LEAST_SCALED, (Floats){0}, largest);
        most.words[v] = (Words)scale;
        inverse.words[v] = (Words)where(scale == 0, (Floats){0}, 1 / scale);
    }
    memcpy(at.first_scale, most.bits, (size_t)groups * sizeof(uint32_t));
    Words weyl = first_dithers(at);
    for (int64_t t = 0; t < groups; t++)
        for (int k = 0; k < VECTORS; k++) {
            int64_t o = t * GROUP + k * WIDTH;
            Words dither = weyl + (uint32_t)o * INDEX_STRIDE;
            store_8(at.first + o, codes_of_averages(work.first[t * VECTORS + k], inverse.values[t], dither));
        }
    return (kind.held && rare.beyond) | any(beyond);
}

#endif
