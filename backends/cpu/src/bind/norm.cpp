#include "../kernels.hpp"
#include "bind.hpp"
#include "program.hpp"
#include "rows.hpp"

namespace trueup {
namespace {

void norm_rows(const Checker& check, const py::array& out_, const py::array& x_, const py::object& weight_, double eps, bool mean) {
    const auto out = rows_out(check, out_, "out");
    const auto x = rows_in(check, x_, "x");
    same_shape(check, "out", out_, "x", x_);
    const float* weight = nullptr;
    if (given(weight_)) {
        const auto w = check.in<float, 1>(as_array(check, weight_, "weight"), "weight", "[n]");
        check.same("weight", "n", w.shape[0], "x", x.n);
        weight = w.data;
    }
    perform([=] {
        const Kernels& use = kernels();
        const double divisor = mean && x.n ? static_cast<double>(x.n) : 1.0;
        map_rows(x.rows, x.n, [&](int64_t r) { use.norm(x.row(r), weight, nullptr, Activation::none, divisor, eps, out.row(r), x.n); });
    });
}

void group_rms_norm_(const py::array& out_, const py::array& x_, const py::array& weight, double eps) {
    const Checker check("group_rms_norm");
    const auto out = check.out<float, 3>(out_, "out", "[rows, groups, n]");
    const auto x = check.in<float, 3>(x_, "x", "[rows, groups, n]");
    const auto w = check.in<float, 1>(weight, "weight", "[groups*n]");
    same_shape(check, "out", out_, "x", x_);
    const int64_t groups = x.shape[1], n = x.shape[2];
    check.same("weight", "groups*n", w.shape[0], "x", groups * n);
    perform([=] {
        const Kernels& use = kernels();
        map_rows(x.shape[0], groups * n, [&](int64_t r) {
            for (int64_t g = 0; g < groups; ++g)
                use.norm(x.at(r, g), w.data + g * n, nullptr, Activation::none, static_cast<double>(n ? n : 1), eps, out.at(r, g), n);
        });
    });
}

void gated_rms_norm_(const py::array& out_, const py::array& x_, const py::array& gate_, const py::array& weight, double eps,
                     const std::string& activation) {
    const Checker check("gated_rms_norm");
    check.require(activation == "silu" || activation == "sigmoid", "activation is '" + activation + "', expected 'silu' or 'sigmoid'");
    const auto out = rows_out(check, out_, "out");
    const auto x = rows_in(check, x_, "x"), gate = rows_in(check, gate_, "gate");
    same_shape(check, "gate", gate_, "x", x_);
    same_shape(check, "out", out_, "x", x_);
    const auto w = check.in<float, 1>(weight, "weight", "[d]");
    check.same("weight", "d", w.shape[0], "x", x.n);
    perform([=] {
        const Kernels& use = kernels();
        const Activation kind = activation == "silu" ? Activation::silu : Activation::sigmoid;
        map_rows(x.rows, x.n, [&](int64_t r) {
            use.norm(x.row(r), w.data, gate.row(r), kind, static_cast<double>(x.n ? x.n : 1), eps, out.row(r), x.n);
        });
    });
}

}  // namespace

void bind_norm(py::module_& m) {
    m.def("rms_norm", [](const py::array& out, const py::array& x, const py::object& weight, double eps) {
        norm_rows(Checker("rms_norm"), out, x, weight, eps, true);
    }, py::arg("out"), py::arg("x"), py::arg("weight") = py::none(), py::kw_only(), py::arg("eps"),
          "x / sqrt(mean(x^2) + eps), times weight[n] if given, over the last axis.");
    m.def("l2_norm", [](const py::array& out, const py::array& x, double eps) {
        norm_rows(Checker("l2_norm"), out, x, py::none(), eps, false);
    }, py::arg("out"), py::arg("x"), py::kw_only(), py::arg("eps"), "x / sqrt(sum(x^2) + eps) over the last axis.");
    m.def("group_rms_norm", &group_rms_norm_, py::arg("out"), py::arg("x"), py::arg("weight"), py::kw_only(), py::arg("eps"),
          "rms_norm of each group of x[rows, groups, n] with its own part of weight[groups*n].");
    m.def("gated_rms_norm", &gated_rms_norm_, py::arg("out"), py::arg("x"), py::arg("gate"), py::arg("weight"), py::kw_only(), py::arg("eps"),
          py::arg("activation"), "activation(gate) rms_norm(x, weight) over the last axis.");
}

}  // namespace trueup
