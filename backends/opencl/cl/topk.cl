// The largest entries of a row, by one rule: numbers falling, ties (and -0 with 0) to the lower index, then NaN of
// either sign by index, then fillers (-inf, -1); -inf is no candidate. Exact: the order is that of 64-bit keys, the
// value's rank above the complement of its index, all distinct; nothing is cut to fewer bits.
//
// Three regimes. Short rows (up to SHORT): each entry counts the entries before it. Others: a group a row finds the k-th
// key by 4 passes over its bytes, collects what is not below it in the order of the row, and sorts that. Few but long
// rows: the host cuts them into segments that are chosen from at the same time, and then from their winners.

#define SHORT 256
#define NAN_RANK 0x007fffffu

// The rank of a value: 0 for -inf, then NaN, then the numbers as they rise.
inline uint rank_of(float x)
{
    const uint bits = as_uint(x), size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return NAN_RANK;
    if (size == 0) return 0x80000000u;
    const uint rank = bits >> 31 ? ~bits : bits | 0x80000000u;
    return rank == NAN_RANK ? 0 : rank;
}

inline void top_k_short_row(
    global const float *in, long n, long k, global float *value, global int *index, local uint *ranks)
{
    for (int i = LANE; i < n; i += LANES) ranks[i] = rank_of(in[i]);
#if LANES > 1
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    int found = 0;
    for (int i = 0; i < n; i++) found += ranks[i] != 0;
    for (int i = LANE; i < n; i += LANES) {
        const uint mine = ranks[i];
        if (!mine) continue;
        int before = 0;
        for (int j = 0; j < i; j++) before += ranks[j] >= mine;
        for (int j = i + 1; j < n; j++) before += ranks[j] > mine;
        if (before < k) {
            value[before] = in[i];
            index[before] = i;
        }
    }
    for (long j = found + LANE; j < k; j += LANES) {
        value[j] = -INFINITY;
        index[j] = -1;
    }
}

kernel void top_k_short(long rows, long n, long k, ROWS(float, scores), ARRAY(float, values), ARRAY(int, indices))
{
    local uint ranks[SHORT];
    const long row = get_group_id(0);
    top_k_short_row(ROW(scores, row), n, k, AT(values) + row * k, AT(indices) + row * k, ranks);
}

// A router: softmax, the k likeliest of up to SHORT, and their shares of their own sum; see normalize_row.
kernel void route(
    long rows, long n, long k, ROWS(float, scores), ARRAY(float, chances), ARRAY(float, values), float least,
    ARRAY(float, shares), ARRAY(int, indices))
{
    local uint ranks[SHORT];
    SCRATCH;
    const long row = get_group_id(0);
    softmax_row(AT(chances) + row * n, ROW(scores, row), n, scratch);
    LANE_BARRIER;
    top_k_short_row(AT(chances) + row * n, n, k, AT(values) + row * k, AT(indices) + row * k, ranks);
    LANE_BARRIER;
    normalize_row(AT(shares) + row * k, AT(values) + row * k, k, least, scratch);
}

#if LANES > 1
// How many of the lanes before this one have `mine` set, and in `all` how many have.
inline int lanes_before(int mine, local int *counts, int *all)
{
    barrier(CLK_LOCAL_MEM_FENCE);
    counts[LANE] = mine;
    barrier(CLK_LOCAL_MEM_FENCE);
    int before = 0, total = 0;
    for (int j = 0; j < LANES; j++) {
        before += j < LANE ? counts[j] : 0;
        total += counts[j];
    }
    *all = total;
    return before;
}
#define COUNT_IN(bin) atomic_inc(&histogram[bin])
#else
inline int lanes_before(int mine, local int *counts, int *all)
{
    *all = mine;
    return 0;
}
#define COUNT_IN(bin) histogram[bin]++
#endif

// A group takes every `groups`-th of the rows, which are `segments` parts of `length` entries of each row of scores.
// `origin`, where given, is the index to report for each entry. `work` holds `room` keys a group, a power of 2 from k.
kernel void top_k_long(
    long rows, long groups, long segments, long length, long n, long k, ROWS(float, scores), ARRAY(const int, origin),
    ARRAY(float, values), ARRAY(int, indices), ARRAY(ulong, work), long room)
{
    local int histogram[256], counts[LANES], chosen[2];
    global ulong *keys = AT(work) + get_group_id(0) * room;
    for (long row = get_group_id(0); row < rows; row += groups) {
        const long whole = row / segments, from = row % segments * length;
        const long size = n - from < length ? n - from : length;
        global const float *in = ROW(scores, whole) + from;

        // The k-th rank, or 1 where fewer than k are candidates: byte by byte, counting those that agree so far.
        uint limit = 0;
        int left = k;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int b = LANE; b < 256; b += LANES) histogram[b] = 0;
            LANE_BARRIER;
            for (long i = LANE; i < size; i += LANES) {
                const uint rank = rank_of(in[i]);
                if (rank && (shift == 24 || rank >> (shift + 8) == limit >> (shift + 8))) COUNT_IN(rank >> shift & 255);
            }
            LANE_BARRIER;
            if (LANE == 0) {
                int byte = 255, rest = left;
                while (byte > 0 && histogram[byte] < rest) rest -= histogram[byte--];
                chosen[0] = byte;
                chosen[1] = rest;
            }
            LANE_BARRIER;
            limit |= (uint)chosen[0] << shift;
            left = chosen[1];
        }
        if (limit == 0) limit = 1;

        // Those above the limit, and of those at it the first `left`, in the order of the row.
        int taken = 0, equal = 0;
        for (long base = 0; base < size; base += LANES) {
            const long i = base + LANE;
            const uint rank = i < size ? rank_of(in[i]) : 0;
            int ties, all;
            const int tie = equal + lanes_before(rank == limit, counts, &ties);
            const int mine = rank > limit || (rank == limit && tie < left);
            const int place = taken + lanes_before(mine, counts, &all);
            if (mine) keys[place] = (ulong)rank << 32 | (uint)~(uint)i;
            taken += all;
            equal += ties;
        }
        for (long j = taken + LANE; j < room; j += LANES) keys[j] = 0;
        LANE_BARRIER;

        // Bitonic, falling.
        for (long width = 2; width <= room; width *= 2)
            for (long step = width / 2; step; step /= 2) {
                for (long j = LANE; j < room / 2; j += LANES) {
                    const long a = j / step * 2 * step + j % step, b = a + step;
                    const ulong x = keys[a], y = keys[b];
                    if ((a & width) == 0 ? x < y : x > y) {
                        keys[a] = y;
                        keys[b] = x;
                    }
                }
                LANE_BARRIER;
            }

        for (long j = LANE; j < k; j += LANES) {
            const bool filler = j >= taken;
            const long i = filler ? 0 : ~(uint)keys[j];
            AT(values)[row * k + j] = filler ? -INFINITY : in[i];
            AT(indices)[row * k + j] = filler ? -1 : origin ? AT(origin)[whole * n + from + i] : from + i;
        }
        LANE_BARRIER;
    }
}

// The lowest index of the largest entry; the first NaN where there is one; 0 in a row of -inf alone.
kernel void argmax(long rows, long n, ROWS(float, scores), ARRAY(int, indices))
{
#if LANES > 1
    local float tops[LANES];
    local int places[LANES];
#endif
    const long row = get_group_id(0);
    global const float *in = ROW(scores, row);
    float top = -INFINITY;
    int place = INT_MAX;
    for (long i = LANE; i < n; i += LANES) {
        const float x = in[i];
        if (place == INT_MAX || x > top || (x != x && top == top)) {
            top = x;
            place = i;
        }
    }
#if LANES > 1
    tops[LANE] = top;
    places[LANE] = place;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (LANE == 0)
        for (int j = 1; j < LANES; j++) {
            const float x = tops[j];
            const bool nan = x != x, had = top != top;
            const bool same = nan ? had : !had && x == top;
            if (places[j] != INT_MAX && (same ? places[j] < place : nan ? !had : !had && x > top)) {
                top = x;
                place = places[j];
            }
        }
#endif
    if (LANE == 0) AT(indices)[row] = place;
}
