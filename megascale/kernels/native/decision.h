/* The decision between the passes: a rank's statistics, what follows from those of all ranks, and the next loss scale. */
#ifndef MEGASCALE_DECISION_H
#define MEGASCALE_DECISION_H

#include <float.h>
#include <math.h>
#include <stdint.h>

/* The vector that is summed over all ranks in a step; see Statistic in decision.py. */
typedef struct {
    double sum_squares, non_finite, zeros, errors, contrast, scaled;
} Statistics;

/* Sum n tensors' statistics into a rank's; zeros are NaN if they were not counted. */
void total(const double *sum_squares, const double *non_finite, const double *zeros, const double *shares,
           const double *contrasts, int64_t n, const double *errors, double scaled, Statistics *out) {
    Statistics sums = {.zeros = zeros ? 0 : (double)NAN, .errors = *errors, .scaled = scaled};
    for (int64_t i = 0; i < n; i++) {
        sums.sum_squares += sum_squares[i] * shares[i];
        sums.non_finite += non_finite[i];
        if (zeros) sums.zeros += zeros[i] * shares[i];
        if (contrasts) sums.contrast += sum_squares[i] * contrasts[i];
    }
    *out = sums;
}

#define REPLICA_TOLERANCE 1e-4

/* Write {found_inf, coefficient, grad_norm, overflow}, the zeros and success. scale: null for an unscaled loss. */
void decide(const Statistics *agreed, const float *scale, double clip_grad, double most_norm, float *decision,
            double *num_zeros, uint8_t *success) {
    double squares = agreed->sum_squares;
    int is_finite = squares <= (double)FLT_MAX; /* false for NaN */
    int is_alike = !(fabs(agreed->contrast) > REPLICA_TOLERANCE * squares);
    double unscale = scale ? (double)(float)(1.0 / (double)*scale) : 1.0;
    double norm = sqrt(squares) * unscale, coefficient = unscale;
    if (clip_grad > 0) {
        double clip = 1.0 / (norm + 1e-6) * clip_grad; /* as torch divides a number by a tensor */
        coefficient *= clip > 1.0 ? 1.0 : clip;
    }
    decision[3] = !is_finite || agreed->non_finite > 0 || agreed->errors != 0 || !is_alike || agreed->scaled <= 0;
    decision[1] = (float)coefficient;
    decision[2] = (float)norm;
    decision[0] = decision[3] != 0 || decision[2] > (float)most_norm;
    *success = decision[0] == 0;
    *num_zeros = rint(agreed->zeros); /* shares such as 1/3 do not add up exactly */
}

typedef struct {
    double min_scale, max_scale, growth_factor, backoff_factor;
    int64_t growth_interval, hysteresis, each_clean_step, fp64_products;
} ScaleRule;

static float scaled(float scale, double factor, const ScaleRule *rule) {
    return rule->fp64_products ? (float)((double)scale * factor) : scale * (float)factor;
}

/* Update the loss scale after one step. */
void rescale(const float *found_inf, float *scale, int64_t *growth, int64_t *hysteresis, const ScaleRule *rule) {
    if (*found_inf != 0) { /* or NaN */
        *growth = 0;
        *hysteresis = *hysteresis > 1 ? *hysteresis - 1 : 0;
        if (*hysteresis) return;
        float least = (float)rule->min_scale, backed_off = scaled(*scale, rule->backoff_factor, rule);
        *scale = backed_off < least ? least : backed_off;
        return;
    }
    int grows = ++*growth >= rule->growth_interval;
    if (grows || rule->each_clean_step) *hysteresis = rule->hysteresis;
    if (!grows) return;
    *growth = 0;
    float most = (float)rule->max_scale, grown = scaled(*scale, rule->growth_factor, rule);
    if (grown <= FLT_MAX) *scale = grown > most ? most : grown;
}

#endif
