// Ops that move values bit by bit: rows chosen, repeated, joined and looked up, and what is written to a paged cache or a tail.
#include <algorithm>
#include <vector>

#include "../kernels.hpp"
#include "../pool.hpp"
#include "bind.hpp"
#include "items.hpp"
#include "program.hpp"
#include "steps.hpp"
#include "weights.hpp"

namespace trueup {
namespace {

constexpr int64_t copy_task = 1 << 16;  // bytes that are worth a task

// f(row) for each of them, of about so many bytes.
template <class Row>
void over_rows(int64_t rows, int64_t bytes, Row&& row) {
    const int64_t step = std::max<int64_t>(1, copy_task / std::max<int64_t>(bytes, 1));
    parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
        for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) row(r);
    });
}

// An index that is read when the step runs.
int64_t index_at(const Checker& check, const char* what, int32_t found, int64_t low, int64_t high) {
    if (found < low || found >= high)
        check.fail("the " + std::string(what) + " " + std::to_string(found) + " is not in " + std::to_string(low) + ":" + std::to_string(high));
    return found;
}

void repeat_streams_(const py::array& out_, const py::array& x_, int64_t streams) {
    const Checker check("repeat_streams");
    const auto out = items_out(check, out_, "out"), x = items_in(check, x_, "x");
    check.require(out.ndim == 3 && x.ndim == 2, "out and x are " + describe(out_) + " and " + describe(x_) + ", expected [rows, streams, n] and [rows, n]");
    same_items(check, "out", out, 2, "x", x, 1);
    check.same("out", "rows", out.shape[0], "x", x.shape[0]);
    check.same("out", "streams", out.shape[1], "the argument streams", streams);
    perform([=] {
        const Copier copy(out, 2, x, 1);
        over_rows(x.shape[0], streams * x.count(1) * x.item, [&](int64_t r) {
            for (int64_t s = 0; s < streams; ++s) copy(out.at(r, s), x.at(r));
        });
    });
}

void contiguous_(const py::array& out_, const py::array& x_) {
    const Checker check("contiguous");
    const auto out = items_out(check, out_, "out"), x = items_in(check, x_, "x");
    same_items(check, "out", out, 0, "x", x, 0);
    perform([=] {
        if (out.ndim == 0) return Copier(out, 0, x, 0)(out.data, x.data);
        const Copier copy(out, 1, x, 1);
        over_rows(out.shape[0], out.count(1) * out.item, [&](int64_t r) { copy(out.at(r), x.at(r)); });
    });
}

// out[..., : n] = a, out[..., n :] = b.
void concat_(const py::array& out_, const py::array& a_, const py::array& b_) {
    const Checker check("concat");
    const auto out = items_out(check, out_, "out"), a = items_in(check, a_, "a"), b = items_in(check, b_, "b");
    check.require(out.ndim >= 1 && a.ndim == out.ndim && b.ndim == out.ndim,
                  "out, a and b are " + describe(out_) + ", " + describe(a_) + " and " + describe(b_) + ", expected as many axes, one at least");
    const int last = out.ndim - 1;
    check.same("a", "bytes an element", a.item, "out", out.item);
    check.same("b", "bytes an element", b.item, "out", out.item);
    for (int axis = 0; axis < last; ++axis) {
        check.same("a", "entries on an axis", a.shape[axis], "out", out.shape[axis]);
        check.same("b", "entries on an axis", b.shape[axis], "out", out.shape[axis]);
    }
    check.same("out", "entries on the last axis", out.shape[last], "a and b together", a.shape[last] + b.shape[last]);
    perform([=] {
        Items left = out, right = out;
        left.shape[last] = a.shape[last];
        right.shape[last] = b.shape[last];
        right.data += a.shape[last] * out.stride[last];
        if (last == 0) {
            Copier(left, 0, a, 0)(left.data, a.data);
            return Copier(right, 0, b, 0)(right.data, b.data);
        }
        const Copier first(left, 1, a, 1), second(right, 1, b, 1);
        over_rows(out.shape[0], out.count(1) * out.item, [&](int64_t r) {
            first(left.at(r), a.at(r));
            second(right.at(r), b.at(r));
        });
    });
}

void take_rows_(const py::array& out_, const py::array& x_, const py::array& at_) {
    const Checker check("take_rows");
    const auto out = items_out(check, out_, "out"), x = items_in(check, x_, "x");
    const auto at = check.in<int32_t, 1>(at_, "at", "[outs]");
    check.require(out.ndim >= 1 && x.ndim >= 1, "out and x are " + describe(out_) + " and " + describe(x_) + ", expected rows");
    same_items(check, "out", out, 1, "x", x, 1);
    check.same("out", "rows", out.shape[0], "at", at.shape[0]);
    perform([=] {
        for (int64_t i = 0; i < at.shape[0]; ++i) index_at(check, "index", *at.at(i), -1, x.shape[0]);
        const Copier copy(out, 1, x, 1);
        const std::vector<uint8_t> zeros(static_cast<size_t>(out.count(1) * out.item));
        Items nothing = x;  // a row of zeros, packed
        nothing.stride[x.ndim - 1] = x.item;
        for (int a = x.ndim - 1; a > 1; --a) nothing.stride[a - 1] = nothing.stride[a] * x.shape[a];
        const Copier clear(out, 1, nothing, 1);
        over_rows(at.shape[0], out.count(1) * out.item, [&](int64_t i) {
            if (*at.at(i) < 0)
                clear(out.at(i), zeros.data());
            else
                copy(out.at(i), x.at(*at.at(i)));
        });
    });
}

void embed_(const py::array& out_, const py::array& table_, const std::string& dtype, const py::array& ids_) {
    const Checker check("embed");
    const auto table = check.in<uint8_t, 2>(table_, "table_bytes", "[vocab, row_bytes]");
    const Rows row = rows_of(check, dtype, table.shape[1], "table_bytes");
    const auto out = check.out<float, 2>(out_, "out", "[ids, n]");
    const auto ids = check.in<int32_t, 1>(ids_, "ids", "[ids]");
    check.same("out", "rows", out.shape[0], "ids", ids.shape[0]);
    check.same("out", "n", out.shape[1], "a row of table_bytes", row.n);
    perform([=] {
        for (int64_t i = 0; i < ids.shape[0]; ++i) index_at(check, "id", *ids.at(i), 0, table.shape[0]);
        const DequantizeFn dequantize = kernels().dequantize[row.format];
        over_rows(ids.shape[0], row.n * 8, [&](int64_t i) { dequantize(table.at(*ids.at(i)), row.n, out.at(i)); });
    });
}

void argmax_(const py::array& out_, const py::array& scores_) {
    const Checker check("argmax");
    const auto out = check.out<int32_t, 1>(out_, "out", "[rows]");
    const auto scores = check.in<float, 2>(scores_, "scores", "[rows, candidates]");
    check.same("out", "rows", out.shape[0], "scores", scores.shape[0]);
    check.require(scores.shape[1] > 0 || scores.shape[0] == 0, "scores has 0 candidates, expected 1 or more");
    perform([=] {
        const int64_t n = scores.shape[1];
        over_rows(scores.shape[0], n * 4, [&](int64_t r) {
            const float* x = scores.at(r);
            int64_t best = 0;
            for (int64_t i = 0; i < n && x[best] == x[best]; ++i)
                if (!(x[i] <= x[best])) best = i;  // larger, or NaN
            *out.at(r) = static_cast<int32_t>(best);
        });
    });
}

void paged_append_(const py::array& rows_, const py::array& cu_seqlens, const py::array& past_, const py::array& block_table,
                   const py::array& cache_, int64_t every) {
    const Checker check("paged_append");
    const auto rows = items_in(check, rows_, "rows"), cache = items_out(check, cache_, "cache");
    const auto cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]");
    const auto past = check.in<int32_t, 1>(past_, "past", "[seqs]");
    const auto table = check.in<int32_t, 2>(block_table, "block_table", "[seqs, blocks]");
    check.require(rows.ndim >= 1 && cache.ndim >= 2,
                  "rows and cache are " + describe(rows_) + " and " + describe(cache_) + ", expected [tokens, ...] and [pages, entries, ...]");
    same_items(check, "cache", cache, 2, "rows", rows, 1);
    check.same("past", "seqs", past.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.same("block_table", "seqs", table.shape[0], "cu_seqlens", cu.shape[0] - 1);
    check.require(every >= 1, "every is " + std::to_string(every) + ", expected 1 or more");
    perform([=] {
        const auto found = spans(check, cu, rows.shape[0]);
        check_past(check, found, past);
        const int64_t entries = cache.shape[1];
        for (const Span& s : found)
            check_pages(check, table, s.seq, past.data[s.seq] / every, (past.data[s.seq] + s.count()) / every, entries, cache.shape[0]);
        const Copier copy(cache, 2, rows, 1);
        for (const Span& s : found)
            for (int64_t t = s.begin; t < s.end; ++t) {
                const int64_t after = past.data[s.seq] + t - s.begin + 1, entry = after / every - 1;
                if (after % every == 0) copy(cache.at(*table.at(s.seq, entry / entries), entry % entries), rows.at(t));
            }
    });
}

void delay_(const py::array& out_, const py::array& x_, const py::array& cu_seqlens, const py::array& slots_, const py::array& tail_,
            const py::object& keep_, int64_t by) {
    const Checker check("delay");
    const auto out = items_out(check, out_, "out"), tail = items_out(check, tail_, "tail");
    const auto x = items_in(check, x_, "x");
    const auto cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]"), slots = check.in<int32_t, 1>(slots_, "slots", "[seqs]");
    check.require(x.ndim >= 1 && tail.ndim >= 2, "x and tail are " + describe(x_) + " and " + describe(tail_) + ", expected [tokens, ...] and [slot, by, ...]");
    same_items(check, "out", out, 0, "x", x, 0);
    same_items(check, "tail", tail, 2, "x", x, 1);
    check.same("tail", "rows back", tail.shape[1], "the argument by", by);
    check.same("slots", "seqs", slots.shape[0], "cu_seqlens", cu.shape[0] - 1);
    const int32_t* keep = nullptr;
    if (given(keep_)) {
        const auto array = check.in<int32_t, 1>(as_array(check, keep_, "keep"), "keep", "[tokens]");
        check.same("keep", "tokens", array.shape[0], "x", x.shape[0]);
        keep = array.data;
    }
    perform([=] {
        const auto found = spans(check, cu, x.shape[0]);
        check_slots(check, found, slots, keep, 1, tail.shape[0]);
        Items before = x;  // the tail before the step, packed
        before.shape[0] = by;
        for (int64_t a = before.ndim - 1, step = x.item; a >= 0; step *= before.shape[a--]) before.stride[a] = step;
        std::vector<uint8_t> space(static_cast<size_t>(before.count(0) * x.item));
        before.data = space.data();
        const Copier save(before, 1, tail, 2), move(out, 1, x, 1), restore(out, 1, before, 1), push(tail, 2, x, 1), push_old(tail, 2, before, 1);
        for (const Span& s : found) {
            const int64_t slot = slots.data[s.seq];
            for (int64_t i = 0; i < by; ++i) save(before.at(i), tail.at(slot, i));
            // Row i of the tail and the step's rows together.
            const auto put = [&](int64_t to, int64_t first) {
                for (int64_t i = 0; i < by; ++i)
                    first + i < by ? push_old(tail.at(to, i), before.at(first + i)) : push(tail.at(to, i), x.at(s.begin + first + i - by));
            };
            for (int64_t t = 0; t < s.count(); ++t) {
                t < by ? restore(out.at(s.begin + t), before.at(t)) : move(out.at(s.begin + t), x.at(s.begin + t - by));
                if (keep && keep[s.begin + t] >= 0) put(keep[s.begin + t], t + 1);
            }
            put(slot, s.count());
        }
        std::vector<uint8_t> zeros(static_cast<size_t>(x.count(1) * x.item));
        Items nothing = before;
        const Copier clear(out, 1, nothing, 1);
        for (int64_t t = found.empty() ? 0 : found.back().end; t < x.shape[0]; ++t) clear(out.at(t), zeros.data());
    });
}

// See core/ops/ngram.py.
void ngram_rows_(const py::array& out_, const py::array& ids_, const py::array& cu_seqlens, const py::array& slots_,
                 const py::array& multipliers_, const py::array& offsets_, const py::array& sizes_, const py::array& context_,
                 const py::object& keep_, int64_t eos) {
    const Checker check("ngram_rows");
    const auto out = check.out<int32_t, 2>(out_, "out", "[tokens, heads]");
    const auto ids = check.in<int32_t, 1>(ids_, "ids", "[tokens]");
    const auto cu = check.in<int32_t, 1>(cu_seqlens, "cu_seqlens", "[seqs+1]"), slots = check.in<int32_t, 1>(slots_, "slots", "[seqs]");
    const auto multipliers = check.in<int64_t, 1>(multipliers_, "multipliers", "[n]");
    const auto offsets = check.in<int64_t, 1>(offsets_, "offsets", "[heads]"), sizes = check.in<int64_t, 1>(sizes_, "sizes", "[heads]");
    const auto context = check.out<int32_t, 2>(context_, "context", "[slot, n-1]");
    const int64_t n = multipliers.shape[0], heads = sizes.shape[0], back = n - 1, tokens = ids.shape[0];
    check.require(n >= 1 && (back ? heads % back == 0 : heads == 0),
                  "sizes has heads = " + std::to_string(heads) + ", expected a multiple of the " + std::to_string(back) + " lengths");
    check.same("offsets", "heads", offsets.shape[0], "sizes", heads);
    check.same("context", "n-1", context.shape[1], "multipliers less one", back);
    check.same("out", "tokens", out.shape[0], "ids", tokens);
    check.same("out", "heads", out.shape[1], "sizes", heads);
    check.same("slots", "seqs", slots.shape[0], "cu_seqlens", cu.shape[0] - 1);
    const int32_t* keep = nullptr;
    if (given(keep_)) {
        const auto array = check.in<int32_t, 1>(as_array(check, keep_, "keep"), "keep", "[tokens]");
        check.same("keep", "tokens", array.shape[0], "ids", tokens);
        keep = array.data;
    }
    perform([=] {
        for (int64_t h = 0; h < heads; ++h)
            if (sizes.data[h] < 1 || offsets.data[h] < 0 || offsets.data[h] > (int64_t{1} << 31) - sizes.data[h])
                check.fail("head " + std::to_string(h) + " has a size of " + std::to_string(sizes.data[h]) + " at offset " +
                           std::to_string(offsets.data[h]) + ", expected rows of an int32 table");
        const auto found = spans(check, cu, tokens);
        check_slots(check, found, slots, keep, 1, context.shape[0]);
        std::vector<int32_t> history;
        for (const Span& s : found) {
            const int64_t slot = slots.data[s.seq];
            history.assign(context.at(slot), context.at(slot) + back);
            for (int64_t t = s.begin; t < s.end; ++t) history.push_back(*ids.at(t));
            for (int64_t t = 0; t < s.count(); ++t) {
                const int32_t* now = history.data() + back + t;
                uint64_t mix = static_cast<uint64_t>(static_cast<int64_t>(now[0])) * static_cast<uint64_t>(multipliers.data[0]);
                bool cut = false;
                for (int64_t m = 1, h = 0; m < n; ++m) {
                    cut = cut || now[-m] == eos;
                    const int64_t token = cut ? eos : now[-m];
                    mix ^= static_cast<uint64_t>(token) * static_cast<uint64_t>(multipliers.data[m]);
                    for (int64_t end = h + heads / back; h < end; ++h) {
                        const int64_t rest = static_cast<int64_t>(mix) % sizes.data[h];
                        *out.at(s.begin + t, h) = static_cast<int32_t>((rest < 0 ? rest + sizes.data[h] : rest) + offsets.data[h]);
                    }
                }
                if (keep && keep[s.begin + t] >= 0) std::copy_n(history.data() + t + 1, back, context.at(keep[s.begin + t]));
            }
            std::copy_n(history.data() + s.count(), back, context.at(slot));
        }
        for (int64_t t = found.empty() ? 0 : found.back().end; t < tokens; ++t) std::fill_n(out.at(t), heads, 0);
    });
}

}  // namespace

void bind_copies(py::module_& m) {
    const auto out = py::arg("out"), x = py::arg("x");
    m.def("repeat_streams", &repeat_streams_, out, x, py::kw_only(), py::arg("streams"), "out[rows, streams, n]: each row of x that often.");
    m.def("contiguous", &contiguous_, out, x, "A copy in out's layout, any type.");
    m.def("concat", &concat_, out, py::arg("a"), py::arg("b"), "Side by side on the last axis, any type.");
    m.def("take_rows", &take_rows_, out, x, py::arg("at"), "out[i] = x[at[i]], zeros where that is -1, any type.");
    m.def("embed", &embed_, out, py::arg("table_bytes"), py::arg("dtype"), py::arg("ids"),
          "out[ids, n]: rows of a table stored as uint8[vocab, row_bytes] of that type.");
    m.def("argmax", &argmax_, out, py::arg("scores"), "The lowest index of the largest entry of each row, or of its first NaN.");
    m.def("paged_append", &paged_append_, py::arg("rows"), py::arg("cu_seqlens"), py::arg("past"), py::arg("block_table"), py::arg("cache"),
          py::kw_only(), py::arg("every") = 1, "Rows that end an entry into a paged cache; see trueup.core.ops.cache.");
    m.def("delay", &delay_, out, x, py::arg("cu_seqlens"), py::arg("slots"), py::arg("tail"), py::arg("keep") = py::none(), py::kw_only(),
          py::arg("by"), "Each row becomes the one `by` rows before it; tail is updated in place. Any type.");
    m.def("ngram_rows", &ngram_rows_, out, py::arg("ids"), py::arg("cu_seqlens"), py::arg("slots"), py::arg("multipliers"),
          py::arg("offsets"), py::arg("sizes"), py::arg("context"), py::arg("keep") = py::none(), py::kw_only(), py::arg("eos"),
          "Rows of the n-gram table; context is updated in place. See trueup.core.ops.ngram.");
}

}  // namespace trueup
