// The gated delta rule, row by row. A work-item does VECTOR columns of one head's state S [dk, dv] of one sequence, in
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
