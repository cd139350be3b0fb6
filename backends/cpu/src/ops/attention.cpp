#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../kernels.hpp"
#include "../pool.hpp"

namespace trueup {
namespace {

// Rows of one sequence and one head of keys that are computed together: tokens x heads, at most attend_rows.
struct Unit {
    const AttentionSpan* span;
    int64_t token, tokens, head, heads, kv;
    int64_t first_chunk, last_chunk;
};

// The entries that a row sees: with a selection, its blocks' and the unfinished block's from `first` on, counted by rank.
struct Seen {
    int64_t first, end;             // entries (without a selection)
    bool selects = false;
    const int32_t* blocks = nullptr;  // chosen, rising; null where a selection chose none at all
    int64_t chosen = 0, tail = 0;   // entries in them; where the unfinished block begins
    int64_t block = 1, skip = 0;    // ranks that lie before the window

    int64_t from() const { return selects ? 0 : first; }
    int64_t to() const { return selects ? chosen + (end - tail) - skip : end; }
    int64_t entry(int64_t rank) const {
        if (!selects) return rank;
        rank += skip;
        return rank < chosen ? blocks[rank / block] * block + rank % block : tail + (rank - chosen);
    }
};

Seen seen(const Attention& a, const AttentionSpan& span, int64_t token) {
    Seen s;
    s.end = (span.past + token - span.begin + 1) / a.every;
    s.first = a.window ? std::max<int64_t>(0, s.end - a.window) : 0;
    if (!a.selects) return s;
    s.selects = true;
    s.blocks = a.blocks.data() + a.starts[token];
    s.block = a.block;
    s.chosen = (a.starts[token + 1] - a.starts[token]) * a.block;
    s.tail = s.end / a.block * a.block;
    const int64_t all = s.to();
    while (s.skip < all && s.entry(0) < s.first) ++s.skip;
    return s;
}

// In place of a part's total, where its row has no keys in the chunk: such a part is not joined, so that a row's sum does not depend on
// the chunks that other rows of its unit need.
constexpr float saw_none = -1.0f;

// Everything of one unit and one chunk: pointers to keys and values, and the part's softmax into most, total, acc.
void part(const Attention& a, const Unit& u, int64_t chunk, float* most, float* total, float* acc) {
    const float *q[attend_rows], *keys[attend_keys], *values[attend_keys];
    int from[attend_rows], to[attend_rows];
    const int64_t base = chunk * attend_keys;
    int64_t low = attend_keys, high = 0;
    Seen last{};
    for (int64_t t = 0, r = 0; t < u.tokens; ++t) {
        last = seen(a, *u.span, u.token + t);
        const int64_t f = std::clamp<int64_t>(last.from() - base, 0, attend_keys), e = std::clamp<int64_t>(last.to() - base, 0, attend_keys);
        if (f < e) low = std::min(low, f), high = std::max(high, e);
        for (int64_t h = 0; h < u.heads; ++h, ++r) {
            from[r] = static_cast<int>(f);
            to[r] = static_cast<int>(std::max(f, e));
            q[r] = a.q + (u.token + t) * a.q_stride + (u.head + h) * a.q_head_stride;
        }
    }
    const int rows = static_cast<int>(u.tokens * u.heads);
    if (low >= high) low = high = 0;
    for (int64_t j = low; j < high; ++j) {
        const int64_t entry = last.entry(base + j), page = u.span->table[entry / a.entries], at = entry % a.entries;
        keys[j] = a.keys.data + page * a.keys.page_stride + at * a.keys.entry_stride + u.kv * a.keys.head_stride;
        values[j] = a.values.data + page * a.values.page_stride + at * a.values.entry_stride + u.kv * a.values.head_stride;
    }
    kernels().attend({q, rows, keys, values, static_cast<int>(low), static_cast<int>(high), from, to, a.d, a.dv, a.scale}, most, total, acc);
    for (int r = 0; r < rows; ++r)
        if (from[r] == to[r]) total[r] = saw_none;
}

void finish(const Attention& a, const Unit& u, const float* most, const float* total, const float* acc) {
    for (int64_t t = 0, r = 0; t < u.tokens; ++t)
        for (int64_t h = 0; h < u.heads; ++h, ++r) {
            float* out = a.out + (u.token + t) * a.out_stride + (u.head + h) * a.out_head_stride;
            const bool nothing = most[r] == -std::numeric_limits<float>::infinity() && total[r] == 0.0f;
            for (int64_t c = 0; c < a.dv; ++c) out[c] = nothing ? 0.0f : acc[r * a.dv + c] / total[r];
            a.lse[(u.token + t) * a.lse_stride + u.head + h] =
                nothing ? -std::numeric_limits<float>::infinity() : static_cast<float>(most[r] + std::log(static_cast<double>(total[r])));
        }
}

// The softmax of a unit's rows as it grows, part by part.
struct Running {
    float *most, *total, *acc;
    void clear(int64_t rows, int64_t dv) {
        for (int64_t r = 0; r < rows; ++r) most[r] = -std::numeric_limits<float>::infinity(), total[r] = 0.0f;
        std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows * dv));
    }
    void join(int64_t rows, int64_t dv, const Running& other) {
        for (int64_t r = 0; r < rows; ++r)
            if (other.total[r] != saw_none)
                kernels().attend_join(most + r, total + r, acc + r * dv, other.most[r], other.total[r], other.acc + r * dv, dv);
    }
};

std::vector<Unit> units_of(const Attention& a) {
    std::vector<Unit> units;
    const int64_t group = a.kv ? a.heads / a.kv : 0;
    for (const AttentionSpan& span : a.spans)
        for (int64_t kv = 0; kv < a.kv; ++kv)
            for (int64_t h = 0; h < group; h += attend_rows) {
                const int64_t heads = std::min<int64_t>(attend_rows, group - h);
                const int64_t most = a.selects ? 1 : attend_rows / heads;
                for (int64_t t = span.begin; t < span.end; t += most) {
                    const int64_t tokens = std::min(most, span.end - t);
                    const Seen first = seen(a, span, t), last = seen(a, span, t + tokens - 1);
                    const int64_t end = (last.to() + attend_keys - 1) / attend_keys;
                    units.push_back({&span, t, tokens, kv * group + h, heads, kv, std::min(first.from() / attend_keys, end), end});
                }
            }
    return units;
}

}  // namespace

void attention(const Attention& a) {
    const std::vector<Unit> units = units_of(a);
    const auto count = static_cast<int64_t>(units.size());
    const int workers = threads();
    const int64_t size = attend_rows * (2 + a.dv);  // of a Running
    auto running = [&](float* at) { return Running{at, at + attend_rows, at + 2 * attend_rows}; };

    if (count >= 2 * workers || workers == 1) {
        std::vector<float> scratch(static_cast<size_t>(2 * size * workers));
        parallel_for(count, [&](int64_t task, int worker) {
            const Unit& u = units[task];
            Running whole = running(scratch.data() + 2 * size * worker), one = running(scratch.data() + 2 * size * worker + size);
            const int64_t rows = u.tokens * u.heads;
            whole.clear(rows, a.dv);
            for (int64_t c = u.first_chunk; c < u.last_chunk; ++c) {
                part(a, u, c, one.most, one.total, one.acc);
                whole.join(rows, a.dv, one);
            }
            finish(a, u, whole.most, whole.total, whole.acc);
        }, workers);
        return;
    }
    // Few units, as when one token is decoded: their chunks are tasks of their own, joined afterwards in the same order.
    std::vector<int64_t> first(static_cast<size_t>(count) + 1, 0);
    for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + units[i].last_chunk - units[i].first_chunk;
    std::vector<float> scratch(static_cast<size_t>(size * (first[count] + count)));
    parallel_for(first[count], [&](int64_t task, int) {
        const int64_t i = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
        const Running one = running(scratch.data() + size * task);
        part(a, units[i], units[i].first_chunk + task - first[i], one.most, one.total, one.acc);
    }, workers);
    parallel_for(count, [&](int64_t i, int) {
        const Unit& u = units[i];
        Running whole = running(scratch.data() + size * (first[count] + i));
        whole.clear(u.tokens * u.heads, a.dv);
        for (int64_t task = first[i]; task < first[i + 1]; ++task)
            whole.join(u.tokens * u.heads, a.dv, running(scratch.data() + size * task));
        finish(a, u, whole.most, whole.total, whole.acc);
    }, workers);
}

}  // namespace trueup
