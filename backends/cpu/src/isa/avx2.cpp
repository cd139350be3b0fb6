#include "common.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace trueup {
namespace avx2 {
#include "../simd/avx2.inc"
#include "../simd/all.inc"
}  // namespace avx2
}  // namespace trueup

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace trueup {
const Kernels avx2_kernels = avx2::table("avx2");
}
#endif
