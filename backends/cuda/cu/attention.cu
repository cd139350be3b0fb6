// Softmax attention over a paged cache, the joining of several, and the indexer's scores.
//
// attention: a block does one query head. Entries are taken CHUNK at a time: each warp scores its share of them, all of
// them rescale by the same running maximum, then each thread adds the values of its own columns. The result so far lies in
// `out`. A query's bits depend on the entries that it sees and on nothing else.
// Limits: none; no memory beyond CHUNK scores a block. Bytes moved: the keys and values seen, once for each query head.

#define CHUNK 64
#define THREADS 128

// Where entry e of sequence s lies, in pages; -1 and a fault where the table, or the cache, has no such page.
INLINE i64 page_of(
    const int *table, i64 s, i64 blocks, i64 block, i64 pages, FAULT_ARGS)
{
    if (outside(block, 0, blocks, fault, node)) return -1;
    const i64 page = table[s * blocks + block];
    return outside(page, 0, pages, fault, node) ? -1 : page;
}

INLINE float dot_of(const float *a, const float *b, i64 n)
{
    float sum = 0;
    for (i64 i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// Tokens of row t's sequence up to and with t; 0 for padding and, as a fault, for a negative past.
INLINE i64 seen_tokens(const int *cu, const int *past, i64 s, i64 t, FAULT_ARGS)
{
    if (s < 0) return 0;
    if (past[s] < 0) { report(fault, node); return 0; }
    return (i64)past[s] + t - first_row(cu, s) + 1;
}

// picks[t, i] = selected[t, i], or -1 where the same block stands before it. A block that is not one of the whole ones
// is a fault.
KERNEL attention_picks(
    i64 tokens, i64 width, const int *selected, const int *cu, i64 seqs, const int *past,
    i64 every, i64 block, int *picks, FAULT_ARGS)
{
    ENTRY_OF_ROW(tokens, width)
    const int *row_of = selected + row * width;
    const i64 s = sequence_of(cu, seqs, row);
    const i64 whole = seen_tokens(cu, past, s, row, fault, node) / every / block;
    {
        int pick = row_of[i];
        if (s < 0 || outside(pick, -1, whole, fault, node)) pick = -1;
        for (i64 j = 0; j < i && pick >= 0; j++)
            if (row_of[j] == pick) pick = -1;
        picks[row * width + i] = pick;
    }
}

KERNEL attention(
    i64 tokens, i64 heads, i64 kv, i64 d, i64 dv, ROWS(float, q), const float *keys, i64 key_page,
    i64 key_entry, i64 key_head, const float *values, i64 value_page, i64 value_entry, i64 value_head,
    i64 pages, i64 entries, const int *cu, i64 seqs, const int *past, const int *table,
    i64 blocks, const int *picks, i64 width, i64 every, i64 block, i64 window, float scale,
    float *out, float *lse, FAULT_ARGS)
{
    __shared__ float scores[CHUNK];
    __shared__ i64 places[CHUNK];
    check_sequences(cu, seqs, tokens, fault, node);
    const i64 t = GROUP / heads, head = GROUP % heads, kv_head = head / (heads / kv);
    const i64 s = sequence_of(cu, seqs, t);
    const i64 n = seen_tokens(cu, past, s, t, fault, node) / every;
    const i64 begin = window && n > window ? n - window : 0, whole = n / block * block;
    const i64 listed = picks ? width * block : 0, count = s < 0 ? 0 : picks ? listed + n - whole : n - begin;
    const float *query = ROW(q, t * heads + head);
    float *to = out + GROUP * dv;
    for (i64 j = threadIdx.x; j < dv; j += THREADS) to[j] = 0;
    float most = MINUS_INFINITY, sum = 0;
    for (i64 at = 0; at < count; at += CHUNK) {
        const int here = (int)(count - at < CHUNK ? count - at : CHUNK);
        __syncthreads();
        for (int c = threadIdx.x >> 5; c < here; c += THREADS / 32) {
            i64 e = begin + at + c;
            if (picks) {
                const i64 i = at + c, pick = i < listed ? picks[t * width + i / block] : 0;
                e = i >= listed ? whole + i - listed : pick < 0 ? -1 : pick * block + i % block;
            }
            const i64 page = e < begin ? -1 : page_of(table, s, blocks, e / entries, pages, fault, node);
            float part = 0;
            if (page >= 0) {
                const float *key = keys + page * key_page + e % entries * key_entry + kv_head * key_head;
                for (i64 j = LANE; j < d; j += 32) part += query[j] * key[j];
            }
            part = warp_sum(part);
            if (LANE == 0) {
                places[c] = page < 0 ? -1 : page * value_page + e % entries * value_entry + kv_head * value_head;
                scores[c] = page < 0 ? MINUS_INFINITY : scale * part;
            }
        }
        __syncthreads();
        float now = most;
        for (int c = 0; c < here; c++) now = larger(now, scores[c]);
        const float fade = most == MINUS_INFINITY ? 1.0f : expf(most - now);
        most = now;
        __syncthreads();
        for (int c = threadIdx.x; c < here; c += THREADS) scores[c] = now == MINUS_INFINITY ? 0.0f : expf(scores[c] - now);
        __syncthreads();
        float part = 0;
        for (int c = 0; c < here; c++) part += scores[c];
        sum = sum * fade + part;
        for (i64 j = threadIdx.x; j < dv; j += THREADS) {
            float total = to[j] * fade;
            for (int c = 0; c < here; c++)
                if (places[c] >= 0) total += scores[c] * (values + places[c])[j];
            to[j] = total;
        }
    }
    const bool nothing = most == MINUS_INFINITY;
    for (i64 j = threadIdx.x; j < dv; j += THREADS) to[j] = nothing ? 0.0f : to[j] / sum;
    if (threadIdx.x == 0) lse[GROUP] = s < 0 ? 0.0f : nothing ? MINUS_INFINITY : most + logf(sum);
}

// scores[t, e] = scale sum_h w_h relu(q_h · key_e) of the complete entries of t's sequence, -inf of all others.
KERNEL index_scores(
    i64 tokens, i64 heads, i64 d, ROWS(float, q), const float *keys, i64 key_page, i64 key_entry,
    i64 pages, i64 entries, const int *cu, i64 seqs, const int *past, const int *table,
    i64 blocks, ROWS(float, weights), i64 every, float scale, float *out, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    const i64 total = blocks * entries;
    ENTRY_OF_ROW(tokens, total)
    const i64 s = sequence_of(cu, seqs, row), n = seen_tokens(cu, past, s, row, fault, node) / every;
    if (n > total) report(fault, node);
    float score = 0;
    const i64 page = i < n ? page_of(table, s, blocks, i / entries, pages, fault, node) : -1;
    for (i64 h = 0; h < heads && page >= 0; h++) {
        const float x = dot_of(ROW(q, row * heads + h), keys + page * key_page + i % entries * key_entry, d);
        const float kept = larger(x, 0.0f);
        score = weights ? kept * ROW(weights, row)[h] + score : score + kept;
    }
    out[ITEM] = i < n ? scale * score : MINUS_INFINITY;
}

// merge_attention, in launches that follow one another: the maximum of all lses (`merge_most` for each part), their sum
// (`merge_sum`), then the results (`merge_part` for each part). A row here is one (token, head).
KERNEL merge_most(i64 rows, ROWS(float, lse), float *most, i64 start)
{
    ENTRY_OF_ROW(1, rows)
    {
        const float x = *ROW(lse, i);
        most[i] = start ? x : larger(most[i], x);
    }
}

KERNEL merge_sum(i64 rows, ROWS(float, lse), const float *most, float *sum, i64 start)
{
    ENTRY_OF_ROW(1, rows)
    {
        const float m = most[i], x = m == MINUS_INFINITY ? 0 : expf(*ROW(lse, i) - m);
        sum[i] = start ? x : sum[i] + x;
    }
}

KERNEL merge_lse(i64 rows, const float *most, const float *sum, float *lse)
{
    ENTRY_OF_ROW(1, rows)
    {
        const float m = most[i];
        lse[i] = m == MINUS_INFINITY ? m : m + logf(sum[i]);
    }
}

KERNEL merge_part(
    i64 rows, i64 n, ROWS(float, x), ROWS(float, lse), const float *most, const float *sum,
    float *out, i64 start)
{
    ENTRY_OF_ROW(rows, n)
    const float m = most[row], own = *ROW(lse, row), share = expf(own - m) / sum[row];
    const float *in = ROW(x, row);
    float *to = out + row * n;
    {
        const float part = own == MINUS_INFINITY ? 0 : share * in[i];
        to[i] = start ? part : to[i] + part;
    }
}
