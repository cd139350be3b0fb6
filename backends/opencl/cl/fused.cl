// Fusions around products with weights. Sums are those of linear.cl and moe.cl, and what is done with them is what the
// elementwise kernels do, VECTOR columns at a time: the same bits as without the fusion, for one row and for many.

enum { AS_IT_IS, SILU, SIGMOID, DECAY, SWIGLU };

inline vec vec_of(const float *v)
{
#if VECTOR == 16
    return (float16)(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]);
#else
    return *v;
#endif
}

// linear_parts: several products of the same rows, each with something done to its entries; see `PART`. A weight of 0
// rows is none. SWIGLU takes a second weight, `a` its limit; SILU scales by `a`; DECAY is rate · softplus(· + bias).
#define PART(i)                                                                                                       \
    long m##i, long kind##i, float a##i, ARRAY(const uchar, weights##i), ARRAY(const uchar, other##i),                \
        ARRAY(const float, bias##i), ARRAY(const float, rate##i), ARRAY(float, out##i)

#define PICK(i)                                                 \
    if (m == 0 && m##i) {                                       \
        if (at < (m##i + columns - 1) / columns) {              \
            m = m##i; kind = kind##i; a = a##i;                 \
            weights = AT(weights##i); other = AT(other##i);     \
            bias = AT(bias##i); rate = AT(rate##i);             \
            out = AT(out##i);                                   \
        } else                                                  \
            at -= (m##i + columns - 1) / columns;               \
    }

#define LINEAR_PARTS(name, COUNT_)                                                                                    \
    kernel void name(                                                                                                 \
        long rows, long n, long wide, long columns, ROWS(float, x), long row_bytes, PART(0), PART(1), PART(2),        \
        PART(3), PART(4))                                                                                             \
    {                                                                                                                 \
        SCRATCH;                                                                                                      \
        const long row = get_group_id(0) / wide * COUNT_;                                                             \
        long at = get_group_id(0) % wide, m = 0, kind = 0;                                                            \
        float a = 0;                                                                                                  \
        global const uchar *weights = 0, *other = 0;                                                                  \
        global const float *bias = 0, *rate = 0;                                                                      \
        global float *out = 0;                                                                                        \
        PICK(0) PICK(1) PICK(2) PICK(3) PICK(4)                                                                       \
        global const float *in[TILE];                                                                                 \
        for (int r = 0; r < COUNT_; r++) in[r] = ROW(x, row + r < rows ? row + r : rows - 1);                         \
        const long first = at * columns, last = first + columns < m ? first + columns : m;                            \
        for (long c = first; c < last; c += VECTOR) {                                                                 \
            const long count = COUNT(c, last);                                                                        \
            float sums[TILE], left[TILE][VECTOR], right[TILE][VECTOR];                                                \
            for (int r = 0; r < COUNT_; r++)                                                                          \
                for (int j = 0; j < VECTOR; j++) left[r][j] = right[r][j] = 0;                                        \
            for (int j = 0; j < count; j++) {                                                                         \
                dots(COUNT_, in, weights + (c + j) * row_bytes, n, sums, scratch);                                    \
                for (int r = 0; r < COUNT_; r++) left[r][j] = sums[r];                                                \
                if (kind != SWIGLU) continue;                                                                         \
                dots(COUNT_, in, other + (c + j) * row_bytes, n, sums, scratch);                                      \
                for (int r = 0; r < COUNT_; r++) right[r][j] = sums[r];                                               \
            }                                                                                                         \
            if (LANE) continue;                                                                                       \
            for (int r = 0; r < COUNT_ && row + r < rows; r++) {                                                      \
                vec v = vec_of(left[r]);                                                                              \
                if (kind == SILU) v = SILU_OF(v, a);                                                                  \
                else if (kind == SIGMOID) v = vec_sigmoid(v);                                                         \
                else if (kind == DECAY)                                                                               \
                    v = DECAY_OF(v, vec_some(bias + c, count), vec_some(rate + c, count));                            \
                else if (kind == SWIGLU) v = SWIGLU_OF(v, vec_of(right[r]), -a, a);                                   \
                vec_put(out + (row + r) * m + c, v, count);                                                           \
            }                                                                                                         \
        }                                                                                                             \
    }

LINEAR_PARTS(parts_row, 1)
LINEAR_PARTS(parts_some, TILE / 2)
LINEAR_PARTS(parts_rows, TILE)

// hc_read of the gates that linear makes: out[r, i] = mean over s of sigmoid(x[r] · weight[s n + i]) normed[r, s, i].
#define LINEAR_READ(name, COUNT_)                                                                                     \
    kernel void name(                                                                                                 \
        long rows, long width, long wide, long columns, ROWS(float, x), ARRAY(const uchar, weights), long row_bytes,  \
        long n, long streams, ROWS(float, normed), ARRAY(float, out))                                                 \
    {                                                                                                                 \
        SCRATCH;                                                                                                      \
        const long row = get_group_id(0) / wide * COUNT_, first = get_group_id(0) % wide * columns;                   \
        const long last = first + columns < n ? first + columns : n;                                                  \
        const float divisor = streams > 1 ? streams : 1;                                                              \
        global const float *in[TILE];                                                                                 \
        for (int r = 0; r < COUNT_; r++) in[r] = ROW(x, row + r < rows ? row + r : rows - 1);                         \
        for (long c = first; c < last; c += VECTOR) {                                                                 \
            const long count = COUNT(c, last);                                                                        \
            float sums[TILE], gates[TILE][VECTOR];                                                                    \
            vec total[TILE];                                                                                          \
            for (int r = 0; r < COUNT_; r++) {                                                                        \
                total[r] = 0;                                                                                         \
                for (int j = 0; j < VECTOR; j++) gates[r][j] = 0;                                                     \
            }                                                                                                         \
            for (long s = 0; s < streams; s++) {                                                                      \
                for (int j = 0; j < count; j++) {                                                                     \
                    dots(COUNT_, in, AT(weights) + (s * n + c + j) * row_bytes, width, sums, scratch);                \
                    for (int r = 0; r < COUNT_; r++) gates[r][j] = sums[r];                                           \
                }                                                                                                     \
                if (LANE) continue;                                                                                   \
                for (int r = 0; r < COUNT_ && row + r < rows; r++) {                                                  \
                    const vec open = vec_sigmoid(vec_of(gates[r]));                                                   \
                    total[r] += open * vec_some(ROW(normed, (row + r) * streams + s) + c, count);                     \
                }                                                                                                     \
            }                                                                                                         \
            if (LANE) continue;                                                                                       \
            for (int r = 0; r < COUNT_ && row + r < rows; r++)                                                        \
                vec_put(AT(out) + (row + r) * n + c, total[r] / divisor, count);                                      \
        }                                                                                                             \
    }

LINEAR_READ(read_row, 1)
LINEAR_READ(read_some, TILE / 2)
LINEAR_READ(read_rows, TILE)

// swiglu of what two weights of an expert make of a row; a group makes `columns` columns of one (t, j).
kernel void expert_swiglu(
    long pairs, long k, long n, long m, long experts_count, long columns, ROWS(float, x), ARRAY(const int, experts),
    ARRAY(const uchar, gate), ARRAY(const uchar, up), long row_bytes, float limit, ARRAY(float, out), FAULT_ARGS)
{
    SCRATCH;
    const long wide = (m + columns - 1) / columns;
    const long pair = get_group_id(0) / wide, first = get_group_id(0) % wide * columns;
    const long last = first + columns < m ? first + columns : m, expert = AT(experts)[pair];
    const bool none = outside(expert, -1, experts_count, fault, node) || expert < 0;
    global const float *in[TILE];
    in[0] = ROW(x, pair / k);
    for (long c = first; c < last; c += VECTOR) {
        const long count = COUNT(c, last);
        float left[VECTOR], right[VECTOR];
        for (int j = 0; j < VECTOR; j++) left[j] = right[j] = 0;
        for (int j = 0; j < count && !none; j++) {
            dots(1, in, AT(gate) + (expert * m + c + j) * row_bytes, n, left + j, scratch);
            dots(1, in, AT(up) + (expert * m + c + j) * row_bytes, n, right + j, scratch);
        }
        if (LANE) continue;
        vec_put(AT(out) + pair * m + c, SWIGLU_OF(vec_of(left), vec_of(right), -limit, limit), count);
    }
}
