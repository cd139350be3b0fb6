// Arrays of any number of axes as rows: the last axis contiguous, the leading ones counted through in order.
#pragma once
#include "../pool.hpp"
#include "view.hpp"

namespace trueup {

template <class T>
struct RowView {
    T* data = nullptr;
    int ndim = 0;                             // leading axes
    std::array<int64_t, 8> shape{}, stride{};
    int64_t rows = 1, n = 1;
    bool packed = true;  // all of it contiguous

    T* row(int64_t r) const {
        int64_t offset = 0;
        for (int a = ndim - 1; a >= 0; --a) {
            offset += r % shape[a] * stride[a];
            r /= shape[a];
        }
        return data + offset;
    }
};

RowView<const float> rows_in(const Checker& check, const py::array& array, const char* name);
RowView<float> rows_out(const Checker& check, const py::array& array, const char* name);
// All axes of `a` and `b` alike; `last` false leaves the last one out.
void same_shape(const Checker& check, const char* name, const py::array& a, const char* other, const py::array& b, bool last = true);

constexpr int64_t map_task = 8192;  // elements that are worth a task

// f(row, from, count) over pieces of every row; one long row where `packed` says that all arrays are contiguous.
template <class Map>
void map_pieces(int64_t rows, int64_t n, bool packed, Map&& map) {
    if (packed) n *= rows, rows = n ? 1 : 0;
    if (n == 0) return;
    const int64_t pieces = (n + map_task - 1) / map_task, step = pieces > 1 ? 1 : std::max<int64_t>(1, map_task / n);
    parallel_for((rows + step - 1) / step * pieces, [&](int64_t task, int) {
        const int64_t from = task % pieces * map_task;
        for (int64_t r = task / pieces * step; r < std::min(rows, (task / pieces + 1) * step); ++r)
            map(r, from, std::min(map_task, n - from));
    });
}

// f(row) over whole rows of about n elements.
template <class Map>
void map_rows(int64_t rows, int64_t n, Map&& map) {
    const int64_t step = std::max<int64_t>(1, map_task / std::max<int64_t>(n, 1));
    parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
        for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) map(r);
    });
}

}  // namespace trueup
