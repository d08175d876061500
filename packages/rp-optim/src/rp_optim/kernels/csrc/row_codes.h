/* FP8 codes of bf16 weights, with a scale a row (kernels/row_codes.py has the same in torch operations). Included by
 * kernels.c.
 *
 * A row's scale is the least power of two by which its largest number fits E4M3, whose largest is 448 = 1.75 * 2^8,
 * but no less than 2^-126. A row with a NaN or an infinity has NaN for its scale and for all of its codes. */

#define E4M3_EXPONENT 8
#define E4M3_NAN 0x7f

/* The largest magnitude of a row, as bits: those of bf16 magnitudes are in the order of the numbers, NaNs last. */
INLINE uint16_t largest_size(const uint16_t *restrict row, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t size = row[i] & 0x7fffu;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Rounds a magnitude of at most 448 to nearest, ties to even. */
INLINE uint32_t round_e4m3(float x) {
    uint32_t bits = bits_of(x);
    /* Near 2^14 floats have the spacing of E4M3's subnormals, 2^-9, so this addition rounds. */
    uint32_t subnormal = bits_of(x + 0x1p14f) - bits_of(0x1p14f);
    uint32_t normal = (bits - (120u << 23) + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
    return bits < (121u << 23) ? subnormal : normal;
}

static void codes_of(const uint16_t *restrict row, uint8_t *restrict codes, int64_t n, float inverse) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t sign = ((uint32_t)row[i] >> 8) & 0x80u;
        codes[i] = (uint8_t)(round_e4m3(widen_bfloat16(row[i] & 0x7fffu) * inverse) | sign);
    }
}

/* The exponent's bits of the scale for a largest magnitude. Half a unit carries where the mantissa is above 1.75. */
INLINE int32_t scale_exponent(uint16_t largest) {
    int32_t exponent = (int32_t)((((uint32_t)largest << 16) + 0x1fffffu) >> 23) - E4M3_EXPONENT;
    return exponent < 1 ? 1 : exponent;
}

static void code_row(const rpo_job *job, int64_t row) {
    uint8_t block[BLOCK];
    const uint16_t *from = (const uint16_t *)job->param.at + row * job->cols;
    uint8_t *to = job->codes + row * job->cols;
    const uint16_t largest = largest_size(from, job->cols);
    if (largest >= 0x7f80u) {
        job->code_scales[row] = float_of(0x7fc00000u);
        memset(to, E4M3_NAN, (size_t)job->cols);
        return;
    }
    const uint32_t exponent = (uint32_t)scale_exponent(largest);
    const float inverse = float_of((254u - exponent) << 23);
    job->code_scales[row] = float_of(exponent << 23);
    for (int64_t i = 0; i < job->cols; i += BLOCK) {
        const int64_t n = job->cols - i < BLOCK ? job->cols - i : BLOCK;
        codes_of(from + i, block, n, inverse);
        if (job->flags & RPO_STREAM)
            write_around(to + i, block, (size_t)n);
        else
            memcpy(to + i, block, (size_t)n);
    }
}

static void code_rows(const rpo_job *job, int64_t matrix, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) code_row(job, matrix * job->rows + r);
}
