#include "experts.hpp"

#include <cstring>

#include "../kernels.hpp"
#include "cut.hpp"
#include "rounded.hpp"

namespace trueup {
namespace {

constexpr int64_t row_block = 96;

// Choices of one expert: [begin, end) of `order`.
struct Group {
    int64_t expert, begin, end;
};

struct Grouped {
    std::vector<int64_t> order;  // choices by expert, each expert's in rising order
    std::vector<Group> groups;   // at most row_block choices each
};

Grouped by_expert(const int32_t* expert, int64_t choices, int64_t count) {
    std::vector<int64_t> start(static_cast<size_t>(count) + 1, 0);
    for (int64_t c = 0; c < choices; ++c)
        if (expert[c] >= 0) ++start[static_cast<size_t>(expert[c]) + 1];
    for (int64_t e = 0; e < count; ++e) start[e + 1] += start[e];
    Grouped found;
    found.order.resize(static_cast<size_t>(start[count]));
    for (int64_t e = 0; e < count; ++e)
        for (int64_t b = start[e]; b < start[e + 1]; b += row_block) found.groups.push_back({e, b, std::min(b + row_block, start[e + 1])});
    for (int64_t c = 0; c < choices; ++c)
        if (expert[c] >= 0) found.order[start[expert[c]]++] = c;
    return found;
}

}  // namespace

void expert_linear(const Experts& w, const Choices& choices, bool rounded) {
    const auto total = static_cast<int64_t>(choices.expert.size());
    const Grouped grouped = by_expert(choices.expert.data(), total, w.count);
    for (int64_t c = 0; c < total; ++c)
        if (choices.expert[c] < 0) std::memset(choices.out[c], 0, sizeof(float) * static_cast<size_t>(w.rows));
    if (w.rows == 0) return;
    const Activations activations(choices.x.data(), total, w.n, w.format, rounded);
    const auto groups = static_cast<int64_t>(grouped.groups.size());
    const int64_t step = rows_of_task(w.rows, w.row_stride, groups), across = (w.rows + step - 1) / step;
    parallel_for(across * groups, [&](int64_t task, int) {
        const Group& group = grouped.groups[task / across];
        const int64_t m0 = task % across * step, m1 = std::min(m0 + step, w.rows), count = group.end - group.begin;
        float* to[row_block];
        for (int64_t r = 0; r < count; ++r) to[r] = choices.out[grouped.order[group.begin + r]] + m0;
        activations.multiply(w.data + group.expert * w.stride, w.row_stride, m0, m1, grouped.order.data() + group.begin, to, count);
    });
}

void expert_combine(const Experts& w, const std::vector<int32_t>& expert, const std::vector<const float*>& x,
                    const std::vector<const float*>& mix, const std::vector<float*>& out, int64_t k, bool rounded) {
    constexpr int64_t most_rows = 1024;  // at a time, which bounds the scratch
    const auto rows = static_cast<int64_t>(out.size());
    if (w.rows == 0) return;
    const int64_t step = rows_of_task(w.rows, w.row_stride, 1), tasks = (w.rows + step - 1) / step;
    const int64_t each = std::min(rows, most_rows) * k * step;
    const int workers = threads();
    std::vector<float> scratch(static_cast<size_t>(each * workers));
    for (int64_t t0 = 0; t0 < rows; t0 += most_rows) {
        const int64_t count = std::min(most_rows, rows - t0);
        const Grouped grouped = by_expert(expert.data() + t0 * k, count * k, w.count);
        const Activations activations(x.data() + t0 * k, count * k, w.n, w.format, rounded);
        parallel_for(tasks, [&](int64_t task, int worker) {
            const int64_t m0 = task * step, m1 = std::min(m0 + step, w.rows);
            float* part = scratch.data() + worker * each;  // [choice, step]
            for (const Group& group : grouped.groups) {
                float* to[row_block];
                for (int64_t r = 0; r < group.end - group.begin; ++r) to[r] = part + grouped.order[group.begin + r] * step;
                activations.multiply(w.data + group.expert * w.stride, w.row_stride, m0, m1, grouped.order.data() + group.begin, to,
                                     group.end - group.begin);
            }
            for (int64_t t = 0; t < count; ++t) {
                float* to = out[t0 + t] + m0;
                std::memset(to, 0, sizeof(float) * static_cast<size_t>(m1 - m0));
                for (int64_t j = 0; j < k; ++j) {
                    if (expert[(t0 + t) * k + j] < 0) continue;
                    const float weight = mix[t0 + t][j];
                    const float* from = part + (t * k + j) * step;
                    for (int64_t i = 0; i < m1 - m0; ++i) to[i] += weight * from[i];
                }
            }
        }, workers);
    }
}

}  // namespace trueup
