#include "../ops/experts.hpp"

#include "bind.hpp"
#include "program.hpp"
#include "weights.hpp"

namespace trueup {
namespace {

Experts experts_of(const Checker& check, const py::array& weight, const std::string& dtype) {
    const auto w = check.in<uint8_t, 3>(weight, "weight", "[e, rows, row_bytes]");
    const Rows row = rows_of(check, dtype, w.shape[2], "weight");
    return {w.data, w.stride[0], w.stride[1], w.shape[1], row.format, row.n, w.shape[0]};
}

std::vector<int32_t> chosen(const Checker& check, const View<const int32_t, 2>& experts, int64_t count) {
    std::vector<int32_t> found(static_cast<size_t>(experts.size()));
    for (int64_t t = 0, c = 0; t < experts.shape[0]; ++t)
        for (int64_t j = 0; j < experts.shape[1]; ++j, ++c) {
            found[c] = *experts.at(t, j);
            if (found[c] < -1 || found[c] >= count)
                check.fail("experts[" + std::to_string(t) + ", " + std::to_string(j) + "] is " + std::to_string(found[c]) +
                           ", expected -1 or one of " + std::to_string(count) + " experts");
        }
    return found;
}

void expert_linear_(const py::array& out_, const py::array& x_, const py::array& experts_, const py::array& weight, const std::string& dtype,
                    bool rounded) {
    const Checker check("expert_linear");
    const auto out = check.out<float, 3>(out_, "out", "[tokens, k, m]");
    const auto x = check.in<float, 2>(x_, "x", "[tokens, n]");
    const auto experts = check.in<int32_t, 2>(experts_, "experts", "[tokens, k]");
    const Experts w = experts_of(check, weight, dtype);
    check.same("x", "n", x.shape[1], "a row of weight", w.n);
    check.same("experts", "tokens", experts.shape[0], "x", x.shape[0]);
    check.same("out", "tokens", out.shape[0], "x", x.shape[0]);
    check.same("out", "k", out.shape[1], "experts", experts.shape[1]);
    check.same("out", "m", out.shape[2], "weight", w.rows);
    perform([=] {
        Choices choices{chosen(check, experts, w.count), {}, {}};
        for (int64_t t = 0; t < out.shape[0]; ++t)
            for (int64_t j = 0; j < out.shape[1]; ++j) choices.x.push_back(x.at(t)), choices.out.push_back(out.at(t, j));
        expert_linear(w, choices, rounded);
    });
}

void expert_combine_(const py::array& out_, const py::array& h_, const py::array& experts_, const py::array& mix_, const py::array& weight,
                     const std::string& dtype, bool rounded) {
    const Checker check("expert_combine");
    const auto out = check.out<float, 2>(out_, "out", "[tokens, n]");
    const auto h = check.in<float, 3>(h_, "h", "[tokens, k, m]");
    const auto experts = check.in<int32_t, 2>(experts_, "experts", "[tokens, k]");
    const auto mix = check.in<float, 2>(mix_, "mix", "[tokens, k]");
    const Experts w = experts_of(check, weight, dtype);
    check.same("h", "m", h.shape[2], "a row of weight", w.n);
    check.same("experts", "tokens", experts.shape[0], "h", h.shape[0]);
    check.same("experts", "k", experts.shape[1], "h", h.shape[1]);
    check.same("mix", "tokens", mix.shape[0], "h", h.shape[0]);
    check.same("mix", "k", mix.shape[1], "h", h.shape[1]);
    check.same("out", "tokens", out.shape[0], "h", h.shape[0]);
    check.same("out", "n", out.shape[1], "weight", w.rows);
    perform([=] {
        const auto ids = chosen(check, experts, w.count);
        std::vector<const float*> from, mixes;
        std::vector<float*> to;
        for (int64_t t = 0; t < h.shape[0]; ++t) {
            for (int64_t j = 0; j < h.shape[1]; ++j) from.push_back(h.at(t, j));
            mixes.push_back(mix.at(t));
            to.push_back(out.at(t));
        }
        expert_combine(w, ids, from, mixes, to, h.shape[1], rounded);
    });
}

}  // namespace

void bind_experts(py::module_& m) {
    m.def("expert_linear", &expert_linear_, py::arg("out"), py::arg("x"), py::arg("experts"), py::arg("weight"), py::arg("dtype"),
          py::arg("rounded") = false, "out[tokens, k, m] = W_e x[tokens, n] for each e in experts int32[tokens, k]; zeros where it is -1. W: uint8[e, m, row_bytes].");
    m.def("expert_combine", &expert_combine_, py::arg("out"), py::arg("h"), py::arg("experts"), py::arg("mix"), py::arg("weight"), py::arg("dtype"),
          py::arg("rounded") = false, "out[tokens, n] = sum_j mix[tokens, j] W_e h[tokens, j], j in order, -1 skipped. W: uint8[e, n, row_bytes].");
}

}  // namespace trueup
