// The gated delta rule, row by row, and in chunks. A head's state S [dk, dv] of one sequence is done by columns, which
// never meet. S is float32 after every row and `out` reads it so: row by row, any split of a sequence into steps gives
// the same bits. Sequences of `least` rows and more, where that is not 0, are left to the chunked form.
//
// Two kernels go row by row. gated_delta_rule: a work-item does VECTOR columns in place; for processors, whose cache
// holds them. gated_delta_rule_shared: SIDE work-items hold `wide` columns in local memory and share each of them; for
// GPUs. Bytes moved: rows once, each sequence's S in and out of memory once.

kernel void gated_delta_rule(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), ARRAY(const int, cu), long seqs, ARRAY(const int, slots),
    ARRAY(float, state), long slot_count, long slot_step, long head_step, long row_step, ARRAY(const int, keep),
    long tiled, float scale, ARRAY(float, out), long least, FAULT_ARGS)
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
    if (start >= end || (least && end - start >= least)) return;
    if (outside(AT(slots)[s], 0, slot_count, fault, node)) return;
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

#if SIDE > 1
#define BOTH_BARRIER barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)

// Zeros in the padding rows of a group's columns; the groups of sequence 0 write them.
inline void no_rows(
    global float *out, global const int *cu, long seqs, long s, long tokens, long heads, long h, long dv, long first,
    long wide)
{
    if (s) return;
    const long end = cu[seqs] < 0 ? 0 : cu[seqs];
    for (long i = get_local_id(0); i < (tokens - end) * wide; i += SIDE) {
        const long t = end + i / wide, c = first + i % wide;
        if (c < dv) out[(t * heads + h) * dv + c] = 0;
    }
}

// Work-item (part, c) of a group has entries part, part + parts, … of column c; `held` is [dk, wide], `sums` two times
// [parts, wide].
kernel void gated_delta_rule_shared(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), ARRAY(const int, cu), long seqs, ARRAY(const int, slots),
    ARRAY(float, state), long slot_count, long slot_step, long head_step, long row_step, ARRAY(const int, keep),
    long tiled, float scale, ARRAY(float, out), long least, long wide, local float *held, local float *sums, FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    const long tiles = (dv + wide - 1) / wide, group = get_group_id(0), parts = SIDE / wide;
    const long s = group / (heads * tiles), h = group / tiles % heads, first = group % tiles * wide;
    const long kh = tiled ? h % key_heads : h / (heads / key_heads);
    no_rows(AT(out), AT(cu), seqs, s, tokens, heads, h, dv, first, wide);
    if (s >= seqs) return;
    const long start = first_row(AT(cu), s), end = end_row(AT(cu), s, tokens);
    if (start >= end || (least && end - start >= least)) return;
    if (outside(AT(slots)[s], 0, slot_count, fault, node)) return;
    const int c = get_local_id(0) % wide, part = get_local_id(0) / wide;
    const bool mine = first + c < dv;
    const long column = mine ? first + c : first, slot = AT(slots)[s];
    global float *own = AT(state) + slot * slot_step + h * head_step + column;
    for (long i = part; i < dk; i += parts) held[i * wide + c] = own[i * row_step];
    for (long t = start; t < end; t++) {
        global const float *key = ROW(k, t * key_heads + kh), *query = ROW(q, t * key_heads + kh);
        const float fade = exp(ROW(decay, t)[h]);
        float sum = 0;
        for (long i = part; i < dk; i += parts) sum += key[i] * (fade * held[i * wide + c]);
        sums[part * wide + c] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        float says = 0;
        for (int j = 0; j < parts; j++) says += sums[j * wide + c];
        const float d = ROW(beta, t)[h] * (ROW(v, t * heads + h)[column] - says);
        sum = 0;
        const long to = keep ? AT(keep)[t] : -1;
        const bool kept = !outside(to, -1, slot_count, fault, node) && to >= 0 && to != slot && mine;
        for (long i = part; i < dk; i += parts) {
            const float now = key[i] * d + fade * held[i * wide + c];
            held[i * wide + c] = now;
            sum += query[i] * now;
            if (kept) own[(to - slot) * slot_step + i * row_step] = now;
        }
        sums[SIDE + part * wide + c] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        float reads = 0;
        for (int j = 0; j < parts; j++) reads += sums[SIDE + j * wide + c];
        if (mine && part == 0) AT(out)[(t * heads + h) * dv + column] = scale * reads;
    }
    if (mine)
        for (long i = part; i < dk; i += parts) own[i * row_step] = held[i * wide + c];
}

// -- the chunked form of the rule, for prompts --------------------------------------------------------------------------

// Chunks of CHUNK_ROWS rows are cut from the first row of each sequence that has `least` rows. Two launches: delta_chunks,
// a group for each chunk and head, finds what rows of a chunk write as d = u - S^T w (chunk_wy's w and u); delta_scan, a
// group for each head and `wide` columns of a sequence, goes from chunk to chunk with S in local memory.

#define CHUNK_ROWS 32
#define TOGETHER 8

// The sequence and the first row of the group's chunk; -1 where there are no more.
inline long chunk_at(global const int *cu, long seqs, long tokens, long least, long group, long *sequence)
{
    for (long s = 0; s < seqs; s++) {
        const long start = first_row(cu, s), count = end_row(cu, s, tokens) - start;
        if (count < least) continue;
        const long chunks = (count + CHUNK_ROWS - 1) / CHUNK_ROWS;
        *sequence = s;
        if (group < chunks) return start + group * CHUNK_ROWS;
        group -= chunks;
    }
    return -1;
}

kernel void delta_chunks(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), ARRAY(const int, cu), long seqs, long tiled, long least,
    ARRAY(float, w), ARRAY(float, u), ARRAY(float, products), ARRAY(float, fades))
{
    local float pairs[CHUNK_ROWS * CHUNK_ROWS], whole[CHUNK_ROWS], step[CHUNK_ROWS];
    const long group = get_group_id(0) / heads, h = get_group_id(0) % heads;
    const long kh = tiled ? h % key_heads : h / (heads / key_heads);
    long s = 0;
    const long begin = chunk_at(AT(cu), seqs, tokens, least, group, &s);
    if (begin < 0) return;
    const long left = end_row(AT(cu), s, tokens) - begin;
    const int rows = left < CHUNK_ROWS ? left : CHUNK_ROWS;
    for (int t = get_local_id(0); t < rows; t += SIDE) step[t] = ROW(decay, begin + t)[h];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int p = get_local_id(0); p < rows * rows; p += SIDE) {
        const int t = p / rows, i = p % rows;
        if (i > t) continue;
        global const float *key = ROW(k, (begin + t) * key_heads + kh), *query = ROW(q, (begin + t) * key_heads + kh);
        global const float *other = ROW(k, (begin + i) * key_heads + kh);
        float run = 0, keys = 0, reads = 0;
        for (int j = t; j > i; j--) run += step[j];
        for (long j = 0; j < dk; j++) {
            keys += key[j] * other[j];
            reads += query[j] * other[j];
        }
        const float fade = exp(run);
        pairs[t * CHUNK_ROWS + i] = fade * keys;
        AT(products)[((begin + t) * heads + h) * CHUNK_ROWS + i] = fade * reads;
        if (i == 0) {
            whole[t] = exp(run + step[0]);
            AT(fades)[(begin + t) * heads + h] = whole[t];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (long c = get_local_id(0); c < dk + dv; c += SIDE) {
        float mine[CHUNK_ROWS];
#pragma unroll
        for (int r = 0; r < CHUNK_ROWS; r++) {
            if (r >= rows) continue;
            const long t = begin + r;
            float own = c < dk ? whole[r] * ROW(k, t * key_heads + kh)[c] : ROW(v, t * heads + h)[c - dk];
            float before = 0;
#pragma unroll
            for (int i = 0; i < r; i++) before += pairs[r * CHUNK_ROWS + i] * mine[i];
            mine[r] = ROW(beta, t)[h] * (own - before);
            if (c < dk) AT(w)[(t * heads + h) * dk + c] = mine[r];
            else AT(u)[(t * heads + h) * dv + c - dk] = mine[r];
        }
    }
}

// Work-item (part, c) of a group does column c: of the rows of a chunk blocks part, part + parts, … of TOGETHER, of S the
// entries part, part + parts, …. `held` is S [dk, wide], `rest` the d of a chunk [CHUNK_ROWS, wide].
kernel void delta_scan(
    long tokens, long key_heads, long heads, long dk, long dv, ROWS(float, q), ROWS(float, k), ROWS(float, decay),
    ARRAY(const int, cu), long seqs, ARRAY(const int, slots), ARRAY(float, state), long slot_count, long slot_step,
    long head_step, long row_step, ARRAY(const int, keep), long tiled, float scale, ARRAY(float, out), long least,
    ARRAY(const float, w), ARRAY(const float, u), ARRAY(const float, products), ARRAY(const float, fades), long wide,
    local float *held, local float *rest, FAULT_ARGS)
{
    local float shares[CHUNK_ROWS];
    const long tiles = (dv + wide - 1) / wide, group = get_group_id(0), parts = SIDE / wide;
    const long s = group / (heads * tiles), h = group / tiles % heads, first = group % tiles * wide;
    const long kh = tiled ? h % key_heads : h / (heads / key_heads);
    const long start = first_row(AT(cu), s), end = end_row(AT(cu), s, tokens);
    if (end - start < least || outside(AT(slots)[s], 0, slot_count, fault, node)) return;
    const int c = get_local_id(0) % wide, part = get_local_id(0) / wide;
    const bool mine = first + c < dv;
    const long column = mine ? first + c : first, slot = AT(slots)[s];
    global float *own = AT(state) + slot * slot_step + h * head_step + column;
    for (long i = part; i < dk; i += parts) held[i * wide + c] = own[i * row_step];
    for (long begin = start; begin < end; begin += CHUNK_ROWS) {
        const int rows = end - begin < CHUNK_ROWS ? end - begin : CHUNK_ROWS;
        float reads[CHUNK_ROWS / TOGETHER][TOGETHER];
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (int b = 0; b < CHUNK_ROWS / TOGETHER; b++) {
            const int at = (b * parts + part) * TOGETHER;
            if (at >= rows) continue;
            global const float *writes[TOGETHER], *queries[TOGETHER];
            float says[TOGETHER];
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                const long t = begin + (at + r < rows ? at + r : rows - 1);
                writes[r] = AT(w) + (t * heads + h) * dk;
                queries[r] = ROW(q, t * key_heads + kh);
                says[r] = reads[b][r] = 0;
            }
            for (long i = 0; i < dk; i++) {
                const float x = held[i * wide + c];
#pragma unroll
                for (int r = 0; r < TOGETHER; r++) {
                    says[r] += writes[r][i] * x;
                    reads[b][r] += queries[r][i] * x;
                }
            }
#pragma unroll
            for (int r = 0; r < TOGETHER; r++)
                if (at + r < rows) rest[(at + r) * wide + c] = AT(u)[((begin + at + r) * heads + h) * dv + column] - says[r];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (int b = 0; b < CHUNK_ROWS / TOGETHER; b++)
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                const int at = (b * parts + part) * TOGETHER + r;
                if (at >= rows) continue;
                const long t = (begin + at) * heads + h;
                float now = AT(fades)[t] * reads[b][r];
                for (int i = 0; i <= at; i++) now += AT(products)[t * CHUNK_ROWS + i] * rest[i * wide + c];
                if (mine) AT(out)[t * dv + column] = scale * now;
            }
        for (int t = 0; t < rows; t++) {
            long to = keep ? AT(keep)[begin + t] : -1;
            if (outside(to, -1, slot_count, fault, node) || to == slot) to = -1;
            const bool ends = t == rows - 1;
            if (!ends && to < 0) continue;
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int r = get_local_id(0); r <= t; r += SIDE) {
                float run = 0;
                for (int j = t; j > r; j--) run += ROW(decay, begin + j)[h];
                shares[r] = exp(run);
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            const float fade = AT(fades)[(begin + t) * heads + h];
            for (long i = part; i < dk; i += parts) {
                float sum = fade * held[i * wide + c];
                for (int r = 0; r <= t; r++)
                    sum += shares[r] * ROW(k, (begin + r) * key_heads + kh)[i] * rest[r * wide + c];
                if (to >= 0 && mine) own[(to - slot) * slot_step + i * row_step] = sum;
                if (ends) held[i * wide + c] = sum;
            }
        }
    }
    if (mine)
        for (long i = part; i < dk; i += parts) own[i * row_step] = held[i * wide + c];
}
#endif

// -- ops of the chunked form: chunks of `chunk` rows are cut from the first row of each sequence -----------------------------

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
