// Products with stored weights, cut into tasks for the pool. See the .cpp for how; results do not depend on it.
#pragma once
#include <cstdint>

namespace trueup {

struct WeightRows {
    const uint8_t* data;
    int64_t stride, count;  // bytes from row to row; rows
    int format;
    int64_t n;  // elements of a row
};

// out[r][i] = w_i . x[r] for all rows r < rows; `rounded`: of x rounded to int8, where there is a kernel.
void linear(const WeightRows& w, const float* const* x, float* const* out, int64_t rows, bool rounded = false);

}  // namespace trueup
