// Mixture of experts: rows grouped by expert, so that each expert's weights are read once for all of its rows.
#pragma once
#include <cstdint>
#include <vector>

namespace trueup {

struct Experts {
    const uint8_t* data;
    int64_t stride, row_stride, rows;  // bytes from expert to expert, from row to row; rows of an expert
    int format;
    int64_t n, count;  // elements of a row; experts
};

// Choice c of a row, `expert` of [0, count) or -1. x[c] is its input, out[c] its output.
struct Choices {
    std::vector<int32_t> expert;
    std::vector<const float*> x;
    std::vector<float*> out;
};

// out[c] = W_expert x[c]; zeros where the expert is -1. `rounded`, here and below: of x rounded to int8, where there is a kernel.
void expert_linear(const Experts& w, const Choices& choices, bool rounded = false);

// out[t] = sum_j mix[t][j] W_expert x[t * k + j] over the k choices of each of the rows, in order; -1 is skipped.
void expert_combine(const Experts& w, const std::vector<int32_t>& expert, const std::vector<const float*>& x,
                    const std::vector<const float*>& mix, const std::vector<float*>& out, int64_t k, bool rounded = false);

}  // namespace trueup
