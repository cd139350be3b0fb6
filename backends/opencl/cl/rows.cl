// Rows copied: chosen by index, repeated, joined, made contiguous, stored in pages. Values pass bit for bit, in words of
// `size` bytes (1, 2, 4 or 8); all counts, strides and offsets here are of such words. Bytes moved: each once.

// out[i] = x[at[i]], zeros where at[i] is -1; another index outside of x is a fault.
kernel void take_rows(
    long outs, long n, long size, ROWS(uchar, x), long count, ARRAY(const int, at), ARRAY(uchar, out), FAULT_ARGS)
{
    RUN_OF_ROW(outs, n);
    const long from = AT(at)[row];
    if (outside(from, -1, count, fault, node)) return;
    global uchar *to = out + (out_at + row * n) * size;
    if (from < 0) zero_words(to, first, last, size);
    else {
        const long start = from / x_inner * x_outer + from % x_inner * x_step;
        copy_words(to, x + (x_at + start) * size, first, last, size);
    }
}

// Rows of x to rows of out, `repeat` of them each: repeat_streams, and the parts of concat.
kernel void copy_rows(
    long rows, long n, long size, ROWS(uchar, x), long repeat, ARRAY(uchar, out), long out_step)
{
    RUN_OF_ROW(rows, n);
    const long from = row / repeat, start = from / x_inner * x_outer + from % x_inner * x_step;
    copy_words(out + (out_at + row * out_step) * size, x + (x_at + start) * size, first, last, size);
}

// An array of up to 8 axes, of any strides, in row-major order. `shape` and `strides` begin with the first axis;
// those that are missing are 1 and 0.
kernel void contiguous(long elements, long size, ARRAY(const uchar, x), long8 shape, long8 strides, ARRAY(uchar, out))
{
    const long n[8] = {shape.s0, shape.s1, shape.s2, shape.s3, shape.s4, shape.s5, shape.s6, shape.s7};
    const long by[8] = {strides.s0, strides.s1, strides.s2, strides.s3, strides.s4, strides.s5, strides.s6, strides.s7};
    RUN_OF_ROW(1, elements);
    for (long i = first; i < last; i++) {
        long left = i, from = 0;
        for (int axis = 7; axis >= 0; axis--) {
            from += left % n[axis] * by[axis];
            left /= n[axis];
        }
        copy_words(out + (out_at + i) * size, x + (x_at + from) * size, 0, 1, size);
    }
}

// The row of position p, where (p + 1) mod every = 0, becomes entry p / every of its sequence: page
// block_table[s, e / entries], place e mod entries. Nothing else of the cache is touched; a page that the table lacks,
// or that the cache does, is a fault.
kernel void paged_append(
    long tokens, long n, long size, ROWS(uchar, x), ARRAY(const int, cu), long seqs, ARRAY(const int, past),
    ARRAY(const int, table), long blocks, ARRAY(uchar, cache), long pages, long entries, long page_step,
    long entry_step, long every, FAULT_ARGS)
{
    check_sequences(AT(cu), seqs, tokens, fault, node);
    RUN_OF_ROW(tokens, n);
    const long s = sequence_of(AT(cu), seqs, row);
    if (s < 0) return;
    if (AT(past)[s] < 0) { report(fault, node); return; }
    const long position = AT(past)[s] + row - AT(cu)[s], entry = position / every;
    if ((position + 1) % every) return;
    if (outside(entry / entries, 0, blocks, fault, node)) return;
    const long page = AT(table)[s * blocks + entry / entries];
    if (outside(page, 0, pages, fault, node)) return;
    const long to = page * page_step + entry % entries * entry_step;
    const long start = row / x_inner * x_outer + row % x_inner * x_step;
    copy_words(cache + (cache_at + to) * size, x + (x_at + start) * size, first, last, size);
}
