#include "steps.hpp"

namespace trueup {

std::vector<Span> spans(const Checker& check, const View<const int32_t, 1>& cu, int64_t tokens) {
    const int64_t ends = cu.shape[0];
    check.require(ends > 0, "cu_seqlens is empty, expected seqs + 1 entries");
    bool good = cu.data[0] == 0 && cu.data[ends - 1] <= tokens;
    for (int64_t s = 0; s + 1 < ends; ++s) good = good && cu.data[s] <= cu.data[s + 1];
    if (!good) {
        std::string found;
        for (int64_t s = 0; s < ends && s < 16; ++s) found += (s ? ", " : "") + std::to_string(cu.data[s]);
        check.fail("cu_seqlens is [" + found + (ends > 16 ? ", ...]" : "]") + ", expected to rise from 0 to at most " +
                   std::to_string(tokens) + " tokens");
    }
    std::vector<Span> found;
    for (int64_t s = 0; s + 1 < ends; ++s)
        if (cu.data[s] < cu.data[s + 1]) found.push_back({s, cu.data[s], cu.data[s + 1]});
    return found;
}

void check_past(const Checker& check, const std::vector<Span>& spans, const View<const int32_t, 1>& past) {
    for (const Span& span : spans)
        if (past.data[span.seq] < 0)
            check.fail("past[" + std::to_string(span.seq) + "] is " + std::to_string(past.data[span.seq]) + ", expected 0 or more tokens");
}

void check_slots(const Checker& check, const std::vector<Span>& spans, const View<const int32_t, 1>& slots, const int32_t* keep,
                 int64_t keep_stride, int64_t count) {
    std::vector<int64_t> owner(static_cast<size_t>(count), -1);
    auto claim = [&](int64_t slot, int64_t seq, const std::string& name) {
        int64_t& by = owner[static_cast<size_t>(slot)];
        if (by >= 0 && by != seq)
            check.fail(name + " is " + std::to_string(slot) + ", which sequence " + std::to_string(by) +
                       " of this step writes too, expected a slot of its own");
        by = seq;
    };
    for (const Span& span : spans) {
        const int64_t slot = slots.data[span.seq];
        const std::string name = "slots[" + std::to_string(span.seq) + "]";
        if (slot < 0 || slot >= count)
            check.fail(name + " is " + std::to_string(slot) + " for a sequence with rows, expected one of " + std::to_string(count) + " slots");
        claim(slot, span.seq, name);
    }
    if (!keep) return;
    for (const Span& span : spans)
        for (int64_t t = span.begin; t < span.end; ++t) {
            const int64_t slot = keep[t * keep_stride];
            if (slot < -1 || slot >= count)
                check.fail("keep[" + std::to_string(t) + "] is " + std::to_string(slot) + ", expected -1 or one of " + std::to_string(count) + " slots");
            if (slot >= 0) claim(slot, span.seq, "keep[" + std::to_string(t) + "]");
        }
}

void check_pages(const Checker& check, const View<const int32_t, 2>& table, int64_t seq, int64_t first, int64_t last, int64_t entries,
                 int64_t pages) {
    if (first >= last) return;
    const int64_t from = first / entries, to = (last - 1) / entries;
    const std::string name = "block_table[" + std::to_string(seq) + ", ";
    if (to >= table.shape[1])
        check.fail(name + "...] holds " + std::to_string(table.shape[1]) + " pages, expected the " + std::to_string(to + 1) +
                   " that entry " + std::to_string(last - 1) + " needs");
    for (int64_t b = from; b <= to; ++b) {
        const int32_t page = *table.at(seq, b);
        if (page < 0 || page >= pages)
            check.fail(name + std::to_string(b) + "] is " + std::to_string(page) + " where it is read, expected one of " +
                       std::to_string(pages) + " pages");
    }
}

}  // namespace trueup
