// Ops in which no entry looks further than itself. Each entry is computed in float32; NaN stays NaN, in its own entry.
// sigmoid and what contains it keep their relative accuracy down to denormal results.

#define UNARY(name, EXPRESSION)                                                    \
    KERNEL name(i64 rows, i64 n, ROWS(float, x), float *out, float a, float b)     \
    {                                                                              \
        ENTRY_OF_ROW(rows, n)                                                      \
        const float v = ROW(x, row)[i];                                            \
        out[ITEM] = EXPRESSION;                                                    \
    }

#define BINARY(name, EXPRESSION)                                                                   \
    KERNEL name(i64 rows, i64 n, ROWS(float, x), ROWS(float, y), float *out, float a, float b)     \
    {                                                                                              \
        ENTRY_OF_ROW(rows, n)                                                                      \
        const float v = ROW(x, row)[i], w = ROW(y, row)[i];                                        \
        out[ITEM] = EXPRESSION;                                                                    \
    }

UNARY(sigmoid, sigmoid_of(v))
UNARY(silu, silu_of(v * a))
UNARY(softplus, softplus_of(v))
UNARY(clamp_between, smaller(larger(v, a), b))
BINARY(add, v + w)
BINARY(multiply, v * w)
BINARY(swiglu, silu_of(smaller(v, b)) * smaller(larger(w, a), b))

// out[r, i] = x[r, i] scale[r]
KERNEL scale_rows(i64 rows, i64 n, ROWS(float, x), ROWS(float, scale), float *out)
{
    ENTRY_OF_ROW(rows, n)
    out[ITEM] = ROW(x, row)[i] * *ROW(scale, row);
}

// rate · softplus(a + bias), entry i of a row with entry i of both weights.
KERNEL gdn_decay(i64 rows, i64 n, ROWS(float, x), const float *bias, const float *rate, float *out)
{
    ENTRY_OF_ROW(rows, n)
    out[ITEM] = rate[i] * softplus_of(ROW(x, row)[i] + bias[i]);
}

// Hyper-connections, read: the mean over streams of sigmoid(gate[r, s n + i]) normed[r, s, i], added in their order.
KERNEL hc_read(i64 rows, i64 n, i64 streams, ROWS(float, normed), ROWS(float, gate), float *out)
{
    ENTRY_OF_ROW(rows, n)
    float total = 0;
    for (i64 s = 0; s < streams; s++)
        total += sigmoid_of(ROW(gate, row)[s * n + i]) * ROW(normed, row * streams + s)[i];
    out[ITEM] = total / (streams > 1 ? streams : 1);
}

// Hyper-connections, write: residual[r, s, i] + 2 sigmoid(inject[r, s] / streams) y[r, i]; a row here is one (r, s).
KERNEL hc_write(i64 rows, i64 n, i64 streams, ROWS(float, residual), ROWS(float, y), ROWS(float, inject), float *out)
{
    ENTRY_OF_ROW(rows, n)
    const float gain = 2 * sigmoid_of(ROW(inject, row / streams)[row % streams] / streams);
    out[ITEM] = gain * ROW(y, row / streams)[i] + ROW(residual, row)[i];
}
