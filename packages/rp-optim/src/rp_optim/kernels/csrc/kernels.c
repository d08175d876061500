/* The optimizer kernels of one variant: compiled once for each instruction set, with RPO_VARIANT as its name.
 *
 * Plain loops that every compiler vectorizes, without contraction into fused multiply-adds and without
 * reassociation, so that all variants give the same bits. Arrays are processed in blocks that fit L1: a 16-bit block
 * is widened to fp32, updated in fp32, and rounded once when it is stored.
 */

#include "rp_optim.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define BLOCK 128
/* The prefetch distance in elements: arithmetic and memory access overlap. BLOCK and AHEAD were tuned on two kinds
 * of processors (benchmarks/results/performance.md). */
#define AHEAD 1024
#define LANES 16
#define GROUPS (BLOCK / RPO_GROUP)
#define INLINE static inline __attribute__((always_inline))
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

/* Conversions between number formats */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float widen_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

/* Rounds to nearest, ties to even; a NaN becomes a quiet NaN. */
INLINE uint16_t round_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

INLINE float widen_float16(uint16_t h) {
    uint32_t sign = ((uint32_t)h & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)h & 0x7fffu;
    /* By integer conversion, since arithmetic on subnormals is slow on some processors. */
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    uint32_t bits = magnitude < 0x400u ? subnormal : (magnitude < 0x7c00u ? normal : special);
    return float_of(bits | sign);
}

INLINE uint16_t round_float16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    /* Near 0.5 floats have the spacing of float16 subnormals, so this addition rounds. */
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
    uint32_t rounded = magnitude < 0x38800000u ? subnormal : (magnitude < 0x47800000u ? normal : special);
    return (uint16_t)(rounded | sign);
}

/* An fp32 number in halves (kernels/halves.py has the same in torch operations): the upper one rounded to nearest,
 * ties away from zero, which is adding half a unit to the magnitude; the lower 16 bits, as a number with a sign, are
 * what that left. A NaN becomes the same quiet NaN everywhere. */

INLINE int is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

INLINE uint16_t upper_half(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)(is_nan_bits(bits) ? 0x7fc0u : (bits + 0x8000u) >> 16);
}

INLINE int16_t lower_half(float x) {
    uint32_t bits = bits_of(x);
    return (int16_t)(is_nan_bits(bits) ? 0 : bits & 0xffffu);
}

INLINE float of_halves(uint16_t upper, int16_t lower) {
    return float_of(((uint32_t)upper << 16) + (uint32_t)(int32_t)lower);
}

/* Loading and storing blocks */

INLINE size_t size_of(int32_t type) { return type == RPO_FLOAT32 ? 4 : 2; }

static void widen(int32_t type, const void *from, float *restrict to, int64_t n) {
    const uint16_t *restrict half = from;
    if (type == RPO_BFLOAT16)
        for (int64_t i = 0; i < n; i++) to[i] = widen_bfloat16(half[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = widen_float16(half[i]);
}

static void narrow(int32_t type, const float *restrict from, void *to, int64_t n) {
    uint16_t *restrict half = to;
    if (type == RPO_BFLOAT16)
        for (int64_t i = 0; i < n; i++) half[i] = round_bfloat16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) half[i] = round_float16(from[i]);
}

INLINE void ask_for(const void *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i);
}

/* Elements [i, i + n) in fp32: in place if they are fp32, else widened into `room`. */
INLINE float *fetch(void *at, int32_t type, int64_t i, int64_t n, float *room) {
    ask_for((const char *)at + (size_t)(i + AHEAD) * size_of(type), (size_t)n * size_of(type));
    if (type == RPO_FLOAT32) return (float *)at + i;
    widen(type, (uint16_t *)at + i, room, n);
    return room;
}

INLINE void put_back(void *at, int32_t type, int64_t i, int64_t n, const float *values) {
    if (type != RPO_FLOAT32) narrow(type, values, (uint16_t *)at + i, n);
}

static void join_halves(const uint16_t *restrict upper, const int16_t *restrict lower, float *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = of_halves(upper[i], lower[i]);
}

/* The same of `param` or `grad`, which may be in halves. */
INLINE float *fetch_wide(const rpo_job *job, rpo_array from, int64_t i, int64_t n, float *room) {
    if (from.type != RPO_HALVES) return fetch(from.at, from.type, i, n, room);
    const uint16_t *upper = (const uint16_t *)from.at + i;
    const int16_t *lower = job->rest + i;
    ask_for(upper + AHEAD, (size_t)n * 2);
    ask_for(lower + AHEAD, (size_t)n * 2);
    join_halves(upper, lower, room, n);
    return room;
}

INLINE float *fetch_param(const rpo_job *job, int64_t i, int64_t n, float *room) {
    return fetch_wide(job, job->param, i, n, room);
}

/* A parameter in halves is written with the weight. */
INLINE void put_param(const rpo_job *job, int64_t i, int64_t n, const float *values) {
    if (job->param.type != RPO_HALVES) put_back(job->param.at, job->param.type, i, n, values);
}

/* The type of `state` that is not packed. */
INLINE int32_t state_type(const rpo_job *job) {
    return job->param.type == RPO_HALVES ? RPO_FLOAT32 : job->param.type;
}

/* Elements [i, i + n) of the gradient in fp32, as by `fetch`: the sum of two arrays if there are two. */
INLINE float *fetch_gradient(const rpo_job *job, int64_t i, int64_t n, float *room) {
    float other[BLOCK];
    float *one = fetch_wide(job, job->grad, i, n, room);
    if (job->more.at == NULL) return one;
    if (one != room) memcpy(room, one, (size_t)n * sizeof(float));
    float *restrict sums = room;
    const float *restrict more = fetch(job->more.at, job->more.type, i, n, other);
    for (int64_t j = 0; j < n; j++) sums[j] = sums[j] + more[j];
    return room;
}

/* Writes full cache lines with streaming stores: they do not read memory that is only written. */
static void write_around(void *to, const void *from, size_t bytes) {
#if defined(__SSE2__)
    size_t head = (size_t)(-(uintptr_t)to & 63u);
    if (head < bytes) {
        size_t lines = (bytes - head) & ~(size_t)63;
        char *out = (char *)to + head;
        const char *in = (const char *)from + head;
        memcpy(to, from, head);
        for (size_t i = 0; i < lines; i += 16)
            _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const __m128i *)(in + i)));
        memcpy(out + lines, in + lines, bytes - head - lines);
        return;
    }
#endif
    memcpy(to, from, bytes);
}

static void to_upper_halves(const float *restrict from, uint16_t *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = upper_half(from[i]);
}

static void to_lower_halves(const float *restrict from, int16_t *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = lower_half(from[i]);
}

static void write_weights(const rpo_job *job, int64_t i, int64_t n, const float *values) {
    uint16_t rounded[BLOCK];
    const void *from = values;
    if (job->weight.at == NULL) return;
    if (job->weight.type == RPO_HALVES) {
        to_upper_halves(values, rounded, n);
        if (job->rest != NULL) to_lower_halves(values, job->rest + i, n);
        from = rounded;
    } else if (job->weight.type != RPO_FLOAT32) {
        narrow(job->weight.type, values, rounded, n);
        from = rounded;
    }
    size_t size = size_of(job->weight.type);
    char *to = (char *)job->weight.at + (size_t)i * size;
    if (job->flags & RPO_STREAM)
        write_around(to, from, (size_t)n * size);
    else
        memcpy(to, from, (size_t)n * size);
}

/* Small state (kernels/packed.py has the same in torch operations, bit for bit, and says where it is from).
 *
 * Rounding is stochastic: the random bits are a hash of the job's key and the element's index. */

/* The hash for element `start + j`, by the mixing of Wellons' lowbias32, with half of the key before and half within. */
INLINE uint32_t noise_of(uint32_t start, int64_t j, uint32_t key) {
    uint32_t x = start + (uint32_t)j;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= (x >> 15) ^ key;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/* 16 random bits for each of an element's three state arrays. */
INLINE uint32_t noise_for(uint32_t noise, const int array) {
    return array == 0 ? noise & 0xffffu : (array == 1 ? noise >> 16 : (noise * 0x9e3779b1u) >> 16);
}

INLINE uint32_t noise_start(const rpo_job *job, int64_t i) {
    return job->key[0] + (uint32_t)i + (uint32_t)((uint64_t)i >> 32) * 0x9e3779b1u;
}

/* The hashes of a block's elements; those past `n` are of no use. All state arrays of an element share its hash. */
INLINE void fill_noise(const rpo_job *job, int64_t i, uint32_t *restrict noise) {
    const uint32_t start = noise_start(job, i), key = job->key[1];
    for (int j = 0; j < BLOCK; j++) noise[j] = noise_of(start, j, key);
}

/* A NaN becomes a quiet NaN, and a number never becomes infinite. */
INLINE uint16_t round_randomly(float x, uint32_t noise) {
    uint32_t bits = bits_of(x), size = bits & 0x7fffffffu;
    uint32_t rounded = (bits + noise) >> 16;
    uint32_t most = ((bits >> 16) & 0x8000u) | 0x7f7fu;
    rounded = ((size < 0x7f800000u) & ((rounded & 0x7fffu) >= 0x7f80u)) ? most : rounded;
    return (uint16_t)(size > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

/* Whether rounding makes numbers and nothing else of all of them: none is a NaN, infinite, or near the largest. */
INLINE int are_below_the_largest(const float *restrict values, int64_t n) {
    int32_t top = 0;
    for (int64_t j = 0; j < n; j++) {
        int32_t size = (int32_t)(bits_of(values[j]) & 0x7fffffffu);
        top = size > top ? size : top;
    }
    return top < 0x7f7f0000;
}

INLINE void put_bfloat16(const rpo_job *job, const int array, int64_t i, int64_t n, const float *restrict from,
                         const uint32_t *restrict noise) {
    uint16_t *restrict to = (uint16_t *)job->state[array] + i;
    if (are_below_the_largest(from, n))
        for (int64_t j = 0; j < n; j++) to[j] = (uint16_t)((bits_of(from[j]) + noise_for(noise[j], array)) >> 16);
    else
        for (int64_t j = 0; j < n; j++) to[j] = round_randomly(from[j], noise_for(noise[j], array));
}

/* The scale of a group whose largest element has these bits: rounded up to bf16, a normal number, 0 or NaN. */
INLINE uint16_t scale_for(uint32_t top) {
    uint32_t up = (top + 0xffffu) >> 16;
    up = up > 0x7f7fu ? 0x7f7fu : (up < 0x80u ? 0x80u : up);
    return (uint16_t)(top >= 0x7f800000u ? 0x7fc0u : (top == 0 ? 0 : up));
}

/* Bits of the largest size in a group; a NaN counts as the largest. */
INLINE uint32_t largest_of(const float *restrict values) {
    int32_t top = 0;
    for (int j = 0; j < RPO_GROUP; j++) {
        int32_t size = (int32_t)(bits_of(values[j]) & 0x7fffffffu);
        top = size > top ? size : top;
    }
    return (uint32_t)top;
}

/* Sets the scales of a block's groups, in fp32 too, after filling up the block with zeros. */
INLINE void put_scales(const rpo_job *job, const int array, int64_t i, int64_t n, float *restrict values,
                       float *restrict scales) {
    for (int64_t j = n; j < BLOCK; j++) values[j] = 0;
    for (int group = 0; group < GROUPS; group++) {
        const uint16_t scale = scale_for(largest_of(values + group * RPO_GROUP));
        scales[group] = widen_bfloat16(scale);
        if (group * RPO_GROUP < n) job->scales[array][i / RPO_GROUP + group] = scale;
    }
}

/* The fp32 number below 1 / 255: no kept root is larger than the scale, which would grow if kept again. */
INLINE float unit_root(float scale) { return scale * 0x1.0101p-8f; }

/* Loops over a whole block take bytes, and loops over a group only numbers of 32 bits: a group is too short for vectors
 * of 64 bytes, so that with bytes in them compilers take shorter ones for everything. */

/* The scales of a block's groups; 0 past its end. */
INLINE void fetch_scales(const rpo_job *job, const int array, int64_t i, int64_t n, float *restrict scales) {
    for (int64_t group = 0; group < GROUPS; group++)
        scales[group] = group * RPO_GROUP < n ? widen_bfloat16(job->scales[array][i / RPO_GROUP + group]) : 0;
}

/* A copy of the last codes of an array, and zeros up to a whole block. */
static void *filled_up(void *room, const void *codes, int64_t n) {
    memset(room, 0, BLOCK);
    return memcpy(room, codes, (size_t)n);
}

INLINE void put_codes(void *to, const void *codes, int64_t n) {
    if (n == BLOCK)
        memcpy(to, codes, BLOCK); /* of a size that compilers know */
    else
        memcpy(to, codes, (size_t)n);
}

/* Square roots: code times scale / 255. Fills the whole block. */
INLINE void get_roots(const rpo_job *job, const int array, int64_t i, int64_t n, float *restrict roots) {
    uint8_t room[BLOCK];
    float scales[GROUPS];
    const uint8_t *codes = (const uint8_t *)job->state[array] + i;
    ask_for(codes + AHEAD, (size_t)n);
    fetch_scales(job, array, i, n, scales);
    if (n < BLOCK) codes = filled_up(room, codes, n);
    for (int j = 0; j < BLOCK; j++) roots[j] = (float)(int32_t)codes[j];
    for (int group = 0; group < GROUPS; group++) {
        const float unit = unit_root(scales[group]);
        for (int j = 0; j < RPO_GROUP; j++) roots[group * RPO_GROUP + j] *= unit;
    }
}

/* Keeps square roots, so that the kept squares are unbiased; only 0 becomes 0. Puts those kept in their place. */
INLINE void put_roots(const rpo_job *job, const int array, int64_t i, int64_t n, float *restrict roots,
                      const uint32_t *restrict noise) {
    int32_t codes[BLOCK];
    uint8_t bytes[BLOCK];
    float scales[GROUPS];
    put_scales(job, array, i, n, roots, scales);
    for (int group = 0; group < GROUPS; group++) {
        const float unit = unit_root(scales[group]), steps = scales[group] == 0 ? 0 : 255.0f / scales[group];
        for (int j = group * RPO_GROUP; j < (group + 1) * RPO_GROUP; j++) {
            float x = roots[j];
            int32_t size = (int32_t)(bits_of(x * steps) & 0x7fffffffu);
            float at = float_of((uint32_t)(size < 0x437f0000 ? size : 0x437f0000)); /* at most 255, also for a NaN */
            float below = (float)(int32_t)at;
            float draw = (float)(int32_t)noise_for(noise[j], array);
            /* 2^-16 (2 below + 1) is exact. */
            int goes_up = (at - below) * (at + below) > draw * (below * 0x1p-15f + 0x1p-16f);
            float code = below + (float)goes_up;
            code = code > 1.0f ? code : 1.0f;
            code = x != 0 ? code : 0;
            codes[j] = (int32_t)code;
            roots[j] = code * unit;
        }
    }
    for (int j = 0; j < BLOCK; j++) bytes[j] = (uint8_t)codes[j];
    put_codes((char *)job->state[array] + i, bytes, n);
}

/* Numbers with a sign, companded: z = code / 127 stands for z / (2 - |z|) of the scale. Fills the whole block. */
INLINE void get_signed(const rpo_job *job, const int array, int64_t i, int64_t n, float *restrict values) {
    int8_t room[BLOCK];
    float scales[GROUPS];
    const int8_t *codes = (const int8_t *)job->state[array] + i;
    ask_for(codes + AHEAD, (size_t)n);
    fetch_scales(job, array, i, n, scales);
    if (n < BLOCK) codes = filled_up(room, codes, n);
    for (int j = 0; j < BLOCK; j++) values[j] = (float)(int32_t)codes[j];
    for (int group = 0; group < GROUPS; group++) {
        for (int j = group * RPO_GROUP; j < (group + 1) * RPO_GROUP; j++)
            values[j] = values[j] / (254.0f - fabsf(values[j])) * scales[group];
    }
}

INLINE void put_signed(const rpo_job *job, const int array, int64_t i, int64_t n, float *restrict values,
                       const uint32_t *restrict noise) {
    int32_t codes[BLOCK];
    int8_t bytes[BLOCK];
    float scales[GROUPS];
    put_scales(job, array, i, n, values, scales);
    for (int group = 0; group < GROUPS; group++) {
        const float per_scale = scales[group] == 0 ? 0 : 1.0f / scales[group];
        for (int j = group * RPO_GROUP; j < (group + 1) * RPO_GROUP; j++) {
            float part = values[j] * per_scale;
            float at = 254.0f * part / (1.0f + fabsf(part));
            float draw = (float)(int32_t)noise_for(noise[j], array) * 0x1p-16f;
            at = at > -127.0f ? at : -127.0f; /* also a NaN */
            /* From 1 to 256, so that truncating rounds down. */
            float code = (at + 128.0f) + draw;
            code = code < 255.0f ? code : 255.0f;
            codes[j] = (int32_t)code - 128;
        }
    }
    for (int j = 0; j < BLOCK; j++) bytes[j] = (int8_t)codes[j];
    put_codes((char *)job->state[array] + i, bytes, n);
}

/* State of one array, with a sign, in any packing. */
INLINE float *fetch_state(const rpo_job *job, const int array, int64_t i, int64_t n, float *room) {
    if (job->packing == RPO_8BIT_STATE) {
        get_signed(job, array, i, n, room);
        return room;
    }
    return fetch(job->state[array], job->packing ? RPO_BFLOAT16 : state_type(job), i, n, room);
}

/* `noise`: by `fill_noise`, if the state is packed. */
INLINE void put_state(const rpo_job *job, const int array, int64_t i, int64_t n, float *values,
                      const uint32_t *restrict noise) {
    if (job->packing == RPO_8BIT_STATE)
        put_signed(job, array, i, n, values, noise);
    else if (job->packing == RPO_BF16_STATE)
        put_bfloat16(job, array, i, n, values, noise);
    else
        put_back(job->state[array], state_type(job), i, n, values);
}

/* The state of an optimizer that keeps one array. */
INLINE void put_only_state(const rpo_job *job, int64_t i, int64_t n, float *values) {
    uint32_t noise[BLOCK];
    if (job->packing) fill_noise(job, i, noise);
    put_state(job, 0, i, n, values, noise);
}

/* Adam's 8-bit state: `v` and `most` are kept as square roots, and `m` in units of the kept root of `v`, since that is
 * what a step divides it by. */
INLINE void get_adam(const rpo_job *job, int64_t i, int64_t n, const int amsgrad, float *restrict m,
                     float *restrict v, float *restrict most) {
    float roots[BLOCK];
    get_roots(job, 1, i, n, roots);
    get_signed(job, 0, i, n, m);
    for (int j = 0; j < BLOCK; j++) {
        m[j] = m[j] * roots[j];
        v[j] = roots[j] * roots[j];
    }
    if (!amsgrad) return;
    get_roots(job, 2, i, n, roots);
    for (int j = 0; j < BLOCK; j++) most[j] = roots[j] * roots[j];
}

/* `roots`: those of `v`, with amsgrad those of the largest `v` so far, as a step takes them anyway. */
INLINE void put_adam(const rpo_job *job, int64_t i, int64_t n, const int amsgrad, float *restrict m,
                     float *restrict v, float *restrict roots, const uint32_t *restrict noise) {
    if (amsgrad) {
        put_roots(job, 2, i, n, roots, noise);
        for (int j = 0; j < BLOCK; j++) v[j] = sqrtf(v[j]);
    }
    float *restrict kept = amsgrad ? v : roots;
    put_roots(job, 1, i, n, kept, noise);
    for (int j = 0; j < BLOCK; j++) m[j] = kept[j] > 0 ? m[j] / kept[j] : 0;
    put_signed(job, 0, i, n, m, noise);
}

/* Adam (Kingma and Ba, 2015; amsgrad: Reddi et al., 2018), in the order of operations of torch.optim.Adam */

typedef enum { NO_DECAY = 0, COUPLED = 1, DECOUPLED = 2 } decay_kind;

INLINE void adam_block(const rpo_job *job, int64_t n, float *restrict p, const float *restrict g,
                       float *restrict m, float *restrict v, float *restrict most, float *restrict roots,
                       const decay_kind decay, const int near, const int amsgrad) {
    const float factor = (float)job->factor, l2 = (float)job->l2, shrink = (float)job->shrink;
    const float rate = (float)job->rate, gain1 = (float)job->gain1, beta1 = (float)job->beta1;
    const float beta2 = (float)job->beta2, gain2 = (float)job->gain2;
    const float root = (float)job->root, eps = (float)job->eps;
    for (int64_t i = 0; i < n; i++) {
        float x = p[i], d = g[i] * factor;
        if (decay == COUPLED) d = d + l2 * x;
        if (decay == DECOUPLED) x = x * shrink;
        float mean = near ? m[i] + gain1 * (d - m[i]) : d - (d - m[i]) * beta1;
        float square = v[i] * beta2 + (gain2 * d) * d;
        float largest = square;
        m[i] = mean;
        v[i] = square;
        if (amsgrad) {
            float old = most[i];
            largest = ((old > square) | (old != old)) ? old : square;
            most[i] = largest;
        }
        float size = sqrtf(largest);
        if (roots != NULL) roots[i] = size;
        p[i] = x - (rate * mean) / (size * root + eps);
    }
}

/* `options`: 4 times the decay_kind, 2 if it is near, 1 for amsgrad. */
INLINE void adam_with(const rpo_job *job, int64_t n, float *restrict p, const float *restrict g, float *restrict m,
                      float *restrict v, float *restrict most, float *restrict roots, const int options) {
    switch (options) {
    case 0: adam_block(job, n, p, g, m, v, most, roots, NO_DECAY, 0, 0); break;
    case 1: adam_block(job, n, p, g, m, v, most, roots, NO_DECAY, 0, 1); break;
    case 2: adam_block(job, n, p, g, m, v, most, roots, NO_DECAY, 1, 0); break;
    case 3: adam_block(job, n, p, g, m, v, most, roots, NO_DECAY, 1, 1); break;
    case 4: adam_block(job, n, p, g, m, v, most, roots, COUPLED, 0, 0); break;
    case 5: adam_block(job, n, p, g, m, v, most, roots, COUPLED, 0, 1); break;
    case 6: adam_block(job, n, p, g, m, v, most, roots, COUPLED, 1, 0); break;
    case 7: adam_block(job, n, p, g, m, v, most, roots, COUPLED, 1, 1); break;
    case 8: adam_block(job, n, p, g, m, v, most, roots, DECOUPLED, 0, 0); break;
    case 9: adam_block(job, n, p, g, m, v, most, roots, DECOUPLED, 0, 1); break;
    case 10: adam_block(job, n, p, g, m, v, most, roots, DECOUPLED, 1, 0); break;
    case 11: adam_block(job, n, p, g, m, v, most, roots, DECOUPLED, 1, 1); break;
    }
}

static void adam(const rpo_job *job, int64_t begin, int64_t end) {
    float rooms[6][BLOCK];
    uint32_t noise[BLOCK];
    const decay_kind decay = job->l2 != 0 ? COUPLED : (job->shrink != 1 ? DECOUPLED : NO_DECAY);
    const int amsgrad = (job->flags & RPO_AMSGRAD) != 0;
    const int near = job->gain1 < 0.5; /* torch's lerp starts from the nearer end */
    const int is_8bit = job->packing == RPO_8BIT_STATE;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        float *g = fetch_gradient(job, i, n, rooms[0]);
        float *p = fetch_param(job, i, n, rooms[1]);
        float *m = rooms[2], *v = rooms[3], *most = rooms[4];
        float *roots = rooms[5]; /* of the largest second moments, for 8 bits alone */
        if (is_8bit) {
            get_adam(job, i, n, amsgrad, m, v, most);
        } else {
            m = fetch_state(job, 0, i, n, m);
            v = fetch_state(job, 1, i, n, v);
            if (amsgrad) most = fetch_state(job, 2, i, n, most);
        }
        const int options = decay * 4 + near * 2 + amsgrad;
        if (is_8bit)
            adam_with(job, n, p, g, m, v, most, roots, options);
        else
            adam_with(job, n, p, g, m, v, most, NULL, options);
        put_param(job, i, n, p);
        if (job->packing) fill_noise(job, i, noise);
        if (is_8bit) {
            put_adam(job, i, n, amsgrad, m, v, roots, noise);
        } else {
            put_state(job, 0, i, n, m, noise);
            put_state(job, 1, i, n, v, noise);
            if (amsgrad) put_state(job, 2, i, n, most, noise);
        }
        write_weights(job, i, n, p);
    }
}

/* SGD, in the order of operations of torch.optim.SGD. beta1 is the momentum, gain1 is 1 - dampening. */

INLINE void sgd_block(const rpo_job *job, int64_t n, float *restrict p, const float *restrict g,
                      float *restrict buffer, const int momentum, const int first, const int nesterov) {
    const float factor = (float)job->factor, l2 = (float)job->l2, rate = (float)job->rate;
    const float keep = (float)job->beta1, gain = (float)job->gain1;
    const int decay = job->l2 != 0;
    for (int64_t i = 0; i < n; i++) {
        float d = g[i] * factor;
        d = decay ? d + l2 * p[i] : d;
        if (momentum) {
            float moved = first ? d : buffer[i] * keep + gain * d;
            buffer[i] = moved;
            d = nesterov ? d + keep * moved : moved;
        }
        p[i] = p[i] - rate * d;
    }
}

static void sgd(const rpo_job *job, int64_t begin, int64_t end) {
    float rooms[3][BLOCK];
    const int momentum = (job->flags & RPO_MOMENTUM) != 0, nesterov = (job->flags & RPO_NESTEROV) != 0;
    const int first = (job->flags & RPO_FIRST) != 0;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        float *g = fetch_gradient(job, i, n, rooms[0]);
        float *p = fetch_param(job, i, n, rooms[1]);
        /* The first step writes the buffer before it reads it. */
        const int reads = momentum && !(first && job->packing);
        float *buffer = reads ? fetch_state(job, 0, i, n, rooms[2]) : rooms[2];
        switch (momentum ? 1 + first * 2 + nesterov : 0) {
        case 0: sgd_block(job, n, p, g, buffer, 0, 0, 0); break;
        case 1: sgd_block(job, n, p, g, buffer, 1, 0, 0); break;
        case 2: sgd_block(job, n, p, g, buffer, 1, 0, 1); break;
        case 3: sgd_block(job, n, p, g, buffer, 1, 1, 0); break;
        case 4: sgd_block(job, n, p, g, buffer, 1, 1, 1); break;
        }
        put_param(job, i, n, p);
        if (momentum) put_only_state(job, i, n, buffer);
        write_weights(job, i, n, p);
    }
}

/* Lion (Chen et al., 2023, algorithm 2) */

INLINE float sign_of(float x) { return (float)((x > 0) - (x < 0)); } /* 0 for NaN, as torch.sign */

INLINE void lion_block(const rpo_job *job, int64_t n, float *restrict p, const float *restrict g,
                       float *restrict m) {
    const float factor = (float)job->factor, shrink = (float)job->shrink, rate = (float)job->rate;
    const float beta1 = (float)job->beta1, gain1 = (float)job->gain1;
    const float beta2 = (float)job->beta2, gain2 = (float)job->gain2;
    for (int64_t i = 0; i < n; i++) {
        float d = g[i] * factor;
        float direction = sign_of(m[i] * beta1 + gain1 * d);
        p[i] = p[i] * shrink - rate * direction;
        m[i] = m[i] * beta2 + gain2 * d;
    }
}

static void lion(const rpo_job *job, int64_t begin, int64_t end) {
    float rooms[3][BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        float *g = fetch_gradient(job, i, n, rooms[0]);
        float *p = fetch_param(job, i, n, rooms[1]);
        float *m = fetch_state(job, 0, i, n, rooms[2]);
        lion_block(job, n, p, g, m);
        put_param(job, i, n, p);
        put_only_state(job, i, n, m);
        write_weights(job, i, n, p);
    }
}

/* Sums of squares, in fp64. There the product of two fp32 numbers is exact, so a fused multiply-add gives the same
 * bits. */

INLINE double add_square(double sum, double x) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fma(x, x, sum);
#else
    return x * x + sum;
#endif
}

INLINE void add_squares(double *restrict lanes, const float *restrict x, int64_t n) {
    double sums[LANES];
    int64_t i = 0;
    memcpy(sums, lanes, sizeof sums);
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] = add_square(sums[j], (double)x[i + j]);
    for (int j = 0; i + j < n; j++) sums[j] = add_square(sums[j], (double)x[i + j]);
    memcpy(lanes, sums, sizeof sums);
}

INLINE double sum_lanes(const double *lanes) {
    double sum = 0;
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

static double squares(const rpo_job *job, int64_t begin, int64_t end) {
    float room[BLOCK];
    double lanes[LANES] = {0};
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        add_squares(lanes, fetch_gradient(job, i, n, room), n);
    }
    return sum_lanes(lanes);
}

/* Adafactor (Shazeer and Stern, 2018), as in torch.optim.Adafactor. The variance of a matrix is row * col. */

INLINE float at_least(float x, float least) { return x < least ? least : x; } /* NaN stays */

static void matrix_squares(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end, double *col_sums) {
    float room[BLOCK];
    for (int64_t r = begin; r < end; r++) {
        const int64_t row = matrix * job->rows + r;
        double lanes[LANES] = {0};
        for (int64_t c = 0; c < job->cols; c += BLOCK) {
            const int64_t n = job->cols - c < BLOCK ? job->cols - c : BLOCK;
            const float *restrict g = fetch_gradient(job, row * job->cols + c, n, room);
            double *restrict sums = col_sums + c;
            add_squares(lanes, g, n);
            for (int64_t i = 0; i < n; i++) sums[i] = add_square(sums[i], (double)g[i]);
        }
        job->row_sums[row] = sum_lanes(lanes);
    }
}

INLINE void matrix_moves(const rpo_job *job, int64_t n, const float *restrict g, float row,
                         const float *restrict col, float *restrict moves) {
    const float factor = (float)job->factor, least = (float)job->eps;
    for (int64_t i = 0; i < n; i++) moves[i] = (g[i] * factor) / sqrtf(at_least(row * col[i], least));
}

static double matrix_norm(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end) {
    float room[BLOCK], moves[BLOCK];
    double lanes[LANES] = {0};
    for (int64_t r = begin; r < end; r++) {
        const int64_t row = matrix * job->rows + r;
        for (int64_t c = 0; c < job->cols; c += BLOCK) {
            const int64_t n = job->cols - c < BLOCK ? job->cols - c : BLOCK;
            const float *g = fetch_gradient(job, row * job->cols + c, n, room);
            matrix_moves(job, n, g, job->row[row], job->col + matrix * job->cols + c, moves);
            add_squares(lanes, moves, n);
        }
    }
    return sum_lanes(lanes);
}

INLINE void apply_moves(const rpo_job *job, int64_t i, int64_t n, const float *restrict moves) {
    float room[BLOCK];
    const float shrink = (float)job->shrink, rate = (float)job->rate;
    float *restrict p = fetch_param(job, i, n, room);
    for (int64_t j = 0; j < n; j++) p[j] = p[j] * shrink - rate * moves[j];
    put_param(job, i, n, p);
    write_weights(job, i, n, p);
}

static void matrix_apply(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end) {
    float room[BLOCK], moves[BLOCK];
    for (int64_t r = begin; r < end; r++) {
        const int64_t row = matrix * job->rows + r;
        for (int64_t c = 0; c < job->cols; c += BLOCK) {
            const int64_t n = job->cols - c < BLOCK ? job->cols - c : BLOCK, i = row * job->cols + c;
            const float *g = fetch_gradient(job, i, n, room);
            matrix_moves(job, n, g, job->row[row], job->col + matrix * job->cols + c, moves);
            apply_moves(job, i, n, moves);
        }
    }
}

INLINE void vector_moves(const rpo_job *job, int64_t n, const float *restrict g, const float *restrict variance,
                         float *restrict moves) {
    const float factor = (float)job->factor, least = (float)job->eps;
    for (int64_t i = 0; i < n; i++) moves[i] = (g[i] * factor) / sqrtf(at_least(variance[i], least));
}

/* Interpolates the variance by gain2 toward the squared gradient; returns the sum of squares of the update. */
static double vector_variance(const rpo_job *job, int64_t begin, int64_t end) {
    float rooms[2][BLOCK], moves[BLOCK];
    double lanes[LANES] = {0};
    const float factor = (float)job->factor, gain = (float)job->gain2, rest = (float)job->beta2;
    const int near = job->gain2 < 0.5;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        const float *restrict g = fetch_gradient(job, i, n, rooms[0]);
        float *restrict v = fetch(job->state[0], state_type(job), i, n, rooms[1]);
        for (int64_t j = 0; j < n; j++) {
            float d = g[j] * factor, square = d * d;
            v[j] = near ? v[j] + gain * (square - v[j]) : square - (square - v[j]) * rest;
        }
        put_back(job->state[0], state_type(job), i, n, v);
        /* Reads the variance back as it was rounded, since vector_apply reads it so. */
        vector_moves(job, n, g, fetch(job->state[0], state_type(job), i, n, rooms[1]), moves);
        add_squares(lanes, moves, n);
    }
    return sum_lanes(lanes);
}

static void vector_apply(const rpo_job *job, int64_t begin, int64_t end) {
    float rooms[2][BLOCK], moves[BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        const float *g = fetch_gradient(job, i, n, rooms[0]);
        vector_moves(job, n, g, fetch(job->state[0], state_type(job), i, n, rooms[1]), moves);
        apply_moves(job, i, n, moves);
    }
}

#include "muon.h"
#include "row_codes.h"

/* Writing parameters, rounded, into weights */

static void to_weight(const rpo_job *job, int64_t begin, int64_t end) {
    float room[BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        write_weights(job, i, n, fetch_param(job, i, n, room));
    }
}

/* Adding `grad` to the pair of `param` and `more`, all 16-bit: the sum, rounded, and what the rounding left. */

INLINE float widen_one(const int32_t type, uint16_t h) {
    return type == RPO_BFLOAT16 ? widen_bfloat16(h) : widen_float16(h);
}

INLINE uint16_t round_one(const int32_t type, float x) {
    return type == RPO_BFLOAT16 ? round_bfloat16(x) : round_float16(x);
}

INLINE void pair_block(const int32_t type, int64_t n, uint16_t *restrict first, uint16_t *restrict second,
                       const uint16_t *restrict addend) {
    for (int64_t i = 0; i < n; i++) {
        float sum = widen_one(type, first[i]) + (widen_one(type, second[i]) + widen_one(type, addend[i]));
        uint16_t rounded = round_one(type, sum);
        float rest = sum - widen_one(type, rounded);
        first[i] = rounded;
        second[i] = round_one(type, fabsf(rest) <= FLT_MAX ? rest : 0); /* an infinite sum leaves nothing */
    }
}

static void add_to_pair(const rpo_job *job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        uint16_t *first = (uint16_t *)job->param.at + i, *second = (uint16_t *)job->more.at + i;
        const uint16_t *addend = (const uint16_t *)job->grad.at + i;
        ask_for(first + AHEAD, (size_t)n * 2);
        ask_for(second + AHEAD, (size_t)n * 2);
        ask_for(addend + AHEAD, (size_t)n * 2);
        if (job->param.type == RPO_BFLOAT16)
            pair_block(RPO_BFLOAT16, n, first, second, addend);
        else
            pair_block(RPO_FLOAT16, n, first, second, addend);
    }
}

/* For benchmarks: the memory traffic of Adam with almost no arithmetic */

INLINE void flip(void *at, size_t bytes) {
    uint64_t *restrict words = at;
    for (size_t i = 0; i < bytes / 8; i++) words[i] ^= 0x0001000100010001u;
}

/* Reads, changes and writes every array of the job in place: 32 bytes a parameter. */
static void rewrite(const rpo_job *job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += BLOCK) {
        const size_t n = (size_t)(end - i < BLOCK ? end - i : BLOCK);
        flip((uint16_t *)job->grad.at + i, 2 * n);
        flip((float *)job->param.at + i, 4 * n);
        flip((float *)job->state[0] + i, 4 * n);
        flip((float *)job->state[1] + i, 4 * n);
        flip((uint16_t *)job->weight.at + i, 2 * n);
    }
}

/* The 28 bytes a parameter of an Adam step: reads the gradient, changes three arrays, writes the weight. */
static void traffic(const rpo_job *job, int64_t begin, int64_t end) {
    float room[BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        const float *restrict g = fetch_gradient(job, i, n, room);
        float *restrict p = (float *)job->param.at + i;
        flip((float *)job->state[0] + i, 4 * (size_t)n);
        flip((float *)job->state[1] + i, 4 * (size_t)n);
        for (int64_t j = 0; j < n; j++) p[j] = p[j] + g[j];
        write_weights(job, i, n, p);
    }
}

const rpo_variant JOIN(rpo_, RPO_VARIANT) = {
    .name = TEXT(RPO_VARIANT),
    .adam = adam,
    .sgd = sgd,
    .lion = lion,
    .momentum = momentum,
    .move = move,
    .vector_apply = vector_apply,
    .to_weight = to_weight,
    .add_to_pair = add_to_pair,
    .rewrite = rewrite,
    .traffic = traffic,
    .squares = squares,
    .vector_variance = vector_variance,
    .matrix_squares = matrix_squares,
    .matrix_norm = matrix_norm,
    .matrix_apply = matrix_apply,
    .code_rows = code_rows,
};
