// What every instruction set's file includes before its own functions: nothing here may be compiled for more than the baseline.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../half.hpp"
#include "../kernels.hpp"

#define TRUEUP_INLINE __attribute__((always_inline))
#if defined(__clang__)
#define TRUEUP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TRUEUP_UNROLL _Pragma("GCC unroll 16")
#endif
