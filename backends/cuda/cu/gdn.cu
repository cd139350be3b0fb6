// The gated delta rule, row by row, and in chunks. A head's state S [dk, dv] of one sequence is done by columns, which
// never meet. S is float32 after every row and `out` reads it so: row by row, any split of a sequence into steps gives
// the same bits. Sequences of `least` rows and more, where that is not 0, are left to the chunked form.
//
// Two kernels go row by row. gated_delta_rule: a thread does one column in place; for keys too long
// for shared memory. gated_delta_rule_shared: SIDE threads hold `wide` columns in shared memory and share each of
// them. Bytes moved: rows once, each sequence's S in and out of memory once.

KERNEL gated_delta_rule(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, i64 dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), const int *cu, i64 seqs, const int *slots,
    float *state, i64 slot_count, i64 slot_step, i64 head_step, i64 row_step, const int *keep,
    i64 tiled, float scale, float *out, i64 least, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    const i64 wide = dv, item = ITEM;
    const i64 s = item / (heads * wide), h = item / wide % heads, column = item % wide;
    if (s > 0 && s >= seqs) return;
    const i64 kh = tiled ? h % key_heads : h / (heads / key_heads);
    if (s == 0) {
        const i64 end = cu[seqs] < 0 ? 0 : cu[seqs];
        for (i64 t = end; t < tokens; t++) *(out + (t * heads + h) * dv + column) = 0.0f;
        if (seqs == 0) return;
    }
    const i64 start = first_row(cu, s), end = end_row(cu, s, tokens);
    if (start >= end || (least && end - start >= least)) return;
    if (outside(slots[s], 0, slot_count, fault, node)) return;
    const i64 slot = slots[s];
    float *mine = state + slot * slot_step + h * head_step + column;
    for (i64 t = start; t < end; t++) {
        const float *key = ROW(k, t * key_heads + kh), *query = ROW(q, t * key_heads + kh);
        const float fade = expf(ROW(decay, t)[h]);
        float says = 0;
        for (i64 i = 0; i < dk; i++) says += key[i] * (fade * *(mine + i * row_step));
        const float d = ROW(beta, t)[h] * (*(ROW(v, t * heads + h) + column) - says);
        float reads = 0;
        for (i64 i = 0; i < dk; i++) {
            const float now = key[i] * d + fade * *(mine + i * row_step);
            *(mine + i * row_step) = now;
            reads += query[i] * now;
        }
        *(out + (t * heads + h) * dv + column) = scale * reads;
        const i64 to = keep ? keep[t] : -1;
        if (outside(to, -1, slot_count, fault, node) || to < 0 || to == slot) continue;
        float *copy = mine + (to - slot) * slot_step;
        for (i64 i = 0; i < dk; i++) *(copy + i * row_step) = *(mine + i * row_step);
    }
}

#define SIDE 128 // threads of a block that shares memory



// Zeros in the padding rows of a block's columns; the groups of sequence 0 write them.
INLINE void no_rows(
    float *out, const int *cu, i64 seqs, i64 s, i64 tokens, i64 heads, i64 h, i64 dv, i64 first,
    i64 wide)
{
    if (s) return;
    const i64 end = cu[seqs] < 0 ? 0 : cu[seqs];
    for (i64 i = threadIdx.x; i < (tokens - end) * wide; i += SIDE) {
        const i64 t = end + i / wide, c = first + i % wide;
        if (c < dv) out[(t * heads + h) * dv + c] = 0;
    }
}

// Thread (part, c) of a block has entries part, part + parts, … of column c; `held` is [dk, wide], `sums` two times
// [parts, wide].
KERNEL gated_delta_rule_shared(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, i64 dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), const int *cu, i64 seqs, const int *slots,
    float *state, i64 slot_count, i64 slot_step, i64 head_step, i64 row_step, const int *keep,
    i64 tiled, float scale, float *out, i64 least, i64 wide, FAULT_ARGS)
{
    float *held = (float *)shared_room, *sums = held + dk * wide;
    check_sequences(cu, seqs, tokens, fault, node);
    const i64 tiles = (dv + wide - 1) / wide, group = GROUP, parts = SIDE / wide;
    const i64 s = group / (heads * tiles), h = group / tiles % heads, first = group % tiles * wide;
    const i64 kh = tiled ? h % key_heads : h / (heads / key_heads);
    no_rows(out, cu, seqs, s, tokens, heads, h, dv, first, wide);
    if (s >= seqs) return;
    const i64 start = first_row(cu, s), end = end_row(cu, s, tokens);
    if (start >= end || (least && end - start >= least)) return;
    if (outside(slots[s], 0, slot_count, fault, node)) return;
    const int c = threadIdx.x % wide, part = threadIdx.x / wide;
    const bool mine = first + c < dv;
    const i64 column = mine ? first + c : first, slot = slots[s];
    float *own = state + slot * slot_step + h * head_step + column;
    for (i64 i = part; i < dk; i += parts) held[i * wide + c] = own[i * row_step];
    for (i64 t = start; t < end; t++) {
        const float *key = ROW(k, t * key_heads + kh), *query = ROW(q, t * key_heads + kh);
        const float fade = expf(ROW(decay, t)[h]);
        float sum = 0;
        for (i64 i = part; i < dk; i += parts) sum += key[i] * (fade * held[i * wide + c]);
        sums[part * wide + c] = sum;
        __syncthreads();
        float says = 0;
        for (int j = 0; j < parts; j++) says += sums[j * wide + c];
        const float d = ROW(beta, t)[h] * (ROW(v, t * heads + h)[column] - says);
        sum = 0;
        const i64 to = keep ? keep[t] : -1;
        const bool kept = !outside(to, -1, slot_count, fault, node) && to >= 0 && to != slot && mine;
        for (i64 i = part; i < dk; i += parts) {
            const float now = key[i] * d + fade * held[i * wide + c];
            held[i * wide + c] = now;
            sum += query[i] * now;
            if (kept) own[(to - slot) * slot_step + i * row_step] = now;
        }
        sums[SIDE + part * wide + c] = sum;
        __syncthreads();
        float reads = 0;
        for (int j = 0; j < parts; j++) reads += sums[SIDE + j * wide + c];
        if (mine && part == 0) out[(t * heads + h) * dv + column] = scale * reads;
    }
    if (mine)
        for (i64 i = part; i < dk; i += parts) own[i * row_step] = held[i * wide + c];
}

// -- the chunked form of the rule, for prompts --------------------------------------------------------------------------

// Chunks of CHUNK_ROWS rows are cut from the first row of each sequence that has `least` rows. Two launches: delta_chunks,
// a block for each chunk and head, finds what rows of a chunk write as d = u - S^T w (chunk_wy's w and u); delta_scan, a
// group for each head and `wide` columns of a sequence, goes from chunk to chunk with S in shared memory.

#define CHUNK_ROWS 32
#define TOGETHER 8 // SIDE / wide times this is CHUNK_ROWS at least, as wide is 32 at most

// The sequence and the first row of the block's chunk; -1 where there are no more.
INLINE i64 chunk_at(const int *cu, i64 seqs, i64 tokens, i64 least, i64 group, i64 *sequence)
{
    for (i64 s = 0; s < seqs; s++) {
        const i64 start = first_row(cu, s), count = end_row(cu, s, tokens) - start;
        if (count < least) continue;
        const i64 chunks = (count + CHUNK_ROWS - 1) / CHUNK_ROWS;
        *sequence = s;
        if (group < chunks) return start + group * CHUNK_ROWS;
        group -= chunks;
    }
    return -1;
}

KERNEL delta_chunks(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, i64 dv, ROWS(float, q), ROWS(float, k), ROWS(float, v),
    ROWS(float, decay), ROWS(float, beta), const int *cu, i64 seqs, i64 tiled, i64 least,
    float *w, float *u, float *products, float *fades)
{
    __shared__ float pairs[CHUNK_ROWS * CHUNK_ROWS], whole[CHUNK_ROWS], step[CHUNK_ROWS], strength[CHUNK_ROWS];
    __shared__ const float *keys[CHUNK_ROWS], *queries[CHUNK_ROWS], *given[CHUNK_ROWS];
    const i64 group = GROUP / heads, h = GROUP % heads;
    const i64 kh = tiled ? h % key_heads : h / (heads / key_heads);
    i64 s = 0;
    const i64 begin = chunk_at(cu, seqs, tokens, least, group, &s);
    if (begin < 0) return;
    const i64 left = end_row(cu, s, tokens) - begin;
    const int rows = (int)(left < CHUNK_ROWS ? left : CHUNK_ROWS);
    for (int t = threadIdx.x; t < rows; t += SIDE) {
        step[t] = ROW(decay, begin + t)[h];
        strength[t] = ROW(beta, begin + t)[h];
        keys[t] = ROW(k, (begin + t) * key_heads + kh);
        queries[t] = ROW(q, (begin + t) * key_heads + kh);
        given[t] = ROW(v, (begin + t) * heads + h);
    }
    __syncthreads();
    for (int p = threadIdx.x; p < rows * rows; p += SIDE) {
        const int t = p / rows, i = p % rows;
        if (i > t) continue;
        const float *key = keys[t], *query = queries[t], *other = keys[i];
        float run = 0, along = 0, reads = 0;
        for (int j = t; j > i; j--) run += step[j];
        for (i64 j = 0; j < dk; j++) {
            along += key[j] * other[j];
            reads += query[j] * other[j];
        }
        const float fade = expf(run);
        pairs[t * CHUNK_ROWS + i] = fade * along;
        products[((begin + t) * heads + h) * CHUNK_ROWS + i] = fade * reads;
        if (i == 0) {
            whole[t] = expf(run + step[0]);
            fades[(begin + t) * heads + h] = whole[t];
        }
    }
    __syncthreads();
    for (i64 c = threadIdx.x; c < dk + dv; c += SIDE) {
        float mine[CHUNK_ROWS];
        const bool key = c < dk;
        float *to = key ? w + (begin * heads + h) * dk + c : u + (begin * heads + h) * dv + c - dk;
        const i64 by = heads * (key ? dk : dv);
#pragma unroll
        for (int r = 0; r < CHUNK_ROWS; r++) {
            mine[r] = 0;
            if (r >= rows) continue; // such rows of `pairs` hold nothing
            float before = 0;
#pragma unroll
            for (int i = 0; i < r; i++) before += pairs[r * CHUNK_ROWS + i] * mine[i];
            mine[r] = strength[r] * ((key ? whole[r] * keys[r][c] : given[r][c - dk]) - before);
            to[r * by] = mine[r];
        }
    }
}

// Thread (part, c) of a block does column c: of the rows of a chunk the part-th TOGETHER, of S the
// entries part, part + parts, …. `held` is S [dk, wide], `rest` the d of a chunk [CHUNK_ROWS, wide].
KERNEL delta_scan(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, i64 dv, ROWS(float, q), ROWS(float, k), ROWS(float, decay),
    const int *cu, i64 seqs, const int *slots, float *state, i64 slot_count, i64 slot_step,
    i64 head_step, i64 row_step, const int *keep, i64 tiled, float scale, float *out, i64 least,
    const float *w, const float *u, const float *products, const float *fades, i64 wide,
    FAULT_ARGS)
{
    float *held = (float *)shared_room, *rest = held + dk * wide;
    __shared__ float shares[CHUNK_ROWS], falls[CHUNK_ROWS];
    __shared__ const float *keys[CHUNK_ROWS], *queries[CHUNK_ROWS];
    const i64 tiles = (dv + wide - 1) / wide, group = GROUP, parts = SIDE / wide;
    const i64 s = group / (heads * tiles), h = group / tiles % heads, first = group % tiles * wide;
    const i64 kh = tiled ? h % key_heads : h / (heads / key_heads);
    const i64 start = first_row(cu, s), end = end_row(cu, s, tokens);
    if (end - start < least || outside(slots[s], 0, slot_count, fault, node)) return;
    const int c = threadIdx.x % wide, part = threadIdx.x / wide;
    const bool mine = first + c < dv;
    const i64 column = mine ? first + c : first, slot = slots[s];
    float *own = state + slot * slot_step + h * head_step + column;
    for (i64 i = part; i < dk; i += parts) held[i * wide + c] = own[i * row_step];
    for (i64 begin = start; begin < end; begin += CHUNK_ROWS) {
        const int rows = end - begin < CHUNK_ROWS ? end - begin : CHUNK_ROWS;
        float reads[TOGETHER];
        const int at = part * TOGETHER;
        __syncthreads();
        for (int r = threadIdx.x; r < rows; r += SIDE) {
            keys[r] = ROW(k, (begin + r) * key_heads + kh);
            queries[r] = ROW(q, (begin + r) * key_heads + kh);
            falls[r] = ROW(decay, begin + r)[h];
        }
        __syncthreads();
        if (at < rows) {
            const float *writes[TOGETHER], *asks[TOGETHER];
            float says[TOGETHER];
#pragma unroll
            for (int r = 0; r < TOGETHER; r++) {
                const int t = at + r < rows ? at + r : rows - 1;
                writes[r] = w + ((begin + t) * heads + h) * dk;
                asks[r] = queries[t];
                says[r] = reads[r] = 0;
            }
            for (i64 i = 0; i < dk; i++) {
                const float x = held[i * wide + c];
#pragma unroll
                for (int r = 0; r < TOGETHER; r++) {
                    says[r] += writes[r][i] * x;
                    reads[r] += asks[r][i] * x;
                }
            }
#pragma unroll
            for (int r = 0; r < TOGETHER; r++)
                if (at + r < rows) rest[(at + r) * wide + c] = u[((begin + at + r) * heads + h) * dv + column] - says[r];
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
            if (at + r >= rows) continue;
            const i64 t = (begin + at + r) * heads + h;
            float now = fades[t] * reads[r];
#pragma unroll 1
            for (int i = 0; i <= at + r; i++) now += products[t * CHUNK_ROWS + i] * rest[i * wide + c];
            if (mine) out[t * dv + column] = scale * now;
        }
        for (int t = 0; t < rows; t++) {
            i64 to = keep ? keep[begin + t] : -1;
            if (outside(to, -1, slot_count, fault, node) || to == slot) to = -1;
            const bool ends = t == rows - 1;
            if (!ends && to < 0) continue;
            __syncthreads();
            for (int r = threadIdx.x; r <= t; r += SIDE) {
                float run = 0;
                for (int j = t; j > r; j--) run += falls[j];
                shares[r] = expf(run);
            }
            __syncthreads();
            const float fade = fades[(begin + t) * heads + h];
            for (i64 i = part; i < dk; i += parts) {
                float sum = fade * held[i * wide + c];
                for (int r = 0; r <= t; r++)
                    sum += shares[r] * keys[r][i] * rest[r * wide + c];
                if (to >= 0 && mine) own[(to - slot) * slot_step + i * row_step] = sum;
                if (ends) held[i * wide + c] = sum;
            }
        }
    }
    if (mine)
        for (i64 i = part; i < dk; i += parts) own[i * row_step] = held[i * wide + c];
}

// -- ops of the chunked form: chunks of `chunk` rows are cut from the first row of each sequence -----------------------------

// E_ti is e to the sum of decays of the rows after i up to t, added from t backwards: no differences, -inf is fine.

INLINE i64 chunk_begin(const int *cu, i64 s, i64 t, i64 chunk)
{
    const i64 start = first_row(cu, s);
    return start + (t - start) / chunk * chunk;
}

// products[t, h, i] = E_ti (x_t · k_i) for rows i of t's chunk before t, and with t where `whole`;
// fades[t, h] = E_t, from the chunk's start on. A thread does one (t, h).
KERNEL chunk_products(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, ROWS(float, x), ROWS(float, k), ROWS(float, decay),
    const int *cu, i64 seqs, i64 chunk, i64 tiled, i64 whole, float *products, float *fades)
{
    const i64 t = ITEM / heads, h = ITEM % heads;
    if (t >= tokens) return;
    const i64 s = sequence_of(cu, seqs, t), kh = tiled ? h % key_heads : h / (heads / key_heads);
    if (s < 0) return;
    const i64 begin = chunk_begin(cu, s, t, chunk);
    const float *mine = ROW(x, t * key_heads + kh);
    float run = 0;
    for (i64 i = t; i >= begin; i--) {
        float sum = 0;
        if (i < t || whole) {
            const float *other = ROW(k, i * key_heads + kh);
            for (i64 j = 0; j < dk; j++) sum += mine[j] * other[j];
        }
        products[(t * heads + h) * chunk + i - begin] = expf(run) * sum;
        run += ROW(decay, i)[h];
    }
    fades[t * heads + h] = expf(run);
}

// w and u by forward substitution; a thread does one column of one head of w or u, for one chunk, whose first
// row is its t. Padding rows give zeros.
KERNEL chunk_wy(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, i64 dv, ROWS(float, k), ROWS(float, v), ROWS(float, beta),
    const int *cu, i64 seqs, i64 chunk, i64 tiled, const float *products, const float *fades,
    float *w, float *u, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    const i64 wide = dk, both = wide + dv;
    const i64 t = ITEM / (heads * both), h = ITEM / both % heads;
    if (t >= tokens) return;
    const bool keys = ITEM % both < wide;
    const i64 n = keys ? dk : dv, column = (ITEM % both - (keys ? 0 : wide));
    const i64 kh = tiled ? h % key_heads : h / (heads / key_heads);
    float *to = (keys ? w : u) + h * n + column;
    const i64 s = sequence_of(cu, seqs, t);
    if (s < 0) {
        *(to + t * heads * n) = 0.0f;
        return;
    }
    const i64 end = end_row(cu, s, tokens);
    if (chunk_begin(cu, s, t, chunk) != t) return;
    for (i64 r = t; r < t + chunk && r < end; r++) {
        float own = keys ? fades[r * heads + h] * *(ROW(k, r * key_heads + kh) + column)
                       : *(ROW(v, r * heads + h) + column);
        float before = 0;
        for (i64 i = t; i < r; i++)
            before += products[(r * heads + h) * chunk + i - t] * *(to + i * heads * n);
        *(to + r * heads * n) = ROW(beta, r)[h] * (own - before);
    }
}

// From chunk to chunk: d_i = u_i - S^T w_i, out_t = scale (E_t S^T q_t + sum of products d_i), then S after the last
// row, and after each row that `keep` names. A thread does one column of one head of one sequence; its d lie in
// `rest`.
KERNEL chunk_delta_scan(
    i64 tokens, i64 key_heads, i64 heads, i64 dk, i64 dv, ROWS(float, q), ROWS(float, k), ROWS(float, w),
    ROWS(float, u), ROWS(float, decay), const int *cu, i64 seqs, const int *slots, float *state,
    i64 slot_count, i64 slot_step, i64 head_step, i64 row_step, const int *keep, i64 chunk, i64 tiled,
    float scale, const float *products, const float *fades, float *rest, float *out,
    FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    const i64 wide = dv, item = ITEM;
    const i64 s = item / (heads * wide), h = item / wide % heads, column = item % wide;
    if (s > 0 && s >= seqs) return;
    const i64 kh = tiled ? h % key_heads : h / (heads / key_heads);
    if (s == 0) {
        const i64 end = cu[seqs] < 0 ? 0 : cu[seqs];
        for (i64 t = end; t < tokens; t++) *(out + (t * heads + h) * dv + column) = 0.0f;
        if (seqs == 0) return;
    }
    const i64 start = first_row(cu, s), end = end_row(cu, s, tokens);
    if (start >= end || outside(slots[s], 0, slot_count, fault, node)) return;
    const i64 slot = slots[s];
    float *mine = state + slot * slot_step + h * head_step + column;
    for (i64 begin = start; begin < end; begin += chunk) {
        const i64 stop = begin + chunk < end ? begin + chunk : end;
        for (i64 t = begin; t < stop; t++) {
            const float *row = ROW(w, t * heads + h), *query = ROW(q, t * key_heads + kh);
            float says = 0, reads = 0;
            for (i64 i = 0; i < dk; i++) {
                const float held = *(mine + i * row_step);
                says += row[i] * held;
                reads += query[i] * held;
            }
            const i64 at = (t * heads + h) * dv + column;
            *(rest + at) = *(ROW(u, t * heads + h) + column) - says;
            float now = fades[t * heads + h] * reads;
            for (i64 i = begin; i <= t; i++)
                now += products[(t * heads + h) * chunk + i - begin]
                     * *(rest + (i * heads + h) * dv + column);
            *(out + at) = scale * now;
        }
        for (i64 t = begin; t < stop; t++) {
            i64 to = keep ? keep[t] : -1;
            if (outside(to, -1, slot_count, fault, node) || to == slot) to = -1;
            const bool ends = t == stop - 1;
            if (!ends && to < 0) continue;
            float *copy = mine + (to - slot) * slot_step;
            for (i64 i = 0; i < dk; i++) {
                float sum = fades[t * heads + h] * *(mine + i * row_step);
                float run = 0;
                for (i64 r = t; r >= begin; r--) {
                    const float share = expf(run) * ROW(k, r * key_heads + kh)[i];
                    sum += share * *(rest + (r * heads + h) * dv + column);
                    run += ROW(decay, r)[h];
                }
                if (to >= 0) *(copy + i * row_step) = sum;
                if (ends) *(mine + i * row_step) = sum;
            }
        }
    }
}
