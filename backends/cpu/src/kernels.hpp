// What one instruction set offers: a table of the functions that do the arithmetic of one task. Knows no threads and no Python; every
// argument has been checked. All offsets are 64-bit, all strides count elements.
#pragma once
#include <cstdint>

#include "formats.hpp"

namespace trueup {

// out[r][i - m0] = sum_j w[i, j] x[r][j] for weight rows i in [m0, m1). Summed in chunks of 1024 elements, in each of them over lanes:
// the order is the same for every number of rows.
using MatmulFn = void (*)(const uint8_t* w, int64_t row_bytes, int64_t m0, int64_t m1, int64_t n, const float* const* x,
                          float* const* out, int64_t rows);
// A row of activations in blocks of 32: x = q scale, and of each block scale times the sum of q.
struct RoundedRow {
    const int8_t* q;
    const float *scale, *sum;
};
using RoundRowFn = bool (*)(const float* x, int64_t n, int8_t* q, float* scale, float* sum);  // n a multiple of 32; false: of no use
using MatmulRoundedFn = void (*)(const uint8_t* w, int64_t row_bytes, int64_t m0, int64_t m1, int64_t n, const RoundedRow* x,
                                 float* const* out, int64_t rows);
using DequantizeFn = void (*)(const uint8_t* row, int64_t n, float* out);

constexpr int attend_rows = 16, attend_keys = 256;

// A few query rows that read one head of keys and values, of a chunk of attend_keys. The rows see keys in [first, last) of the chunk,
// and only these are given; row r sees [from[r], to[r]) of them.
struct AttendChunk {
    const float* const* q;  // [rows] -> d
    int rows;
    const float *const *keys, *const *values;  // [attend_keys] -> d, dv
    int first, last;
    const int *from, *to;
    int64_t d, dv;
    float scale;
};
// most[r] = the largest score that is a number (-inf: none), total[r] = sum_j e^(x_j - most), acc[r * dv ...] = sum_j e^(x_j - most) v_j;
// most reads as 0 there if it is -inf. Keys in rising order; nothing depends on the other rows.
using AttendFn = void (*)(const AttendChunk&, float* most, float* total, float* acc);
// Joins the second part into the first, both of one row. The parts of a row are joined in the order of their keys.
using AttendJoinFn = void (*)(float* most, float* total, float* acc, float most2, float total2, const float* acc2, int64_t dv);

// Columns of one head's state, up to delta_width of them, through the rows of one sequence. fade = e^decay.
struct DeltaBlock {
    const float *q, *k, *v, *fade, *beta;  // of the first row
    int64_t q_stride, k_stride, v_stride, fade_stride, beta_stride;  // from row to row
    float* out;
    int64_t out_stride;
    float* state;  // [dk, columns]
    int64_t state_stride, dk, columns;
    const int32_t* keep;  // [rows] or null; the state after row t goes to slots + keep[t] * slot_stride where keep[t] >= 0
    float* slots;
    int64_t slot_stride;
    int64_t rows;
    float scale;
};
using DeltaFn = void (*)(const DeltaBlock&, float* scratch);  // scratch [dk, delta_width]

// out[j] = scale sum_h weights[h] relu(q[h] . keys[j]), h in order; weights may be null.
using IndexFn = void (*)(const float* const* q, const float* weights, int64_t heads, const float* const* keys, int64_t count, int64_t d,
                         float scale, float* out);

// Maps of n contiguous elements; out may be one of the inputs.
using MapFn = void (*)(const float* x, float* out, int64_t n);
using ScaledMapFn = void (*)(const float* x, float s, float* out, int64_t n);
using PairMapFn = void (*)(const float* a, const float* b, float* out, int64_t n);
using SwigluFn = void (*)(const float* gate, const float* up, float limit, float* out, int64_t n);
using AddScaledFn = void (*)(const float* x, const float* y, float s, float* out, int64_t n);  // x + s y

// out = x / sqrt(sum x^2 / divisor + eps), times weight and activation(gate) where these are given. In float64, rounded once but for
// the activation.
enum class Activation { none, sigmoid, silu };
using NormFn = void (*)(const float* x, const float* weight, const float* gate, Activation activation, double divisor, double eps,
                        float* out, int64_t n);

// out = the mean over streams of sigmoid(gate[s]) normed[s].
using HcReadFn = void (*)(const float* normed, int64_t stride, const float* gate, int64_t streams, float* out, int64_t n);

// out[c] = sum_j taps[j * stride + c] x[j][c], j in order.
using ConvolveFn = void (*)(const float* const* x, const float* taps, int64_t stride, int64_t count, float* out, int64_t n);

struct Kernels {
    const char* name;
    MatmulFn matmul[format_count];
    MatmulRoundedFn matmul_rounded[format_count];  // nullptr where there is none
    RoundRowFn round_row;
    DequantizeFn dequantize[format_count];
    AttendFn attend;
    AttendJoinFn attend_join;
    DeltaFn delta_rule;
    int delta_width;
    IndexFn index_keys;
    MapFn sigmoid;
    ScaledMapFn silu;  // of s x
    SwigluFn swiglu;
    PairMapFn add, mul;
    ScaledMapFn scale;
    AddScaledFn add_scaled;
    MapFn softmax;  // of a row
    NormFn norm;
    HcReadFn hc_read;
    ConvolveFn convolve;
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

const Kernels& kernels();  // those in use
bool set_isa(const char* name);  // false where the name is unknown or the machine lacks it
const char* available_isa(int index);  // best first; nullptr at the end

}  // namespace trueup
