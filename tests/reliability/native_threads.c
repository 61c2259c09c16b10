/* native.c on threads that the thread sanitizer knows: OpenMP's own are not instrumented, so that each handing over would
 * be reported. What a compiler makes of `omp parallel for` calls three functions of OpenMP's; here they are on pthreads.
 *
 * Runs measure() and update() with several numbers of threads, and compares with one thread. Exits with 1 where the
 * results differ, with 66 where the sanitizer has something to report. Prints a digest of each rule's results, which
 * other CPUs must have too.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "native.c"

#define ROWS 300
#define STATES 2

/* ---- OpenMP on pthreads ---- */

typedef struct {
    void (*run)(void *);
    void *data;
    int index, count;
} Worker;

static __thread int thread_index = 0, thread_count = 1;

int omp_get_thread_num(void) { return thread_index; }

int omp_get_num_threads(void) { return thread_count; }

static void *work(void *given) {
    Worker *worker = given;
    thread_index = worker->index;
    thread_count = worker->count;
    worker->run(worker->data);
    return NULL;
}

void GOMP_parallel(void (*run)(void *), void *data, unsigned count, unsigned flags) {
    (void)flags;
    if (count == 0) count = 1;
    pthread_t *threads = calloc(count, sizeof *threads);
    Worker *workers = calloc(count, sizeof *workers);
    for (unsigned i = 0; i < count; i++) {
        workers[i] = (Worker){run, data, (int)i, (int)count};
        if (pthread_create(threads + i, NULL, work, workers + i)) abort();
    }
    for (unsigned i = 0; i < count; i++) pthread_join(threads[i], NULL);
    free(workers);
    free(threads);
}

/* ---- what is updated ---- */

typedef struct {
    int64_t numels[ROWS], first[ROWS], types[ROWS];
    char *grads[ROWS];
    Row rows[ROWS];
    Lengths all;
} Table;

/* Rows of one chunk, of several, and empty ones. */
static int64_t length_of(int row) {
    if (row % 97 == 5) return 3 * CHUNK + row;
    if (row % 50 == 7) return 0;
    return 1 + (row * 37) % 700;
}

static float *values(int64_t n, unsigned seed) {
    float *made = malloc(sizeof(float) * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        made[i] = (float)(seed >> 8) / (1 << 23) - 1.0f;
    }
    return made;
}

/* Finite 16-bit numbers below 2, in fp16 as in bf16. */
static char *halves(int64_t n, unsigned seed) {
    uint16_t *made = malloc(2 * (size_t)(n + 1));
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        made[i] = (uint16_t)(seed >> 16) & 0xbfff;
    }
    return (char *)made;
}

static Table *table(void) {
    const int64_t types[] = {F32, F16, BF16};
    Table *made = calloc(1, sizeof *made);
    int64_t chunks = 0;
    for (int r = 0; r < ROWS; r++) {
        int64_t n = length_of(r);
        made->numels[r] = n;
        made->first[r] = chunks;
        chunks += (n + CHUNK - 1) / CHUNK;
        made->types[r] = types[r % 3];
        made->grads[r] = r % 3 ? halves(n, (unsigned)r) : (char *)values(n, (unsigned)r);
        made->rows[r].main = (char *)values(n, (unsigned)r + 1000);
        made->rows[r].model = calloc((size_t)n + 1, 2);
        made->rows[r].model_type = r % 2 ? F16 : BF16;
        for (int k = 0; k < STATES; k++) {
            made->rows[r].state[k] = calloc((size_t)n + 1, sizeof(float));
            made->rows[r].state_type[k] = types[r / 3 % 3];
        }
        made->rows[r].step = calloc(1, sizeof(float));
    }
    made->all = (Lengths){made->numels, made->first, ROWS, chunks};
    return made;
}

/* Everything that is written, as one number. */
static uint64_t digest(const Table *made, const double *sums, const uint8_t *overflowed) {
    uint64_t hash = 1469598103934665603u;
#define ADD(at, bytes) \
    for (size_t i_ = 0; i_ < (size_t)(bytes); i_++) hash = (hash ^ ((const unsigned char *)(at))[i_]) * 1099511628211u
    for (int r = 0; r < ROWS; r++) {
        ADD(made->rows[r].main, 4 * made->numels[r]);
        ADD(made->rows[r].model, 2 * made->numels[r]);
        for (int k = 0; k < STATES; k++) ADD(made->rows[r].state[k], 4 * made->numels[r]);
        ADD(made->rows[r].step, 4);
    }
    ADD(sums, 3 * ROWS * sizeof(double));
    ADD(overflowed, ROWS);
    return hash;
#undef ADD
}

static void drop(Table *made) {
    for (int r = 0; r < ROWS; r++) {
        free(made->grads[r]);
        free(made->rows[r].main);
        free(made->rows[r].model);
        for (int k = 0; k < STATES; k++) free(made->rows[r].state[k]);
        free(made->rows[r].step);
    }
    free(made);
}

static uint64_t run(int threads, int64_t rule) {
    Table *made = table();
    Grads grads = {made->grads, made->types};
    Hyper hyper = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .momentum = 0.9,
                   .decoupled = 1};
    const float found_inf[] = {0, 1, 0}, coefficient = 0.5f;
    double *partial = calloc((size_t)made->all.num_chunks * 3, sizeof(double)), sums[3 * ROWS];
    uint8_t overflowed[ROWS];
    for (int step = 0; step < 3; step++) {
        measure(&made->all, &grads, 1, partial, sums, threads);
        update(&made->all, &grads, made->rows, rule, &hyper, found_inf + step, &coefficient, overflowed, threads);
    }
    uint64_t found = digest(made, sums, overflowed);
    free(partial);
    drop(made);
    return found;
}

/* Many threads for few chunks each: they take one another's all the time. */
static int share(int threads, int64_t chunks, int backwards);

typedef struct {
    Share *shares;
    int *taken, parts, backwards;
    int64_t chunks;
} Sharing;

static void take_all(void *given) {
    Sharing *sharing = given;
    int64_t first, last;
    while (take_next(sharing->shares, thread_index, sharing->parts, sharing->chunks, sharing->backwards, &first, &last))
        for (int64_t chunk = first; chunk < last; chunk++) sharing->taken[chunk]++; /* a race, were it taken twice */
}

static int share(int threads, int64_t chunks, int backwards) {
    Share shares[MOST_THREADS];
    Sharing sharing = {shares, calloc((size_t)chunks, sizeof(int)), threads, backwards, chunks};
    share_out(chunks, shares, threads);
    GOMP_parallel(take_all, &sharing, (unsigned)threads, 0);
    int wrong = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) wrong |= sharing.taken[chunk] != 1;
    free(sharing.taken);
    return wrong;
}

int main(void) {
    int wrong = 0;
    for (int round = 0; round < 20; round++)
        for (int threads = 1; threads <= 16; threads *= 2) wrong |= share(threads, 1 + 997 * (round % 5), round % 2);
    for (int64_t rule = ADAM; rule <= NOTHING; rule++) {
        uint64_t expected = run(1, rule);
        for (int threads = 2; threads <= 8; threads *= 2) wrong |= run(threads, rule) != expected;
        printf("%016llx\n", (unsigned long long)expected);
    }
    puts(wrong ? "results differ" : "the same results");
    return wrong;
}
