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
