// Products with weights that stay as they are stored: linear, and looking rows up. One program for each type of weight.
//
// linear: out[r, c] = sum_i x[r, i] weight[c, i]. A warp makes one column for 1, 2, 4 or 8 rows of x, which share the reading
// and unpacking of a weight row. Each lane takes every 32nd run of 16 elements; lanes are added in a tree, the last n % 16
// elements after that. A row's bits are the same for 1 row and for many. Bytes moved: the weight once for every 8 rows.

#define TILE 8

INLINE void load16(const float *p, bool whole, float *v)
{
    if (whole) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 q = *((const float4 *)p + i);
            v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
        }
    } else
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = p[i];
}

// `sums[r]` becomes x[r] · the weight row, for COUNT rows, in every lane.
template <int COUNT> INLINE void dots(const float *const *x, const u8 *weights, i64 n, float *sums)
{
    bool whole = true;
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        whole &= aligned16(x[r]);
        sums[r] = 0;
    }
    for (i64 g = LANE; g < n / 16; g += 32) {
        float w[16], v[16];
        weight16(weights, g, w);
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            load16(x[r] + 16 * g, whole, v);
#pragma unroll
            for (int i = 0; i < 16; i++) sums[r] = fmaf(w[i], v[i], sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        sums[r] = warp_sum(sums[r]);
#ifdef PLAIN
        for (i64 i = n / 16 * 16; i < n; i++) sums[r] = fmaf(weight1(weights, i), x[r][i], sums[r]);
#endif
    }
}

template <int COUNT>
INLINE void linear_of(
    i64 rows, i64 n, i64 m, const float *x, i64 x_inner, i64 x_outer, i64 x_step, const u8 *weights, i64 row_bytes,
    float *out)
{
    const i64 first = WARP / m * COUNT, c = WARP % m;
    if (first >= rows) return;
    const float *in[COUNT];
    float sums[COUNT];
#pragma unroll
    for (int r = 0; r < COUNT; r++) in[r] = ROW(x, first + r < rows ? first + r : rows - 1);
    dots<COUNT>(in, weights + c * row_bytes, n, sums);
#pragma unroll
    for (int r = 0; r < COUNT; r++)
        if (LANE == 0 && first + r < rows) out[(first + r) * m + c] = sums[r];
}

#define LINEAR(COUNT)                                                                                            \
    KERNEL __launch_bounds__(128) linear_##COUNT(                                                                \
        i64 rows, i64 n, i64 m, ROWS(float, x), const u8 *__restrict__ weights, i64 row_bytes, float *out)       \
    {                                                                                                            \
        linear_of<COUNT>(rows, n, m, x, x_inner, x_outer, x_step, weights, row_bytes, out);                      \
    }

LINEAR(1)
LINEAR(2)
LINEAR(4)
LINEAR(8)

// embed: out[i] = table[ids[i]], exactly the stored values; 16 entries a thread. An id outside of the table is a fault.
KERNEL embed(i64 rows, i64 n, i64 vocab, const u8 *table, i64 row_bytes, const int *ids, float *out, FAULT_ARGS)
{
    const i64 runs = (n + 15) / 16, row = ITEM / runs, g = ITEM % runs;
    if (row >= rows) return;
    const i64 id = ids[row];
    if (outside(id, 0, vocab, fault, node)) return;
    const u8 *from = table + id * row_bytes;
    float *to = out + row * n;
    if (16 * g + 16 <= n) {
        float w[16];
        weight16(from, g, w);
        for (int i = 0; i < 16; i++) to[16 * g + i] = w[i];
    }
#ifdef PLAIN
    else
        for (i64 i = 16 * g; i < n; i++) to[i] = weight1(from, i);
#endif
}
