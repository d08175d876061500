/* The types shared by entry.c and kernels.c: a job, a kernel's signatures, and the table of a variant's kernels. */

#ifndef RP_OPTIM_H
#define RP_OPTIM_H

#include <stdint.h>

/* Elements in one unit of work. Sums are formed unit by unit, so results do not depend on the number of threads. */
#define RPO_UNIT 65536

/* RPO_HALVES: the upper half of an fp32 number, as bf16 rounded to nearest with ties away from zero. Its 16 bits of
 * remainder are in the job's `rest`, if there is one. Of `param`, `grad` and `weight` only. */
typedef enum { RPO_FLOAT32 = 0, RPO_BFLOAT16 = 1, RPO_FLOAT16 = 2, RPO_HALVES = 3 } rpo_type;

typedef struct {
    void *at;
    int32_t type;
} rpo_array;

/* One parameter's update. `more` is added to `grad`, in fp32, wherever `grad` is read. The sum is multiplied by
 * `factor` (unscaling, clipping; negative to maximize), then `l2` times the parameter is added. The parameter is multiplied by `shrink`, and `rate` times the direction is
 * subtracted. The other numbers belong to one optimizer each. Unused arrays are null. `state` has the parameter's
 * type (fp32 for halves) unless `packing` says otherwise. A parameter in halves is read from `param` and `rest`, and
 * written to `weight`, which may be the same memory as `param`, and `rest`. */
typedef struct {
    int64_t count;
    int32_t threads;
    int32_t flags;
    rpo_array param, grad, more, weight;
    int16_t *rest;
    void *state[3];
    double factor, l2, shrink, rate;
    double beta1, beta2, gain1, gain2; /* gains: 1 - beta, computed by the caller in double, so rounded once */
    double root;                       /* Adam: 1 / sqrt(bias correction 2) */
    double eps;                        /* Adam: added to the denominator; Adafactor: minimum of the variance */
    /* Adafactor: `count` = batch * rows * cols, and the variance of an element is row * col. */
    /* Small state: how `state` is kept (an rpo_packing), the scales of 8-bit state, and the key of the noise. */
    int32_t packing;
    uint32_t key[2];
    uint16_t *scales[3];
    int64_t batch, rows, cols;
    const float *row, *col;
    double *row_sums, *col_sums;
    /* FP8 (E4M3) of `param`, a bf16 matrix of `rows` and `cols`: a code for each element, a scale for each row. */
    uint8_t *codes;
    float *code_scales;
    double result; /* the sum, of kernels that return one */
} rpo_job;

enum {
    RPO_AMSGRAD = 1,  /* Adam: state[2] is the largest second moment so far */
    RPO_MOMENTUM = 2, /* SGD: state[0] is the momentum buffer */
    RPO_FIRST = 4,    /* SGD: the buffer starts as this gradient */
    RPO_NESTEROV = 8,  /* SGD and Muon */
    RPO_STREAM = 16, /* write weights around the cache: they are too many to stay in it */
};

typedef enum {
    RPO_LIKE_PARAM = 0,
    RPO_BF16_STATE = 1, /* bf16, rounded stochastically */
    RPO_8BIT_STATE = 2, /* a byte for each element, a bf16 scale for each RPO_GROUP elements */
} rpo_packing;

#define RPO_GROUP 32

/* An elementwise update of the elements [begin, end). */
typedef void rpo_range(const rpo_job *job, int64_t begin, int64_t end);
/* A sum over the elements [begin, end), always in the same order. */
typedef double rpo_sum(const rpo_job *job, int64_t begin, int64_t end);
/* An update, a sum, or sums of rows and columns, over the rows [begin, end) of one matrix of the batch. */
typedef void rpo_rows(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end);
typedef double rpo_rows_sum(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end);
typedef void rpo_rows_cols(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end, double *col_sums);

typedef struct {
    const char *name;
    rpo_range *adam, *sgd, *lion, *momentum, *move, *vector_apply, *to_weight, *add_to_pair, *rewrite, *traffic;
    rpo_sum *squares, *vector_variance;
    rpo_rows_cols *matrix_squares;
    rpo_rows_sum *matrix_norm;
    rpo_rows *matrix_apply, *code_rows;
} rpo_variant;

extern const rpo_variant rpo_scalar, rpo_neon, rpo_avx2, rpo_avx512;

#endif
