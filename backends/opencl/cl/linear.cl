// Products with weights that stay as they are stored: linear, and looking rows up. One program for each type of weight.
//
// linear: out[r, c] = sum_i x[r, i] weight[c, i]. A group of LANES work-items makes `columns` columns for 1, TILE / 2 or TILE rows
// of x, which share the reading and unpacking of a weight row. Each lane takes every LANES-th run of 16 elements; lanes
// are added in a tree, the last n % 16 elements after that. A row's bits are the same for 1 row and for many.
// Bytes moved: the weight once for every TILE rows.

#pragma OPENCL FP_CONTRACT ON

#if VECTOR == 16
typedef float16 partial;
#define partial_sum sum16
inline float16 add_product(float16 w, float16 x, float16 sum) { return w * x + sum; }
#else
typedef float partial;
#define partial_sum(v) (v)
inline float add_product(float16 w, float16 x, float sum)
{
    sum = w.s0 * x.s0 + sum; sum = w.s1 * x.s1 + sum; sum = w.s2 * x.s2 + sum; sum = w.s3 * x.s3 + sum;
    sum = w.s4 * x.s4 + sum; sum = w.s5 * x.s5 + sum; sum = w.s6 * x.s6 + sum; sum = w.s7 * x.s7 + sum;
    sum = w.s8 * x.s8 + sum; sum = w.s9 * x.s9 + sum; sum = w.sa * x.sa + sum; sum = w.sb * x.sb + sum;
    sum = w.sc * x.sc + sum; sum = w.sd * x.sd + sum; sum = w.se * x.se + sum; sum = w.sf * x.sf + sum;
    return sum;
}
#endif

// `sums[r]` becomes x[r] · the weight row, for `count` rows, which the caller writes as a constant.
inline __attribute__((always_inline)) void dots(
    const int count, global const float **x, global const uchar *weights, long n, float *sums, SCRATCH_ARG)
{
    partial part[TILE];
    for (int r = 0; r < count; r++) part[r] = 0;
    for (long g = LANE; g < n / 16; g += LANES) {
        const float16 w = weight16(weights, g);
#pragma unroll
        for (int r = 0; r < count; r++) part[r] = add_product(w, load16(x[r] + 16 * g), part[r]);
    }
    for (int r = 0; r < count; r++) {
        float sum = lanes_sum(partial_sum(part[r]), scratch);
#ifdef PLAIN
        for (long i = n / 16 * 16; i < n; i++) sum = weight1(weights, i) * x[r][i] + sum;
#endif
        sums[r] = sum;
    }
}

#define LINEAR(name, COUNT)                                                                                           \
    kernel void name(                                                                                                 \
        long rows, long n, long m, long columns, ROWS(float, x), ARRAY(const uchar, weights), long row_bytes,         \
        ARRAY(float, out))                                                                                            \
    {                                                                                                                 \
        SCRATCH;                                                                                                      \
        const long wide = (m + columns - 1) / columns;                                                                \
        const long group = get_group_id(0), row = group / wide * COUNT, first = group % wide * columns;               \
        global const float *in[TILE];                                                                                 \
        float sums[TILE];                                                                                             \
        for (int r = 0; r < COUNT; r++) in[r] = ROW(x, row + r < rows ? row + r : rows - 1);                          \
        for (long c = first; c < first + columns && c < m; c++) {                                                     \
            dots(COUNT, in, AT(weights) + c * row_bytes, n, sums, scratch);                                           \
            for (int r = 0; r < COUNT; r++)                                                                           \
                if (LANE == 0 && row + r < rows) AT(out)[(row + r) * m + c] = sums[r];                                \
        }                                                                                                             \
    }

LINEAR(linear_row, 1)
LINEAR(linear_some, TILE / 2)
LINEAR(linear_rows, TILE)

// embed: out[i] = table[ids[i]], exactly the stored values. An id outside of the table is a fault.
kernel void embed(
    long rows, long n, long vocab, ARRAY(const uchar, table), long row_bytes, ARRAY(const int, ids), ARRAY(float, out),
    FAULT_ARGS)
{
    RUN_OF_ROW(rows, (n + 15) / 16);
    const long id = AT(ids)[row];
    if (outside(id, 0, vocab, fault, node)) return;
    global const uchar *from = AT(table) + id * row_bytes;
    global float *to = AT(out) + row * n;
    for (long g = first; g < last; g++) {
        if (16 * g + 16 <= n) store16(to + 16 * g, weight16(from, g));
#ifdef PLAIN
        else
            for (long i = 16 * g; i < n; i++) to[i] = weight1(from, i);
#endif
    }
}
