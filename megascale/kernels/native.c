/* The passes over memory on a CPU: one call for all tensors, whatever their number.
 *
 * A table of rows says where each parameter's tensors are. Rows are cut into chunks of fixed length, so that statistics
 * are the same bits for any number of threads. Within a chunk, blocks that fit the first-level cache are widened to fp32
 * where they are narrower, updated, and rounded back. The order of operations is the reference backend's: compile with
 * contraction off and without fast math, and main params are its bits.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define CHUNK 65536 /* elements that one thread takes at a time */
#define STAGE 1024  /* elements of a gradient that are measured at a time */
#define BLOCK 512   /* elements that are updated at a time */
#define LANES 32    /* partial sums of a stage */
#define STREAMED (1 << 22) /* elements of an update that leaves nothing of itself in cache */
#define MANY 4096   /* rows that are worth a second thread where each takes no time */
#define FP16_OVERFLOW 65520.0f

enum { F32 = 0, F16 = 1, BF16 = 2 };

typedef struct {
    int64_t numel;
    void *grad, *main, *model; /* model: 0 where the main param is the model param */
    void *state[3];
    float *step; /* 0 where the optimizer counts none */
    int64_t grad_type, model_type, state_type[3];
    int64_t first_chunk; /* chunks of all rows before this one */
} Row;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double momentum, dampening;
    int64_t decoupled, amsgrad, maximize, nesterov;
} Hyper;

/* ---- 16-bit types ---- */

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    /* Exponents are moved by multiplication, which subnormals survive; inf and NaN get all exponent bits. */
    float scaled = float_of(magnitude << 13) * 0x1p112f;
    uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return float_of(sign | bits_of(scaled) | special);
}

static inline uint16_t float_to_half(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* subnormal: the addition rounds to their step */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

static inline uint16_t float_to_bfloat(float x) {
    uint32_t u = bits_of(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

static void widen(float *restrict out, const void *in, int64_t type, int64_t n) {
    const uint16_t *restrict h = in;
    int64_t i = 0;
    if (type == BF16) {
        for (; i < n; i++) out[i] = float_of((uint32_t)h[i] << 16);
        return;
    }
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(h + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(h + i))));
#endif
    for (; i < n; i++) out[i] = half_to_float(h[i]);
}

static void narrow(void *out, const float *restrict in, int64_t type, int64_t n) {
    uint16_t *restrict h = out;
    int64_t i = 0;
    if (type == BF16) {
        for (; i < n; i++) h[i] = float_to_bfloat(in[i]);
        return;
    }
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(h + i), _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(h + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) h[i] = float_to_half(in[i]);
}

/* Round n <= BLOCK elements past the caches, which saves reading what is overwritten. */
static void narrow_streamed(void *out, const float *in, int64_t type, int64_t n) {
#if defined(__SSE2__)
    if (!((uintptr_t)out & 63)) {
        uint16_t rounded[BLOCK] __attribute__((aligned(16)));
        uint16_t *h = out;
        int64_t i = 0, whole = n & ~(int64_t)31; /* a cache line that is streamed in part costs more than it saves */
        narrow(rounded, in, type, n);
        for (; i < whole; i += 8) _mm_stream_si128((__m128i *)(h + i), *(const __m128i *)(rounded + i));
        memcpy(h + i, rounded + i, 2 * (size_t)(n - i));
        return;
    }
#endif
    narrow(out, in, type, n);
}

static inline int64_t size_of(int64_t type) { return type == F32 ? 4 : 2; }

/* Return n elements from `start` on as fp32: in place, or copied into the stage. */
static inline float *as_float(void *data, int64_t type, int64_t start, int64_t n, float *stage) {
    char *at = (char *)data + start * size_of(type);
    if (type == F32) return (float *)at;
    widen(stage, at, type, n);
    return stage;
}

/* ---- rows and chunks ---- */

static int64_t chunks_of(const Row *row) { return (row->numel + CHUNK - 1) / CHUNK; }

/* Return the row that holds a chunk: the last one whose first chunk is not beyond it. Empty rows lie before it. */
static int64_t row_of(const Row *rows, int64_t num_rows, int64_t chunk) {
    int64_t low = 0, high = num_rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (rows[middle].first_chunk <= chunk) low = middle; else high = middle;
    }
    return low;
}

/* Return the row of a chunk, given that of an earlier one: a walk, as most rows have one chunk. */
static inline int64_t row_after(const Row *rows, int64_t num_rows, int64_t row, int64_t chunk) {
    while (row + 1 < num_rows && rows[row + 1].first_chunk <= chunk) row++;
    return row;
}

/* The chunks of one of several threads: [*first, *last). Neighbours in memory stay with one thread. */
static void share_of(int64_t num_chunks, int part, int parts, int64_t *first, int64_t *last) {
    *first = num_chunks * part / parts;
    *last = num_chunks * (part + 1) / parts;
}

/* ---- statistics ---- */

/* Add lanes in pairs: one after the other, the CPU would not reach the next stage's loads meanwhile. */
static inline double sum_of(const float *lanes) {
    double sums[LANES];
    for (int j = 0; j < LANES; j++) sums[j] = (double)lanes[j];
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    return sums[0];
}

static void measure_chunk(const Row *row, int64_t start, int64_t end, int count_zeros, double *out) {
    double sum_squares = 0;
    int64_t non_finite = 0, zeros = 0;
    float stage[STAGE];
    for (int64_t at = start; at < end; at += STAGE) {
        int64_t n = end - at < STAGE ? end - at : STAGE, i = 0;
        const float *g = as_float(row->grad, row->grad_type, at, n, stage);
        float lanes[LANES] = {0};
        for (; i + LANES <= n; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += g[i + j] * g[i + j];
        for (int j = 0; i + j < n; j++) lanes[j] += g[i + j] * g[i + j];
        double block = sum_of(lanes);
        sum_squares += block;
        /* A sum is finite only if all elements are: they are looked at one by one where it is not. */
        if (!isfinite(block))
            for (i = 0; i < n; i++) non_finite += !isfinite(g[i]);
        if (count_zeros)
            for (i = 0; i < n; i++) zeros += g[i] == 0;
    }
    out[0] = sum_squares;
    out[1] = (double)non_finite;
    out[2] = (double)zeros;
}

/* partial: shape [chunks, 3], scratch. out: shape [3, rows]: sums of squares, non-finite elements, zeros. */
void measure(const Row *rows, int64_t num_rows, int64_t num_chunks, int64_t count_zeros, double *partial, double *out,
             int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (num_chunks > 1)
    for (int part = 0; part < threads; part++) {
        int64_t first, last;
        share_of(num_chunks, part, threads, &first, &last);
        int64_t index = row_of(rows, num_rows, first);
        for (int64_t chunk = first; chunk < last; chunk++) {
            index = row_after(rows, num_rows, index, chunk);
            const Row *row = rows + index;
            int64_t start = (chunk - row->first_chunk) * CHUNK;
            int64_t end = start + CHUNK < row->numel ? start + CHUNK : row->numel;
            measure_chunk(row, start, end, (int)count_zeros, partial + 3 * chunk);
        }
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (num_rows > MANY)
    for (int64_t r = 0; r < num_rows; r++) {
        double sums[3] = {0, 0, 0};
        for (int64_t c = 0; c < chunks_of(rows + r); c++)
            for (int k = 0; k < 3; k++) sums[k] += partial[3 * (rows[r].first_chunk + c) + k];
        for (int k = 0; k < 3; k++) out[k * num_rows + r] = sums[k];
    }
}

/* ---- updates: one block of fp32 values, n elements ---- */

typedef struct { float lr_wd, wd, beta1, one_beta1, beta2, one_beta2, eps, step_size, inv_correction2_sqrt; } AdamScalars;

static inline __attribute__((always_inline)) void adam_block(
    float *restrict p, const float *restrict g, float *restrict m, float *restrict v, float *restrict top, int64_t n,
    AdamScalars s, int decay, int amsgrad) {
    for (int64_t i = 0; i < n; i++) {
        float gradient = g[i], value = p[i];
        if (decay == 1) value = value * s.lr_wd;
        if (decay == 2) gradient = gradient + s.wd * value;
        float average = s.beta1 * m[i] + s.one_beta1 * gradient;
        float square = s.beta2 * v[i] + s.one_beta2 * gradient * gradient;
        float second = square;
        if (amsgrad) top[i] = second = top[i] > square || top[i] != top[i] ? top[i] : square;
        m[i] = average;
        v[i] = square;
        p[i] = value - s.step_size * average / (sqrtf(second) * s.inv_correction2_sqrt + s.eps);
    }
}

/* Options are constants of each call, so that no loop tests them. */
static void adam_any(float *p, const float *g, float *m, float *v, float *top, int64_t n, AdamScalars s, int decay,
                     int amsgrad) {
    if (amsgrad) {
        if (decay == 0) adam_block(p, g, m, v, top, n, s, 0, 1);
        else if (decay == 1) adam_block(p, g, m, v, top, n, s, 1, 1);
        else adam_block(p, g, m, v, top, n, s, 2, 1);
    } else {
        if (decay == 0) adam_block(p, g, m, v, top, n, s, 0, 0);
        else if (decay == 1) adam_block(p, g, m, v, top, n, s, 1, 0);
        else adam_block(p, g, m, v, top, n, s, 2, 0);
    }
}

static AdamScalars adam_scalars(const Hyper *h, float step) {
    double t = (double)(step + 1.0f);
    AdamScalars s;
    s.lr_wd = (float)(1 - h->lr * h->weight_decay);
    s.wd = (float)h->weight_decay;
    s.beta1 = (float)h->beta1;
    s.one_beta1 = (float)(1 - h->beta1);
    s.beta2 = (float)h->beta2;
    s.one_beta2 = (float)(1 - h->beta2);
    s.eps = (float)h->eps;
    s.step_size = (float)(h->lr / (1 - pow(h->beta1, t)));
    s.inv_correction2_sqrt = (float)(1 / sqrt(1 - pow(h->beta2, t)));
    return s;
}

typedef struct { float lr, wd, momentum, kept; int has_momentum, nesterov; } SgdScalars;

static void sgd_block(float *restrict p, const float *restrict g, float *restrict buffer, int64_t n, SgdScalars s) {
    if (!s.has_momentum) {
        for (int64_t i = 0; i < n; i++) {
            float gradient = s.wd != 0 ? g[i] + s.wd * p[i] : g[i];
            p[i] = p[i] - s.lr * gradient;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float gradient = s.wd != 0 ? g[i] + s.wd * p[i] : g[i];
        float velocity = s.momentum * buffer[i] + s.kept * gradient;
        buffer[i] = velocity;
        p[i] = p[i] - s.lr * (s.nesterov ? gradient + s.momentum * velocity : velocity);
    }
}

static SgdScalars sgd_scalars(const Hyper *h, const float *step) {
    SgdScalars s = {(float)h->lr, (float)h->weight_decay, (float)h->momentum, (float)(1 - h->dampening),
                    h->momentum != 0, (int)h->nesterov};
    /* torch's first momentum buffer is the gradient itself, not dampened. */
    if (step && *step == 0) s.kept = 1;
    return s;
}

typedef struct { float lr, lr_wd, beta1, one_beta1, beta2, one_beta2; } LionScalars;

static void lion_block(float *restrict p, const float *restrict g, float *restrict m, int64_t n, LionScalars s) {
    for (int64_t i = 0; i < n; i++) {
        float mixed = s.beta1 * m[i] + s.one_beta1 * g[i];
        float direction = (float)((mixed > 0) - (mixed < 0));
        direction = mixed != mixed ? mixed : direction;
        m[i] = s.beta2 * m[i] + s.one_beta2 * g[i];
        p[i] = p[i] * s.lr_wd - s.lr * direction;
    }
}

static LionScalars lion_scalars(const Hyper *h) {
    LionScalars s = {(float)h->lr, (float)(1 - h->lr * h->weight_decay), (float)h->beta1, (float)(1 - h->beta1),
                     (float)h->beta2, (float)(1 - h->beta2)};
    return s;
}

/* ---- the update ---- */

enum { ADAM = 0, SGD = 1, LION = 2, NOTHING = 3 };

/* Return whether the rounding of a chunk into fp16 is not finite. */
static int rounds_beyond(const float *main, int64_t n) {
    int beyond = 0;
    for (int64_t i = 0; i < n; i++) beyond |= !(fabsf(main[i]) < FP16_OVERFLOW);
    return beyond;
}

/* What blocks are updated with: constants of a row, kept from row to row as long as these have the same step. */
typedef struct {
    AdamScalars adam;
    SgdScalars sgd;
    LionScalars lion;
    float step;
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

/* Update one chunk. Returns whether a rounding into fp16 is not finite. */
static int update_chunk(const Row *row, int64_t start, int64_t end, int64_t rule, const Hyper *h, const Scalars *scalars,
                        float coefficient, int stream) {
    float grad_stage[BLOCK], state_stage[3][BLOCK];
    int decay = h->decoupled ? 1 : h->weight_decay != 0 ? 2 : 0;
    int overflowed = 0;
    for (int64_t at = start; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        float *p = (float *)row->main + at, *state[3] = {0, 0, 0};
        if (rule != NOTHING) {
            const float *g = as_float(row->grad, row->grad_type, at, n, grad_stage);
            for (int64_t i = 0; i < n; i++) grad_stage[i] = g[i] * coefficient;
            for (int k = 0; k < 3; k++)
                if (row->state[k]) state[k] = as_float(row->state[k], row->state_type[k], at, n, state_stage[k]);
            if (rule == ADAM) adam_any(p, grad_stage, state[0], state[1], state[2], n, scalars->adam, decay, (int)h->amsgrad);
            if (rule == SGD) sgd_block(p, grad_stage, state[0], n, scalars->sgd);
            if (rule == LION) lion_block(p, grad_stage, state[0], n, scalars->lion);
            for (int k = 0; k < 3; k++)
                if (state[k] == state_stage[k])
                    narrow((char *)row->state[k] + 2 * at, state[k], row->state_type[k], n);
        }
        if (!row->model) continue;
        if (stream) narrow_streamed((char *)row->model + 2 * at, p, row->model_type, n);
        else narrow((char *)row->model + 2 * at, p, row->model_type, n);
        if (row->model_type == F16) overflowed |= rounds_beyond(p, n);
    }
    return overflowed;
}

/* Update all rows. Where *found_inf is set nothing is written but `overflowed`, shape [rows]. With rule NOTHING main
 * params are only rounded into model params.
 */
void update(const Row *rows, int64_t num_rows, int64_t num_chunks, int64_t rule, const Hyper *hyper,
            const float *found_inf, const float *coefficient, uint8_t *overflowed, int threads) {
    int skip = rule != NOTHING && *found_inf != 0;
    float factor = rule == NOTHING ? 1.0f : hyper->maximize ? -*coefficient : *coefficient;
    int64_t total = 0;
    for (int64_t r = 0; r < num_rows && total <= STREAMED; r++) total += rows[r].numel;
    int stream = total > STREAMED;
    memset(overflowed, 0, (size_t)num_rows);
#pragma omp parallel for schedule(static) num_threads(threads) if (num_chunks > 1)
    for (int part = 0; part < threads; part++) {
        int64_t first, last;
        share_of(num_chunks, part, threads, &first, &last);
        int64_t index = row_of(rows, num_rows, first);
        Scalars scalars = {0};
        for (int64_t chunk = first; chunk < last; chunk++) {
            index = row_after(rows, num_rows, index, chunk);
            const Row *row = rows + index;
            int64_t start = (chunk - row->first_chunk) * CHUNK;
            int64_t end = start + CHUNK < row->numel ? start + CHUNK : row->numel;
            int beyond;
            scalars_of(row, rule, hyper, &scalars);
            if (!skip) beyond = update_chunk(row, start, end, rule, hyper, &scalars, factor, stream);
            else beyond = row->model && row->model_type == F16 && rounds_beyond((float *)row->main + start, end - start);
            if (beyond) {
#pragma omp atomic write
                overflowed[index] = 1;
            }
        }
#if defined(__SSE2__)
        if (stream) _mm_sfence(); /* what was streamed is there before other threads go on */
#endif
    }
    if (skip || rule == NOTHING) return;
#pragma omp parallel for schedule(static) num_threads(threads) if (num_rows > MANY)
    for (int64_t r = 0; r < num_rows; r++)
        if (rows[r].step) *rows[r].step += 1.0f;
}
