#include <vector>

#include "../ops/linear.hpp"
#include "../ops/rounded.hpp"
#include "../pool.hpp"
#include "bind.hpp"
#include "program.hpp"
#include "weights.hpp"

namespace trueup {
namespace {

void linear_(const py::array& out_, const py::array& x_, const py::array& weight, const std::string& dtype, bool rounded) {
    const Checker check("linear");
    const auto out = check.out<float, 2>(out_, "out", "[rows, m]");
    const auto x = check.in<float, 2>(x_, "x", "[rows, n]");
    const auto w = check.in<uint8_t, 2>(weight, "weight_bytes", "[m, row_bytes]");
    const Rows row = rows_of(check, dtype, w.shape[1], "weight_bytes");
    check.same("x", "n", x.shape[1], "a row of weight_bytes", row.n);
    check.same("out", "m", out.shape[1], "weight_bytes", w.shape[0]);
    check.same("out", "rows", out.shape[0], "x", x.shape[0]);
    const int64_t rows = x.shape[0];
    std::vector<const float*> from(static_cast<size_t>(rows));
    std::vector<float*> to(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) from[r] = x.at(r), to[r] = out.at(r);
    perform([=] {
        linear({w.data, w.stride[0], w.shape[0], row.format, row.n}, from.data(), to.data(), rows, rounded);
    });
}

py::array_t<float> dequantize_(const py::array& weight, const std::string& dtype) {
    const Checker check("dequantize");
    const auto w = check.in<uint8_t, 2>(weight, "weight_bytes", "[rows, row_bytes]");
    const Rows row = rows_of(check, dtype, w.shape[1], "weight_bytes");
    py::array_t<float> out({w.shape[0], row.n});
    float* to = out.mutable_data();
    {
        py::gil_scoped_release release;
        const DequantizeFn dequantize = kernels().dequantize[row.format];
        constexpr int64_t step = 16;
        parallel_for((w.shape[0] + step - 1) / step, [&](int64_t task, int) {
            for (int64_t r = task * step; r < w.shape[0] && r < (task + 1) * step; ++r) dequantize(w.at(r), row.n, to + r * row.n);
        });
    }
    return out;
}

}  // namespace

void bind_linear(py::module_& m) {
    m.def("linear", &linear_, py::arg("out"), py::arg("x"), py::arg("weight_bytes"), py::arg("dtype"),
          py::arg("rounded") = false, "out[rows, m] = x[rows, n] W^T for W stored as weight_bytes uint8[m, row_bytes] of that type. With "
          "`rounded`, x is rounded to int8 in blocks of 32, where the type is one of ROUNDED.");
    m.def("dequantize", &dequantize_, py::arg("weight_bytes"), py::arg("dtype"),
          "float32[rows, n] of uint8[rows, row_bytes]: the values that the kernels compute with, the same bits as gguf-py's.");
    py::list names;
    for (const auto& f : format_info) names.append(f.name);
    m.attr("DTYPES") = py::tuple(names);
    py::list rounded;
    for (int f = 0; f < format_count; ++f)
        if (kernels().matmul_rounded[f]) rounded.append(format_info[f].name);
    m.attr("ROUNDED") = py::tuple(rounded);
    m.attr("FEW_ROWS") = few_rows;
}

}  // namespace trueup
