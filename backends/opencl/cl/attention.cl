// Softmax attention over a paged cache, the joining of several, and the indexer's scores.
//
// attention: the entries that a query sees are cut into spans of SPAN, in their order. Within a span a group of LANES
// work-items takes CHUNK at a time: each lane scores its share of them, all of them rescale by the same running maximum,
// then each lane adds the values of its own columns. Spans are joined in order. Where there are few queries, each span of a
// query head has a group of its own (`attention_span`) and a second launch joins them (`attention_join`); else one group
// does it all (`attention`), by the same steps: a query's bits depend on the entries that it sees and on nothing else.
// Limits: none; no memory beyond CHUNK scores a group. Bytes moved: the keys and values seen, once for each query head.

#define CHUNK 64
#define SPAN 512

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

#define SEEN_ARGS                                                                                                     \
    long tokens, long heads, long kv, long d, long dv, ROWS(float, q), ARRAY(const float, keys), long key_page,       \
        long key_entry, long key_head, ARRAY(const float, values), long value_page, long value_entry,                 \
        long value_head, long pages, long entries, ARRAY(const int, cu), long seqs, ARRAY(const int, past),           \
        ARRAY(const int, table), long blocks, ARRAY(const int, picks), long width, long every, long block,            \
        long window, float scale

// What the query of row t sees: entries `begin` and on of sequence s, or, `listed` of them picked, `count` in all.
#define SEEN(t)                                                                                                       \
    const long s = sequence_of(AT(cu), seqs, t);                                                                      \
    const long n = seen_tokens(AT(cu), AT(past), s, t, fault, node) / every;                                          \
    const long begin = window && n > window ? n - window : 0, whole = n / block * block;                              \
    const long listed = picks ? width * block : 0, count = s < 0 ? 0 : picks ? listed + n - whole : n - begin;        \
    const long kv_head = head / (heads / kv);                                                                         \
    global const float *query = ROW(q, t * heads + head)

// Entries `from` … `end` of those seen: `to` becomes sum of e^(x - most) v, `most` the largest x, `sum` that of e^(x - most).
#define ATTEND(from, end)                                                                                             \
    most = -INFINITY;                                                                                                 \
    sum = 0;                                                                                                          \
    for (long j = LANE; j < dv; j += LANES) to[j] = 0;                                                                \
    for (long at = (from); at < (end); at += CHUNK) {                                                                 \
        const int here = (end) - at < CHUNK ? (end) - at : CHUNK;                                                     \
        LOCAL_BARRIER;                                                                                                \
        for (int c = LANE; c < here; c += LANES) {                                                                    \
            long e = begin + at + c;                                                                                  \
            if (picks) {                                                                                              \
                const long i = at + c, pick = i < listed ? AT(picks)[t * width + i / block] : 0;                      \
                e = i >= listed ? whole + i - listed : pick < 0 ? -1 : pick * block + i % block;                      \
            }                                                                                                         \
            places[c] = -1;                                                                                           \
            scores[c] = -INFINITY;                                                                                    \
            if (e < begin) continue;                                                                                  \
            const long page = page_of(AT(table), s, blocks, e / entries, pages, fault, node);                         \
            if (page < 0) continue;                                                                                   \
            places[c] = page * value_page + e % entries * value_entry + kv_head * value_head;                         \
            global const float *key = AT(keys) + page * key_page + e % entries * key_entry + kv_head * key_head;      \
            scores[c] = scale * dot_of(query, key, d);                                                                \
        }                                                                                                             \
        LOCAL_BARRIER;                                                                                                \
        float now = most;                                                                                             \
        for (int c = 0; c < here; c++) now = larger(now, scores[c]);                                                  \
        const float fade = most == -INFINITY ? 1.0f : exp(most - now);                                                \
        most = now;                                                                                                   \
        LOCAL_BARRIER;                                                                                                \
        for (int c = LANE; c < here; c += LANES) scores[c] = now == -INFINITY ? 0.0f : exp(scores[c] - now);          \
        LOCAL_BARRIER;                                                                                                \
        float part = 0;                                                                                               \
        for (int c = 0; c < here; c++) part += scores[c];                                                             \
        sum = sum * fade + part;                                                                                      \
        const long wide = dv / VECTOR;                                                                                \
        for (long g = LANE; g < wide; g += LANES) {                                                                   \
            vec total = vec_load(to + VECTOR * g) * fade;                                                             \
            for (int c = 0; c < here; c++)                                                                            \
                if (places[c] >= 0) total += scores[c] * vec_load(AT(values) + places[c] + VECTOR * g);               \
            vec_store(to + VECTOR * g, total);                                                                        \
        }                                                                                                             \
        for (long j = wide * VECTOR + LANE; j < dv; j += LANES) {                                                     \
            float total = to[j] * fade;                                                                               \
            for (int c = 0; c < here; c++)                                                                            \
                if (places[c] >= 0) total += scores[c] * (AT(values) + places[c])[j];                                 \
            to[j] = total;                                                                                            \
        }                                                                                                             \
    }

#if LANES > 1
#define LOCAL_BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#else
#define LOCAL_BARRIER
#endif

// A lane's columns of `part`, with their maximum and sum, added to those of `all`; -inf is nothing yet.
inline void join(
    global float *all, global const float *part, long dv, float *most, float *sum, float part_most, float part_sum)
{
    if (part_most == -INFINITY) return;
    if (*most == -INFINITY) {
        for (long j = LANE; j < dv; j += LANES) all[j] = part[j];
        *most = part_most;
        *sum = part_sum;
        return;
    }
    const float now = larger(*most, part_most), old = exp(*most - now), own = exp(part_most - now);
    for (long j = LANE; j < dv; j += LANES) {
        const float kept = all[j] * old;
        all[j] = own * part[j] + kept;
    }
    const float kept = *sum * old;
    *sum = own * part_sum + kept;
    *most = now;
}

inline void divide(global float *all, long dv, float most, float sum)
{
    const bool nothing = most == -INFINITY;
    for (long j = LANE; j < dv; j += LANES) all[j] = nothing ? 0.0f : all[j] / sum;
}

// A group does a query head; `parts` has room for one span's result of each.
kernel void attention(SEEN_ARGS, ARRAY(float, parts), ARRAY(float, out), ARRAY(float, lse), FAULT_ARGS)
{
    local float scores[CHUNK];
    local long places[CHUNK];
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long t = get_group_id(0) / heads, head = get_group_id(0) % heads, at_row = t * heads + head;
    SEEN(t);
    global float *to = AT(parts) + at_row * dv, *all = AT(out) + at_row * dv;
    float total_most = -INFINITY, total = 0, most, sum;
    for (long first = 0; first < count; first += SPAN) {
        const long last = first + SPAN < count ? first + SPAN : count;
        ATTEND(first, last)
        join(all, to, dv, &total_most, &total, most, sum);
    }
    divide(all, dv, total_most, total);
    if (LANE == 0) AT(lse)[at_row] = s < 0 ? 0.0f : total_most == -INFINITY ? -INFINITY : total_most + log(total);
}

// A group does a span of a query head, of at most `spans`: its result to `parts`, its maximum and sum to `sizes`.
kernel void attention_span(SEEN_ARGS, long spans, ARRAY(float, parts), ARRAY(float, sizes), FAULT_ARGS)
{
    local float scores[CHUNK];
    local long places[CHUNK];
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long place = get_group_id(0), t = place / spans / heads, head = place / spans % heads;
    SEEN(t);
    const long first = place % spans * SPAN, last = first + SPAN < count ? first + SPAN : count;
    global float *to = AT(parts) + place * dv;
    float most = -INFINITY, sum = 0;
    if (first < last) {
        ATTEND(first, last)
    }
    if (LANE == 0) {
        AT(sizes)[2 * place] = most;
        AT(sizes)[2 * place + 1] = s < 0 ? -1.0f : sum;
    }
}

kernel void attention_join(
    long dv, long spans, ARRAY(const float, parts), ARRAY(const float, sizes), ARRAY(float, out), ARRAY(float, lse))
{
    const long row = get_group_id(0);
    global float *all = AT(out) + row * dv;
    global const float *size = AT(sizes) + 2 * row * spans;
    float most = -INFINITY, sum = 0;
    for (long i = 0; i < spans; i++)
        join(all, AT(parts) + (row * spans + i) * dv, dv, &most, &sum, size[2 * i], size[2 * i + 1]);
    divide(all, dv, most, sum);
    if (LANE == 0) AT(lse)[row] = size[1] == -1.0f ? 0.0f : most == -INFINITY ? -INFINITY : most + log(sum);
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
