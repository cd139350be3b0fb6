// The k largest of a row. Sorts only what can still be chosen.
#pragma once
#include <cstdint>
#include <vector>

namespace trueup {

// Numbers falling, ties (and -0 with 0) to the lower index; then NaN, lowest index first; then -inf with index -1, where fewer remain.
// k <= n. `space` is storage that a caller may keep from row to row.
void top_k(const float* scores, int64_t n, int64_t k, float* values, int32_t* indices, std::vector<uint64_t>& space);
constexpr int64_t top_k_space(int64_t k) { return 2 * k + 256; }

}  // namespace trueup
