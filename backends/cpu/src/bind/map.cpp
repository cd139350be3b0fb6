// Maps: every entry by itself, or with its row (softmax, normalize, hyper-connections).
#include <cmath>

#include "../kernels.hpp"
#include "bind.hpp"
#include "program.hpp"
#include "rows.hpp"

namespace trueup {
namespace {

// out = f(x), with f(kernels, x, out, count).
template <class Map>
void unary(const char* name, const py::array& out_, const py::array& x_, Map&& map) {
    const Checker check(name);
    const auto out = rows_out(check, out_, "out");
    const auto x = rows_in(check, x_, "x");
    same_shape(check, "out", out_, "x", x_);
    perform([=] {
        const Kernels& use = kernels();
        map_pieces(x.rows, x.n, out.packed && x.packed,
                   [&](int64_t r, int64_t from, int64_t count) { map(use, x.row(r) + from, out.row(r) + from, count); });
    });
}

template <class Map>
void binary(const char* name, const char* first, const char* second, const py::array& out_, const py::array& a_, const py::array& b_, Map&& map) {
    const Checker check(name);
    const auto out = rows_out(check, out_, "out");
    const auto a = rows_in(check, a_, first), b = rows_in(check, b_, second);
    same_shape(check, second, b_, first, a_);
    same_shape(check, "out", out_, first, a_);
    perform([=] {
        const Kernels& use = kernels();
        map_pieces(a.rows, a.n, out.packed && a.packed && b.packed,
                   [&](int64_t r, int64_t from, int64_t count) { map(use, a.row(r) + from, b.row(r) + from, out.row(r) + from, count); });
    });
}

double softplus_of(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

void scale_rows_(const py::array& out_, const py::array& x_, const py::array& scale_) {
    const Checker check("scale_rows");
    const auto out = check.out<float, 2>(out_, "out", "[rows, n]");
    const auto x = check.in<float, 2>(x_, "x", "[rows, n]");
    const auto scale = check.in<float, 2>(scale_, "scale", "[rows, 1]");
    same_shape(check, "out", out_, "x", x_);
    check.same("scale", "rows", scale.shape[0], "x", x.shape[0]);
    check.same("scale", "columns", scale.shape[1], "one number a row", 1);
    perform([=] {
        const Kernels& use = kernels();
        map_rows(x.shape[0], x.shape[1], [&](int64_t r) { use.scale(x.at(r), *scale.at(r), out.at(r), x.shape[1]); });
    });
}

void softmax_(const py::array& out_, const py::array& x_) {
    const Checker check("softmax");
    const auto out = rows_out(check, out_, "out");
    const auto x = rows_in(check, x_, "x");
    same_shape(check, "out", out_, "x", x_);
    perform([=] {
        const Kernels& use = kernels();
        map_rows(x.rows, x.n, [&](int64_t r) { use.softmax(x.row(r), out.row(r), x.n); });
    });
}

void normalize_(const py::array& out_, const py::array& x_, double floor) {
    const Checker check("normalize");
    const auto out = rows_out(check, out_, "out");
    const auto x = rows_in(check, x_, "x");
    same_shape(check, "out", out_, "x", x_);
    perform([=] {
        map_rows(x.rows, x.n, [&](int64_t r) {
            const float* from = x.row(r);
            float* to = out.row(r);
            double divisor = 0;
            for (int64_t i = 0; i < x.n; ++i) divisor += from[i];
            if (divisor < floor || std::isnan(floor)) divisor = floor;
            for (int64_t i = 0; i < x.n; ++i) to[i] = divisor == 0 ? 0.0f : static_cast<float>(from[i] / divisor);
        });
    });
}

void gdn_decay_(const py::array& out_, const py::array& a_, const py::array& bias_, const py::array& rate_) {
    const Checker check("gdn_decay");
    const auto out = check.out<float, 2>(out_, "out", "[tokens, heads]");
    const auto a = check.in<float, 2>(a_, "a", "[tokens, heads]");
    const auto bias = check.in<float, 1>(bias_, "bias", "[heads]"), rate = check.in<float, 1>(rate_, "rate", "[heads]");
    same_shape(check, "out", out_, "a", a_);
    check.same("bias", "heads", bias.shape[0], "a", a.shape[1]);
    check.same("rate", "heads", rate.shape[0], "a", a.shape[1]);
    perform([=] {
        map_rows(a.shape[0], a.shape[1] * 16, [&](int64_t t) {
            for (int64_t h = 0; h < a.shape[1]; ++h)
                *out.at(t, h) = static_cast<float>(rate.data[h] * softplus_of(static_cast<double>(*a.at(t, h)) + bias.data[h]));
        });
    });
}

void hc_read_(const py::array& out_, const py::array& normed_, const py::array& gate_) {
    const Checker check("hc_read");
    const auto out = check.out<float, 2>(out_, "out", "[rows, n]");
    const auto normed = check.in<float, 3>(normed_, "normed", "[rows, streams, n]");
    const auto gate = check.in<float, 2>(gate_, "gate", "[rows, streams*n]");
    const int64_t rows = normed.shape[0], streams = normed.shape[1], n = normed.shape[2];
    check.same("gate", "rows", gate.shape[0], "normed", rows);
    check.same("gate", "streams*n", gate.shape[1], "normed", streams * n);
    check.same("out", "rows", out.shape[0], "normed", rows);
    check.same("out", "n", out.shape[1], "normed", n);
    perform([=] {
        const Kernels& use = kernels();
        map_rows(rows, streams * n, [&](int64_t r) { use.hc_read(normed.at(r), normed.stride[1], gate.at(r), streams, out.at(r), n); });
    });
}

void hc_write_(const py::array& out_, const py::array& residual_, const py::array& y_, const py::array& inject_) {
    const Checker check("hc_write");
    const auto out = check.out<float, 3>(out_, "out", "[rows, streams, n]");
    const auto residual = check.in<float, 3>(residual_, "residual", "[rows, streams, n]");
    const auto y = check.in<float, 2>(y_, "y", "[rows, n]");
    const auto inject = check.in<float, 2>(inject_, "inject", "[rows, streams]");
    const int64_t rows = residual.shape[0], streams = residual.shape[1], n = residual.shape[2];
    same_shape(check, "out", out_, "residual", residual_);
    check.same("y", "rows", y.shape[0], "residual", rows);
    check.same("y", "n", y.shape[1], "residual", n);
    check.same("inject", "rows", inject.shape[0], "residual", rows);
    check.same("inject", "streams", inject.shape[1], "residual", streams);
    perform([=] {
        const Kernels& use = kernels();
        map_rows(rows, streams * n, [&](int64_t r) {
            for (int64_t s = 0; s < streams; ++s) {
                const double gain = 2 / (1 + std::exp(-static_cast<double>(*inject.at(r, s)) / static_cast<double>(streams)));
                use.add_scaled(residual.at(r, s), y.at(r), static_cast<float>(gain), out.at(r, s), n);
            }
        });
    });
}

void ple_gate_(const py::array& out_, const py::array& key_, const py::array& query_, const py::array& value_) {
    const Checker check("ple_gate");
    const auto out = check.out<float, 3>(out_, "out", "[rows, streams, n]");
    const auto key = check.in<float, 3>(key_, "key", "[rows, streams, n]"), query = check.in<float, 3>(query_, "query", "[rows, streams, n]");
    const auto value = check.in<float, 2>(value_, "value", "[rows, n]");
    const int64_t rows = key.shape[0], streams = key.shape[1], n = key.shape[2];
    same_shape(check, "query", query_, "key", key_);
    same_shape(check, "out", out_, "key", key_);
    check.same("value", "rows", value.shape[0], "key", rows);
    check.same("value", "n", value.shape[1], "key", n);
    perform([=] {
        const Kernels& use = kernels();
        map_rows(rows, streams * n, [&](int64_t r) {
            for (int64_t s = 0; s < streams; ++s) {
                const float *k = key.at(r, s), *q = query.at(r, s);
                double u = 0;  // the gate steps at 0: float64 keeps its side
                for (int64_t i = 0; i < n; ++i) u += static_cast<double>(k[i]) * static_cast<double>(q[i]);
                u /= std::sqrt(static_cast<double>(n ? n : 1));
                const double root = std::sqrt(std::fabs(u) < 1e-6 ? 1e-6 : std::fabs(u));  // NaN stays
                const double gate = 1 / (1 + std::exp(-(u > 0 ? root : u < 0 ? -root : u)));
                use.scale(value.at(r), static_cast<float>(gate), out.at(r, s), n);
            }
        });
    });
}

}  // namespace

void bind_map(py::module_& m) {
    const auto one = [](const char* name, MapFn Kernels::*map) {
        return [name, map](const py::array& out, const py::array& x) {
            unary(name, out, x, [map](const Kernels& use, const float* from, float* to, int64_t n) { (use.*map)(from, to, n); });
        };
    };
    const auto two = [](const char* name, PairMapFn Kernels::*map) {
        return [name, map](const py::array& out, const py::array& a, const py::array& b) {
            binary(name, "a", "b", out, a, b,
                   [map](const Kernels& use, const float* p, const float* q, float* to, int64_t n) { (use.*map)(p, q, to, n); });
        };
    };
    m.def("sigmoid", one("sigmoid", &Kernels::sigmoid), py::arg("out"), py::arg("x"), "1 / (1 + e^-x), any shape.");
    m.def("add", two("add", &Kernels::add), py::arg("out"), py::arg("a"), py::arg("b"), "a + b, any shape.");
    m.def("mul", two("mul", &Kernels::mul), py::arg("out"), py::arg("a"), py::arg("b"), "a b, any shape.");
    m.def("silu", [](const py::array& out, const py::array& x, double scale) {
        const auto s = static_cast<float>(scale);
        unary("silu", out, x, [s](const Kernels& use, const float* from, float* to, int64_t n) { use.silu(from, s, to, n); });
    }, py::arg("out"), py::arg("x"), py::kw_only(), py::arg("scale") = 1.0, "y sigmoid(y) for y = scale x, any shape.");
    m.def("softplus", [](const py::array& out, const py::array& x) {
        unary("softplus", out, x, [](const Kernels&, const float* from, float* to, int64_t n) {
            for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(softplus_of(from[i]));
        });
    }, py::arg("out"), py::arg("x"), "ln(1 + e^x), any shape.");
    m.def("clamp", [](const py::array& out, const py::array& x, double low, double high) {
        unary("clamp", out, x, [low, high](const Kernels&, const float* from, float* to, int64_t n) {
            for (int64_t i = 0; i < n; ++i) {
                const double v = from[i], least = v < low ? low : v;
                to[i] = static_cast<float>(least > high ? high : least);
            }
        });
    }, py::arg("out"), py::arg("x"), py::kw_only(), py::arg("low") = -std::numeric_limits<double>::infinity(),
          py::arg("high") = std::numeric_limits<double>::infinity(), "min(max(x, low), high), any shape; NaN stays.");
    m.def("swiglu", [](const py::array& out, const py::array& gate, const py::array& up, double limit) {
        const auto l = static_cast<float>(limit);
        binary("swiglu", "gate", "up", out, gate, up,
               [l](const Kernels& use, const float* g, const float* u, float* to, int64_t n) { use.swiglu(g, u, l, to, n); });
    }, py::arg("out"), py::arg("gate"), py::arg("up"), py::kw_only(), py::arg("limit") = std::numeric_limits<double>::infinity(),
          "silu(min(gate, limit)) min(max(up, -limit), limit), any shape.");
    m.def("scale_rows", &scale_rows_, py::arg("out"), py::arg("x"), py::arg("scale"), "x[rows, n] scale[rows, 1].");
    m.def("softmax", &softmax_, py::arg("out"), py::arg("x"), "Over the last axis; a row of -inf gives zeros.");
    m.def("normalize", &normalize_, py::arg("out"), py::arg("x"), py::kw_only(), py::arg("floor") = 0.0,
          "x / max(sum x, floor) over the last axis; zeros where that divisor is 0.");
    m.def("gdn_decay", &gdn_decay_, py::arg("out"), py::arg("a"), py::arg("bias"), py::arg("rate"), "rate softplus(a + bias).");
    m.def("hc_read", &hc_read_, py::arg("out"), py::arg("normed"), py::arg("gate"), "Mean over streams of sigmoid(gate) normed.");
    m.def("hc_write", &hc_write_, py::arg("out"), py::arg("residual"), py::arg("y"), py::arg("inject"),
          "residual + 2 sigmoid(inject / streams) y.");
    m.def("ple_gate", &ple_gate_, py::arg("out"), py::arg("key"), py::arg("query"), py::arg("value"),
          "sigmoid(sign(u) sqrt(max(|u|, 1e-6))) value for u = key.query / sqrt(n).");
}

}  // namespace trueup
