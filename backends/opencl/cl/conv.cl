// Ops that look a fixed number of rows back: causal_conv, trailing_mean, delay. The rows before the step lie in
// tail[slot, 0 … size-1, …], oldest first. Two kernels a node, in this order: the values, then the tails: those that `keep`
// asks for, then the one after the step, in place. Padding rows give zeros; a slot outside of the state is a fault.
// The history of a sequence is its tail, then its rows: entry h of it is tail[h] or row h - size.

// The slot of sequence s where it has rows, else -1.
inline long slot_of(
    global const int *cu, global const int *slots, long s, long tokens, long slot_count, FAULT_ARGS)
{
    if (first_row(cu, s) >= end_row(cu, s, tokens)) return -1;
    return outside(slots[s], 0, slot_count, fault, node) ? -1 : slots[s];
}

// out[t, c] = sum_j weight[c, j] history[t + j dilation, c], in the order of j; without a weight the mean. Where `gated`,
// silu of that, scaled by `gain`.
kernel void causal_conv(
    long tokens, long n, long taps, long dilation, long gated, float gain, ROWS(float, x), ARRAY(const float, weight), ARRAY(const int, cu),
    long seqs, ARRAY(const int, slots), ARRAY(const float, tail), long slot_count, long slot_step, long row_step,
    ARRAY(float, out), FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    RUN_OF_ROW(tokens, n);
    global float *to = AT(out) + row * n;
    for (long i = first; i < last; i++) to[i] = 0;
    const long s = sequence_of(AT(cu), seqs, row);
    if (s < 0) return;
    const long slot = slot_of(AT(cu), AT(slots), s, tokens, slot_count, fault, node);
    if (slot < 0) return;
    const long size = (taps - 1) * dilation, behind = row - AT(cu)[s];
    for (long j = 0; j < taps; j++) {
        const long h = behind + j * dilation;
        global const float *from = h < size ? AT(tail) + slot * slot_step + h * row_step : ROW(x, row - behind + h - size);
        if (weight)
            for (long i = first; i < last; i++) to[i] = AT(weight)[i * taps + j] * from[i] + to[i];
        else
            for (long i = first; i < last; i++) to[i] += from[i];
    }
    if (!weight)
        for (long i = first; i < last; i++) to[i] /= taps;
    for (long i = first; i < last && gated; i += VECTOR) {
        const long count = COUNT(i, last);
        const vec v = vec_some(to + i, count);
        vec_put(to + i, SILU_OF(v, gain), count);
    }
}

// out[t] = history[t]: the row `size` rows before, in words of `width` bytes.
kernel void delay(
    long tokens, long n, long size, long width, ROWS(uchar, x), ARRAY(const int, cu), long seqs, ARRAY(const int, slots),
    ARRAY(const uchar, tail), long slot_count, long slot_step, long row_step, ARRAY(uchar, out), long out_step,
    FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    RUN_OF_ROW(tokens, n);
    global uchar *to = out + (out_at + row * out_step) * width;
    const long s = sequence_of(AT(cu), seqs, row);
    const long slot = s < 0 ? -1 : slot_of(AT(cu), AT(slots), s, tokens, slot_count, fault, node);
    if (slot < 0) {
        zero_words(to, first, last, width);
        return;
    }
    const long behind = row - AT(cu)[s], earlier = row - size;
    if (behind < size)
        copy_words(to, tail + (tail_at + slot * slot_step + behind * row_step) * width, first, last, width);
    else
        copy_words(
            to, x + (x_at + earlier / x_inner * x_outer + earlier % x_inner * x_step) * width, first, last, width);
}

#define TAIL_ARGS                                                                                                \
    long tokens, long n, long size, long width, ROWS(uchar, x), ARRAY(const int, cu), long seqs,                 \
        ARRAY(const int, slots), ARRAY(uchar, tail), long slot_count, long slot_step, long row_step

// tail[to] = the `size` entries of the history that begin at entry `begin`; in place where `to` is the sequence's own
// slot, so rising.
#define COPY_TAIL(to, begin)                                                                                     \
    for (long j = 0; j < size; j++) {                                                                            \
        const long h = (begin) + j, r = start + h - size;                                                        \
        global const uchar *from =                                                                               \
            h < size ? tail + (tail_at + slot * slot_step + h * row_step) * width                                \
                     : x + (x_at + r / x_inner * x_outer + r % x_inner * x_step) * width;                        \
        copy_words(tail + (tail_at + (to)*slot_step + j * row_step) * width, from, first, last, width);          \
    }

// The tail after row t goes to slot keep[t] too; of rows of a sequence that name one slot, the last.
kernel void tail_push(TAIL_ARGS, ARRAY(const int, keep), FAULT_ARGS)
{
    RUN_OF_ROW(seqs, n);
    const long slot = slot_of(AT(cu), AT(slots), row, tokens, slot_count, fault, node);
    if (slot < 0) return;
    const long start = first_row(AT(cu), row), end = end_row(AT(cu), row, tokens);
    for (long t = start; t < end && keep; t++) {
        const long to = AT(keep)[t];
        if (!outside(to, -1, slot_count, fault, node) && to >= 0 && to != slot) COPY_TAIL(to, t - start + 1)
    }
    COPY_TAIL(slot, end - start)
}

// n-gram rows: item (t, head), head h of length m = h / per + 2 mixes the last m ids. 64-bit integers that wrap, a mod
// that is never negative; an id that is eos, and all before it, read as eos. Exact. A table that int32 can't index is a
// fault.
kernel void ngram_rows(
    long tokens, long heads, long size, long per, ROWS(int, ids), ARRAY(const int, cu), long seqs,
    ARRAY(const int, slots), ARRAY(const long, multipliers), ARRAY(const long, offsets), ARRAY(const long, sizes),
    ARRAY(const int, context), long slot_count, long slot_step, long row_step, long eos, ARRAY(int, out), FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    RUN_OF_ROW(tokens, heads);
    const long s = sequence_of(AT(cu), seqs, row);
    const long slot = s < 0 ? -1 : slot_of(AT(cu), AT(slots), s, tokens, slot_count, fault, node);
    const long behind = slot < 0 ? 0 : row - AT(cu)[s];
    for (long h = first; h < last; h++) {
        const long count = AT(sizes)[h], offset = AT(offsets)[h];
        if (outside(count, 1, 0x80000001l, fault, node) || outside(offset, 0, 0x80000001l - count, fault, node)) continue;
        ulong mix = slot < 0 ? 0 : (ulong)(long)*ROW(ids, row) * (ulong)AT(multipliers)[0];
        bool cut = false;
        for (long back = 1; back < h / per + 2 && slot >= 0; back++) {
            const long at = size + behind - back;
            const int id = at < size ? AT(context)[slot * slot_step + at * row_step] : *ROW(ids, row - back);
            cut |= id == eos;
            mix ^= (ulong)(long)(cut ? eos : id) * (ulong)AT(multipliers)[back];
        }
        const long left = (long)mix % count;
        AT(out)[row * heads + h] = slot < 0 ? 0 : (int)((left < 0 ? left + count : left) + offset);
    }
}
