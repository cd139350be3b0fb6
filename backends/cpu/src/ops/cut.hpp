// How many weight rows make a task: enough bytes to be worth a thread's while, few enough that all threads have some.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../pool.hpp"

namespace trueup {

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// For `groups` products of `count` weight rows each, of `bytes` a row; a multiple of 4.
inline int64_t rows_of_task(int64_t count, int64_t bytes, int64_t groups) {
    constexpr int64_t task_bytes = 64 * 1024;
    const int64_t most = std::max<int64_t>(32, round_up(task_bytes / std::max<int64_t>(1, bytes), 4));
    const int64_t parts = std::max<int64_t>(1, 4 * threads() / std::max<int64_t>(1, groups));
    return std::min(most, round_up((count + parts - 1) / parts, 4));
}

}  // namespace trueup
