// Rows through the experts that a router chose for them. One program for each type of weight; dot products are those of
// linear.cl. An expert of -1 gives zeros and is not read; another id outside of the experts is a fault. No atomics on
// values: each entry of a result has one owner, who adds in the order of j.

// out[t, j, c] = weight[experts[t, j], c] · x[t]; a group makes `columns` columns of one (t, j).
kernel void expert_linear(
    long pairs, long k, long n, long m, long experts_count, long columns, ROWS(float, x), ARRAY(const int, experts),
    ARRAY(const uchar, weights), long row_bytes, ARRAY(float, out), FAULT_ARGS)
{
    SCRATCH;
    const long wide = (m + columns - 1) / columns;
    const long pair = get_group_id(0) / wide, first = get_group_id(0) % wide * columns;
    const long expert = AT(experts)[pair];
    const bool none = outside(expert, -1, experts_count, fault, node) || expert < 0;
    global const float *in[TILE];
    in[0] = ROW(x, pair / k);
    for (long c = first; c < first + columns && c < m; c++) {
        float sum = 0;
        if (!none) dots(1, in, AT(weights) + (expert * m + c) * row_bytes, n, &sum, scratch);
        if (LANE == 0) AT(out)[pair * m + c] = sum;
    }
}

// out[t, c] = sum_j mix[t, j] (weight[experts[t, j], c] · h[t, j]); a group makes `columns` columns of one t.
kernel void expert_combine(
    long tokens, long k, long n, long m, long experts_count, long columns, ROWS(float, h), ARRAY(const int, experts),
    ROWS(float, mix), ARRAY(const uchar, weights), long row_bytes, ARRAY(float, out), FAULT_ARGS)
{
    SCRATCH;
    const long wide = (n + columns - 1) / columns;
    const long t = get_group_id(0) / wide, first = get_group_id(0) % wide * columns;
    for (long c = first; c < first + columns && c < n; c++) {
        float total = 0;
        for (long j = 0; j < k; j++) {
            const long expert = AT(experts)[t * k + j];
            if (outside(expert, -1, experts_count, fault, node) || expert < 0) continue;
            global const float *in[TILE];
            float sum;
            in[0] = ROW(h, t * k + j);
            dots(1, in, AT(weights) + (expert * n + c) * row_bytes, m, &sum, scratch);
            total = ROW(mix, t)[j] * sum + total;
        }
        if (LANE == 0) AT(out)[t * n + c] = total;
    }
}

// Many rows: pairs (t, j) in the order of their expert, TILE of one expert together, so that they share the reading and
// unpacking of its weights as rows of `linear` do, and with the same bits as each alone.

// counts[e]: how many pairs go to expert e.
kernel void expert_counts(
    long pairs, long experts_count, ARRAY(const int, experts), ARRAY(int, counts), FAULT_ARGS)
{
    const long e = get_global_id(0);
    if (e >= experts_count) return;
    int count = 0;
    for (long p = 0; p < pairs; p++) count += AT(experts)[p] == e;
    AT(counts)[e] = count;
    if (e == 0)
        for (long p = 0; p < pairs; p++) outside(AT(experts)[p], -1, experts_count, fault, node);
}

// order[…]: the pairs by expert, those of one as they come; tiles[i] = (expert, its first place in `order`, how many),
// of experts in rising order, then (-1, 0, 0).
kernel void expert_tiles(
    long pairs, long experts_count, long tile_count, ARRAY(const int, experts), ARRAY(const int, counts),
    ARRAY(int, order), ARRAY(int, tiles))
{
    const long e = get_global_id(0);
    if (e >= experts_count) return;
    long first = 0, tile = 0;
    for (long i = 0; i < e; i++) {
        first += AT(counts)[i];
        tile += (AT(counts)[i] + TILE - 1) / TILE;
    }
    const long count = AT(counts)[e];
    for (long at = 0; at < count; at += TILE, tile++) {
        AT(tiles)[3 * tile] = e;
        AT(tiles)[3 * tile + 1] = first + at;
        AT(tiles)[3 * tile + 2] = count - at < TILE ? count - at : TILE;
    }
    for (long p = 0; p < pairs; p++)
        if (AT(experts)[p] == e) AT(order)[first++] = p;
    if (e == experts_count - 1)
        for (; tile < tile_count; tile++) AT(tiles)[3 * tile] = -1;
}

// out[p] = weight[expert of p] · row p / share of x for the pairs of a tile; a group makes `columns` columns of one tile.
// The rows of pairs without an expert are not written.
kernel void expert_products(
    long tile_count, long share, long n, long m, long columns, ROWS(float, x), ARRAY(const int, order),
    ARRAY(const int, tiles), ARRAY(const uchar, weights), long row_bytes, ARRAY(float, out))
{
    SCRATCH;
    const long wide = (m + columns - 1) / columns;
    const long tile = get_group_id(0) / wide, first = get_group_id(0) % wide * columns;
    const long expert = AT(tiles)[3 * tile];
    if (expert < 0) return;
    const long count = AT(tiles)[3 * tile + 2];
    global const int *mine = AT(order) + AT(tiles)[3 * tile + 1];
    global const float *in[TILE];
    float sums[TILE];
    for (int r = 0; r < TILE; r++) in[r] = ROW(x, mine[r < count ? r : count - 1] / share);
    for (long c = first; c < first + columns && c < m; c++) {
        dots(TILE, in, AT(weights) + (expert * m + c) * row_bytes, n, sums, scratch);
        if (LANE == 0)
            for (int r = 0; r < count; r++) AT(out)[mine[r] * m + c] = sums[r];
    }
}

// Zeros in the rows of pairs without an expert.
kernel void expert_none(long pairs, long n, ARRAY(const int, experts), ARRAY(float, out))
{
    RUN_OF_ROW(pairs, n);
    if (AT(experts)[row] >= 0) return;
    for (long i = first; i < last; i++) AT(out)[row * n + i] = 0;
}

// out[t, c] = sum_j mix[t, j] each[t, j, c], in the order of j, without those that have no expert.
kernel void expert_sum(
    long tokens, long n, long k, long experts_count, ARRAY(const int, experts), ROWS(float, mix),
    ARRAY(const float, each), ARRAY(float, out))
{
    RUN_OF_ROW(tokens, n);
    global float *to = AT(out) + row * n;
    for (long i = first; i < last; i++) to[i] = 0;
    for (long j = 0; j < k; j++) {
        const int expert = AT(experts)[row * k + j];
        if (expert < 0 || expert >= experts_count) continue;
        const float share = ROW(mix, row)[j];
        global const float *from = AT(each) + (row * k + j) * n;
        for (long i = first; i < last; i++) to[i] = share * from[i] + to[i];
    }
}
