// Ops that look a fixed number of rows back: causal_conv, trailing_mean, delay. The rows before the step lie in
// tail[slot, 0 … size-1, …], oldest first. Three kernels a node, in this order: the values, then the tails that `keep`
// asks for, then the tail after the step, in place. Padding rows give zeros; a slot outside of the state is a fault.
// The history of a sequence is its tail, then its rows: entry h of it is tail[h] or row h - size.

// The slot of sequence s where it has rows, else -1.
INLINE i64 slot_of(
    const int *cu, const int *slots, i64 s, i64 tokens, i64 slot_count, FAULT_ARGS)
{
    if (first_row(cu, s) >= end_row(cu, s, tokens)) return -1;
    return outside(slots[s], 0, slot_count, fault, node) ? -1 : slots[s];
}

// out[t, c] = sum_j weight[c, j] history[t + j dilation, c], in the order of j; without a weight the mean.
KERNEL causal_conv(
    i64 tokens, i64 n, i64 taps, i64 dilation, ROWS(float, x), const float *weight, const int *cu,
    i64 seqs, const int *slots, const float *tail, i64 slot_count, i64 slot_step, i64 row_step,
    float *out, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    ENTRY_OF_ROW(tokens, n)
    float *to = out + ITEM;
    *to = 0;
    const i64 s = sequence_of(cu, seqs, row);
    if (s < 0) return;
    const i64 slot = slot_of(cu, slots, s, tokens, slot_count, fault, node);
    if (slot < 0) return;
    const i64 size = (taps - 1) * dilation, behind = row - cu[s];
    float sum = 0;
    for (i64 j = 0; j < taps; j++) {
        const i64 h = behind + j * dilation;
        const float *from = h < size ? tail + slot * slot_step + h * row_step : ROW(x, row - behind + h - size);
        sum = weight ? fmaf(weight[i * taps + j], from[i], sum) : sum + from[i];
    }
    *to = weight ? sum : sum / taps;
}

// out[t] = history[t]: the row `size` rows before, in words of `width` bytes.
KERNEL delay(
    i64 tokens, i64 n, i64 size, i64 width, ROWS(u8, x), const int *cu, i64 seqs, const int *slots,
    const u8 *tail, i64 slot_count, i64 slot_step, i64 row_step, u8 *out, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    ENTRY_OF_ROW(tokens, n)
    const i64 s = sequence_of(cu, seqs, row);
    const i64 slot = s < 0 ? -1 : slot_of(cu, slots, s, tokens, slot_count, fault, node);
    if (slot < 0) {
        zero_word(out, ITEM, width);
        return;
    }
    const i64 behind = row - cu[s], earlier = row - size;
    if (behind < size)
        copy_word(out, ITEM, tail, slot * slot_step + behind * row_step + i, width);
    else
        copy_word(out, ITEM, x, PLACE(x, earlier) + i, width);
}

#define TAIL_ARGS                                                                                                \
    i64 tokens, i64 n, i64 size, i64 width, ROWS(u8, x), const int *cu, i64 seqs,                 \
        const int *slots, u8 *tail, i64 slot_count, i64 slot_step, i64 row_step

// tail[to] = the `size` entries of the history that begin at entry `begin`; in place where `to` is the sequence's own
// slot, so rising.
#define COPY_TAIL(to, begin)                                                                                     \
    for (i64 j = 0; j < size; j++) {                                                                             \
        const i64 h = (begin) + j, r = start + h - size;                                                         \
        copy_word(tail, (to) * slot_step + j * row_step + i, h < size ? tail : x,                                \
            (h < size ? slot * slot_step + h * row_step : PLACE(x, r)) + i, width);                              \
    }

// The tail after row t goes to slot keep[t] too; of rows of a sequence that name one slot, the last.
KERNEL tail_keep(TAIL_ARGS, const int *keep, FAULT_ARGS)
{
    ENTRY_OF_ROW(tokens, n)
    const i64 s = sequence_of(cu, seqs, row);
    if (s < 0) return;
    const i64 to = keep[row];
    if (outside(to, -1, slot_count, fault, node) || to < 0) return;
    const i64 slot = slot_of(cu, slots, s, tokens, slot_count, fault, node);
    if (slot < 0 || slot == to) return;
    const i64 start = first_row(cu, s), end = end_row(cu, s, tokens);
    for (i64 later = row + 1; later < end; later++)
        if (keep[later] == to) return;
    COPY_TAIL(to, row - start + 1)
}

KERNEL tail_push(TAIL_ARGS, FAULT_ARGS)
{
    ENTRY_OF_ROW(seqs, n)
    const i64 slot = slot_of(cu, slots, row, tokens, slot_count, fault, node);
    if (slot < 0) return;
    const i64 start = first_row(cu, row), end = end_row(cu, row, tokens);
    COPY_TAIL(slot, end - start)
}

// n-gram rows: item (t, head), head h of length m = h / per + 2 mixes the last m ids. 64-bit integers that wrap, a mod
// that is never negative; an id that is eos, and all before it, read as eos. Exact. A table that int32 can't index is a
// fault.
KERNEL ngram_rows(
    i64 tokens, i64 heads, i64 size, i64 per, ROWS(int, ids), const int *cu, i64 seqs,
    const int *slots, const i64 *multipliers, const i64 *offsets, const i64 *sizes,
    const int *context, i64 slot_count, i64 slot_step, i64 row_step, i64 eos, int *out, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    ENTRY_OF_ROW(tokens, heads)
    const i64 s = sequence_of(cu, seqs, row);
    const i64 slot = s < 0 ? -1 : slot_of(cu, slots, s, tokens, slot_count, fault, node);
    const i64 behind = slot < 0 ? 0 : row - cu[s];
    const i64 h = i;
    const i64 count = sizes[h], offset = offsets[h];
    if (outside(count, 1, 0x80000001ll, fault, node) || outside(offset, 0, 0x80000001ll - count, fault, node)) return;
    u64 mix = slot < 0 ? 0 : (u64)(i64)*ROW(ids, row) * (u64)multipliers[0];
    bool cut = false;
    for (i64 back = 1; back < h / per + 2 && slot >= 0; back++) {
        const i64 at = size + behind - back;
        const int id = at < size ? context[slot * slot_step + at * row_step] : *ROW(ids, row - back);
        cut |= id == eos;
        mix ^= (u64)(i64)(cut ? eos : id) * (u64)multipliers[back];
    }
    const i64 left = (i64)mix % count;
    out[row * heads + h] = slot < 0 ? 0 : (int)((left < 0 ? left + count : left) + offset);
}
