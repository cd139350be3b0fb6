#include "rounded.hpp"

#include <algorithm>

#include "../pool.hpp"

namespace trueup {

Activations::Activations(const float* const* x, int64_t rows, int64_t n, int format, bool rounded) : x_(x), n_(n) {
    const Kernels& use = kernels();
    plain_ = use.matmul[format];
    if (!rounded || !use.matmul_rounded[format] || n == 0 || n % 32) return;
    product_ = use.matmul_rounded[format];
    q_.reset(new int8_t[static_cast<size_t>(rows * n)]);
    scale_.reset(new float[static_cast<size_t>(rows * n / 32)]);
    sum_.reset(new float[static_cast<size_t>(rows * n / 32)]);
    at_.reset(new int64_t[static_cast<size_t>(rows)]);
    const int64_t step = std::max<int64_t>(1, 16384 / n);
    parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
        for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) {
            if (r > task * step && x[r] == x[r - 1]) {
                at_[r] = at_[r - 1];
                continue;
            }
            const bool good = use.round_row(x[r], n, q_.get() + r * n, scale_.get() + r * n / 32, sum_.get() + r * n / 32);
            at_[r] = good ? r : -1;
        }
    });
}

void Activations::multiply(const uint8_t* w, int64_t row_bytes, int64_t m0, int64_t m1, const int64_t* rows, float* const* out,
                           int64_t count) const {
    constexpr int64_t most = 96;
    for (int64_t first = 0; first < count; first += most) {
        const float* from[most];
        RoundedRow rounded[most];
        float *to[most], *rounded_to[most];
        int64_t plain = 0, made = 0;
        for (int64_t i = first; i < std::min(count, first + most); ++i) {
            const int64_t r = rows[i], at = product_ && count <= few_rows ? at_[r] : -1;
            if (at < 0) {
                from[plain] = x_[r];
                to[plain++] = out[i];
            } else {
                rounded[made] = {q_.get() + at * n_, scale_.get() + at * n_ / 32, sum_.get() + at * n_ / 32};
                rounded_to[made++] = out[i];
            }
        }
        if (plain) plain_(w, row_bytes, m0, m1, n_, from, to, plain);
        if (made) product_(w, row_bytes, m0, m1, n_, rounded, rounded_to, made);
    }
}

}  // namespace trueup
