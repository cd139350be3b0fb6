// Softmax attention over a paged cache, the joining of several, and the indexer's scores.
//
// attention: a group of LANES work-items does one query head. Entries are taken CHUNK at a time: each lane scores its
// share of them, all of them rescale by the same running maximum, then each lane adds the values of its own columns.
// The result so far lies in `out`. A query's bits depend on the entries that it sees and on nothing else.
// Limits: none; no memory beyond CHUNK scores a group. Bytes moved: the keys and values seen, once for each query head.

#define CHUNK 64

// Where entry e of sequence s lies, in pages; -1 and a fault where the table, or the cache, has no such page.
inline long page_of(
    global const int *table, long s, long blocks, long block, long pages, FAULT_ARGS)
{
    if (outside(block, 0, blocks, fault, node)) return -1;
    const long page = table[s * blocks + block];
    return outside(page, 0, pages, fault, node) ? -1 : page;
}

inline float dot_of(global const float *a, global const float *b, long n)
{
    vec sum = 0;
    float rest = 0;
    const long whole = n / VECTOR;
    for (long g = 0; g < whole; g++) sum += vec_load(a + VECTOR * g) * vec_load(b + VECTOR * g);
    for (long i = whole * VECTOR; i < n; i++) rest += a[i] * b[i];
    return vec_sum(sum) + rest;
}

// Tokens of row t's sequence up to and with t; 0 for padding and, as a fault, for a negative past.
inline long seen_tokens(global const int *cu, global const int *past, long s, long t, FAULT_ARGS)
{
    if (s < 0) return 0;
    if (past[s] < 0) { report(fault, node); return 0; }
    return (long)past[s] + t - first_row(cu, s) + 1;
}

// picks[t, i] = selected[t, i], or -1 where the same block stands before it. A block that is not one of the whole ones
// is a fault.
kernel void attention_picks(
    long tokens, long width, ARRAY(const int, selected), ARRAY(const int, cu), long seqs, ARRAY(const int, past),
    long every, long block, ARRAY(int, picks), FAULT_ARGS)
{
    RUN_OF_ROW(tokens, width);
    global const int *row_of = AT(selected) + row * width;
    const long s = sequence_of(AT(cu), seqs, row);
    const long whole = seen_tokens(AT(cu), AT(past), s, row, fault, node) / every / block;
    for (long i = first; i < last; i++) {
        int pick = row_of[i];
        if (s < 0 || outside(pick, -1, whole, fault, node)) pick = -1;
        for (long j = 0; j < i && pick >= 0; j++)
            if (row_of[j] == pick) pick = -1;
        AT(picks)[row * width + i] = pick;
    }
}

kernel void attention(
    long tokens, long heads, long kv, long d, long dv, ROWS(float, q), ARRAY(const float, keys), long key_page,
    long key_entry, long key_head, ARRAY(const float, values), long value_page, long value_entry, long value_head,
    long pages, long entries, ARRAY(const int, cu), long seqs, ARRAY(const int, past), ARRAY(const int, table),
    long blocks, ARRAY(const int, picks), long width, long every, long block, long window, float scale,
    ARRAY(float, out), ARRAY(float, lse), FAULT_ARGS)
{
    local float scores[CHUNK];
    local long places[CHUNK];
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long t = get_group_id(0) / heads, head = get_group_id(0) % heads, kv_head = head / (heads / kv);
    const long s = sequence_of(AT(cu), seqs, t);
    const long n = seen_tokens(AT(cu), AT(past), s, t, fault, node) / every;
    const long begin = window && n > window ? n - window : 0, whole = n / block * block;
    const long listed = picks ? width * block : 0, count = s < 0 ? 0 : picks ? listed + n - whole : n - begin;
    global const float *query = ROW(q, t * heads + head);
    global float *to = AT(out) + (t * heads + head) * dv;
    for (long j = LANE; j < dv; j += LANES) to[j] = 0;
    float most = -INFINITY, sum = 0;
    for (long at = 0; at < count; at += CHUNK) {
        const int here = count - at < CHUNK ? count - at : CHUNK;
#if LANES > 1
        barrier(CLK_LOCAL_MEM_FENCE);
#endif
        for (int c = LANE; c < here; c += LANES) {
            long e = begin + at + c;
            if (picks) {
                const long i = at + c, pick = i < listed ? AT(picks)[t * width + i / block] : 0;
                e = i >= listed ? whole + i - listed : pick < 0 ? -1 : pick * block + i % block;
            }
            places[c] = -1;
            scores[c] = -INFINITY;
            if (e < begin) continue;
            const long page = page_of(AT(table), s, blocks, e / entries, pages, fault, node);
            if (page < 0) continue;
            places[c] = page * value_page + e % entries * value_entry + kv_head * value_head;
            scores[c] = scale * dot_of(query, AT(keys) + page * key_page + e % entries * key_entry + kv_head * key_head, d);
        }
#if LANES > 1
        barrier(CLK_LOCAL_MEM_FENCE);
#endif
        float now = most;
        for (int c = 0; c < here; c++) now = larger(now, scores[c]);
        const float fade = most == -INFINITY ? 1.0f : exp(most - now);
        most = now;
#if LANES > 1
        barrier(CLK_LOCAL_MEM_FENCE);
#endif
        for (int c = LANE; c < here; c += LANES) scores[c] = now == -INFINITY ? 0.0f : exp(scores[c] - now);
#if LANES > 1
        barrier(CLK_LOCAL_MEM_FENCE);
#endif
        float part = 0;
        for (int c = 0; c < here; c++) part += scores[c];
        sum = sum * fade + part;
        const long wide = dv / VECTOR;
        for (long g = LANE; g < wide; g += LANES) {
            vec total = vec_load(to + VECTOR * g) * fade;
            for (int c = 0; c < here; c++)
                if (places[c] >= 0) total += scores[c] * vec_load(AT(values) + places[c] + VECTOR * g);
            vec_store(to + VECTOR * g, total);
        }
        for (long j = wide * VECTOR + LANE; j < dv; j += LANES) {
            float total = to[j] * fade;
            for (int c = 0; c < here; c++)
                if (places[c] >= 0) total += scores[c] * (AT(values) + places[c])[j];
            to[j] = total;
        }
    }
    const bool nothing = most == -INFINITY;
    for (long j = LANE; j < dv; j += LANES) to[j] = nothing ? 0.0f : to[j] / sum;
    if (LANE == 0) AT(lse)[t * heads + head] = s < 0 ? 0.0f : nothing ? -INFINITY : most + log(sum);
}

// scores[t, e] = scale sum_h w_h relu(q_h · key_e) of the complete entries of t's sequence, -inf of all others.
kernel void index_scores(
    long tokens, long heads, long d, ROWS(float, q), ARRAY(const float, keys), long key_page, long key_entry,
    long pages, long entries, ARRAY(const int, cu), long seqs, ARRAY(const int, past), ARRAY(const int, table),
    long blocks, ROWS(float, weights), long every, float scale, ARRAY(float, out), FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long total = blocks * entries;
    RUN_OF_ROW(tokens, total);
    global float *to = AT(out) + row * total;
    const long s = sequence_of(AT(cu), seqs, row);
    const long n = seen_tokens(AT(cu), AT(past), s, row, fault, node) / every;
    if (n > total) report(fault, node);
    long e = first;
    for (; e < last && e < n; e++) {
        const long page = page_of(AT(table), s, blocks, e / entries, pages, fault, node);
        float score = 0;
        for (long h = 0; h < heads && page >= 0; h++) {
            const float x = dot_of(ROW(q, row * heads + h), AT(keys) + page * key_page + e % entries * key_entry, d);
            const float kept = larger(x, 0.0f);
            score = weights ? kept * ROW(weights, row)[h] + score : score + kept;
        }
        to[e] = scale * score;
    }
    for (; e < last; e++) to[e] = -INFINITY;
}

// merge_attention, in launches that follow one another: the maximum of all lses (`merge_most` for each part), their sum
// (`merge_sum`), then the results (`merge_part` for each part). A row here is one (token, head).
kernel void merge_most(long rows, ROWS(float, lse), ARRAY(float, most), long start)
{
    RUN_OF_ROW(1, rows);
    for (long i = first; i < last; i++) {
        const float x = *ROW(lse, i);
        AT(most)[i] = start ? x : larger(AT(most)[i], x);
    }
}

kernel void merge_sum(long rows, ROWS(float, lse), ARRAY(const float, most), ARRAY(float, sum), long start)
{
    RUN_OF_ROW(1, rows);
    for (long i = first; i < last; i++) {
        const float m = AT(most)[i], x = m == -INFINITY ? 0 : exp(*ROW(lse, i) - m);
        AT(sum)[i] = start ? x : AT(sum)[i] + x;
    }
}

kernel void merge_lse(long rows, ARRAY(const float, most), ARRAY(const float, sum), ARRAY(float, lse))
{
    RUN_OF_ROW(1, rows);
    for (long i = first; i < last; i++) {
        const float m = AT(most)[i];
        AT(lse)[i] = m == -INFINITY ? m : m + log(AT(sum)[i]);
    }
}

kernel void merge_part(
    long rows, long n, ROWS(float, x), ROWS(float, lse), ARRAY(const float, most), ARRAY(const float, sum),
    ARRAY(float, out), long start)
{
    RUN_OF_ROW(rows, n);
    const float m = AT(most)[row], own = *ROW(lse, row), share = exp(own - m) / AT(sum)[row];
    global const float *in = ROW(x, row);
    global float *to = AT(out) + row * n;
    for (long i = first; i < last; i++) {
        const float part = own == -INFINITY ? 0 : share * in[i];
        to[i] = start ? part : to[i] + part;
    }
}
