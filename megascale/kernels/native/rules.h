/* The rules that update up to WIDTH main params at a time: Adam, SGD and Lion. Included by native.c. */
#ifndef MEGASCALE_RULES_H
#define MEGASCALE_RULES_H

enum { ADAM = 0, SGD = 1, LION = 2, NOTHING = 3 };
enum { L2 = 1, AMSGRAD = 2, MOMENTUM = 4, OPTIONS = 8 }; /* a rule's options, and the number of their combinations */
enum { NONE = 3 }; /* the type of a missing model param */

/* All that branches depend on. Where the compiler knows it, no branch is left. */
typedef struct { int64_t rule, options, held, grad, model, state[3]; } Kind;

/* The addresses of up to WIDTH elements. */
typedef struct { const char *grad; char *main, *model, *state[3], *remainder; int64_t n; } Place;

typedef struct { float lr_wd, wd, beta1, one_beta1, beta2, one_beta2, eps, step_size, inv_correction2_sqrt; } AdamScalars;

INLINE Floats adam(Floats value, Floats gradient, Place at, Kind kind, AdamScalars s) {
    if (kind.options & L2) gradient = gradient + s.wd * value;
    else value = value * s.lr_wd; /* by 1 without weight decay */
    Floats average = s.beta1 * load(at.state[0], kind.state[0], at.n) + s.one_beta1 * gradient;
    Floats square = s.beta2 * load(at.state[1], kind.state[1], at.n) + s.one_beta2 * gradient * gradient;
    Floats second = square;
    if (kind.options & AMSGRAD) {
        Floats top = load(at.state[2], kind.state[2], at.n);
        second = where((top > square) | (top != top), top, square);
        store(at.state[2], second, kind.state[2], at.n);
    }
    store(at.state[0], average, kind.state[0], at.n);
    store(at.state[1], square, kind.state[1], at.n);
    return value - s.step_size * average / (root(second) * s.inv_correction2_sqrt + s.eps);
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

typedef struct { float lr, wd, momentum, kept; int nesterov; } SgdScalars;

INLINE Floats sgd(Floats value, Floats gradient, Place at, Kind kind, SgdScalars s) {
    if (kind.options & L2) gradient = gradient + s.wd * value;
    if (!(kind.options & MOMENTUM)) return value - s.lr * gradient;
    Floats velocity = s.momentum * load(at.state[0], kind.state[0], at.n) + s.kept * gradient;
    store(at.state[0], velocity, kind.state[0], at.n);
    return value - s.lr * (s.nesterov ? gradient + s.momentum * velocity : velocity);
}

static SgdScalars sgd_scalars(const Hyper *h, const float *step) {
    SgdScalars s = {(float)h->lr, (float)h->weight_decay, (float)h->momentum, (float)(1 - h->dampening),
                    (int)h->nesterov};
    /* torch's first momentum buffer is the gradient itself, not dampened. */
    if (step && *step == 0) s.kept = 1;
    return s;
}

typedef struct { float lr, lr_wd, beta1, one_beta1, beta2, one_beta2; } LionScalars;

INLINE Floats lion(Floats value, Floats gradient, Place at, Kind kind, LionScalars s) {
    Floats average = load(at.state[0], kind.state[0], at.n), mixed = s.beta1 * average + s.one_beta1 * gradient;
    Floats direction = __builtin_convertvector((mixed < 0) - (mixed > 0), Floats);
    direction = where(mixed != mixed, mixed, direction); /* NaN stays NaN */
    store(at.state[0], s.beta2 * average + s.one_beta2 * gradient, kind.state[0], at.n);
    return value * s.lr_wd - s.lr * direction;
}

static LionScalars lion_scalars(const Hyper *h) {
    LionScalars s = {(float)h->lr, (float)(1 - h->lr * h->weight_decay), (float)h->beta1, (float)(1 - h->beta1),
                     (float)h->beta2, (float)(1 - h->beta2)};
    return s;
}

#endif
