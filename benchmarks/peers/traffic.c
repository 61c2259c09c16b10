/* What a step moves and nothing else: the bare loops that a rule's bandwidth is compared with.
 *
 * A table has a row for each parameter: its gradient, its model param (0: none), and COLUMNS columns of fp32, 0 where a
 * rule has fewer. All rows have one length, a multiple of the vectors'.
 */
#include "vector.h"

#define COLUMNS 4
#define AHEAD 1536 /* bytes of fp32 */

typedef struct { const char *grad; char *model, *fp32[COLUMNS]; } Row;

INLINE void fetch(const char *at) { __builtin_prefetch(at, 0, 2); }

/* Read the gradients, as the statistics must. Returns a sum of no meaning. */
float read_grads(const Row *rows, int64_t num_rows, int64_t numel, int64_t type, int threads) {
    float total = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : total)
    for (int64_t r = 0; r < num_rows; r++) {
        Floats sums[4] = {{0}};
        const char *grad = rows[r].grad;
        int64_t step = WIDTH * size_of(type);
        for (int64_t at = 0; at < numel * size_of(type); at += 4 * step) {
            for (int64_t line = 0; line < 4 * step; line += 64) fetch(grad + at + 4096 + line);
            for (int k = 0; k < 4; k++) sums[k] += load(grad + at + k * step, type, WIDTH);
        }
        for (int k = 0; k < 4; k++) total += sums[k][0];
    }
    return total;
}

INLINE void update_row(Row row, int64_t numel, int64_t type, int64_t model_type, int columns) {
    for (int64_t i = 0; i < numel; i += WIDTH) {
        const char *grad = row.grad + i * size_of(type);
        __builtin_prefetch(grad + AHEAD * size_of(type) / 4);
        Floats x = load(grad, type, WIDTH);
        for (int k = 0; k < columns; k++) {
            char *at = row.fp32[k] + 4 * i;
            fetch(at + AHEAD);
            x += load(at, F32, WIDTH);
            store(at, x, F32, WIDTH);
        }
        if (model_type != F32) stream(row.model + 2 * i, x, model_type);
    }
}

INLINE void update_rows(const Row *rows, int64_t num_rows, int64_t numel, int64_t type, int columns, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t r = num_rows - 1; r >= 0; r--) update_row(rows[r], numel, type, type, columns);
    finish_streams();
}

/* Read gradients, read and write columns of fp32, write 16-bit model params. */
void update(const Row *rows, int64_t num_rows, int64_t numel, int64_t type, int64_t columns, int threads) {
#define LOOP(t, c) if (type == t && columns == c) update_rows(rows, num_rows, numel, t, c, threads);
    LOOP(F32, 1) LOOP(F32, 2) LOOP(F32, 3) LOOP(F32, 4)
    LOOP(F16, 1) LOOP(F16, 2) LOOP(F16, 3) LOOP(F16, 4)
    LOOP(BF16, 1) LOOP(BF16, 2) LOOP(BF16, 3) LOOP(BF16, 4)
#undef LOOP
}
