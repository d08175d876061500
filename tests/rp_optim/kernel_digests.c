/* Prints a digest of what a kernel made of each of many inputs, so that machines can be compared line by line.
 *
 * kernel_digests LIBRARY VARIANT. Needs no torch, and does no floating-point arithmetic on what it compares:
 * scripts/test-neon runs it here and, emulated, for another processor. Each kernel gets every combination of its
 * options (`choose`), and inputs, lengths, offsets, numbers and threads by a generator of integers. A NaN may have
 * other bits on another processor: x86 makes negative ones, arm64 positive ones. So all quiet NaNs count as one.
 */

#include "rp_optim.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int kernel_function(int variant, rpo_job *jobs, int64_t count);

static void fail(const char *what, const char *which) {
    fprintf(stderr, "%s: %s\n", what, which);
    exit(1);
}

/* Random integers (splitmix64, Steele et al., 2014) */

static uint64_t seed;

static uint64_t random_bits(void) {
    uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t below(int64_t end) { return (int64_t)(random_bits() % (uint64_t)end); }

#define ONE_OF(list) ((list)[below((int64_t)(sizeof(list) / sizeof *(list)))])

/* Combinations: an odometer, whose digits come to be as a case asks for them */

#define DIGITS 16
static struct {
    int at, count, digit[DIGITS], options[DIGITS];
} odometer;

static int choose(int options) {
    const int at = odometer.at++;
    if (at == odometer.count) odometer.digit[odometer.count++] = 0;
    odometer.options[at] = options;
    return odometer.digit[at];
}

/* Turns to the next combination; returns 0 after the last. */
static int turn(void) {
    odometer.at = 0;
    for (; odometer.count > 0; odometer.count--)
        if (++odometer.digit[odometer.count - 1] < odometer.options[odometer.count - 1]) return 1;
    return 0;
}

/* Numbers, as bits. All arrays of a case are of one mood. */

enum { PLAIN, WIDE, TINY, SPECIAL, MOODS };
static int mood;

static uint32_t float_bits(int is_positive) {
    static const uint32_t specials[] = {
        0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0xffbfffff, 1,
        0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x3f800000, 0x3f808000, 0xbf818000, 0x477ff000, 0x33000000,
    };
    const uint32_t bits = (uint32_t)random_bits(), mantissa = bits & 0x7fffff;
    const uint32_t sign = is_positive ? 0 : bits & 0x80000000;
    if (mood == SPECIAL && below(24) == 0) return ONE_OF(specials);
    if (mood == WIDE) return (uint32_t)below(255) << 23 | mantissa | sign;
    if (mood == TINY) return (below(2) ? (uint32_t)below(70) << 23 : 0) | mantissa | sign;
    return (uint32_t)(118 + below(14)) << 23 | mantissa | sign;
}

static uint16_t float16_bits(int is_positive) {
    static const uint16_t specials[] = {
        0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01, 1, 0x83ff, 0x0400, 0x7bff, 0x3c00,
    };
    const uint16_t bits = (uint16_t)random_bits(), sign = is_positive ? 0 : bits & 0x8000;
    if (mood == SPECIAL && below(24) == 0) return ONE_OF(specials);
    if (mood == WIDE) return (uint16_t)(below(31) << 10 | (bits & 0x3ff) | sign);
    if (mood == TINY) return (bits & 0x7ff) | sign;
    return (uint16_t)((8 + below(10)) << 10 | (bits & 0x3ff) | sign);
}

static uint16_t scale_bits(void) {
    static const uint16_t specials[] = {0, 0x7fc0, 0x80, 0x7f7f};
    return mood == SPECIAL && below(4) == 0 ? ONE_OF(specials) : (uint16_t)(0x3c00 + below(0x400));
}

/* Arrays, each with room before and after it that must stay as it is */

typedef enum { FLOAT32, BFLOAT16, FLOAT16, WORDS, BYTES, FLOAT64, SCALES } kind;
static const size_t sizes[] = {4, 2, 2, 2, 1, 8, 2};

typedef struct {
    char *memory;
    kind kind;
    size_t elements;
} array;

#define ROOM 64
#define ARRAYS 64
static array arrays[ARRAYS];
static int array_count;

static uint64_t one_element(kind of, int is_positive) {
    switch (of) {
    case FLOAT32: return float_bits(is_positive);
    case BFLOAT16: return float_bits(is_positive) >> 16;
    case FLOAT16: return float16_bits(is_positive);
    case SCALES: return scale_bits();
    default: return random_bits();
    }
}

/* `offset`: of its first element from the start of a cache line, in elements. */
static void *make_array_at(kind of, int64_t count, int is_positive, int64_t offset) {
    const size_t elements = (size_t)(count + offset + 2 * ROOM), bytes = (elements * sizes[of] + 63) & ~(size_t)63;
    char *memory = aligned_alloc(64, bytes);
    if (memory == NULL || array_count == ARRAYS) fail("no room", "array");
    for (size_t i = 0; i < elements; i++) {
        const uint64_t bits = one_element(of, is_positive);
        memcpy(memory + i * sizes[of], &bits, sizes[of]); /* of the low bytes: both machines are little-endian */
    }
    arrays[array_count++] = (array){memory, of, elements};
    return memory + (size_t)(ROOM + offset) * sizes[of];
}

static void *make_array(kind of, int64_t count, int is_positive) {
    return make_array_at(of, count, is_positive, below(2) ? below(16) : 0);
}

/* Digests (FNV-1a) */

static uint64_t digest;

static void add_to_digest(uint64_t bits, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ (bits >> 8 * i & 0xff)) * 0x100000001b3u;
}

/* The bits of the largest exponent and of a quiet NaN, which all quiet NaNs have. */
static uint64_t nan_of(kind of) {
    switch (of) {
    case FLOAT32: return 0x7fc00000;
    case BFLOAT16: return 0x7fc0;
    case FLOAT16: return 0x7e00;
    case FLOAT64: return 0x7ff8000000000000;
    default: return UINT64_MAX;
    }
}

static void add_number(kind of, uint64_t bits) {
    const uint64_t nan = nan_of(of);
    add_to_digest((bits & nan) == nan ? nan : bits, sizes[of]);
}

static void add_array(const array *from) {
    for (size_t i = 0; i < from->elements; i++) {
        uint64_t bits = 0;
        memcpy(&bits, from->memory + i * sizes[from->kind], sizes[from->kind]);
        add_number(from->kind, bits);
    }
}

static uint64_t digest_of(const rpo_job *jobs, int count) {
    digest = 0xcbf29ce484222325u;
    for (int j = 0; j < count; j++) {
        uint64_t bits;
        memcpy(&bits, &jobs[j].result, 8);
        add_number(FLOAT64, bits);
    }
    for (int i = 0; i < array_count; i++) {
        add_array(arrays + i);
        free(arrays[i].memory);
    }
    array_count = 0;
    return digest;
}

/* Lengths: all ends of vectors and blocks; a prime number of them, so that each meets all options. Some jobs have
 * several units, which are divided among threads. */

static int64_t next_length(void) {
    static const int64_t more[] = {96, 127, 128, 129, 160, 191, 255, 256, 257, 1000, 4099};
    static int at;
    const int number = at++;
    if (number % 997 == 996) return 2 * RPO_UNIT + below(300);
    return number % 79 < 68 ? number % 79 : more[number % 79 - 68];
}

/* Options of all jobs of a case, chosen one after the other */

typedef struct {
    int param, grad, more, weight, in_place, has_rest, packing, flags, decay, near;
} options;

static int choose_type(void) { return choose(3); }
static int choose_type_or_none(void) { return choose(4) - 1; }

static void choose_gradient(options *o) {
    o->grad = choose_type();
    o->more = choose_type_or_none();
}

/* For kernels that have other options enough. */
static void draw_gradient(options *o) {
    o->grad = (int)below(3);
    o->more = (int)below(4) - 1;
}

/* A whole parameter may have a weight of any type, also in halves, with what is left of them or without; one in
 * halves is written to others or in place. */
static void choose_parameter(options *o) {
    o->param = choose(4);
    if (o->param == RPO_HALVES) {
        o->weight = RPO_HALVES;
        o->in_place = choose(2);
        o->has_rest = 1;
    } else {
        const int weight = choose(6);
        o->weight = weight == 5 ? RPO_HALVES : weight - 1;
        o->has_rest = weight == 5;
    }
}

static void choose_update(options *o) {
    choose_parameter(o);
    choose_gradient(o);
}

static void choose_state(options *o) {
    o->packing = choose(3);
    o->near = choose(2);
}

static void choose_adam(options *o) {
    choose_parameter(o);
    draw_gradient(o);
    choose_state(o);
    o->decay = choose(3);
    o->flags = choose(2) ? RPO_AMSGRAD : 0;
}

static void choose_sgd(options *o) {
    static const int flags[] = {0, RPO_MOMENTUM, RPO_MOMENTUM | RPO_NESTEROV, RPO_MOMENTUM | RPO_FIRST,
                                RPO_MOMENTUM | RPO_FIRST | RPO_NESTEROV};
    choose_parameter(o);
    draw_gradient(o);
    choose_state(o);
    o->decay = choose(2);
    o->flags = flags[choose(5)];
}

static void choose_lion(options *o) {
    choose_parameter(o);
    draw_gradient(o);
    choose_state(o);
    o->decay = 2 * choose(2);
}

static void choose_momentum(options *o) {
    draw_gradient(o);
    o->param = choose_type();
    o->weight = choose_type();
    choose_state(o);
    o->flags = choose(2) ? RPO_NESTEROV : 0;
}

static void choose_move(options *o) {
    choose_update(o);
    o->decay = 2 * choose(2);
}

static void choose_variance(options *o) {
    o->param = choose_type();
    choose_gradient(o);
    o->near = choose(2);
}

static void choose_squares(options *o) {
    o->grad = choose(4);
    o->param = o->grad;
    o->has_rest = o->grad == RPO_HALVES;
    o->more = o->has_rest ? -1 : choose_type_or_none();
}

static void choose_pair(options *o) { o->param = o->more = o->grad = RPO_BFLOAT16 + choose(2); }

/* Arrays of a job, as its options say */

static kind kind_of(int type) {
    static const kind kinds[] = {FLOAT32, BFLOAT16, FLOAT16, WORDS};
    return kinds[type];
}

static rpo_array make(int type, int64_t count) { return (rpo_array){make_array(kind_of(type), count, 0), type}; }

static void set_numbers(rpo_job *job, const options *o) {
    static const double factors[] = {1.0, -0.37, 1.0 / 65536, 3.0}, rates[] = {1e-3, 0.3, 2e-5},
                        roots[] = {1.0, 1.7, 31.6};
    job->flags = o->flags | (below(2) ? RPO_STREAM : 0);
    job->factor = ONE_OF(factors);
    job->l2 = o->decay == 1 ? 0.01 : 0;
    job->shrink = o->decay == 2 ? 0.99 : 1;
    job->rate = ONE_OF(rates);
    job->beta1 = o->near ? 0.9 : 0.3;
    job->gain1 = 1 - job->beta1;
    job->beta2 = o->near ? 0.999 : 0.4;
    job->gain2 = 1 - job->beta2;
    job->root = ONE_OF(roots);
    job->eps = 1e-8;
    job->key[0] = (uint32_t)random_bits();
    job->key[1] = (uint32_t)random_bits();
}

static void fill_gradient(rpo_job *job, const options *o) {
    job->grad = o->grad == RPO_HALVES ? job->param : make(o->grad, job->count);
    if (o->more >= 0) job->more = make(o->more, job->count);
}

static void fill_parameter(rpo_job *job, const options *o) {
    job->param = make(o->param, job->count);
    if (o->has_rest) job->rest = make_array(WORDS, job->count, 0);
    if (o->weight >= 0) job->weight = o->in_place ? job->param : make(o->weight, job->count);
}

static void fill_update(rpo_job *job, const options *o) {
    fill_parameter(job, o);
    fill_gradient(job, o);
}

/* Arrays of state from `positive` on have no sign. */
static void fill_state(rpo_job *job, const options *o, int count, int positive) {
    const kind whole = o->param == RPO_HALVES ? FLOAT32 : kind_of(o->param);
    const kind kinds[] = {whole, BFLOAT16, BYTES};
    job->packing = o->packing;
    for (int a = 0; a < count; a++) {
        job->state[a] = make_array(kinds[o->packing], job->count, a >= positive);
        if (o->packing == RPO_8BIT_STATE)
            job->scales[a] = make_array(SCALES, (job->count + RPO_GROUP - 1) / RPO_GROUP, 1);
    }
}

static void fill_adam(rpo_job *job, const options *o) {
    fill_update(job, o);
    fill_state(job, o, 3, 1);
}

static void fill_one_state(rpo_job *job, const options *o) {
    fill_update(job, o);
    fill_state(job, o, 1, 1);
}

static void fill_variance(rpo_job *job, const options *o) {
    fill_update(job, o);
    job->state[0] = make_array(o->param == RPO_HALVES ? FLOAT32 : kind_of(o->param), job->count, 1);
}

static void fill_matrix(rpo_job *job, const options *o) {
    static const int64_t rows[] = {1, 2, 31, 33, 70};
    job->cols = job->count % RPO_UNIT + 1;
    job->rows = job->cols > 300 ? 1 + below(3) : ONE_OF(rows);
    job->batch = 1 + below(3);
    /* Some have more pieces than are divided among threads. */
    if (job->cols > 36 && job->cols < 40) job->rows = 2100, job->batch = 1;
    job->count = job->batch * job->rows * job->cols;
    job->row = make_array(FLOAT32, job->batch * job->rows, 1);
    job->col = make_array(FLOAT32, job->batch * job->cols, 1);
    job->row_sums = make_array(FLOAT64, job->batch * job->rows, 1);
    job->col_sums = make_array(FLOAT64, job->batch * job->cols, 1);
    fill_update(job, o);
}

static void choose_codes(options *o) { o->param = RPO_BFLOAT16; }

static void fill_codes(rpo_job *job, const options *o) {
    fill_matrix(job, o);
    job->codes = make_array(BYTES, job->count, 0);
    job->code_scales = make_array(FLOAT32, job->batch * job->rows, 0);
}

/* For benchmarks: takes words of 8 bytes, so its arrays start at such. */
static void fill_traffic(rpo_job *job, const options *o) {
    const int64_t count = job->count;
    job->param = (rpo_array){make_array_at(FLOAT32, count, 0, 0), RPO_FLOAT32};
    job->grad = (rpo_array){make_array_at(BFLOAT16, count, 0, 0), RPO_BFLOAT16};
    job->weight = (rpo_array){make_array_at(kind_of(o->weight), count, 0, 0), o->weight};
    for (int a = 0; a < 2; a++) job->state[a] = make_array_at(FLOAT32, count, 0, 0);
}

static void choose_rewrite(options *o) { o->weight = RPO_BFLOAT16; }
static void choose_traffic(options *o) { o->weight = choose_type(); }

/* Kernels: how each one's options are chosen and its jobs are filled */

typedef struct {
    const char *name;
    void (*choose)(options *o);
    void (*fill)(rpo_job *job, const options *o);
    int is_matrix; /* takes one job */
} kernel;

static const kernel kernels[] = {
    {"rpo_adam", choose_adam, fill_adam, 0},
    {"rpo_sgd", choose_sgd, fill_one_state, 0},
    {"rpo_lion", choose_lion, fill_one_state, 0},
    {"rpo_momentum", choose_momentum, fill_one_state, 0},
    {"rpo_move", choose_move, fill_update, 0},
    {"rpo_vector_variance", choose_variance, fill_variance, 0},
    {"rpo_vector_apply", choose_update, fill_variance, 0},
    {"rpo_to_weight", choose_parameter, fill_parameter, 0},
    {"rpo_add_to_pair", choose_pair, fill_update, 0},
    {"rpo_squares", choose_squares, fill_update, 0},
    {"rpo_matrix_squares", choose_squares, fill_matrix, 1},
    {"rpo_matrix_norm", choose_squares, fill_matrix, 1},
    {"rpo_matrix_apply", choose_move, fill_matrix, 1},
    {"rpo_code_rows", choose_codes, fill_codes, 1},
    {"rpo_rewrite", choose_rewrite, fill_traffic, 0},
    {"rpo_traffic", choose_traffic, fill_traffic, 0},
};

/* Whether the caller flushes subnormals, which must change nothing, and must not be changed */

#if defined(__aarch64__)
static uint64_t mode(void) {
    uint64_t now;
    __asm__ volatile("mrs %0, fpcr" : "=r"(now));
    return now;
}
static void flush(int yes) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)yes << 24)); }
#else
static uint64_t mode(void) { return __builtin_ia32_stmxcsr() & 0xffc0u; } /* without what happened */
static void flush(int yes) { __builtin_ia32_ldmxcsr(yes ? 0x9fc0u : 0x1f80u); }
#endif

static void run(const kernel *which, kernel_function *function, int variant, int number) {
    rpo_job jobs[3] = {{0}};
    options o = {.more = -1, .weight = -1};
    seed = (uint64_t)number * 0x2545f4914f6cdd1du + (uint64_t)(which - kernels);
    which->choose(&o);
    mood = (int)below(MOODS);
    const int count = which->is_matrix ? 1 : 1 + (int)below(3), threads = below(2) ? 3 : 1;
    for (int j = 0; j < count; j++) {
        jobs[j].count = next_length();
        jobs[j].threads = threads;
        set_numbers(jobs + j, &o);
        which->fill(jobs + j, &o);
    }
    /* A call has something to do. */
    if (jobs[0].count + jobs[1].count + jobs[2].count == 0) return (void)digest_of(jobs, 0);
    flush(number & 1);
    const uint64_t before = mode();
    if (function(variant, jobs, count)) fail("no memory for", which->name);
    if (mode() != before) fail("changed the floating-point mode", which->name);
    flush(0);
    printf("%s %d mood=%d threads=%d jobs=%dx%lld ", which->name, number, mood, threads, count,
           (long long)jobs[0].count);
    printf("param=%d grad=%d more=%d weight=%d in_place=%d rest=%d ", o.param, o.grad, o.more, o.weight, o.in_place,
           o.has_rest);
    printf("packing=%d flags=%d decay=%d near=%d ", o.packing, o.flags, o.decay, o.near);
    printf("%016llx\n", (unsigned long long)digest_of(jobs, count));
}

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) fail("the library has no", name);
    return found;
}

/* Every combination once, and again until there are this many cases. */
#define AT_LEAST 200

static void run_all(const kernel *which, void *library, int variant) {
    kernel_function *function;
    *(void **)&function = find(library, which->name);
    for (int number = 0; number < AT_LEAST;)
        do
            run(which, function, variant, number++);
        while (turn());
}

static int number_of(void *library, const char *variant) {
    const char *(*name_of)(int);
    *(void **)&name_of = find(library, "rpo_variant_name");
    printf("rpo_variant_name %s\n", variant);
    for (int number = 0; name_of(number) != NULL; number++)
        if (strcmp(name_of(number), variant) == 0) return number;
    fail("does not run here", variant);
    return -1;
}

int main(int count, char **arguments) {
    if (count != 3) fail("usage", "kernel_digests LIBRARY VARIANT");
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (library == NULL) fail("cannot load", dlerror());
    const int variant = number_of(library, arguments[2]);
    const char *(*source)(void);
    *(void **)&source = find(library, "rpo_source");
    printf("rpo_source %s\n", source());
    int (*has_openmp)(void);
    *(void **)&has_openmp = find(library, "rpo_has_openmp");
    printf("rpo_has_openmp %d\n", has_openmp());
    int64_t (*job_bytes)(void);
    *(void **)&job_bytes = find(library, "rpo_job_bytes");
    printf("rpo_job_bytes %lld %zu\n", (long long)job_bytes(), sizeof(rpo_job));
    for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) run_all(kernels + k, library, variant);
    return 0;
}
