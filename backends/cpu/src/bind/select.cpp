#include <algorithm>
#include <limits>
#include <vector>

#include "../kernels.hpp"
#include "../ops/top_k.hpp"
#include "../pool.hpp"
#include "bind.hpp"
#include "program.hpp"
#include "steps.hpp"

namespace trueup {
namespace {

void top_k_(const py::array& values_, const py::array& indices_, const py::array& scores_, int64_t k) {
    const Checker check("top_k");
    const auto values = check.out<float, 2>(values_, "values", "[rows, k]");
    const auto indices = check.out<int32_t, 2>(indices_, "indices", "[rows, k]");
    const auto scores = check.in<float, 2>(scores_, "scores", "[rows, candidates]");
    const int64_t rows = scores.shape[0], n = scores.shape[1];
    check.require(k >= 0 && k <= n, "k is " + std::to_string(k) + ", expected 0 to the " + std::to_string(n) + " candidates");
    check.require(n <= std::numeric_limits<int32_t>::max(), "scores has " + std::to_string(n) + " candidates, expected indices that fit int32");
    check.same("values", "rows", values.shape[0], "scores", rows);
    check.same("indices", "rows", indices.shape[0], "scores", rows);
    check.same("values", "k", values.shape[1], "the argument k", k);
    check.same("indices", "k", indices.shape[1], "the argument k", k);
    perform([=] {
        const int workers = threads();
        std::vector<std::vector<uint64_t>> space(static_cast<size_t>(workers), std::vector<uint64_t>(static_cast<size_t>(top_k_space(k))));
        const int64_t step = std::clamp<int64_t>(16384 / std::max<int64_t>(n, 1), 1, std::max<int64_t>(rows, 1));
        parallel_for((rows + step - 1) / step, [&](int64_t task, int worker) {
            for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r)
                top_k(scores.at(r), n, k, values.at(r), indices.at(r), space[static_cast<size_t>(worker)]);
        }, workers);
    });
}

void index_scores_(const py::array& out_, const py::array& q_, const py::array& keys_, const py::array& cu_seqlens, const py::array& past_,
                   const py::array& block_table, const py::object& weights_, int64_t every, double scale) {
    const Checker check("index_scores");
    const auto out = check.out<float, 2>(out_, "out", "[tokens, blocks*entries]");
    const auto q = check.in<float, 3>(q_, "q", "[tokens, heads, d]");
    const auto keys = check.in<float, 3>(keys_, "keys", "[pages, entries, d]");
    const auto cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]");
    const auto past = check.in<int32_t, 1>(past_, "past", "[seqs]");
    const auto table = check.in<int32_t, 2>(block_table, "block_table", "[seqs, blocks]");
    const int64_t tokens = q.shape[0], heads = q.shape[1], d = q.shape[2], entries = keys.shape[1];
    check.same("keys", "d", keys.shape[2], "q", d);
    check.same("out", "tokens", out.shape[0], "q", tokens);
    check.same("out", "blocks*entries", out.shape[1], "block_table and keys", table.shape[1] * entries);
    check.same("past", "seqs", past.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.same("block_table", "seqs", table.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.require(every >= 1, "every is " + std::to_string(every) + ", expected 1 or more");
    View<const float, 2> weights;
    if (given(weights_)) {
        weights = check.in<float, 2>(as_array(check, weights_, "weights"), "weights", "[tokens, heads]");
        check.same("weights", "tokens", weights.shape[0], "q", tokens);
        check.same("weights", "heads", weights.shape[1], "q", heads);
    }
    perform([=] {
        const auto found = spans(check, cu, tokens);
        check_past(check, found, past);
        for (const Span& s : found) check_pages(check, table, s.seq, 0, (past.data[s.seq] + s.count()) / every, entries, keys.shape[0]);

        const Kernels& use = kernels();
        constexpr int64_t run = 256;  // keys of a task
        const int64_t runs = (out.shape[1] + run - 1) / run;
        std::vector<int64_t> seq(static_cast<size_t>(tokens), -1), seen(static_cast<size_t>(tokens), 0);
        for (const Span& s : found)
            for (int64_t t = s.begin; t < s.end; ++t) seq[t] = s.seq, seen[t] = (past.data[s.seq] + t - s.begin + 1) / every;
        std::vector<const float*> rows(static_cast<size_t>(tokens * heads));
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t h = 0; h < heads; ++h) rows[t * heads + h] = q.at(t, h);
        parallel_for(tokens * runs, [&](int64_t task, int) {
            const int64_t t = task / runs, begin = task % runs * run, end = std::min(begin + run, out.shape[1]);
            const int64_t last = std::clamp(seen[t], begin, end);
            const float* at[run];
            for (int64_t e = begin; e < last; ++e) at[e - begin] = keys.at(*table.at(seq[t], e / entries), e % entries);
            if (begin < last)
                use.index_keys(rows.data() + t * heads, weights.data ? weights.at(t) : nullptr, heads, at, last - begin, d,
                               static_cast<float>(scale), out.at(t, begin));
            std::fill(out.at(t, last), out.at(t, 0) + end, -std::numeric_limits<float>::infinity());
        });
    });
}

}  // namespace

void bind_select(py::module_& m) {
    m.def("top_k", &top_k_, py::arg("values"), py::arg("indices"), py::arg("scores"), py::arg("k"),
          "The k largest of each row of scores[rows, candidates] into values[rows, k] and indices int32[rows, k]; see trueup.core.ops.topk.");
    m.def("index_scores", &index_scores_, py::arg("out"), py::arg("q"), py::arg("keys"), py::arg("cu_seqlens"), py::arg("past"),
          py::arg("block_table"), py::arg("weights") = py::none(), py::kw_only(), py::arg("every"), py::arg("scale"),
          "out[tokens, blocks*entries] of the indexer of sparse attention; see trueup.core.ops.qsa.");
}

}  // namespace trueup
