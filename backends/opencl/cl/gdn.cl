// The gated delta rule, row by row, and in chunks. A work-item does VECTOR columns of one head's state S [dk, dv] of one sequence, in
// place: columns never meet, so no order between work-items matters and no lane waits for another. S is float32 after
// every row and `out` reads it so: any split of a sequence into steps gives the same bits.
// Bytes moved a row: each sequence's S read and written once, which stays in the cache where it fits.

kernel void gated_delta_rule(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), ARRAY(const int, cu), long seqs, ARRAY(const int, slots),
    ARRAY(float, state), long slot_count, long slot_step, long head_step, long row_step, ARRAY(const int, keep),
    long tiled, float scale, ARRAY(float, out), FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long wide = (dv + VECTOR - 1) / VECTOR, item = get_global_id(0);
    const long s = item / (heads * wide), h = item / wide % heads, column = item % wide * VECTOR;
    if (s > 0 && s >= seqs) return;
    const long count = dv - column < VECTOR ? dv - column : VECTOR;
    const long kh = tiled ? h % key_heads : h / (heads / key_heads);
    if (s == 0) {
        const long end = cu[cu_at + seqs] < 0 ? 0 : cu[cu_at + seqs];
        for (long t = end; t < tokens; t++) vec_put(AT(out) + (t * heads + h) * dv + column, (vec)0, count);
        if (seqs == 0) return;
    }
    const long start = first_row(AT(cu), s), end = end_row(AT(cu), s, tokens);
    if (start >= end || outside(AT(slots)[s], 0, slot_count, fault, node)) return;
    const long slot = AT(slots)[s];
    global float *mine = AT(state) + slot * slot_step + h * head_step + column;
    for (long t = start; t < end; t++) {
        global const float *key = ROW(k, t * key_heads + kh), *query = ROW(q, t * key_heads + kh);
        const float fade = exp(ROW(decay, t)[h]);
        vec says = 0;
        for (long i = 0; i < dk; i++) says += key[i] * (fade * vec_some(mine + i * row_step, count));
        const vec d = ROW(beta, t)[h] * (vec_some(ROW(v, t * heads + h) + column, count) - says);
        vec reads = 0;
        for (long i = 0; i < dk; i++) {
            const vec now = key[i] * d + fade * vec_some(mine + i * row_step, count);
            vec_put(mine + i * row_step, now, count);
            reads += query[i] * now;
        }
        vec_put(AT(out) + (t * heads + h) * dv + column, scale * reads, count);
        const long to = keep ? AT(keep)[t] : -1;
        if (outside(to, -1, slot_count, fault, node) || to < 0 || to == slot) continue;
        global float *copy = mine + (to - slot) * slot_step;
        for (long i = 0; i < dk; i++) vec_put(copy + i * row_step, vec_some(mine + i * row_step, count), count);
    }
}

// -- the chunked form: chunks of `chunk` rows are cut from the first row of each sequence -----------------------------

// E_ti is e to the sum of decays of the rows after i up to t, added from t backwards: no differences, -inf is fine.

inline long chunk_begin(global const int *cu, long s, long t, long chunk)
{
    const long start = first_row(cu, s);
    return start + (t - start) / chunk * chunk;
}

// products[t, h, i] = E_ti (x_t · k_i) for rows i of t's chunk before t, and with t where `whole`;
// fades[t, h] = E_t, from the chunk's start on. A work-item does one (t, h).
kernel void chunk_products(
    long tokens, long key_heads, long heads, long dk, ROWS(float, x), ROWS(float, k), ROWS(float, decay),
    ARRAY(const int, cu), long seqs, long chunk, long tiled, long whole, ARRAY(float, products), ARRAY(float, fades))
{
    const long t = get_global_id(0) / heads, h = get_global_id(0) % heads;
    if (t >= tokens) return;
    const long s = sequence_of(AT(cu), seqs, t), kh = tiled ? h % key_heads : h / (heads / key_heads);
    if (s < 0) return;
    const long begin = chunk_begin(AT(cu), s, t, chunk);
    global const float *mine = ROW(x, t * key_heads + kh);
    float run = 0;
    for (long i = t; i >= begin; i--) {
        float sum = 0;
        if (i < t || whole) {
            global const float *other = ROW(k, i * key_heads + kh);
            for (long j = 0; j < dk; j++) sum += mine[j] * other[j];
        }
        AT(products)[(t * heads + h) * chunk + i - begin] = exp(run) * sum;
        run += ROW(decay, i)[h];
    }
    AT(fades)[t * heads + h] = exp(run);
}

// w and u by forward substitution; a work-item does VECTOR columns of one head of w or u, for one chunk, whose first
// row is its t. Padding rows give zeros.
kernel void chunk_wy(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, k), ROWS(float, v), ROWS(float, beta),
    ARRAY(const int, cu), long seqs, long chunk, long tiled, ARRAY(const float, products), ARRAY(const float, fades),
    ARRAY(float, w), ARRAY(float, u), FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long wide = (dk + VECTOR - 1) / VECTOR, both = wide + (dv + VECTOR - 1) / VECTOR;
    const long t = get_global_id(0) / (heads * both), h = get_global_id(0) / both % heads;
    if (t >= tokens) return;
    const bool keys = get_global_id(0) % both < wide;
    const long n = keys ? dk : dv, column = (get_global_id(0) % both - (keys ? 0 : wide)) * VECTOR;
    const long count = COUNT(column, n), kh = tiled ? h % key_heads : h / (heads / key_heads);
    global float *to = (keys ? AT(w) : AT(u)) + h * n + column;
    const long s = sequence_of(AT(cu), seqs, t);
    if (s < 0) {
        vec_put(to + t * heads * n, (vec)0, count);
        return;
    }
    const long end = end_row(AT(cu), s, tokens);
    if (chunk_begin(AT(cu), s, t, chunk) != t) return;
    for (long r = t; r < t + chunk && r < end; r++) {
        vec own = keys ? AT(fades)[r * heads + h] * vec_some(ROW(k, r * key_heads + kh) + column, count)
                       : vec_some(ROW(v, r * heads + h) + column, count);
        vec before = 0;
        for (long i = t; i < r; i++)
            before += AT(products)[(r * heads + h) * chunk + i - t] * vec_some(to + i * heads * n, count);
        vec_put(to + r * heads * n, ROW(beta, r)[h] * (own - before), count);
    }
}

// From chunk to chunk: d_i = u_i - S^T w_i, out_t = scale (E_t S^T q_t + sum of products d_i), then S after the last
// row, and after each row that `keep` names. A work-item does VECTOR columns of one head of one sequence; its d lie in
// `rest`.
kernel void chunk_delta_scan(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, q), ROWS(float, k), ROWS(float, w),
    ROWS(float, u), ROWS(float, decay), ARRAY(const int, cu), long seqs, ARRAY(const int, slots), ARRAY(float, state),
    long slot_count, long slot_step, long head_step, long row_step, ARRAY(const int, keep), long chunk, long tiled,
    float scale, ARRAY(const float, products), ARRAY(const float, fades), ARRAY(float, rest), ARRAY(float, out),
    FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long wide = (dv + VECTOR - 1) / VECTOR, item = get_global_id(0);
    const long s = item / (heads * wide), h = item / wide % heads, column = item % wide * VECTOR;
    if (s > 0 && s >= seqs) return;
    const long count = COUNT(column, dv), kh = tiled ? h % key_heads : h / (heads / key_heads);
    if (s == 0) {
        const long end = cu[cu_at + seqs] < 0 ? 0 : cu[cu_at + seqs];
        for (long t = end; t < tokens; t++) vec_put(AT(out) + (t * heads + h) * dv + column, (vec)0, count);
        if (seqs == 0) return;
    }
    const long start = first_row(AT(cu), s), end = end_row(AT(cu), s, tokens);
    if (start >= end || outside(AT(slots)[s], 0, slot_count, fault, node)) return;
    const long slot = AT(slots)[s];
    global float *mine = AT(state) + slot * slot_step + h * head_step + column;
    for (long begin = start; begin < end; begin += chunk) {
        const long stop = begin + chunk < end ? begin + chunk : end;
        for (long t = begin; t < stop; t++) {
            global const float *row = ROW(w, t * heads + h), *query = ROW(q, t * key_heads + kh);
            vec says = 0, reads = 0;
            for (long i = 0; i < dk; i++) {
                const vec held = vec_some(mine + i * row_step, count);
                says += row[i] * held;
                reads += query[i] * held;
            }
            const long at = (t * heads + h) * dv + column;
            vec_put(AT(rest) + at, vec_some(ROW(u, t * heads + h) + column, count) - says, count);
            vec now = AT(fades)[t * heads + h] * reads;
            for (long i = begin; i <= t; i++)
                now += AT(products)[(t * heads + h) * chunk + i - begin]
                     * vec_some(AT(rest) + (i * heads + h) * dv + column, count);
            vec_put(AT(out) + at, scale * now, count);
        }
        for (long t = begin; t < stop; t++) {
            long to = keep ? AT(keep)[t] : -1;
            if (outside(to, -1, slot_count, fault, node) || to == slot) to = -1;
            const bool ends = t == stop - 1;
            if (!ends && to < 0) continue;
            global float *copy = mine + (to - slot) * slot_step;
            for (long i = 0; i < dk; i++) {
                vec sum = AT(fades)[t * heads + h] * vec_some(mine + i * row_step, count);
                float run = 0;
                for (long r = t; r >= begin; r--) {
                    const float share = exp(run) * ROW(k, r * key_heads + kh)[i];
                    sum += share * vec_some(AT(rest) + (r * heads + h) * dv + column, count);
                    run += ROW(decay, r)[h];
                }
                if (to >= 0) vec_put(copy + i * row_step, sum, count);
                if (ends) vec_put(mine + i * row_step, sum, count);
            }
        }
    }
}
