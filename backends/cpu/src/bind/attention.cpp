#include "../ops/attention.hpp"

#include <algorithm>

#include "bind.hpp"
#include "program.hpp"
#include "steps.hpp"

namespace trueup {
namespace {

// The blocks that each row selects, rising and each once; every one is whole for that row.
void select(const Checker& check, Attention& a, const View<const int32_t, 2>& selected) {
    a.starts.assign(static_cast<size_t>(a.tokens) + 1, 0);
    for (const AttentionSpan& span : a.spans)
        for (int64_t t = span.begin; t < span.end; ++t) {
            const int64_t whole = (span.past + t - span.begin + 1) / a.every / a.block;
            const auto begin = static_cast<std::ptrdiff_t>(a.blocks.size());
            for (int64_t i = 0; i < selected.shape[1]; ++i) {
                const int32_t pick = *selected.at(t, i);
                if (pick < -1 || pick >= whole)
                    check.fail("selected[" + std::to_string(t) + ", " + std::to_string(i) + "] is " + std::to_string(pick) +
                               ", expected -1 or one of the " + std::to_string(whole) + " whole blocks that row sees");
                if (pick >= 0) a.blocks.push_back(pick);
            }
            std::sort(a.blocks.begin() + begin, a.blocks.end());
            a.blocks.erase(std::unique(a.blocks.begin() + begin, a.blocks.end()), a.blocks.end());
            a.starts[t + 1] = static_cast<int64_t>(a.blocks.size());
        }
    for (int64_t t = 0; t < a.tokens; ++t) a.starts[t + 1] = std::max(a.starts[t + 1], a.starts[t]);
}

void attention_(const py::array& out_, const py::array& lse_, const py::array& q_, const py::array& keys_, const py::array& values_,
                const py::array& cu_seqlens, const py::array& past_, const py::array& block_table, const py::object& selected_,
                double scale, int64_t every, int64_t block, int64_t window) {
    const Checker check("attention");
    const auto out = check.out<float, 3>(out_, "out", "[tokens, heads, dv]");
    const auto lse = check.out<float, 2>(lse_, "lse", "[tokens, heads]");
    const auto q = check.in<float, 3>(q_, "q", "[tokens, heads, d]");
    const auto keys = check.in<float, 4>(keys_, "keys", "[pages, entries, kv, d]");
    const auto values = check.in<float, 4>(values_, "values", "[pages, entries, kv, dv]");
    const auto cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]");
    const auto past = check.in<int32_t, 1>(past_, "past", "[seqs]");
    const auto table = check.in<int32_t, 2>(block_table, "block_table", "[seqs, blocks]");
    const int64_t tokens = q.shape[0], heads = q.shape[1], kv = keys.shape[2], pages = keys.shape[0], entries = keys.shape[1];
    check.same("keys", "d", keys.shape[3], "q", q.shape[2]);
    check.same("values", "pages", values.shape[0], "keys", pages);
    check.same("values", "entries", values.shape[1], "keys", entries);
    check.same("values", "kv", values.shape[2], "keys", kv);
    check.same("out", "tokens", out.shape[0], "q", tokens);
    check.same("out", "heads", out.shape[1], "q", heads);
    check.same("out", "dv", out.shape[2], "values", values.shape[3]);
    check.same("lse", "tokens", lse.shape[0], "q", tokens);
    check.same("lse", "heads", lse.shape[1], "q", heads);
    check.same("past", "seqs", past.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.same("block_table", "seqs", table.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.require(kv ? heads % kv == 0 : heads == 0,
                  "q has heads = " + std::to_string(heads) + ", expected a multiple of the " + std::to_string(kv) + " heads of keys");
    check.require(every >= 1, "every is " + std::to_string(every) + ", expected 1 or more");
    check.require(block >= 1, "block is " + std::to_string(block) + ", expected 1 or more");
    check.require(window >= 0, "window is " + std::to_string(window) + ", expected 0 (none) or more");
    View<const int32_t, 2> selected;
    const bool selects = given(selected_);
    if (selects) {
        selected = check.in<int32_t, 2>(as_array(check, selected_, "selected"), "selected", "[tokens, picks]");
        check.same("selected", "tokens", selected.shape[0], "q", tokens);
    }
    perform([=] {
        const auto spans_found = spans(check, cu, tokens);
        check_past(check, spans_found, past);
        Attention a{};
        a.q = q.data, a.q_stride = q.stride[0], a.q_head_stride = q.stride[1];
        a.keys = {keys.data, keys.stride[0], keys.stride[1], keys.stride[2]};
        a.values = {values.data, values.stride[0], values.stride[1], values.stride[2]};
        a.out = out.data, a.out_stride = out.stride[0], a.out_head_stride = out.stride[1];
        a.lse = lse.data, a.lse_stride = lse.stride[0];
        a.tokens = tokens, a.heads = heads, a.kv = kv, a.d = q.shape[2], a.dv = values.shape[3], a.entries = entries;
        a.scale = static_cast<float>(scale), a.every = every, a.block = block, a.window = window;
        for (const Span& s : spans_found) a.spans.push_back({s.begin, s.end, past.data[s.seq], table.at(s.seq)});
        a.selects = selects;
        if (selects) select(check, a, selected);
        for (const Span& s : spans_found) {
            const int64_t before = past.data[s.seq], last = (before + s.count()) / every;
            if (!a.selects) {
                const int64_t seen = (before + 1) / every;  // by the first row
                check_pages(check, table, s.seq, window ? std::max<int64_t>(0, seen - window) : 0, last, entries, pages);
                continue;
            }
            for (int64_t t = s.begin; t < s.end; ++t) {
                const int64_t n = (before + t - s.begin + 1) / every, first = window ? std::max<int64_t>(0, n - window) : 0;
                for (int64_t i = a.starts[t]; i < a.starts[t + 1]; ++i)
                    check_pages(check, table, s.seq, std::max(first, a.blocks[i] * block), (a.blocks[i] + 1) * block, entries, pages);
                check_pages(check, table, s.seq, std::max(first, n / block * block), n, entries, pages);
            }
        }
        const int64_t end = spans_found.empty() ? 0 : spans_found.back().end;
        for (int64_t t = end; t < tokens; ++t)
            for (int64_t h = 0; h < heads; ++h) {
                std::fill_n(out.at(t, h), a.dv, 0.0f);
                *lse.at(t, h) = 0.0f;
            }
        attention(a);
    });
}

}  // namespace

void bind_attention(py::module_& m) {
    m.def("attention", &attention_, py::arg("out"), py::arg("lse"), py::arg("q"), py::arg("keys"), py::arg("values"), py::arg("cu_seqlens"),
          py::arg("past"), py::arg("block_table"), py::arg("selected") = py::none(), py::kw_only(), py::arg("scale"), py::arg("every") = 1,
          py::arg("block") = 1, py::arg("window") = 0,
          "out[tokens, heads, dv], lse[tokens, heads] of causal attention over a paged cache; see trueup.core.ops.attention.");
}

}  // namespace trueup
