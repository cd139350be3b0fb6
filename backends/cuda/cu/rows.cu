// Rows copied: chosen by index, repeated, joined, made contiguous, stored in pages. Values pass bit for bit, in words of
// `size` bytes (1, 2, 4 or 8); all counts, strides and offsets here are of such words. Bytes moved: each once.

// out[i] = x[at[i]], zeros where at[i] is -1; another index outside of x is a fault.
KERNEL take_rows(
    i64 outs, i64 n, i64 size, ROWS(u8, x), i64 count, const int *at, u8 *out, FAULT_ARGS)
{
    ENTRY_OF_ROW(outs, n)
    const i64 from = at[row];
    if (outside(from, -1, count, fault, node)) return;
    if (from < 0) zero_word(out, ITEM, size);
    else copy_word(out, ITEM, x, PLACE(x, from) + i, size);
}

// Rows of x to rows of out, `repeat` of them each: repeat_streams, and the parts of concat.
KERNEL copy_rows(
    i64 rows, i64 n, i64 size, ROWS(u8, x), i64 repeat, u8 *out, i64 out_step)
{
    ENTRY_OF_ROW(rows, n)
    copy_word(out, row * out_step + i, x, PLACE(x, row / repeat) + i, size);
}

// An array of up to 8 axes, of any strides, in row-major order. `shape` and `strides` begin with the first axis;
// those that are missing are 1 and 0.
struct Axes {
    i64 of[8];
};

KERNEL contiguous(i64 elements, i64 size, const u8 *x, Axes shape, Axes strides, u8 *out)
{
    ENTRY_OF_ROW(1, elements)
    i64 left = i, from = 0;
    for (int axis = 7; axis >= 0; axis--) {
        from += left % shape.of[axis] * strides.of[axis];
        left /= shape.of[axis];
    }
    copy_word(out, row + i, x, from, size);
}

// The row of position p, where (p + 1) mod every = 0, becomes entry p / every of its sequence: page
// block_table[s, e / entries], place e mod entries. Nothing else of the cache is touched; a page that the table lacks,
// or that the cache does, is a fault.
KERNEL paged_append(
    i64 tokens, i64 n, i64 size, ROWS(u8, x), const int *cu, i64 seqs, const int *past,
    const int *table, i64 blocks, u8 *cache, i64 pages, i64 entries, i64 page_step,
    i64 entry_step, i64 every, FAULT_ARGS)
{
    check_sequences(cu, seqs, tokens, fault, node);
    ENTRY_OF_ROW(tokens, n)
    const i64 s = sequence_of(cu, seqs, row);
    if (s < 0) return;
    if (past[s] < 0) { report(fault, node); return; }
    const i64 position = past[s] + row - cu[s], entry = position / every;
    if ((position + 1) % every) return;
    if (outside(entry / entries, 0, blocks, fault, node)) return;
    const i64 page = table[s * blocks + entry / entries];
    if (outside(page, 0, pages, fault, node)) return;
    const i64 to = page * page_step + entry % entries * entry_step;
    copy_word(cache, to + i, x, PLACE(x, row) + i, size);
}
