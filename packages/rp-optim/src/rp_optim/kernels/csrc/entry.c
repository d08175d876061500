/* The functions that Python calls: choose the variant, divide jobs among threads, and add partial sums in a fixed
 * order. */

#include "rp_optim.h"

#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

/* A matrix is divided into pieces of at least so many rows, and into at most so many pieces. */
#define ROWS_AT_LEAST 32
#define PIECES_AT_MOST 64

/* A thread inherits the floating-point mode of the thread that started it. During a job the mode is the default one,
 * so that no subnormal is flushed to zero and all threads round alike; afterwards it is restored. */
#if defined(__SSE2__)
typedef unsigned int mode;
static mode enter(void) {
    mode old = _mm_getcsr();
    _mm_setcsr(0x1f80u);
    return old;
}
static void leave(mode old) {
    _mm_sfence(); /* makes writes around the cache visible to other threads before the job ends */
    _mm_setcsr(old);
}
#elif defined(__aarch64__)
typedef uint64_t mode;
static mode enter(void) {
    mode old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return old;
}
static void leave(mode old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
typedef int mode;
static mode enter(void) { return 0; }
static void leave(mode old) { (void)old; }
#endif

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t units_of(const rpo_job *job) { return (job->count + RPO_UNIT - 1) / RPO_UNIT; }

static int64_t units_of_all(const rpo_job *jobs, int64_t count) {
    int64_t units = 0;
    for (int64_t j = 0; j < count; j++) units += units_of(jobs + j);
    return units;
}

/* A thread's position in the sequence of all jobs' units; a thread gets units in increasing order. */
typedef struct {
    int64_t job, first; /* the job's index, and the number of its first unit */
} place;

/* Advance to the job of this unit; returns the unit's first element in the job. */
static int64_t find(place *at, const rpo_job *jobs, int64_t unit) {
    while (unit - at->first >= units_of(jobs + at->job)) at->first += units_of(jobs + at->job++);
    return (unit - at->first) * RPO_UNIT;
}

/* One parallel region for all jobs: threads are woken once, and do not wait for each other after a small job. */
#define FOR_UNITS(jobs, units, statement)                                          \
    const int threads = (int)smaller((jobs)->threads, units);                      \
    (void)threads; /* of no use without OpenMP */                                  \
    _Pragma("omp parallel num_threads(threads) if (threads > 1)") {                \
        mode old = enter();                                                        \
        place at = {0, 0};                                                         \
        /* Dynamic: with static shares all would wait for a thread that shares its core. */ \
        _Pragma("omp for schedule(monotonic : dynamic)")                           \
        for (int64_t u = 0; u < units; u++) {                                      \
            const int64_t begin = find(&at, jobs, u);                              \
            const rpo_job *job = (jobs) + at.job;                                  \
            const int64_t end = smaller(begin + RPO_UNIT, job->count);             \
            statement;                                                             \
        }                                                                          \
        leave(old);                                                                \
    }

static void run_range(rpo_range *kernel, const rpo_job *jobs, int64_t count) {
    const int64_t units = units_of_all(jobs, count);
    FOR_UNITS(jobs, units, kernel(job, begin, end))
}

static double sum_of(const double *parts, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += parts[i];
    return sum;
}

static int run_sum(rpo_sum *kernel, rpo_job *jobs, int64_t count) {
    const int64_t units = units_of_all(jobs, count);
    double *parts = malloc((size_t)(units + 1) * sizeof(double));
    if (parts == NULL) return 1;
    FOR_UNITS(jobs, units, parts[u] = kernel(job, begin, end))
    const double *next = parts;
    for (int64_t j = 0; j < count; j++) {
        jobs[j].result = sum_of(next, units_of(jobs + j));
        next += units_of(jobs + j);
    }
    free(parts);
    return 0;
}

/* Matrices, in pieces of rows */

typedef struct {
    int64_t rows, per_matrix, count;
} pieces;

static pieces pieces_of(const rpo_job *job) {
    int64_t rows = (job->rows + PIECES_AT_MOST - 1) / PIECES_AT_MOST;
    rows = rows < ROWS_AT_LEAST ? ROWS_AT_LEAST : rows;
    const int64_t per_matrix = (job->rows + rows - 1) / rows;
    return (pieces){rows, per_matrix, per_matrix * job->batch};
}

static int threads_for(const rpo_job *job, pieces cut) {
    return (int)smaller(smaller(job->threads, cut.count), 1 + job->count / RPO_UNIT);
}

#define FOR_PIECES(job, cut, statement)                                                              \
    const int threads = threads_for(job, cut);                                                       \
    (void)threads;                                                                                   \
    _Pragma("omp parallel num_threads(threads) if (threads > 1)") {                                  \
        mode old = enter();                                                                          \
        _Pragma("omp for schedule(static)") for (int64_t piece = 0; piece < cut.count; piece++) {    \
            const int64_t matrix = piece / cut.per_matrix;                                           \
            const int64_t begin = (piece % cut.per_matrix) * cut.rows;                               \
            const int64_t end = smaller(begin + cut.rows, job->rows);                                \
            statement;                                                                               \
        }                                                                                            \
        leave(old);                                                                                  \
    }

static void sum_columns(const rpo_job *job, pieces cut, const double *parts) {
    memset(job->col_sums, 0, (size_t)(job->batch * job->cols) * sizeof(double));
    for (int64_t piece = 0; piece < cut.count; piece++) {
        double *sums = job->col_sums + piece / cut.per_matrix * job->cols;
        for (int64_t c = 0; c < job->cols; c++) sums[c] += parts[piece * job->cols + c];
    }
}

static int run_matrix_squares(rpo_rows_cols *kernel, const rpo_job *job) {
    const pieces cut = pieces_of(job);
    double *parts = calloc((size_t)(cut.count * job->cols) + 1, sizeof(double));
    if (parts == NULL) return 1;
    FOR_PIECES(job, cut, kernel(job, matrix, begin, end, parts + piece * job->cols))
    sum_columns(job, cut, parts);
    free(parts);
    return 0;
}

static int run_matrix_norm(rpo_rows_sum *kernel, rpo_job *job) {
    const pieces cut = pieces_of(job);
    double *parts = malloc((size_t)(cut.count + 1) * sizeof(double));
    if (parts == NULL) return 1;
    FOR_PIECES(job, cut, parts[piece] = kernel(job, matrix, begin, end))
    job->result = sum_of(parts, cut.count);
    free(parts);
    return 0;
}

static int run_matrix(rpo_rows *kernel, const rpo_job *job) {
    const pieces cut = pieces_of(job);
    FOR_PIECES(job, cut, kernel(job, matrix, begin, end))
    return 0;
}

/* Variants, the fastest first */

static int runs_here(const rpo_variant *variant) {
#if defined(RPO_HAVE_AVX512)
    if (variant == &rpo_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("fma");
#endif
#if defined(RPO_HAVE_AVX2)
    if (variant == &rpo_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    (void)variant;
    return 1;
}

static const rpo_variant *const variants[] = {
#if defined(RPO_HAVE_AVX512)
    &rpo_avx512,
#endif
#if defined(RPO_HAVE_AVX2)
    &rpo_avx2,
#endif
#if defined(RPO_HAVE_NEON)
    &rpo_neon,
#endif
    &rpo_scalar,
};

/* The name of the variant with this number; null past the last one, "" if this processor cannot run it. */
EXPORT const char *rpo_variant_name(int number) {
    const int count = (int)(sizeof variants / sizeof *variants);
    if (number < 0 || number >= count) return NULL;
    return runs_here(variants[number]) ? variants[number]->name : "";
}

EXPORT const char *rpo_source(void) { return RPO_SOURCE; }

EXPORT int64_t rpo_job_bytes(void) { return (int64_t)sizeof(rpo_job); }

EXPORT int rpo_has_openmp(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

/* All return 0, or 1 if there is no memory for partial sums. RANGE and SUM take any number of jobs, MATRIX one. */
#define RANGE(kernel)                                                  \
    EXPORT int rpo_##kernel(int variant, rpo_job *jobs, int64_t count) { \
        run_range(variants[variant]->kernel, jobs, count);             \
        return 0;                                                      \
    }
RANGE(adam)
RANGE(sgd)
RANGE(lion)
RANGE(momentum)
RANGE(move)
RANGE(vector_apply)
RANGE(to_weight)
RANGE(add_to_pair)
RANGE(rewrite)
RANGE(traffic)

#define SUM(kernel)                                                    \
    EXPORT int rpo_##kernel(int variant, rpo_job *jobs, int64_t count) { \
        return run_sum(variants[variant]->kernel, jobs, count);        \
    }
SUM(squares)
SUM(vector_variance)

#define MATRIX(kernel, run)                                            \
    EXPORT int rpo_##kernel(int variant, rpo_job *job, int64_t one) {  \
        (void)one;                                                     \
        return run(variants[variant]->kernel, job);                    \
    }
MATRIX(matrix_squares, run_matrix_squares)
MATRIX(matrix_norm, run_matrix_norm)
MATRIX(matrix_apply, run_matrix)
MATRIX(code_rows, run_matrix)
