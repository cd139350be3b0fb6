// Activations as products with stored weights take them: float32 rows and, where these are asked for and there is a kernel, the same rows
// rounded to int8 in blocks of 32. Rows that can't be rounded are multiplied as they are, and so are more than a few at a time, which
// share one dequantization.
#pragma once
#include <cstdint>
#include <memory>

#include "../kernels.hpp"

namespace trueup {

constexpr int64_t few_rows = 4;  // up to which unpacking the weights for each row pays

class Activations {
public:
    // `rounded`: whether to round. Equal pointers that follow each other are rounded once.
    Activations(const float* const* x, int64_t rows, int64_t n, int format, bool rounded);

    // out[i] = w rows [m0, m1) times row rows[i], for i < count.
    void multiply(const uint8_t* w, int64_t row_bytes, int64_t m0, int64_t m1, const int64_t* rows, float* const* out, int64_t count) const;

private:
    const float* const* x_;
    int64_t n_;
    MatmulFn plain_;
    MatmulRoundedFn product_ = nullptr;
    std::unique_ptr<int8_t[]> q_;
    std::unique_ptr<float[]> scale_, sum_;
    std::unique_ptr<int64_t[]> at_;  // of a row, where it is rounded; -1: it is not
};

}  // namespace trueup
