// Rotary position embedding: angles in float64, each computed once a token and used for all heads.
#include <cmath>
#include <cstring>
#include <vector>

#include "bind.hpp"
#include "program.hpp"
#include "rows.hpp"

namespace trueup {
namespace {

void rope_(const py::array& out_, const py::array& x_, const py::array& positions_, const py::array& freqs_, const py::array& component_,
           int64_t start, bool interleaved, bool inverse) {
    const Checker check("rope");
    const auto out = check.out<float, 3>(out_, "out", "[tokens, heads, d]");
    const auto x = check.in<float, 3>(x_, "x", "[tokens, heads, d]");
    const auto positions = check.in<int32_t, 2>(positions_, "positions", "[tokens, components]");
    const auto freqs = check.in<float, 1>(freqs_, "freqs", "[half]");
    const auto component = check.in<int32_t, 1>(component_, "component", "[half]");
    const int64_t tokens = x.shape[0], heads = x.shape[1], d = x.shape[2], half = freqs.shape[0];
    same_shape(check, "out", out_, "x", x_);
    check.same("positions", "tokens", positions.shape[0], "x", tokens);
    check.same("component", "half", component.shape[0], "freqs", half);
    check.require(start >= 0 && start + 2 * half <= d, "start is " + std::to_string(start) + ", from which " + std::to_string(half) +
                                                           " pairs leave a head of " + std::to_string(d));
    perform([=] {
        for (int64_t i = 0; i < half; ++i)
            if (component.data[i] < 0 || component.data[i] >= positions.shape[1])
                check.fail("component[" + std::to_string(i) + "] is " + std::to_string(component.data[i]) + ", expected one of the " +
                           std::to_string(positions.shape[1]) + " components of a position");
        const int64_t second = interleaved ? 1 : half, step = interleaved ? 2 : 1;
        const int workers = threads();
        std::vector<double> angles(static_cast<size_t>(2 * half * workers));
        parallel_for(tokens, [&](int64_t t, int worker) {
            double *cosine = angles.data() + 2 * half * worker, *sine = cosine + half;
            for (int64_t i = 0; i < half; ++i) {
                const double angle = static_cast<double>(*positions.at(t, component.data[i])) * static_cast<double>(freqs.data[i]);
                cosine[i] = std::cos(angle);
                sine[i] = inverse ? -std::sin(angle) : std::sin(angle);
            }
            for (int64_t h = 0; h < heads; ++h) {
                const float* from = x.at(t, h);
                float* to = out.at(t, h);
                if (from != to) std::memcpy(to, from, sizeof(float) * static_cast<size_t>(d));
                for (int64_t i = 0; i < half; ++i) {
                    float *p = to + start + i * step, *q = p + second;
                    const double a = *p, b = *q;
                    *p = static_cast<float>(a * cosine[i] - b * sine[i]);
                    *q = static_cast<float>(b * cosine[i] + a * sine[i]);
                }
            }
        }, workers);
    });
}

}  // namespace

void bind_rope(py::module_& m) {
    m.def("rope", &rope_, py::arg("out"), py::arg("x"), py::arg("positions"), py::arg("freqs"), py::arg("component"), py::kw_only(),
          py::arg("start") = 0, py::arg("interleaved") = false, py::arg("inverse") = false,
          "x[tokens, heads, d] with pairs rotated by positions[token, component] freqs; see trueup.core.ops.rope.");
}

}  // namespace trueup
