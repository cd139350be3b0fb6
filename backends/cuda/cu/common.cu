// What every kernel of this backend stands on. Compiled by NVRTC without any header.
//
// Layout. An array is a pointer to its first element; a strided input is rows of n neighbours, row r at
// (r / inner) * outer + (r % inner) * step from there (`ROWS`). All counts and offsets are 64-bit.
//
// Numerics. float32 throughout; products that are added may be contracted to fused ones, except where a file says no.
// Every sum has one order, fixed by the sizes of its own row: the same bits in every run and for every number of rows.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef signed char i8;

#define KERNEL extern "C" __global__ void
#define INLINE __device__ __forceinline__
#define ROWS(T, name) const T *name, i64 name##_inner, i64 name##_outer, i64 name##_step
#define PLACE(name, r) (((i64)(r) / name##_inner) * name##_outer + ((i64)(r) % name##_inner) * name##_step)
#define ROW(name, r) (name + PLACE(name, r))
#define MINUS_INFINITY __int_as_float(0xff800000)
#define ALL 0xffffffffu

// What a launch asks for besides the shared memory that kernels declare.
extern __shared__ __align__(16) char shared_room[];

#define GROUP ((i64)blockIdx.x)
#define ITEM ((i64)blockIdx.x * blockDim.x + threadIdx.x)
#define WARP (ITEM >> 5)
#define LANE ((int)(threadIdx.x & 31))

// An entry a thread: `row` and `i` follow from its number.
#define ENTRY_OF_ROW(rows, n)                    \
    if (ITEM >= (i64)(rows) * (n)) return;       \
    const i64 row = ITEM / (n), i = ITEM % (n);

// -- reductions: one order each, a tree; every thread gets the result ---------------------------------------------------

INLINE float larger(float a, float b) { return (b > a || b != b) ? b : a; }
INLINE float smaller(float a, float b) { return (b < a || b != b) ? b : a; }
INLINE float sum_of(float a, float b) { return a + b; }
INLINE u32 most_of(u32 a, u32 b) { return a > b ? a : b; }

#define REDUCE(T, warp_name, block_name, OP)                                                  \
    INLINE T warp_name(T v)                                                                   \
    {                                                                                         \
        for (int d = 16; d; d >>= 1) v = OP(v, __shfl_xor_sync(ALL, v, d));                   \
        return v;                                                                             \
    }                                                                                         \
    INLINE T block_name(T v)                                                                  \
    {                                                                                         \
        __shared__ T parts[32];                                                               \
        v = warp_name(v);                                                                     \
        __syncthreads();                                                                      \
        if (!LANE) parts[threadIdx.x >> 5] = v;                                               \
        __syncthreads();                                                                      \
        v = parts[0];                                                                         \
        for (int w = 1; w < (int)(blockDim.x >> 5); w++) v = OP(v, parts[w]);                 \
        return v;                                                                             \
    }

REDUCE(float, warp_sum, block_sum, sum_of)
REDUCE(float, warp_max, block_max, larger) // NaN wins over every number
REDUCE(u32, warp_most, block_most, most_of)

// -- functions of one entry ----------------------------------------------------------------------------------------------

INLINE float minus_size(float x) { return x < 0 ? x : -x; }

// 1 / (1 + e^-x), of full relative accuracy on both sides.
INLINE float sigmoid_of(float x)
{
    const float e = expf(minus_size(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

INLINE float silu_of(float x) { return x * sigmoid_of(x); }
INLINE float softplus_of(float x) { return larger(0.0f, x) + log1pf(expf(minus_size(x))); }

// Words of `size` bytes, bit for bit.
INLINE void copy_word(u8 *to, i64 a, const u8 *from, i64 b, i64 size)
{
    if (size == 4) ((u32 *)to)[a] = ((const u32 *)from)[b];
    else if (size == 2) ((u16 *)to)[a] = ((const u16 *)from)[b];
    else if (size == 8) ((u64 *)to)[a] = ((const u64 *)from)[b];
    else
        for (i64 j = 0; j < size; j++) to[a * size + j] = from[b * size + j];
}

INLINE void zero_word(u8 *to, i64 a, i64 size)
{
    for (i64 j = 0; j < size; j++) to[a * size + j] = 0;
}

// -- faults and sequences ------------------------------------------------------------------------------------------------

// An index that its op's contract forbids is never followed: the number of the first node that met one is left in
// `fault`, which the host reads with the step's outputs and raises as an error.
#define FAULT_ARGS int *fault, i64 node

INLINE void report(FAULT_ARGS) { atomicMin(fault, (int)node); }

INLINE bool outside(i64 index, i64 low, i64 high, FAULT_ARGS)
{
    if (low <= index && index < high) return false;
    report(fault, node);
    return true;
}

// The sequence of row t, -1 for padding: the last one that begins at or before t, if it ends behind t.
INLINE i64 sequence_of(const int *cu, i64 seqs, i64 t)
{
    i64 low = 0, high = seqs;
    while (low < high) {
        const i64 middle = (low + high + 1) / 2;
        if (cu[middle] <= t) low = middle;
        else high = middle - 1;
    }
    return low < seqs && cu[low] <= t ? low : -1;
}

// `cu_seqlens` must rise from 0 to at most `tokens`; the first thread looks.
INLINE void check_sequences(const int *cu, i64 seqs, i64 tokens, FAULT_ARGS)
{
    if (ITEM) return;
    bool good = cu[0] == 0 && cu[seqs] <= tokens;
    for (i64 s = 0; s < seqs; s++) good &= cu[s] <= cu[s + 1];
    if (!good) report(fault, node);
}

// Rows of a sequence, within the step whatever `cu` says.
INLINE i64 first_row(const int *cu, i64 s) { return cu[s] < 0 ? 0 : cu[s]; }
INLINE i64 end_row(const int *cu, i64 s, i64 tokens) { return cu[s + 1] < tokens ? cu[s + 1] : tokens; }
