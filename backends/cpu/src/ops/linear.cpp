#include "linear.hpp"

#include "../kernels.hpp"
#include "cut.hpp"
#include "rounded.hpp"

namespace trueup {
namespace {

constexpr int64_t row_block = 96;   // rows of x that share one dequantization: their chunk of x stays in a 512 KiB cache
constexpr int64_t small = 1 << 15;  // multiply-adds below which waking a thread costs more than it saves

}  // namespace

void linear(const WeightRows& w, const float* const* x, float* const* out, int64_t rows, bool rounded) {
    if (rows == 0 || w.count == 0) return;
    const Activations activations(x, rows, w.n, w.format, rounded && rows <= few_rows);
    const int64_t down = (rows + row_block - 1) / row_block;
    const int64_t step = w.count * w.n * rows <= small ? w.count : rows_of_task(w.count, w.stride, down);
    const int64_t across = (w.count + step - 1) / step;
    parallel_for(across * down, [&](int64_t task, int) {
        const int64_t m0 = task % across * step, m1 = std::min(m0 + step, w.count);
        const int64_t r0 = task / across * row_block, count = std::min(row_block, rows - r0);
        float* to[row_block];
        int64_t at[row_block];
        for (int64_t r = 0; r < count; ++r) at[r] = r0 + r, to[r] = out[r0 + r] + m0;
        activations.multiply(w.data, w.stride, m0, m1, at, to, count);
    });
}

}  // namespace trueup
