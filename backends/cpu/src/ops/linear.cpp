#include "linear.hpp"

#include "../kernels.hpp"
#include "cut.hpp"

namespace trueup {
namespace {

constexpr int64_t row_block = 96;   // rows of x that share one dequantization: their chunk of x stays in a 512 KiB cache
constexpr int64_t small = 1 << 15;  // multiply-adds below which waking a thread costs more than it saves

}  // namespace

void linear(const WeightRows& w, const float* const* x, float* const* out, int64_t rows) {
    const MatmulFn matmul = kernels().matmul[w.format];
    if (rows == 0 || w.count == 0) return;
    const int64_t down = (rows + row_block - 1) / row_block;
    const int64_t step = w.count * w.n * rows <= small ? w.count : rows_of_task(w.count, w.stride, down);
    const int64_t across = (w.count + step - 1) / step;
    parallel_for(across * down, [&](int64_t task, int) {
        const int64_t m0 = task % across * step, m1 = std::min(m0 + step, w.count);
        const int64_t r0 = task / across * row_block, count = std::min(row_block, rows - r0);
        float* to[row_block];
        for (int64_t r = 0; r < count; ++r) to[r] = out[r0 + r] + m0;
        matmul(w.data, w.stride, m0, m1, w.n, x + r0, to, count);
    });
}

}  // namespace trueup
