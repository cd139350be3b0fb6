// A step's index arrays, checked before any work: where sequences begin, how long they were, their pages and slots. See
// core/ops/_sequences.py for what they mean.
#pragma once
#include <string>
#include <vector>

#include "view.hpp"

namespace trueup {

struct Span {
    int64_t seq, begin, end;  // rows of the step
    int64_t count() const { return end - begin; }
};

// The sequences that have rows.
std::vector<Span> spans(const Checker& check, const View<const int32_t, 1>& cu_seqlens, int64_t tokens);

// past >= 0 for sequences with rows.
void check_past(const Checker& check, const std::vector<Span>& spans, const View<const int32_t, 1>& past);

// Every slot that a sequence with rows or `keep` names exists, and no two sequences of the step write the same one.
void check_slots(const Checker& check, const std::vector<Span>& spans, const View<const int32_t, 1>& slots, const int32_t* keep,
                 int64_t keep_stride, int64_t count);

// The table has a page for each entry in [first, last) of the sequence.
void check_pages(const Checker& check, const View<const int32_t, 2>& block_table, int64_t seq, int64_t first, int64_t last,
                 int64_t entries, int64_t pages);

}  // namespace trueup
