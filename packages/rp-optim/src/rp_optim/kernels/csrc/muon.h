/* Muon's two passes over memory, before and after its matrix products; included by kernels.c, once for each variant. */

INLINE void momentum_block(const rpo_job *job, int64_t n, const float *restrict g, float *restrict buffer,
                           float *restrict update, const int nesterov) {
    const float factor = (float)job->factor, keep = (float)job->beta1, gain = (float)job->gain1;
    const int near = job->gain1 < 0.5; /* torch's lerp starts from the nearer end */
    for (int64_t i = 0; i < n; i++) {
        float d = g[i] * factor;
        float mean = near ? buffer[i] + gain * (d - buffer[i]) : d - (d - buffer[i]) * keep;
        float ahead = near ? mean - (mean - d) * gain : d + keep * (mean - d);
        buffer[i] = mean;
        update[i] = nesterov ? ahead : mean;
    }
}

/* Moves the buffer toward the gradient, and writes the update, which is to be orthogonalized, as the weight. */
static void momentum(const rpo_job *job, int64_t begin, int64_t end) {
    float rooms[3][BLOCK];
    const int nesterov = (job->flags & RPO_NESTEROV) != 0;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        float *g = fetch_gradient(job, i, n, rooms[0]);
        float *buffer = fetch_state(job, 0, i, n, rooms[1]);
        momentum_block(job, n, g, buffer, rooms[2], nesterov);
        put_only_state(job, i, n, buffer);
        write_weights(job, i, n, rooms[2]);
    }
}

/* Moves the parameter by the gradient, in whose place the orthogonalized update is. */
static void move(const rpo_job *job, int64_t begin, int64_t end) {
    float room[BLOCK], moves[BLOCK];
    const float factor = (float)job->factor;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t n = end - i < BLOCK ? end - i : BLOCK;
        const float *restrict g = fetch_gradient(job, i, n, room);
        for (int64_t j = 0; j < n; j++) moves[j] = g[j] * factor;
        apply_moves(job, i, n, moves);
    }
}
