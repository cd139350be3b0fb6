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
using DequantizeFn = void (*)(const uint8_t* row, int64_t n, float* out);

struct Kernels {
    const char* name;
    MatmulFn matmul[format_count];
    DequantizeFn dequantize[format_count];
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
