// Rows through the experts that a router chose for them. One program for each type of weight; dot products are those of
// linear.cu. An expert of -1 gives zeros and is not read; another id outside of the experts is a fault. No atomics on
// values: each entry of a result has one owner, who adds in the order of j.

// out[t, j, c] = weight[experts[t, j], c] · x[t]; a warp makes one column of one (t, j).
KERNEL __launch_bounds__(128) expert_linear(
    i64 pairs, i64 k, i64 n, i64 m, i64 experts_count, ROWS(float, x), const int *experts, const u8 *__restrict__ weights,
    i64 row_bytes, float *out, FAULT_ARGS)
{
    const i64 pair = WARP / m, c = WARP % m;
    if (pair >= pairs) return;
    const i64 expert = experts[pair];
    const bool none = outside(expert, -1, experts_count, fault, node) || expert < 0;
    const float *in[1] = {ROW(x, pair / k)};
    float sum = 0;
    if (!none) dots<1>(in, weights + (expert * m + c) * row_bytes, n, &sum);
    if (LANE == 0) out[pair * m + c] = sum;
}

// out[t, c] = sum_j mix[t, j] (weight[experts[t, j], c] · h[t, j]); a warp makes one column of one t.
KERNEL __launch_bounds__(128) expert_combine(
    i64 tokens, i64 k, i64 n, i64 m, i64 experts_count, ROWS(float, h), const int *experts, ROWS(float, mix),
    const u8 *__restrict__ weights, i64 row_bytes, float *out, FAULT_ARGS)
{
    const i64 t = WARP / n, c = WARP % n;
    if (t >= tokens) return;
    float total = 0;
    for (i64 j = 0; j < k; j++) {
        const i64 expert = experts[t * k + j];
        if (outside(expert, -1, experts_count, fault, node) || expert < 0) continue;
        const float *in[1] = {ROW(h, t * k + j)};
        float sum;
        dots<1>(in, weights + (expert * n + c) * row_bytes, m, &sum);
        total = fmaf(ROW(mix, t)[j], sum, total);
    }
    if (LANE == 0) out[t * n + c] = total;
}

// Many rows: pairs (t, j) in the order of their expert, TILE of one expert together, so that they share the reading and
// unpacking of its weights as rows of `linear` do, and with the same bits as each alone.

// counts[e]: how many pairs go to expert e.
KERNEL expert_counts(i64 pairs, i64 experts_count, const int *experts, int *counts, FAULT_ARGS)
{
    const i64 e = ITEM;
    if (e >= experts_count) return;
    int count = 0;
    for (i64 p = 0; p < pairs; p++) count += experts[p] == e;
    counts[e] = count;
    for (i64 p = e; p < pairs; p += experts_count) outside(experts[p], -1, experts_count, fault, node);
}

// order[…]: the pairs by expert, those of one as they come; tiles[i] = (expert, its first place in `order`, how many),
// of experts in rising order, then (-1, 0, 0).
KERNEL expert_tiles(
    i64 pairs, i64 experts_count, i64 tile_count, const int *experts, const int *counts, int *order, int *tiles)
{
    const i64 e = ITEM;
    if (e >= experts_count) return;
    i64 first = 0, tile = 0;
    for (i64 i = 0; i < e; i++) {
        first += counts[i];
        tile += (counts[i] + TILE - 1) / TILE;
    }
    const i64 count = counts[e];
    for (i64 at = 0; at < count; at += TILE, tile++) {
        tiles[3 * tile] = (int)e;
        tiles[3 * tile + 1] = (int)(first + at);
        tiles[3 * tile + 2] = (int)(count - at < TILE ? count - at : TILE);
    }
    for (i64 p = 0; p < pairs; p++)
        if (experts[p] == e) order[first++] = (int)p;
    if (e == experts_count - 1)
        for (; tile < tile_count; tile++) tiles[3 * tile] = -1;
}

// out[p] = weight[expert of p] · row p / share of x for the pairs of a tile; a warp makes one column of one tile.
// The rows of pairs without an expert are not written.
KERNEL __launch_bounds__(128) expert_products(
    i64 tile_count, i64 share, i64 n, i64 m, ROWS(float, x), const int *order, const int *tiles,
    const u8 *__restrict__ weights, i64 row_bytes, float *out)
{
    const i64 tile = WARP / m, c = WARP % m;
    if (tile >= tile_count) return;
    const i64 expert = tiles[3 * tile];
    if (expert < 0) return;
    const int count = tiles[3 * tile + 2], *mine = order + tiles[3 * tile + 1];
    const float *in[TILE];
    float sums[TILE];
#pragma unroll
    for (int r = 0; r < TILE; r++) in[r] = ROW(x, mine[r < count ? r : count - 1] / share);
    dots<TILE>(in, weights + (expert * m + c) * row_bytes, n, sums);
#pragma unroll
    for (int r = 0; r < TILE; r++)
        if (LANE == 0 && r < count) out[mine[r] * m + c] = sums[r];
}

// Zeros in the rows of pairs without an expert.
KERNEL expert_none(i64 pairs, i64 n, const int *experts, float *out)
{
    ENTRY_OF_ROW(pairs, n)
    if (experts[row] < 0) out[row * n + i] = 0;
}

// out[t, c] = sum_j mix[t, j] each[t, j, c], in the order of j, without those that have no expert.
KERNEL expert_sum(
    i64 tokens, i64 n, i64 k, i64 experts_count, const int *experts, ROWS(float, mix), const float *each, float *out)
{
    ENTRY_OF_ROW(tokens, n)
    float total = 0;
    for (i64 j = 0; j < k; j++) {
        const int expert = experts[row * k + j];
        if (expert < 0 || expert >= experts_count) continue;
        total = fmaf(ROW(mix, row)[j], each[(row * k + j) * n + i], total);
    }
    out[row * n + i] = total;
}
