"""Per-layer n-gram embeddings as in Qwen4-Exp: the rows of the table that a token's past names, and their gate."""

from __future__ import annotations

import numpy as np

from trueup.core.op import op

from ._arrays import F32, Array, narrow, wide
from ._sequences import placed, push


@op(
    "ids[tokens]:i32, cu_seqlens[seqs+1]:i32, slots[seqs]:i32, multipliers[n]:i64, offsets[(n-1)*per]:i64, "
    "sizes[(n-1)*per]:i64, &context[slot, n-1]:i32, keep?[tokens]:i32 -> rows[tokens, (n-1)*per]:i32"
)
def ngram_rows(
    ids: Array,
    cu_seqlens: Array,
    slots: Array,
    multipliers: Array,
    offsets: Array,
    sizes: Array,
    context: Array,
    keep: Array | None = None,
    *,
    eos: int,
) -> Array:
    """Rows of the n-gram table for the 2-grams … n-grams that end at each token, `per` heads for each length.

    With c_0 the token and c_s the token s before it; where one of them is eos (or lies before the sequence), it and all
    older ones read as eos, while c_0 being eos cuts nothing. Length m mixes c_0 multipliers[0] xor … xor
    c_(m-1) multipliers[m-1] in signed 64-bit integers, which wrap, and head h of it, at (m-2)·per + h, is
    mix mod sizes + offsets, with a mod that is never negative.

    `context` holds the n-1 ids before the step, oldest first, eos at the start of a sequence; after row t it also
    goes to slot keep[t], unless that is -1. Padding rows are zeros. ValueError for a size below 1, and for rows
    beyond int32. Exact in every split of a sequence into steps. Source: Qwen4-Exp in transformers.
    """
    n = len(multipliers)
    if np.any(sizes < 1) or np.any(offsets < 0) or np.any(offsets + sizes > 2**31):
        raise ValueError(
            f"ngram_rows: sizes {sizes.tolist()} at offsets {offsets.tolist()} must be rows of an int32 table"
        )
    out = np.zeros((len(ids), len(sizes)), np.int32)
    heads = np.arange(len(sizes)).reshape(max(n - 1, 0), -1 if n > 1 else 0)
    for slot, rows in placed(cu_seqlens, slots, context, len(ids)):
        history = np.concatenate([context[slot], ids[rows]])
        count = rows.stop - rows.start
        past = [history[n - 1 - s : n - 1 - s + count].astype(np.int64) for s in range(n)]
        mix = past[0] * multipliers[0]
        cut = np.zeros(count, bool)
        for s, at in enumerate(heads, start=1):
            cut |= past[s] == eos
            mix = mix ^ np.where(cut, eos, past[s]) * multipliers[s]
            out[rows, at] = (mix[:, None] % sizes[at] + offsets[at]).astype(np.int32)
        push(context, slot, history, rows, keep)
    return out


@op("key[rows, streams, n], query[rows, streams, n], value[rows, n] -> out[rows, streams, n]")
@np.errstate(all="ignore")
def ple_gate(key: F32, query: F32, value: F32) -> F32:
    """sigmoid(sign(u) sqrt(max(|u|, 1e-6))) · value with u = key·query / sqrt(n), for each stream.

    Not continuous at u = 0, where the gate is 1/2 and steps by 1e-3/4 to either side. In float64, rounded once. n = 0
    stays empty. Source: Qwen4-Exp in transformers.
    """
    u = np.sum(wide(key) * wide(query), axis=-1) / np.sqrt(max(key.shape[-1], 1))
    gate = 1 / (1 + np.exp(-np.sign(u) * np.sqrt(np.maximum(np.abs(u), 1e-6))))
    return narrow(gate[:, :, None] * wide(value)[:, None])
