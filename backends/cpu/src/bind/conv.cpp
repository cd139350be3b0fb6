// Ops that look back through a tail: the causal convolution and the trailing mean. Cut by sequence and by columns, which never meet.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../kernels.hpp"
#include "bind.hpp"
#include "program.hpp"
#include "rows.hpp"
#include "steps.hpp"

namespace trueup {
namespace {

constexpr int64_t width = 512;  // columns of a task

// The arguments that both ops have.
struct Look {
    View<float, 2> out;
    View<const float, 2> x;
    View<float, 3> tail;
    View<const int32_t, 1> cu, slots;
    const int32_t* keep = nullptr;  // [tokens]
};

Look look(const Checker& check, const py::array& out, const py::array& x, const py::array& cu_seqlens, const py::array& slots,
          const py::array& tail, const py::object& keep, int64_t back) {
    Look l;
    l.out = check.out<float, 2>(out, "out", "[tokens, n]");
    l.x = check.in<float, 2>(x, "x", "[tokens, n]");
    l.cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]");
    l.slots = check.in<int32_t, 1>(slots, "slots", "[seqs]");
    l.tail = check.out<float, 3>(tail, "tail", "[slot, back, n]");
    same_shape(check, "out", out, "x", x);
    check.same("tail", "rows back", l.tail.shape[1], "what the op looks back", back);
    check.same("tail", "n", l.tail.shape[2], "x", l.x.shape[1]);
    check.same("slots", "seqs", l.slots.shape[0], "cu_seqlens", l.cu.shape[0] - 1);
    if (given(keep)) {
        const auto array = check.in<int32_t, 1>(as_array(check, keep, "keep"), "keep", "[tokens]");
        check.same("keep", "tokens", array.shape[0], "x", l.x.shape[0]);
        l.keep = array.data;
    }
    return l;
}

// row(history, to, column, count) for every row of the step and piece of columns; history[i] is the row `back - i` rows before it.
template <class Row>
void walk(const Checker& check, const Look& l, Row&& row) {
    const auto found = spans(check, l.cu, l.x.shape[0]);
    check_slots(check, found, l.slots, l.keep, 1, l.tail.shape[0]);
    const int64_t back = l.tail.shape[1], n = l.x.shape[1], pieces = (n + width - 1) / width;
    const int workers = threads();
    std::vector<float> scratch(static_cast<size_t>(workers * back * width));  // the tail as it was before the step
    std::vector<const float*> pointers(static_cast<size_t>(workers * (back + 1)));
    parallel_for(static_cast<int64_t>(found.size()) * pieces, [&](int64_t task, int worker) {
        const Span& s = found[task / pieces];
        const int64_t c = task % pieces * width, count = std::min(width, n - c), slot = l.slots.data[s.seq];
        const size_t bytes = sizeof(float) * static_cast<size_t>(count);
        float* before = scratch.data() + worker * back * width;
        const float** history = pointers.data() + worker * (back + 1);
        for (int64_t i = 0; i < back; ++i) std::memcpy(before + i * width, l.tail.at(slot, i, c), bytes);
        // Row i of the tail and the step's rows together.
        auto past = [&](int64_t i) { return i < back ? before + i * width : l.x.at(s.begin + i - back, c); };
        auto push = [&](int64_t to, int64_t first) {
            for (int64_t i = 0; i < back; ++i) std::memcpy(l.tail.at(to, i, c), past(first + i), bytes);
        };
        for (int64_t t = 0; t < s.count(); ++t) {
            for (int64_t i = 0; i <= back; ++i) history[i] = past(t + i);
            row(history, l.out.at(s.begin + t, c), c, count);
            if (l.keep && l.keep[s.begin + t] >= 0) push(l.keep[s.begin + t], t + 1);
        }
        push(slot, s.count());
    }, workers);
    for (int64_t t = found.empty() ? 0 : found.back().end; t < l.x.shape[0]; ++t) std::fill_n(l.out.at(t), n, 0.0f);
}

void causal_conv_(const py::array& out, const py::array& x, const py::array& weight_, const py::array& cu_seqlens, const py::array& slots,
                  const py::array& tail, const py::object& keep, int64_t dilation) {
    const Checker check("causal_conv");
    const auto weight = check.in<float, 2>(weight_, "weight", "[channels, taps]");
    const int64_t channels = weight.shape[0], taps = weight.shape[1];
    check.require(dilation >= 1, "dilation is " + std::to_string(dilation) + ", expected 1 or more");
    check.require(taps >= 1, "weight has taps = 0, expected 1 or more");
    const Look l = look(check, out, x, cu_seqlens, slots, tail, keep, (taps - 1) * dilation);
    check.same("weight", "channels", channels, "x", l.x.shape[1]);
    std::vector<float> by_tap(static_cast<size_t>(taps * channels));
    for (int64_t c = 0; c < channels; ++c)
        for (int64_t j = 0; j < taps; ++j) by_tap[j * channels + c] = *weight.at(c, j);
    perform([=] {
        const Kernels& use = kernels();
        walk(check, l, [&](const float** history, float* to, int64_t c, int64_t count) {
            for (int64_t j = 0; j < taps; ++j) history[j] = history[j * dilation];
            use.convolve(history, by_tap.data() + c, channels, taps, to, count);
        });
    });
}

void trailing_mean_(const py::array& out, const py::array& x, const py::array& cu_seqlens, const py::array& slots, const py::array& tail,
                    const py::object& keep, int64_t every) {
    const Checker check("trailing_mean");
    check.require(every >= 1, "every is " + std::to_string(every) + ", expected 1 or more");
    const Look l = look(check, out, x, cu_seqlens, slots, tail, keep, every - 1);
    perform([=] {
        walk(check, l, [&](const float** history, float* to, int64_t, int64_t count) {
            for (int64_t c = 0; c < count; ++c) {
                double total = 0;
                for (int64_t i = 0; i < every; ++i) total += history[i][c];
                to[c] = static_cast<float>(total / static_cast<double>(every));
            }
        });
    });
}

}  // namespace

void bind_conv(py::module_& m) {
    m.def("causal_conv", &causal_conv_, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("cu_seqlens"), py::arg("slots"),
          py::arg("tail"), py::arg("keep") = py::none(), py::kw_only(), py::arg("dilation") = 1,
          "Depthwise causal convolution of x[tokens, channels] with weight float32[channels, taps]; tail is updated in place.");
    m.def("trailing_mean", &trailing_mean_, py::arg("out"), py::arg("x"), py::arg("cu_seqlens"), py::arg("slots"), py::arg("tail"),
          py::arg("keep") = py::none(), py::kw_only(), py::arg("every"),
          "The mean of each row and the every-1 before it; tail is updated in place.");
}

}  // namespace trueup
