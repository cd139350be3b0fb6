// Ops in which no entry looks further than itself. Each entry is computed in float32; NaN stays NaN, in its own entry.
// sigmoid and what contains it keep their relative accuracy down to denormal results.

#define UNARY(name, EXPRESSION)                                                                           \
    kernel void name(long rows, long n, ROWS(float, x), ARRAY(float, out), float a, float b)              \
    {                                                                                                     \
        RUN_OF_ROW(rows, n);                                                                              \
        global const float *in = ROW(x, row);                                                             \
        global float *to = AT(out) + row * n;                                                             \
        for (long i = first; i < last; i++) {                                                             \
            const float v = in[i];                                                                        \
            to[i] = (EXPRESSION);                                                                         \
        }                                                                                                 \
    }

#define BINARY(name, EXPRESSION)                                                                          \
    kernel void name(long rows, long n, ROWS(float, x), ROWS(float, y), ARRAY(float, out), float a, float b) \
    {                                                                                                     \
        RUN_OF_ROW(rows, n);                                                                              \
        global const float *left = ROW(x, row), *right = ROW(y, row);                                     \
        global float *to = AT(out) + row * n;                                                             \
        for (long i = first; i < last; i++) {                                                             \
            const float v = left[i], w = right[i];                                                        \
            to[i] = (EXPRESSION);                                                                         \
        }                                                                                                 \
    }

UNARY(sigmoid, sigmoid_of(v))
UNARY(silu, (v * a) * sigmoid_of(v * a))
UNARY(softplus, softplus_of(v))
UNARY(clamp_between, smaller(larger(v, a), b))
BINARY(add, v + w)
BINARY(mul, v * w)
BINARY(swiglu, smaller(v, b) * sigmoid_of(smaller(v, b)) * smaller(larger(w, a), b))

// out[r, i] = x[r, i] scale[r]
kernel void scale_rows(long rows, long n, ROWS(float, x), ROWS(float, scale), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *in = ROW(x, row);
    const float s = *ROW(scale, row);
    for (long i = first; i < last; i++) AT(out)[row * n + i] = in[i] * s;
}

// rate · softplus(a + bias), entry i of a row with entry i of both weights.
kernel void gdn_decay(
    long rows, long n, ROWS(float, x), ARRAY(const float, bias), ARRAY(const float, rate), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *in = ROW(x, row);
    for (long i = first; i < last; i++) AT(out)[row * n + i] = AT(rate)[i] * softplus_of(in[i] + AT(bias)[i]);
}

// Hyper-connections, read: the mean over streams of sigmoid(gate[r, s n + i]) normed[r, s, i], added in their order.
kernel void hc_read(long rows, long n, long streams, ROWS(float, normed), ROWS(float, gate), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *gates = ROW(gate, row);
    global float *to = AT(out) + row * n;
    for (long i = first; i < last; i++) to[i] = 0;
    for (long s = 0; s < streams; s++) {
        global const float *in = ROW(normed, row * streams + s);
        for (long i = first; i < last; i++) to[i] += sigmoid_of(gates[s * n + i]) * in[i];
    }
    const float count = streams > 1 ? streams : 1;
    for (long i = first; i < last; i++) to[i] /= count;
}

// Hyper-connections, write: residual[r, s, i] + 2 sigmoid(inject[r, s] / streams) y[r, i]; a row here is one (r, s).
kernel void hc_write(
    long rows, long n, long streams, ROWS(float, residual), ROWS(float, y), ROWS(float, inject), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    const float gain = 2 * sigmoid_of(ROW(inject, row / streams)[row % streams] / streams);
    global const float *in = ROW(residual, row), *add = ROW(y, row / streams);
    for (long i = first; i < last; i++) AT(out)[row * n + i] = gain * add[i] + in[i];
}
