// The gated delta rule, row by row. A work-item does VECTOR columns of one head's state S [dk, dv] of one sequence, in
// place: columns never meet, so no order between work-items matters and no lane waits for another. S is float32 after
// every row and `out` reads it so: any split of a sequence into steps gives the same bits.
// Bytes moved a row: each sequence's S read and written once, which stays in the cache where it fits.

inline vec load_columns(global const float *p, long count)
{
#if VECTOR == 16
    if (count == 16) return load16(p);
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = i < count ? p[i] : 0;
    return (float16)(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]);
#else
    return *p;
#endif
}

inline void store_columns(global float *p, vec v, long count)
{
#if VECTOR == 16
    if (count == 16) store16(p, v);
    else {
        const float all[16] = {v.s0, v.s1, v.s2, v.s3, v.s4, v.s5, v.s6, v.s7,
                               v.s8, v.s9, v.sa, v.sb, v.sc, v.sd, v.se, v.sf};
        for (int i = 0; i < count; i++) p[i] = all[i];
    }
#else
    *p = v;
#endif
}

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
        for (long t = end; t < tokens; t++) store_columns(AT(out) + (t * heads + h) * dv + column, (vec)0, count);
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
        for (long i = 0; i < dk; i++) says += key[i] * (fade * load_columns(mine + i * row_step, count));
        const vec d = ROW(beta, t)[h] * (load_columns(ROW(v, t * heads + h) + column, count) - says);
        vec reads = 0;
        for (long i = 0; i < dk; i++) {
            const vec now = key[i] * d + fade * load_columns(mine + i * row_step, count);
            store_columns(mine + i * row_step, now, count);
            reads += query[i] * now;
        }
        store_columns(AT(out) + (t * heads + h) * dv + column, scale * reads, count);
        const long to = keep ? AT(keep)[t] : -1;
        if (outside(to, -1, slot_count, fault, node) || to < 0 || to == slot) continue;
        global float *copy = mine + (to - slot) * slot_step;
        for (long i = 0; i < dk; i++) store_columns(copy + i * row_step, load_columns(mine + i * row_step, count), count);
    }
}
