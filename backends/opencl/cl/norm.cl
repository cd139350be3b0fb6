// Ops that reduce a row: norms, softmax, normalize, the n-gram gate. A group of LANES work-items does one row.
//
// Squares are summed after a scaling by a power of two, from the row's largest entry and the root of eps, so that no
// square of a finite row overflows and none that counts underflows. A row of zeros gives zeros unless eps is 0; a NaN
// makes its row NaN, an infinity itself NaN and the finite entries 0.

// The exponent of the largest magnitude of a row, and of `root`; 0 where the row holds an infinity or NaN.
inline int row_exponent(global const float *x, long n, float root, SCRATCH_ARG)
{
    vec_bits most = 0;
    uint rest = as_uint(root);
    const long whole = n / VECTOR;
    for (long g = LANE; g < whole; g += LANES) {
        const vec_bits b = as_vec_bits(vec_load(x + VECTOR * g)) & 0x7fffffffu;
        most = b > most ? b : most;
    }
    for (long i = whole * VECTOR + LANE; i < n; i += LANES) {
        const uint b = as_uint(x[i]) & 0x7fffffffu;
        rest = b > rest ? b : rest;
    }
    const uint here = vec_largest(most);
    const uint bits = lanes_largest(here > rest ? here : rest, scratch);
    if (bits >= 0x7f800000u) return 0;
    const int e = (int)(bits >> 23) - 127;
    return e < -126 ? -126 : e > 126 ? 126 : e;
}

inline float power_of_2(int e) { return as_float((uint)(e + 127) << 23); }

inline float sum_of_squares(global const float *x, long n, float scale, SCRATCH_ARG)
{
    vec sum = 0;
    float rest = 0;
    const long whole = n / VECTOR;
    for (long g = LANE; g < whole; g += LANES) {
        const vec v = vec_load(x + VECTOR * g) * scale;
        sum += v * v;
    }
    for (long i = whole * VECTOR + LANE; i < n; i += LANES) rest += (x[i] * scale) * (x[i] * scale);
    return lanes_sum(vec_sum(sum) + rest, scratch);
}

inline float sum_of_row(global const float *x, long n, SCRATCH_ARG)
{
    vec sum = 0;
    float rest = 0;
    const long whole = n / VECTOR;
    for (long g = LANE; g < whole; g += LANES) sum += vec_load(x + VECTOR * g);
    for (long i = whole * VECTOR + LANE; i < n; i += LANES) rest += x[i];
    return lanes_sum(vec_sum(sum) + rest, scratch);
}

// to = x / sqrt(share · sum x² + root²) · w · activation(gate); `share` is 1/n for a mean, w and gates may be missing.
// gate_kind: 0 none, 1 sigmoid, 2 silu.
inline void norm_row(
    global float *to, global const float *in, long n, global const float *w, global const float *gates, long gate_kind,
    float share, float root, SCRATCH_ARG)
{
    const float scale = power_of_2(-row_exponent(in, n, root, scratch));
    const float squares = sum_of_squares(in, n, scale, scratch) * share + (root * scale) * (root * scale);
    const float divisor = sqrt(squares);
    for (long i = LANE * VECTOR; i < n; i += LANES * VECTOR) {
        const long count = COUNT(i, n);
        vec y = (vec_some(in + i, count) * scale) / divisor;
        if (w) y *= vec_some(w + i, count);
        if (gate_kind) {
            const vec g = vec_some(gates + i, count);
            y *= vec_sigmoid(g) * (gate_kind == 2 ? g : (vec)1.0f);
        }
        vec_put(to + i, y, count);
    }
}

// Row r has part r mod groups of the weight.
kernel void norm(
    long rows, long n, long groups, ROWS(float, x), ARRAY(const float, weight), ROWS(float, gate), long gate_kind,
    ARRAY(float, out), float share, float root)
{
    SCRATCH;
    const long row = get_group_id(0);
    global const float *in = ROW(x, row), *w = weight ? AT(weight) + row % groups * n : 0;
    norm_row(AT(out) + row * n, in, n, w, gate_kind ? ROW(gate, row) : 0, gate_kind, share, root, scratch);
}

// hc_write and the norm of what it wrote; a row here is one (row, stream).
kernel void write_norm(
    long rows, long n, long streams, ROWS(float, residual), ROWS(float, y), ROWS(float, inject),
    ARRAY(const float, weight), float share, float root, ARRAY(float, out), ARRAY(float, normed))
{
    SCRATCH;
    const long row = get_group_id(0);
    const float gain = 2 * sigmoid_of(ROW(inject, row / streams)[row % streams] / streams);
    global const float *in = ROW(residual, row), *add = ROW(y, row / streams);
    global float *to = AT(out) + row * n;
    for (long i = LANE; i < n; i += LANES) to[i] = gain * add[i] + in[i];
    LANE_BARRIER;
    norm_row(AT(normed) + row * n, to, n, AT(weight) + row % streams * n, 0, 0, share, root, scratch);
}

inline float row_max(global const float *x, long n, SCRATCH_ARG)
{
    float most = -INFINITY;
    for (long i = LANE; i < n; i += LANES) most = larger(most, x[i]);
    return lanes_max(most, scratch);
}

// e^(x - m) / sum e^(x - m); a row of -inf alone gives zeros, NaN or +inf anywhere a row of NaN.
inline void softmax_row(global float *to, global const float *in, long n, SCRATCH_ARG)
{
    const float most = row_max(in, n, scratch);
    for (long i = LANE * VECTOR; i < n; i += LANES * VECTOR) {
        const long count = COUNT(i, n);
        const vec e = exp(vec_some(in + i, count) - most);
        vec_put(to + i, most == -INFINITY ? (vec)0.0f : e, count);
    }
    LANE_BARRIER;
    const float sum = sum_of_row(to, n, scratch);
    for (long i = LANE; i < n; i += LANES) to[i] = most == -INFINITY ? 0 : to[i] / sum;
}

kernel void softmax(long rows, long n, ROWS(float, x), ARRAY(float, out))
{
    SCRATCH;
    const long row = get_group_id(0);
    softmax_row(AT(out) + row * n, ROW(x, row), n, scratch);
}

// x / max(sum x, floor); a divisor of 0 gives zeros.
inline void normalize_row(global float *to, global const float *in, long n, float least, SCRATCH_ARG)
{
    const float divisor = larger(sum_of_row(in, n, scratch), least);
    for (long i = LANE; i < n; i += LANES) to[i] = divisor == 0 ? 0 : in[i] / divisor;
}

kernel void normalize_rows(long rows, long n, ROWS(float, x), ARRAY(float, out), float least)
{
    SCRATCH;
    const long row = get_group_id(0);
    normalize_row(AT(out) + row * n, ROW(x, row), n, least, scratch);
}

// sigmoid(sign(u) sqrt(max(|u|, 1e-6))) value, u = key · query / sqrt(n); a row here is one (token, stream).
kernel void ple_gate(
    long rows, long n, long streams, ROWS(float, key), ROWS(float, query), ROWS(float, value), ARRAY(float, out),
    float root)
{
    SCRATCH;
    const long row = get_group_id(0);
    global const float *k = ROW(key, row), *q = ROW(query, row), *v = ROW(value, row / streams);
    vec sum = 0;
    float rest = 0;
    const long whole = n / VECTOR;
    for (long g = LANE; g < whole; g += LANES) sum += vec_load(k + VECTOR * g) * vec_load(q + VECTOR * g);
    for (long i = whole * VECTOR + LANE; i < n; i += LANES) rest += k[i] * q[i];
    const float u = lanes_sum(vec_sum(sum) + rest, scratch) / root;
    const float size = sqrt(larger(fabs(u), 1e-6f));
    const float gate = sigmoid_of(u > 0 ? size : u < 0 ? -size : u);
    for (long i = LANE; i < n; i += LANES) AT(out)[row * n + i] = gate * v[i];
}
