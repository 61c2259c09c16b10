/* Rows of elements, the chunks that they are cut into, and how threads share them. */
#ifndef MEGASCALE_CHUNKS_H
#define MEGASCALE_CHUNKS_H

#include <stdint.h>

#define CHUNK 65536 /* elements that one thread works on at a time */
#define MOST_THREADS 1024
#define TAKES 128 /* the number of times that a thread takes chunks, about */

/* The rows' lengths. */
typedef struct {
    const int64_t *numels, *first; /* of each row: its elements, and the number of chunks before it */
    int64_t num_rows, num_chunks;
} Lengths;

/* Elements [start, end) of a row. */
typedef struct { int64_t row, start, end; } Chunk;

/* Return the row that holds a chunk: the last one whose first chunk is not after it, as empty rows come before. */
static int64_t row_of(const Lengths *all, int64_t chunk) {
    int64_t low = 0, high = all->num_rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (all->first[middle] <= chunk) low = middle; else high = middle;
    }
    return low;
}

/* Return a chunk, searched linearly from the row of an earlier one, as most rows have one chunk. */
static inline Chunk chunk_after(const Lengths *all, int64_t row, int64_t chunk) {
    while (row + 1 < all->num_rows && all->first[row + 1] <= chunk) row++;
    int64_t start = (chunk - all->first[row]) * CHUNK, end = start + CHUNK;
    return (Chunk){row, start, end < all->numels[row] ? end : all->numels[row]};
}

/* Whether a row is one chunk, and not empty. */
static inline int is_one_chunk(const Lengths *all, int64_t row) {
    return all->numels[row] > 0 && all->numels[row] <= CHUNK;
}

/* The chunks left to one thread: the next one in the high half, the end in the low half. Has its own cache line. */
typedef struct { _Alignas(64) uint64_t left; } Share;

/* Divide all chunks among threads: neighbours in memory go to one thread, the same one in every call. */
static void share_out(int64_t num_chunks, Share *shares, int parts) {
    for (int64_t part = 0; part < parts; part++)
        shares[part].left = (uint64_t)(num_chunks * part / parts) << 32 | (uint64_t)(num_chunks * (part + 1) / parts);
}

/* Take up to `most` chunks off a share, [*first, *last): its owner from one end, others from the other. */
static int take(Share *share, int64_t most, int from_back, int64_t *first, int64_t *last) {
    uint64_t left = __atomic_load_n(&share->left, __ATOMIC_RELAXED), rest;
    do {
        int64_t start = (int64_t)(left >> 32), end = (int64_t)(left & UINT32_MAX);
        int64_t n = end - start < most ? end - start : most;
        if (n <= 0) return 0;
        *first = from_back ? end - n : start;
        *last = *first + n;
        rest = from_back ? left - (uint64_t)n : left + ((uint64_t)n << 32);
    } while (!__atomic_compare_exchange_n(&share->left, &left, rest, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return 1;
}

/* Take the next chunks: a thread's own and, when there are none, another's, so that no thread waits for a slow one.
 *
 * backwards: each thread begins at the end of its share. An update that follows the statistics then finds in the cache
 * the gradients that were measured last.
 */
static int take_next(Share *shares, int part, int parts, int64_t num_chunks, int backwards, int64_t *first,
                     int64_t *last) {
    int64_t most = 1 + num_chunks / (TAKES * parts);
    for (int other = 0; other < parts; other++)
        if (take(shares + (part + other) % parts, most, (other > 0) != backwards, first, last)) return 1;
    return 0;
}

#endif
