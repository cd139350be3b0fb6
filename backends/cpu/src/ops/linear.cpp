#include "linear.hpp"

#include <algorithm>

#include "../kernels.hpp"
#include "../pool.hpp"

namespace trueup {
namespace {

constexpr int64_t row_block = 96;          // rows of x that share one dequantization: their chunk of x stays in a 512 KiB cache
constexpr int64_t small = 1 << 15;         // multiply-adds below which waking a thread costs more than it saves
constexpr int64_t task_bytes = 64 * 1024;  // of weights

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

}  // namespace

void linear(const WeightRows& w, const float* const* x, float* const* out, int64_t rows) {
    const MatmulFn matmul = kernels().matmul[w.format];
    if (rows == 0 || w.count == 0) return;
    const int64_t most = rows == 1 ? round_up(std::max<int64_t>(1, task_bytes / std::max<int64_t>(1, w.stride)), 4) : 32;
    const int64_t fair = round_up((w.count + 4 * threads() - 1) / (4 * threads()), 4);
    const int64_t step = w.count * w.n * rows <= small ? w.count : std::min(most, fair);
    const int64_t across = (w.count + step - 1) / step, down = (rows + row_block - 1) / row_block;
    parallel_for(across * down, [&](int64_t task, int) {
        const int64_t m0 = task % across * step, m1 = std::min(m0 + step, w.count);
        const int64_t r0 = task / across * row_block, count = std::min(row_block, rows - r0);
        float* to[row_block];
        for (int64_t r = 0; r < count; ++r) to[r] = out[r0 + r] + m0;
        matmul(w.data, w.stride, m0, m1, w.n, x + r0, to, count);
    });
}

}  // namespace trueup
