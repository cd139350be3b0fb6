// What every kernel of this backend stands on. The host puts these macros before it, from the device's own limits:
//
//   LANES   work-items that share one reduction, a power of 2; 1 on processors
//   VECTOR  floats that one work-item adds at a time in a reduction: 16 on processors, 1 where lanes lie side by side
//   RUN     neighbours of a row that one work-item of an elementwise kernel does
//   TILE    rows of x that share one pass over a weight row
//
// Layout. An array is a buffer and the element at which it begins (`ARRAY`); a strided input is rows of n neighbours,
// row r at (r / inner) * outer + (r % inner) * step from there (`ROWS`). All counts and offsets are 64-bit.
//
// Numerics. float32 throughout; products that are added may be contracted to fused ones, except where a file says no.
// Every sum has one order, fixed by the sizes of its own row: the same bits in every run and for every number of rows.
//
// Built-in vector functions are calls where the device is a processor: none stands in a hot loop but where it pays (exp).

#define ARRAY(T, name) global T *name, ulong name##_at
#define ROWS(T, name) global const T *name, ulong name##_at, long name##_inner, long name##_outer, long name##_step
#define AT(name) (name + name##_at)
#define ROW(name, r) \
    (name + name##_at + ((long)(r) / name##_inner) * name##_outer + ((long)(r) % name##_inner) * name##_step)

// -- vectors ----------------------------------------------------------------------------------------------------------

// Loads from any address: vload16 is a call on some processors, a pointer to float16 asks for 64 bytes of alignment.
typedef struct __attribute__((packed)) { float16 v; } packed_float16;

inline float16 load16(global const float *p) { return ((global const packed_float16 *)p)->v; }
inline void store16(global float *p, float16 v) { ((global packed_float16 *)p)->v = v; }

inline float sum16(float16 v)
{
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    const float2 c = b.lo + b.hi;
    return c.x + c.y;
}

#if VECTOR == 16
typedef float16 vec;
typedef uint16 vec_bits;
#define vec_load load16
#define vec_store store16
#define vec_sum sum16
#define as_vec_bits as_uint16
#else
typedef float vec;
typedef uint vec_bits;
inline float vec_load(global const float *p) { return *p; }
inline void vec_store(global float *p, float v) { *p = v; }
inline float vec_sum(float v) { return v; }
#define as_vec_bits as_uint
#endif

inline uint vec_largest(vec_bits v)
{
#if VECTOR == 16
    const uint8 a = v.lo > v.hi ? v.lo : v.hi;
    const uint4 b = a.lo > a.hi ? a.lo : a.hi;
    const uint2 c = b.lo > b.hi ? b.lo : b.hi;
    return c.x > c.y ? c.x : c.y;
#else
    return v;
#endif
}

// The first `count` of VECTOR entries; what is missing reads as 0 and is not written.
inline vec vec_some(global const float *p, long count)
{
#if VECTOR == 16
    if (count == 16) return load16(p);
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = i < count ? p[i] : 0;
    return (float16)(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]);
#else
    return *p;
#endif
}

inline void vec_put(global float *p, vec v, long count)
{
#if VECTOR == 16
    if (count == 16) store16(p, v);
    else {
        const float all[16] = {v.s0, v.s1, v.s2, v.s3, v.s4, v.s5, v.s6, v.s7,
                               v.s8, v.s9, v.sa, v.sb, v.sc, v.sd, v.se, v.sf};
        for (int i = 0; i < count; i++) p[i] = all[i];
    }
#else
    *p = v;
#endif
}

// How many entries of a row of n a vector takes from entry i on.
#define COUNT(i, n) ((n) - (i) < VECTOR ? (n) - (i) : VECTOR)

// -- lanes ------------------------------------------------------------------------------------------------------------

// A work-group of LANES work-items does one row. Every lane gets the result; the order of a sum is a fixed tree.
#if LANES > 1
#define LANE ((int)get_local_id(0))
#define SCRATCH local float scratch[LANES]
#define SCRATCH_ARG local float *scratch
#define LANE_BARRIER barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define REDUCE(T, name, EXPRESSION)                              \
    inline T name(T mine, SCRATCH_ARG)                           \
    {                                                            \
        local T *s = (local T *)scratch;                         \
        LANE_BARRIER;                                            \
        s[LANE] = mine;                                          \
        LANE_BARRIER;                                            \
        for (int half_way = LANES / 2; half_way; half_way /= 2) {\
            if (LANE < half_way) {                               \
                const T a = s[LANE], b = s[LANE + half_way];     \
                s[LANE] = (EXPRESSION);                          \
            }                                                    \
            LANE_BARRIER;                                        \
        }                                                        \
        return s[0];                                             \
    }
#else
#define LANE 0
#define SCRATCH const int scratch = 0
#define SCRATCH_ARG const int scratch
#define LANE_BARRIER
#define REDUCE(T, name, EXPRESSION) \
    inline T name(T mine, SCRATCH_ARG) { return mine; }
#endif

REDUCE(float, lanes_sum, a + b)
REDUCE(uint, lanes_largest, a > b ? a : b)
// NaN wins over every number.
REDUCE(float, lanes_max, (b > a || b != b) ? b : a)

// -- elementwise ------------------------------------------------------------------------------------------------------

// One work-item does RUN neighbours of a row of n: `row`, `first` and `last` follow from its number.
#define RUNS(n) (((n) + RUN - 1) / RUN)
#define RUN_OF_ROW(rows, n)                                        \
    const ulong item = get_global_id(0), runs_ = RUNS((ulong)(n)); \
    if (item >= (ulong)(rows) * runs_) return;                     \
    const long row = item / runs_, first = (item % runs_) * RUN;   \
    const long last = first + RUN < (n) ? first + RUN : (n)

inline float larger(float a, float b) { return (b > a || b != b) ? b : a; }
inline vec vec_larger(vec a, vec b) { return (b > a) | (b != b) ? b : a; }
inline vec vec_smaller(vec a, vec b) { return (b < a) | (b != b) ? b : a; }
inline vec vec_minus_size(vec x) { return x < 0.0f ? x : -x; }

// 1 / (1 + e^-x), of full relative accuracy on both sides. Vector `exp` is one call for VECTOR entries.
inline vec vec_sigmoid(vec x)
{
    const vec e = exp(vec_minus_size(x));
    return (x < 0.0f ? e : (vec)1.0f) / (1.0f + e);
}

inline float sigmoid_of(float x)
{
    const float e = exp(x < 0 ? x : -x);
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// What elementwise kernels and fusions make of a vector.
#define SILU_OF(v, a) (((v) * (a)) * vec_sigmoid((v) * (a)))
#define SWIGLU_OF(v, w, low, high) \
    (vec_smaller(v, (vec)(high)) * vec_sigmoid(vec_smaller(v, (vec)(high))) \
     * vec_smaller(vec_larger(w, (vec)(low)), (vec)(high)))
#define DECAY_OF(v, bias, rate) ((rate) * vec_softplus((v) + (bias)))

inline vec vec_softplus(vec x) { return vec_larger((vec)0.0f, x) + log1p(exp(vec_minus_size(x))); }

// Words of `size` bytes, from `first` to before `last`, bit for bit.
inline void copy_words(global uchar *to, global const uchar *from, long first, long last, long size)
{
    if (size == 4) {
        for (long i = first; i < last; i++) ((global uint *)to)[i] = ((global const uint *)from)[i];
    } else if (size == 2) {
        for (long i = first; i < last; i++) ((global ushort *)to)[i] = ((global const ushort *)from)[i];
    } else if (size == 8) {
        for (long i = first; i < last; i++) ((global ulong *)to)[i] = ((global const ulong *)from)[i];
    } else {
        for (long i = first * size; i < last * size; i++) to[i] = from[i];
    }
}

inline void zero_words(global uchar *to, long first, long last, long size)
{
    for (long i = first * size; i < last * size; i++) to[i] = 0;
}

// -- faults and sequences ---------------------------------------------------------------------------------------------

// An index that its op's contract forbids is never followed: the number of the first node that met one is left in
// `fault`, which the host reads with the step's outputs and raises as an error.
#define FAULT_ARGS volatile global int *fault, long node

inline void report(volatile global int *fault, long node) { atomic_min(fault, (int)node); }

inline bool outside(long index, long low, long high, FAULT_ARGS)
{
    if (low <= index && index < high) return false;
    report(fault, node);
    return true;
}

// The sequence of row t, -1 for padding: the last one that begins at or before t, if it ends behind t.
inline long sequence_of(global const int *cu, long seqs, long t)
{
    long low = 0, high = seqs;
    while (low < high) {
        const long middle = (low + high + 1) / 2;
        if (cu[middle] <= t) low = middle;
        else high = middle - 1;
    }
    return low < seqs && cu[low] <= t ? low : -1;
}

// `cu_seqlens` must rise from 0 to at most `tokens`; the first work-item looks.
inline void check_sequences(global const int *cu, long seqs, long tokens, FAULT_ARGS)
{
    if (get_global_id(0)) return;
    bool good = cu[0] == 0 && cu[seqs] <= tokens;
    for (long s = 0; s < seqs; s++) good &= cu[s] <= cu[s + 1];
    if (!good) report(fault, node);
}

// Rows of a sequence, within the step whatever `cu` says.
inline long first_row(global const int *cu, long s) { return cu[s] < 0 ? 0 : cu[s]; }
inline long end_row(global const int *cu, long s, long tokens) { return cu[s + 1] < tokens ? cu[s + 1] : tokens; }
