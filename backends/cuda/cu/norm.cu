// Ops that reduce a row: norms, softmax, normalize, the n-gram gate. A block does one row.
//
// Squares are summed after a scaling by a power of two, from the row's largest entry and the root of eps, so that no
// square of a finite row overflows and none that counts underflows. A row of zeros gives zeros unless eps is 0; a NaN
// makes its row NaN, an infinity itself NaN and the finite entries 0.

// The exponent of the largest magnitude of a row, and of `root`; 0 where the row holds an infinity or NaN.
INLINE int row_exponent(const float *x, i64 n, float root)
{
    u32 most = __float_as_uint(root);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) most = most_of(most, __float_as_uint(x[i]) & 0x7fffffffu);
    const u32 bits = block_most(most);
    if (bits >= 0x7f800000u) return 0;
    const int e = (int)(bits >> 23) - 127;
    return e < -126 ? -126 : e > 126 ? 126 : e;
}

INLINE float power_of_2(int e) { return __uint_as_float((u32)(e + 127) << 23); }

INLINE float sum_of_row(const float *x, i64 n)
{
    float sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    return block_sum(sum);
}

// out = x / sqrt(share · sum x² + root²) · weight[(r mod groups) n + i] · activation(gate); `share` is 1/n for a mean.
// gate_kind: 0 none, 1 sigmoid, 2 silu.
KERNEL norm_rows(
    i64 rows, i64 n, i64 groups, ROWS(float, x), const float *weight, ROWS(float, gate), i64 gate_kind, float *out,
    float share, float root)
{
    const i64 row = GROUP;
    const float *in = ROW(x, row), *gates = gate_kind ? ROW(gate, row) : in, *w = weight + row % groups * n;
    const float scale = power_of_2(-row_exponent(in, n, root));
    float sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += (in[i] * scale) * (in[i] * scale);
    const float divisor = sqrtf(block_sum(sum) * share + (root * scale) * (root * scale));
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        float y = (in[i] * scale) / divisor;
        if (weight) y *= w[i];
        if (gate_kind) y *= sigmoid_of(gates[i]) * (gate_kind == 2 ? gates[i] : 1.0f);
        out[row * n + i] = y;
    }
}

INLINE float row_max(const float *x, i64 n)
{
    float most = MINUS_INFINITY;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) most = larger(most, x[i]);
    return block_max(most);
}

// e^(x - m) / sum e^(x - m); a row of -inf alone gives zeros, NaN or +inf anywhere a row of NaN.
KERNEL softmax(i64 rows, i64 n, ROWS(float, x), float *out)
{
    const i64 row = GROUP;
    const float *in = ROW(x, row), most = row_max(in, n);
    const bool nothing = most == MINUS_INFINITY;
    float sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        const float e = nothing ? 0.0f : expf(in[i] - most);
        out[row * n + i] = e;
        sum += e;
    }
    sum = block_sum(sum);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) out[row * n + i] = nothing ? 0.0f : out[row * n + i] / sum;
}

// x / max(sum x, floor); a divisor of 0 gives zeros.
KERNEL normalize_rows(i64 rows, i64 n, ROWS(float, x), float *out, float least)
{
    const i64 row = GROUP;
    const float *in = ROW(x, row), divisor = larger(sum_of_row(in, n), least);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) out[row * n + i] = divisor == 0 ? 0 : in[i] / divisor;
}

// sigmoid(sign(u) sqrt(max(|u|, 1e-6))) value, u = key · query / sqrt(n); a row here is one (token, stream).
KERNEL ple_gate(
    i64 rows, i64 n, i64 streams, ROWS(float, key), ROWS(float, query), ROWS(float, value), float *out, float root)
{
    const i64 row = GROUP;
    const float *k = ROW(key, row), *q = ROW(query, row), *v = ROW(value, row / streams);
    float sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += k[i] * q[i];
    const float u = block_sum(sum) / root, size = sqrtf(larger(fabsf(u), 1e-6f));
    const float gate = sigmoid_of(u > 0 ? size : u < 0 ? -size : u);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) out[row * n + i] = gate * v[i];
}
