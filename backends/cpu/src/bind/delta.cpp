#include <algorithm>
#include <cmath>
#include <vector>

#include "../kernels.hpp"
#include "../pool.hpp"
#include "bind.hpp"
#include "program.hpp"
#include "steps.hpp"

namespace trueup {
namespace {

void gated_delta_rule_(const py::array& out_, const py::array& q_, const py::array& k_, const py::array& v_, const py::array& decay_,
                       const py::array& beta_, const py::array& cu_seqlens, const py::array& slots_, const py::array& state_,
                       const py::object& keep_, double scale, bool tiled) {
    const Checker check("gated_delta_rule");
    const auto out = check.out<float, 3>(out_, "out", "[tokens, heads, dv]");
    const auto q = check.in<float, 3>(q_, "q", "[tokens, kheads, dk]");
    const auto k = check.in<float, 3>(k_, "k", "[tokens, kheads, dk]");
    const auto v = check.in<float, 3>(v_, "v", "[tokens, heads, dv]");
    const auto decay = check.in<float, 2>(decay_, "decay", "[tokens, heads]");
    const auto beta = check.in<float, 2>(beta_, "beta", "[tokens, heads]");
    const auto cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]");
    const auto slots = check.in<int32_t, 1>(slots_, "slots", "[seqs]");
    const auto state = check.out<float, 4>(state_, "state", "[slot, heads, dk, dv]");
    const int64_t tokens = v.shape[0], heads = v.shape[1], dv = v.shape[2], kheads = q.shape[1], dk = q.shape[2];
    check.same("q", "tokens", q.shape[0], "v", tokens);
    check.same("k", "tokens", k.shape[0], "v", tokens);
    check.same("k", "kheads", k.shape[1], "q", kheads);
    check.same("k", "dk", k.shape[2], "q", dk);
    check.same("decay", "tokens", decay.shape[0], "v", tokens);
    check.same("decay", "heads", decay.shape[1], "v", heads);
    check.same("beta", "tokens", beta.shape[0], "v", tokens);
    check.same("beta", "heads", beta.shape[1], "v", heads);
    check.same("out", "tokens", out.shape[0], "v", tokens);
    check.same("out", "heads", out.shape[1], "v", heads);
    check.same("out", "dv", out.shape[2], "v", dv);
    check.same("state", "heads", state.shape[1], "v", heads);
    check.same("state", "dk", state.shape[2], "q", dk);
    check.same("state", "dv", state.shape[3], "v", dv);
    check.same("slots", "seqs", slots.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.require(kheads ? heads % kheads == 0 : heads == 0,
                  "v has heads = " + std::to_string(heads) + ", expected a multiple of the " + std::to_string(kheads) + " heads of q and k");
    const int32_t* keep = nullptr;
    if (given(keep_)) {
        const auto array = check.in<int32_t, 1>(as_array(check, keep_, "keep"), "keep", "[tokens]");
        check.same("keep", "tokens", array.shape[0], "v", tokens);
        keep = array.data;
    }
    perform([=] {
        const auto found = spans(check, cu, tokens);
        check_slots(check, found, slots, keep, 1, state.shape[0]);
        const Kernels& use = kernels();
        const int workers = threads();
        const int64_t width = use.delta_width, blocks = (dv + width - 1) / width, rep = kheads ? heads / kheads : 1;
        std::vector<float> fade(static_cast<size_t>(tokens * heads)), scratch(static_cast<size_t>(dk * width * workers));
        for (const Span& s : found)
            for (int64_t t = s.begin; t < s.end; ++t)
                for (int64_t h = 0; h < heads; ++h) fade[t * heads + h] = static_cast<float>(std::exp(static_cast<double>(*decay.at(t, h))));
        parallel_for(static_cast<int64_t>(found.size()) * heads * blocks, [&](int64_t task, int worker) {
            const Span& s = found[task / (heads * blocks)];
            const int64_t h = task / blocks % heads, c = task % blocks * width, key = tiled ? h % kheads : h / rep;
            DeltaBlock b{};
            b.q = q.at(s.begin, key), b.q_stride = q.stride[0];
            b.k = k.at(s.begin, key), b.k_stride = k.stride[0];
            b.v = v.at(s.begin, h, c), b.v_stride = v.stride[0];
            b.fade = fade.data() + s.begin * heads + h, b.fade_stride = heads;
            b.beta = beta.at(s.begin, h), b.beta_stride = beta.stride[0];
            b.out = out.at(s.begin, h, c), b.out_stride = out.stride[0];
            b.state = state.at(slots.data[s.seq], h, 0, c), b.state_stride = state.stride[2];
            b.dk = dk, b.columns = std::min(width, dv - c);
            b.keep = keep ? keep + s.begin : nullptr;
            b.slots = state.at(0, h, 0, c), b.slot_stride = state.stride[0];
            b.rows = s.count(), b.scale = static_cast<float>(scale);
            use.delta_rule(b, scratch.data() + worker * dk * width);
        }, workers);
        const int64_t end = found.empty() ? 0 : found.back().end;
        for (int64_t t = end; t < tokens; ++t)
            for (int64_t h = 0; h < heads; ++h) std::fill_n(out.at(t, h), dv, 0.0f);
    });
}

}  // namespace

void bind_delta(py::module_& m) {
    m.def("gated_delta_rule", &gated_delta_rule_, py::arg("out"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("decay"), py::arg("beta"),
          py::arg("cu_seqlens"), py::arg("slots"), py::arg("state"), py::arg("keep") = py::none(), py::kw_only(), py::arg("scale"),
          py::arg("tiled"),
          "out[tokens, heads, dv] of the gated delta rule; state[slot, heads, dk, dv] is updated in place. See trueup.core.ops.gdn.");
}

}  // namespace trueup
