#include "common.hpp"

namespace trueup {
namespace portable {
#include "../simd/portable.inc"
#include "../simd/all.inc"
}  // namespace portable

const Kernels portable_kernels = portable::table("portable");
}  // namespace trueup
