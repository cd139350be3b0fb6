// The largest entries of a row, by one rule: numbers falling, ties (and -0 with 0) to the lower index, then NaN of
// either sign by index, then fillers (-inf, -1); -inf is no candidate. Exact: the order is that of 64-bit keys, the
// value's rank above the complement of its index, all distinct; nothing is cut to fewer bits.
//
// Three regimes. Short rows (up to SHORT): each entry counts the entries before it. Others: a block a row finds the k-th
// key by 4 passes over its bytes, collects what is not below it in the order of the row, and sorts that. Few but long
// rows: the host cuts them into segments that are chosen from at the same time, and then from their winners.

#define SHORT 256
#define NAN_RANK 0x007fffffu
#define NOWHERE 0x7fffffff

// The rank of a value: 0 for -inf, then NaN, then the numbers as they rise.
INLINE u32 rank_of(float x)
{
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return NAN_RANK;
    if (size == 0) return 0x80000000u;
    const u32 rank = bits >> 31 ? ~bits : bits | 0x80000000u;
    return rank == NAN_RANK ? 0 : rank;
}

KERNEL top_k_short(i64 rows, i64 n, i64 k, ROWS(float, scores), float *values, int *indices)
{
    __shared__ u32 ranks[SHORT];
    const i64 row = GROUP;
    const float *in = ROW(scores, row);
    float *value = values + row * k;
    int *index = indices + row * k;
    for (int i = threadIdx.x; i < n; i += blockDim.x) ranks[i] = rank_of(in[i]);
    __syncthreads();
    int found = 0;
    for (int i = 0; i < n; i++) found += ranks[i] != 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const u32 mine = ranks[i];
        if (!mine) continue;
        int before = 0;
        for (int j = 0; j < i; j++) before += ranks[j] >= mine;
        for (int j = i + 1; j < n; j++) before += ranks[j] > mine;
        if (before < k) {
            value[before] = in[i];
            index[before] = i;
        }
    }
    for (i64 j = found + (int)threadIdx.x; j < k; j += blockDim.x) {
        value[j] = MINUS_INFINITY;
        index[j] = -1;
    }
}

// How many of the threads before this one have `mine` set, and in `all` how many have.
INLINE int threads_before(bool mine, int *counts, int *all)
{
    const u32 set = __ballot_sync(ALL, mine);
    __syncthreads();
    if (!LANE) counts[threadIdx.x >> 5] = __popc(set);
    __syncthreads();
    int before = __popc(set & ((1u << LANE) - 1)), total = 0;
    for (int w = 0; w < (int)(blockDim.x >> 5); w++) {
        before += w < (int)(threadIdx.x >> 5) ? counts[w] : 0;
        total += counts[w];
    }
    *all = total;
    return before;
}

// A block takes every `groups`-th of the rows, which are `segments` parts of `length` entries of each row of scores.
// `origin`, where given, is the index to report for each entry. `work` holds `room` keys a block, a power of 2 from k; null:
// they lie in shared memory.
KERNEL __launch_bounds__(512) top_k_long(
    i64 rows, i64 groups, i64 segments, i64 length, i64 n, i64 k, ROWS(float, scores), const int *origin, float *values,
    int *indices, u64 *work, i64 room)
{
    extern __shared__ u64 near_keys[];
    __shared__ int histogram[256], counts[32], chosen[2];
    u64 *keys = work ? work + GROUP * room : (u64 *)shared_room;
    for (i64 row = GROUP; row < rows; row += groups) {
        const i64 whole = row / segments, from = row % segments * length;
        const i64 size = n - from < length ? n - from : length;
        const float *in = ROW(scores, whole) + from;

        // The k-th rank, or 1 where fewer than k are candidates: byte by byte, counting those that agree so far.
        u32 limit = 0;
        int left = (int)k;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int b = threadIdx.x; b < 256; b += blockDim.x) histogram[b] = 0;
            __syncthreads();
            for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
                const u32 rank = rank_of(in[i]);
                if (rank && (shift == 24 || rank >> (shift + 8) == limit >> (shift + 8)))
                    atomicAdd(&histogram[rank >> shift & 255], 1);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                int byte = 255, rest = left;
                while (byte > 0 && histogram[byte] < rest) rest -= histogram[byte--];
                chosen[0] = byte;
                chosen[1] = rest;
            }
            __syncthreads();
            limit |= (u32)chosen[0] << shift;
            left = chosen[1];
        }
        if (limit == 0) limit = 1;

        // Those above the limit, and of those at it the first `left`, in the order of the row.
        int taken = 0, equal = 0;
        for (i64 base = 0; base < size; base += blockDim.x) {
            const i64 i = base + threadIdx.x;
            const u32 rank = i < size ? rank_of(in[i]) : 0;
            int ties, all;
            const int tie = equal + threads_before(rank == limit, counts, &ties);
            const bool mine = rank > limit || (rank == limit && tie < left);
            const int place = taken + threads_before(mine, counts, &all);
            if (mine) keys[place] = (u64)rank << 32 | (u32) ~(u32)i;
            taken += all;
            equal += ties;
        }
        for (i64 j = taken + (int)threadIdx.x; j < room; j += blockDim.x) keys[j] = 0;
        __syncthreads();

        // Bitonic, falling.
        for (i64 width = 2; width <= room; width *= 2)
            for (i64 step = width / 2; step; step /= 2) {
                for (i64 j = threadIdx.x; j < room / 2; j += blockDim.x) {
                    const i64 a = j / step * 2 * step + j % step, b = a + step;
                    const u64 x = keys[a], y = keys[b];
                    if ((a & width) == 0 ? x < y : x > y) {
                        keys[a] = y;
                        keys[b] = x;
                    }
                }
                __syncthreads();
            }

        for (i64 j = threadIdx.x; j < k; j += blockDim.x) {
            const bool filler = j >= taken;
            const i64 i = filler ? 0 : (i64)(u32) ~(u32)keys[j];
            values[row * k + j] = filler ? MINUS_INFINITY : in[i];
            indices[row * k + j] = filler ? -1 : origin ? origin[whole * n + from + i] : (int)(from + i);
        }
        __syncthreads();
    }
}

// Whether (x, i) comes before (y, j): the first NaN, else the lowest index of the largest.
INLINE bool precedes(float x, int i, float y, int j)
{
    if (i == NOWHERE || j == NOWHERE) return j == NOWHERE && i != NOWHERE;
    const bool nan = x != x, had = y != y;
    if (nan || had) return nan && (!had || i < j);
    return x > y || (x == y && i < j);
}

// The lowest index of the largest entry; the first NaN where there is one; 0 in a row of -inf alone.
KERNEL __launch_bounds__(512) argmax(i64 rows, i64 n, ROWS(float, scores), int *indices)
{
    __shared__ float tops[16];
    __shared__ int places[16];
    const i64 row = GROUP;
    const float *in = ROW(scores, row);
    float top = MINUS_INFINITY;
    int place = NOWHERE;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x)
        if (precedes(in[i], (int)i, top, place)) {
            top = in[i];
            place = (int)i;
        }
    for (int d = 16; d; d >>= 1) {
        const float x = __shfl_xor_sync(ALL, top, d);
        const int i = __shfl_xor_sync(ALL, place, d);
        if (precedes(x, i, top, place)) top = x, place = i;
    }
    if (!LANE) tops[threadIdx.x >> 5] = top, places[threadIdx.x >> 5] = place;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < (int)(blockDim.x >> 5); w++)
        if (precedes(tops[w], places[w], top, place)) top = tops[w], place = places[w];
    indices[row] = place;
}
