// Ops in which no entry looks further than itself. Each entry is computed in float32; NaN stays NaN, in its own entry.
// sigmoid and what contains it keep their relative accuracy down to denormal results.

#define UNARY(name, EXPRESSION)                                                                              \
    kernel void name(long rows, long n, ROWS(float, x), ARRAY(float, out), float a, float b)                 \
    {                                                                                                        \
        RUN_OF_ROW(rows, n);                                                                                 \
        global const float *in = ROW(x, row);                                                                \
        global float *to = AT(out) + row * n;                                                                \
        for (long i = first; i < last; i += VECTOR) {                                                        \
            const long count = COUNT(i, last);                                                               \
            const vec v = vec_some(in + i, count);                                                           \
            vec_put(to + i, (EXPRESSION), count);                                                            \
        }                                                                                                    \
    }

#define BINARY(name, EXPRESSION)                                                                             \
    kernel void name(long rows, long n, ROWS(float, x), ROWS(float, y), ARRAY(float, out), float a, float b) \
    {                                                                                                        \
        RUN_OF_ROW(rows, n);                                                                                 \
        global const float *left = ROW(x, row), *right = ROW(y, row);                                        \
        global float *to = AT(out) + row * n;                                                                \
        for (long i = first; i < last; i += VECTOR) {                                                        \
            const long count = COUNT(i, last);                                                               \
            const vec v = vec_some(left + i, count), w = vec_some(right + i, count);                         \
            vec_put(to + i, (EXPRESSION), count);                                                            \
        }                                                                                                    \
    }

UNARY(sigmoid, vec_sigmoid(v))
UNARY(silu, SILU_OF(v, a))
UNARY(softplus, vec_softplus(v))
UNARY(clamp_between, vec_smaller(vec_larger(v, (vec)a), (vec)b))
BINARY(add, v + w)
BINARY(mul, v * w)
BINARY(swiglu, SWIGLU_OF(v, w, a, b))

// out[r, i] = x[r, i] scale[r]
kernel void scale_rows(long rows, long n, ROWS(float, x), ROWS(float, scale), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *in = ROW(x, row);
    const float s = *ROW(scale, row);
    for (long i = first; i < last; i++) AT(out)[row * n + i] = in[i] * s;
}

// out[r, i] = a[r, i] + x[r, i] scale[r]
kernel void add_scaled(
    long rows, long n, ROWS(float, a), ROWS(float, x), ROWS(float, scale), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *base = ROW(a, row), *in = ROW(x, row);
    const float s = *ROW(scale, row);
    for (long i = first; i < last; i++) {
        const float part = in[i] * s;
        AT(out)[row * n + i] = base[i] + part;
    }
}

// rate · softplus(a + bias), entry i of a row with entry i of both weights.
kernel void gdn_decay(
    long rows, long n, ROWS(float, x), ARRAY(const float, bias), ARRAY(const float, rate), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *in = ROW(x, row);
    for (long i = first; i < last; i += VECTOR) {
        const long count = COUNT(i, last);
        const vec made = DECAY_OF(vec_some(in + i, count), vec_some(AT(bias) + i, count), vec_some(AT(rate) + i, count));
        vec_put(AT(out) + row * n + i, made, count);
    }
}

// Hyper-connections, read: the mean over streams of sigmoid(gate[r, s n + i]) normed[r, s, i], added in their order.
kernel void hc_read(long rows, long n, long streams, ROWS(float, normed), ROWS(float, gate), ARRAY(float, out))
{
    RUN_OF_ROW(rows, n);
    global const float *gates = ROW(gate, row);
    const float divisor = streams > 1 ? streams : 1;
    for (long i = first; i < last; i += VECTOR) {
        const long count = COUNT(i, last);
        vec total = 0;
        for (long s = 0; s < streams; s++) {
            const vec open = vec_sigmoid(vec_some(gates + s * n + i, count));
            total += open * vec_some(ROW(normed, row * streams + s) + i, count);
        }
        vec_put(AT(out) + row * n + i, total / divisor, count);
    }
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
