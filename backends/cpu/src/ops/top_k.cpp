#include "top_k.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

namespace trueup {
namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

// Larger for a larger score, and for the lower index of equal ones; never equal for two indices.
uint64_t key_of(float score, int64_t index) {
    const float positive = score + 0.0f;  // -0 becomes 0
    uint32_t bits;
    std::memcpy(&bits, &positive, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | ~static_cast<uint32_t>(index);
}

int64_t index_of(uint64_t key) { return static_cast<int64_t>(~static_cast<uint32_t>(key)); }

}  // namespace

void top_k(const float* scores, int64_t n, int64_t k, float* values, int32_t* indices, std::vector<uint64_t>& space) {
    if (k == 0) return;
    // Keys that beat the threshold are collected; when there is no room, the best k stay and the k-th becomes the threshold. A later
    // entry equal to it loses the tie, so only greater ones are kept.
    const size_t room = space.size();
    size_t held = 0;
    float threshold = none;
    auto shrink = [&] {
        std::nth_element(space.begin(), space.begin() + (k - 1), space.begin() + static_cast<std::ptrdiff_t>(held), std::greater<>());
        held = static_cast<size_t>(k);
        threshold = scores[index_of(space[k - 1])];
    };
    constexpr int64_t step = 16;
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        int any = 0;
        for (int64_t j = 0; j < step; ++j) any |= scores[i + j] > threshold;
        if (!any) continue;
        if (held + step > room) shrink();
        for (int64_t j = i; j < i + step; ++j)
            if (scores[j] > threshold) space[held++] = key_of(scores[j], j);
    }
    if (held + step > room) shrink();
    for (; i < n; ++i)
        if (scores[i] > threshold) space[held++] = key_of(scores[i], i);
    if (held > static_cast<size_t>(k)) shrink();
    std::sort(space.begin(), space.begin() + static_cast<std::ptrdiff_t>(held), std::greater<>());
    int64_t chosen = 0;
    for (; chosen < static_cast<int64_t>(held); ++chosen) {
        indices[chosen] = static_cast<int32_t>(index_of(space[chosen]));
        values[chosen] = scores[indices[chosen]];
    }
    for (i = 0; i < n && chosen < k; ++i)
        if (scores[i] != scores[i]) {
            values[chosen] = scores[i];
            indices[chosen++] = static_cast<int32_t>(i);
        }
    for (; chosen < k; ++chosen) {
        values[chosen] = none;
        indices[chosen] = -1;
    }
}

}  // namespace trueup
