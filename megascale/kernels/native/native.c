/* The passes over memory on a CPU: one call for any number of tensors.
 *
 * Tables hold the addresses of tensors, one row per parameter. Rows are cut into chunks of fixed length, so that
 * statistics are the same bits for any number of threads. Within a chunk, elements go from memory through registers, as
 * vectors of fp32, and back. The order of operations is the reference backend's: compile without contraction and
 * without fast math, so that main params have its bits.
 */
#include "chunks.h"
#include "vector.h"

#define STAGE 1024  /* elements of a gradient that are measured at a time */
#define STAGES_AHEAD 4 /* between those that are measured and those that are prefetched */
#define LINE 32     /* 16-bit elements in a cache line; only whole lines are worth streaming */
#define LANES 32    /* partial sums of a stage */
#define AHEAD 384   /* bytes of fp32 between the update and its prefetch into the first-level cache */
#define FAR 1536    /* into the second-level cache */
#define STREAMED (1 << 22) /* elements of an update that are more than a cache holds */
#define SHORT 4096  /* elements of a row that is prefetched while an earlier one is read */
#define SOON 6      /* rows between the one that is read and the one that is prefetched */
#define START 512   /* bytes of each tensor that an update prefetches */
#define FP16_OVERFLOW 65520.0f

/* The gradients of all rows. A row whose gradient is missing, at address 0, is left alone. */
typedef struct { char *const *addresses; const int64_t *types; } Grads;

/* The tensors that are updated with a gradient. */
typedef struct {
    char *main, *model; /* model: 0 where the main param is the model param */
    char *state[3];
    float *step; /* 0 where the optimizer counts none */
    int64_t model_type, state_type[3];
    char *remainder; /* 0 where main has memory */
} Row;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double momentum, dampening;
    int64_t decoupled, amsgrad, maximize, nesterov;
} Hyper;

/* Prefetch into the second-level cache, which can wait for many more lines at once than the first. */
static inline void fetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

/* ---- statistics ---- */

/* Add lanes in pairs: adding one after the other would delay the next stage's loads. */
static inline double sum_of(const float *lanes) {
    double sums[LANES];
    for (int j = 0; j < LANES; j++) sums[j] = (double)lanes[j];
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    return sums[0];
}

/* Add the squares of up to LANES elements. */
INLINE void add_squares(Floats *lanes, const char *grads, int64_t type, int64_t n) {
    for (int j = 0; j < LANES / WIDTH; j++) {
        Floats x = load(grads + j * WIDTH * size_of(type), type, n - j * WIDTH);
        lanes[j] += x * x;
    }
}

/* Count the non-finite and the zero ones of n <= STAGE elements. */
static void count(const char *grads, int64_t type, int64_t n, double *non_finite, double *zeros) {
    const Floats infinity = (Floats){0} + INFINITY;
    Ints beyond = {0}, zero = {0};
    int64_t i = 0;
    for (; i < n; i += WIDTH) {
        Floats x = load(grads + i * size_of(type), type, n - i);
        beyond += ~(magnitude_of(x) < infinity);
        zero += x == 0;
    }
    *non_finite += (double)times(beyond);
    *zeros += (double)(times(zero) - (i - n));
}

INLINE void measure_as(const char *grad, int64_t type, int64_t start, int64_t end, int count_zeros, double *out) {
    out[0] = out[1] = out[2] = 0;
    for (int64_t at = start; at < end; at += STAGE) {
        const char *from = grad + at * size_of(type);
        int64_t n = end - at < STAGE ? end - at : STAGE, i = 0;
        int more = at + STAGES_AHEAD * STAGE < end;
        Floats lanes[LANES / WIDTH] = {{0}};
        for (; i + LANES <= n; i += LANES) {
            /* The hardware's own prefetching stops at each page boundary. */
            if (more) fetch(from + (i + STAGES_AHEAD * STAGE) * size_of(type), LANES * size_of(type));
            add_squares(lanes, from + i * size_of(type), type, LANES);
        }
        if (i < n) add_squares(lanes, from + i * size_of(type), type, n - i);
        double squares = sum_of((const float *)lanes);
        out[0] += squares;
        /* A finite sum has finite elements only; else count them. */
        if (count_zeros || !isfinite(squares)) count(from, type, n, out + 1, out + 2);
    }
}

static void measure_chunk(const char *grad, int64_t type, Chunk chunk, int count_zeros, double *out) {
    if (type == F32) measure_as(grad, F32, chunk.start, chunk.end, count_zeros, out);
    else if (type == F16) measure_as(grad, F16, chunk.start, chunk.end, count_zeros, out);
    else measure_as(grad, BF16, chunk.start, chunk.end, count_zeros, out);
}

/* Measure chunks [first, last). */
static void measure_chunks(const Lengths *all, const Grads *grads, int64_t first, int64_t last, int count_zeros,
                           double *partial, double *out) {
    int64_t n = all->num_rows;
    Chunk chunk = {row_of(all, first), 0, 0};
    for (int64_t c = first; c < last; c++) {
        chunk = chunk_after(all, chunk.row, c);
        int64_t row = chunk.row, soon = row + SOON;
        /* Where rows are short, the hardware's own prefetching starts too late. */
        if (soon < n && grads->addresses[soon] && all->numels[soon] <= SHORT)
            fetch(grads->addresses[soon], all->numels[soon] * size_of(grads->types[soon]));
        double *sums = partial + 3 * c;
        if (grads->addresses[row])
            measure_chunk(grads->addresses[row], grads->types[row], chunk, count_zeros, sums);
        else
            memset(sums, 0, 3 * sizeof *sums);
        if (is_one_chunk(all, row))
            for (int k = 0; k < 3; k++) out[k * n + row] = sums[k];
    }
}

/* partial: shape [chunks, 3], scratch. out: shape [3, rows]: sums of squares, non-finite elements, zeros. */
void measure(const Lengths *all, const Grads *grads, int64_t count_zeros, double *partial, double *out, int threads) {
    int64_t n = all->num_rows;
    Share shares[MOST_THREADS];
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    share_out(all->num_chunks, shares, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (all->num_chunks > 1)
    for (int part = 0; part < threads; part++) {
        int64_t first, last;
        while (take_next(shares, part, threads, all->num_chunks, 0, &first, &last))
            measure_chunks(all, grads, first, last, (int)count_zeros, partial, out);
    }
    for (int64_t r = 0; r < n; r++) {
        if (is_one_chunk(all, r)) continue;
        int64_t end = r + 1 < n ? all->first[r + 1] : all->num_chunks;
        double sums[3] = {0, 0, 0};
        for (int64_t c = all->first[r]; c < end; c++)
            for (int k = 0; k < 3; k++) sums[k] += partial[3 * c + k];
        for (int k = 0; k < 3; k++) out[k * n + r] = sums[k];
    }
}

/* Return -1 for elements whose rounding into fp16 is not finite. */
INLINE Ints rounds_beyond(Floats main) { return ~(magnitude_of(main) < (Floats){0} + FP16_OVERFLOW); }

/* Return whether the rounding of a chunk's main params into fp16 is not finite. */
static int chunk_rounds_beyond(const Row *row, Chunk chunk) {
    Ints beyond = {0};
    for (int64_t i = chunk.start; i < chunk.end; i += WIDTH)
        beyond |= rounds_beyond(load(row->main + 4 * i, F32, chunk.end - i));
    return any(beyond);
}

#include "remainder.h"
#include "rules.h"

/* ---- the update ---- */

/* Constants of a row's update, reused for the next row if that has the same step. */
typedef struct {
    AdamScalars adam;
    SgdScalars sgd;
    LionScalars lion;
    float coefficient, step;
    int known;
} Scalars;

static void scalars_of(const Row *row, int64_t rule, const Hyper *h, Scalars *s) {
    float step = row->step ? *row->step : 0.0f;
    if (s->known && step == s->step) return;
    if (rule == ADAM) s->adam = adam_scalars(h, step);
    if (rule == SGD) s->sgd = sgd_scalars(h, row->step);
    if (rule == LION) s->lion = lion_scalars(h);
    s->step = step;
    s->known = 1;
}

/* Update up to WIDTH elements except what holds 16 bits of main params. Returns these. */
INLINE Floats updated(Place at, Kind kind, Scalars s) {
    Floats value = kind.held ? held_value(at.model, at.remainder, kind.model, at.n) : load(at.main, F32, at.n);
    if (kind.rule == NOTHING) return value;
    Floats gradient = load(at.grad, kind.grad, at.n) * s.coefficient;
    if (kind.rule == ADAM) value = adam(value, gradient, at, kind, s.adam);
    if (kind.rule == SGD) value = sgd(value, gradient, at, kind, s.sgd);
    if (kind.rule == LION) value = lion(value, gradient, at, kind, s.lion);
    if (!kind.held) store(at.main, value, F32, at.n);
    return value;
}

INLINE Place place_of(const Row *row, const char *grad, Kind kind, int64_t i, int64_t n) {
    Place at = {grad + i * size_of(kind.grad), row->main + 4 * i, row->model + 2 * i, {0}, row->remainder + 2 * i, n};
    for (int k = 0; k < 3; k++) at.state[k] = row->state[k] + i * size_of(kind.state[k]);
    return at;
}

/* Whether all that an update reads is fp32. */
INLINE int is_fp32(Kind kind) {
    return kind.grad == F32 && kind.state[0] == F32 && kind.state[1] == F32 && kind.state[2] == F32;
}

/* Prefetch a line into the second-level cache, as the statistics do, or into the first. */
INLINE void fetch_line(const char *at, int second) {
    if (second) __builtin_prefetch(at, 0, 2);
    else __builtin_prefetch(at);
}

/* With mixed types, lines of 16-bit elements are prefetched twice: that costs least in the first-level cache. */
INLINE void fetch_ahead(const Row *row, Place at, Kind kind) {
    int second = is_fp32(kind), ahead = second ? FAR : AHEAD;
    if (kind.held) {
        fetch_line(at.model + ahead / 2, second);
        fetch_line(at.remainder + ahead / 2, second);
    } else {
        fetch_line(at.main + ahead, second);
    }
    if (kind.rule == NOTHING) return;
    fetch_line(at.grad + ahead * size_of(kind.grad) / 4, second);
    for (int k = 0; k < 3; k++)
        if (row->state[k]) fetch_line(at.state[k] + ahead * size_of(kind.state[k]) / 4, second);
}

/* Prefetch the start of a row: for short ones the hardware's own prefetching starts too late. */
static inline void fetch_start(const Row *row, const char *grad) {
    const char *main = row->remainder ? row->model : row->main;
    const char *starts[] = {grad, main, row->remainder, row->state[0], row->state[1], row->state[2]};
    for (int k = 0; k < 6; k++)
        if (starts[k]) fetch(starts[k], START);
}

/* Update a chunk's whole vectors, of main params that are remainders. Returns the same as update_vectors(). */
INLINE int update_held_vectors(const Row *row, const char *grad, Kind kind, Scalars s, Chunk chunk) {
    int beyond = 0;
    for (int64_t i = chunk.start; i + WIDTH <= chunk.end; i += WIDTH) {
        Place at = place_of(row, grad, kind, i, WIDTH);
        fetch_ahead(row, at, kind);
        beyond |= hold_value(updated(at, kind, s), at.model, at.remainder, kind.model, WIDTH);
    }
    return beyond;
}

/* Update a chunk's whole vectors. Returns whether a rounding into fp16 is not finite. */
INLINE int update_vectors(const Row *row, const char *grad, Kind kind, Scalars s, Chunk chunk, int streamed) {
    if (kind.held) return update_held_vectors(row, grad, kind, s, chunk);
    int64_t i = chunk.start, end = chunk.end, in_lines = i;
    if (streamed && !((uintptr_t)row->model & 63)) in_lines = end - (end - i) % LINE;
    Ints beyond = {0};
    for (; i + WIDTH <= end; i += WIDTH) {
        Place at = place_of(row, grad, kind, i, WIDTH);
        fetch_ahead(row, at, kind);
        Floats value = updated(at, kind, s);
        if (kind.model == NONE) continue;
        if (i < in_lines) stream(at.model, value, kind.model);
        else store(at.model, value, kind.model, WIDTH);
        if (kind.model == F16) beyond |= rounds_beyond(value);
    }
    return any(beyond);
}

/* Update the rest of a chunk after its whole vectors, for all kinds. Returns the same as update_vectors(). */
static __attribute__((noinline)) int update_rest(const Row *row, const char *grad, Kind kind, const Scalars *s,
                                                 Chunk chunk) {
    int64_t n = (chunk.end - chunk.start) % WIDTH;
    if (n == 0) return 0;
    Place at = place_of(row, grad, kind, chunk.end - n, n);
    Floats value = updated(at, kind, *s);
    if (kind.held) return hold_value(value, at.model, at.remainder, kind.model, n);
    if (kind.model != NONE) store(at.model, value, kind.model, n);
    return kind.model == F16 && any(rounds_beyond(value) & before(n));
}

static int64_t options_of(int64_t rule, const Hyper *h) {
    int64_t options = 0;
    if ((rule == ADAM || rule == SGD) && h->weight_decay != 0 && !h->decoupled) options |= L2;
    if (rule == ADAM && h->amsgrad) options |= AMSGRAD;
    if (rule == SGD && h->momentum != 0) options |= MOMENTUM;
    return options;
}

#define VECTORS(rule, options, held, grad_type, model_type, ...) \
    update_vectors(row, grad, (Kind){rule, options, held, grad_type, model_type, {__VA_ARGS__}}, *s, chunk, streamed)

/* The same as update_chunk(), for main params that are held as remainders: a loop for each of the usual kinds, and one
 * for all others. usual: the type of 16-bit columns beside fp32 moments, or NONE.
 */
static int update_held(const Row *row, const char *grad, Kind kind, const Scalars *s, Chunk chunk, int64_t usual) {
    const int streamed = 0;
    switch (OPTIONS * kind.rule + kind.options) {
#define LOOP(rule, options)                                                           \
    case OPTIONS * rule + (options):                                                  \
        if (usual == F16) return VECTORS(rule, options, 1, F16, F16, F32, F32, F32);    \
        if (usual == BF16) return VECTORS(rule, options, 1, BF16, BF16, F32, F32, F32); \
        break;
        LOOP(ADAM, 0)
        LOOP(SGD, MOMENTUM)
        LOOP(LION, 0)
#undef LOOP
    }
    return update_vectors(row, grad, kind, *s, chunk, streamed);
}

/* Update a chunk of a row. Returns whether a rounding into fp16 is not finite.
 *
 * Each rule with its options has one loop for any types, one for fp32 moments, and one for fp32 moments with 16-bit
 * columns of one type, the usual case, which has no branches on types. A loop for each combination would make hundreds.
 */
static int update_chunk(const Row *row, const char *grad, Kind kind, const Scalars *s, Chunk chunk, int streamed) {
    int fp32 = kind.state[0] == F32 && kind.state[1] == F32 && kind.state[2] == F32, beyond = 0;
    int64_t usual = fp32 && kind.grad == kind.model ? kind.grad : NONE;
    if (kind.held) return update_held(row, grad, kind, s, chunk, usual) | update_rest(row, grad, kind, s, chunk);
    switch (OPTIONS * kind.rule + kind.options) {
#define LOOP(rule, options)                                                                                            \
    case OPTIONS * rule + (options):                                                                                   \
        if (usual == F16) beyond = VECTORS(rule, options, 0, F16, F16, F32, F32, F32);                                 \
        else if (usual == BF16) beyond = VECTORS(rule, options, 0, BF16, BF16, F32, F32, F32);                         \
        else if (fp32) beyond = VECTORS(rule, options, 0, kind.grad, kind.model, F32, F32, F32);                       \
        else beyond = VECTORS(rule, options, 0, kind.grad, kind.model, kind.state[0], kind.state[1], kind.state[2]);   \
        break;
        LOOP(ADAM, 0)
        LOOP(ADAM, L2)
        LOOP(ADAM, AMSGRAD)
        LOOP(ADAM, L2 | AMSGRAD)
        LOOP(SGD, 0)
        LOOP(SGD, L2)
        LOOP(SGD, MOMENTUM)
        LOOP(SGD, L2 | MOMENTUM)
        LOOP(LION, 0)
        LOOP(NOTHING, 0)
#undef LOOP
    }
    return beyond | update_rest(row, grad, kind, s, chunk);
}
#undef VECTORS

/* The arguments of an update, shared by all threads. */
typedef struct {
    const Lengths *all;
    const Grads *grads;
    const Row *rows;
    const Hyper *hyper;
    int64_t rule, options;
    int skip, streamed;
} Update;

static Kind kind_of(const Update *u, int64_t index) {
    const Row *row = u->rows + index;
    Kind kind = {u->rule, u->options, row->remainder != 0, u->grads->types[index], row->model ? row->model_type : NONE,
                 {0}};
    for (int k = 0; k < 3; k++) kind.state[k] = row->state_type[k];
    return kind;
}

/* Update chunks [first, last). scalars: those of the row before, replaced as needed. */
static void update_chunks(const Update *u, int64_t first, int64_t last, Scalars *scalars, uint8_t *overflowed) {
    const Lengths *all = u->all;
    Chunk chunk = {row_of(all, first), 0, 0};
    for (int64_t c = first; c < last; c++) {
        chunk = chunk_after(all, chunk.row, c);
        int64_t index = chunk.row, soon = index + SOON;
        const Row *row = u->rows + index;
        const char *grad = u->grads->addresses[index];
        if (soon < all->num_rows && all->numels[soon] <= SHORT) fetch_start(u->rows + soon, u->grads->addresses[soon]);
        if (!grad) continue;
        scalars_of(row, u->rule, u->hyper, scalars);
        Kind kind = kind_of(u, index);
        int beyond = 0;
        if (u->skip) beyond = !kind.held && kind.model == F16 && chunk_rounds_beyond(row, chunk);
        else beyond = update_chunk(row, grad, kind, scalars, chunk, u->streamed);
        if (!u->skip && u->rule != NOTHING && row->step && is_one_chunk(all, index)) *row->step += 1.0f;
        if (beyond) {
#pragma omp atomic write
            overflowed[index] = 1;
        }
    }
}

/* Update all rows. If *found_inf is set only `overflowed`, shape [rows], is written. With rule NOTHING main
 * params are only rounded into model params.
 */
void update(const Lengths *all, const Grads *grads, const Row *rows, int64_t rule, const Hyper *hyper,
            const float *found_inf, const float *coefficient, uint8_t *overflowed, int threads) {
    Update u = {all, grads, rows, hyper, rule, options_of(rule, hyper), rule != NOTHING && *found_inf != 0, 0};
    float factor = rule == NOTHING ? 1.0f : hyper->maximize ? -*coefficient : *coefficient;
    int64_t total = 0, n = all->num_rows;
    if (n <= 0) return;
    for (int64_t r = 0; r < n && total <= STREAMED; r++) total += all->numels[r];
    u.streamed = total > STREAMED;
    memset(overflowed, 0, (size_t)n);
    Share shares[MOST_THREADS];
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    share_out(all->num_chunks, shares, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (all->num_chunks > 1)
    for (int part = 0; part < threads; part++) {
        int64_t first, last;
        Scalars scalars = {.coefficient = factor};
        while (take_next(shares, part, threads, all->num_chunks, 1, &first, &last))
            update_chunks(&u, first, last, &scalars, overflowed);
        if (u.streamed) finish_streams();
    }
    if (u.skip || rule == NOTHING) return;
    for (int64_t r = 0; r < n; r++)
        if (grads->addresses[r] && !is_one_chunk(all, r) && rows[r].step) *rows[r].step += 1.0f;
}

/* ---- the other entry points, which use the above ---- */

#include "compact.h"
#include "decision.h"
