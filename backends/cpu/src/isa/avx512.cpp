#include "common.hpp"

#if defined(__x86_64__)
// GCC's own headers leave vectors undefined on purpose, and GCC 12 warns about it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace trueup {
namespace avx512 {
#include "../simd/avx512.inc"
#include "../simd/all.inc"
}  // namespace avx512
}  // namespace trueup

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace trueup {
const Kernels avx512_kernels = avx512::table("avx512");
}
#endif
