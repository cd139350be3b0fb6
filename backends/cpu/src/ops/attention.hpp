// Attention over a paged cache: which keys each query row sees, and how the work is cut. The arithmetic is simd/attention.inc's.
//
// A row's keys are taken in chunks of 256 counted from the start of its sequence (of its selection), so what is added to what does
// not depend on the other rows, on the number of threads, or on whether the chunks of a row are computed apart.
#pragma once
#include <cstdint>
#include <vector>

namespace trueup {

struct Cache {
    const float* data;
    int64_t page_stride, entry_stride, head_stride;
};

struct AttentionSpan {
    int64_t begin, end, past;  // rows of the step; tokens before them
    const int32_t* table;      // pages
};

struct Attention {
    const float* q;
    int64_t q_stride, q_head_stride;
    Cache keys, values;
    float* out;
    int64_t out_stride, out_head_stride;
    float* lse;
    int64_t lse_stride;
    int64_t tokens, heads, kv, d, dv, entries;  // entries: of a page
    std::vector<AttentionSpan> spans;
    // With a selection: the chosen blocks of each row, rising, in [starts[row], starts[row + 1]).
    bool selects;
    std::vector<int32_t> blocks;
    std::vector<int64_t> starts;
    float scale;
    int64_t every, block, window;
};

void attention(const Attention& a);

}  // namespace trueup
