"""Attention over a paged cache, and the joining of several."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.op import Cost, op
from trueup.core.types import TensorType

from ._arrays import F32, F64, Array, narrow, wide
from ._sequences import check_pages, gather, length, spans


@op(
    "q[tokens, group*kv, d], keys[pages, entries, kv, d], values[pages, entries, kv, dv], cu_seqlens[seqs+1]:i32, "
    "past[seqs]:i32, block_table[seqs, blocks]:i32, selected?[tokens, picks]:i32 "
    "-> out[tokens, group*kv, dv], lse[tokens, group*kv]"
)
@np.errstate(all="ignore")
def attention(
    q: F32,
    keys: F32,
    values: F32,
    cu_seqlens: Array,
    past: Array,
    block_table: Array,
    selected: Array | None = None,
    *,
    scale: float,
    every: int = 1,
    block: int = 1,
    window: int = 0,
) -> tuple[F32, F32]:
    """Causal softmax attention of each query over the entries of its sequence, and the logarithm of its softmax's sum.

    The query at position p (past[s] for the first row of sequence s) sees the n = (p+1) // every entries that are
    complete: all of them, or the last `window` where that is not 0. With `selected` it sees, of these, only the
    blocks of `block` entries named there (-1: none; one named twice counts once) and the n mod block entries after
    the last whole block. Query head h reads head h // group of keys and values. With x_i = scale q·k_i over the
    entries seen: out = sum_i e^(x_i) v_i / sum_i e^(x_i), lse = ln sum_i e^(x_i).

    A query that sees nothing, or only scores of -inf, gives out 0 and lse -inf; so does padding (out 0, lse 0 there).
    NaN in a query, or in a key or value that it sees, reaches that query's results only; entries not seen are not
    read. Each query is computed alone, in float64, and rounded once: its bits depend on no other row. ValueError for
    a block that is not one of the n // block whole ones, and for a page that the table lacks.

    Sources: Vaswani et al., arXiv 1706.03762; paging Kwon et al., arXiv 2309.06180; selection as in Qwen4-Exp's QSA
    (block > 1) and DeepSeek-V4's CSA (every > 1).
    """
    kv, group = keys.shape[2], q.shape[1] // max(keys.shape[2], 1)
    out, lse = np.zeros((*q.shape[:2], values.shape[3])), np.zeros(q.shape[:2])
    queries = wide(q).reshape(len(q), kv, group, q.shape[2])
    for s, rows in spans(cu_seqlens, len(q)):
        last = length(past, s, rows)
        k = wide(gather(keys, block_table, s, last // every).swapaxes(0, 1))  # [kv, entries, d]
        v = wide(gather(values, block_table, s, last // every).swapaxes(0, 1))
        for t in range(rows.start, rows.stop):
            n = (last - rows.stop + t + 1) // every
            seen = slice(max(0, n - window) if window else 0, n)
            at = seen if selected is None else _chosen(selected[t], n, block, seen.start, t)
            o, z = _attend(queries[t], k[:, at], v[:, at], scale)
            out[t], lse[t] = o.reshape(out.shape[1:]), z.reshape(-1)
    return narrow(out), narrow(lse)


def _chosen(picks: Array, n: int, block: int, first: int, row: int) -> Array:
    """The entries that `picks` and the unfinished block leave of the first n, from `first` on, rising."""
    whole = n // block
    picked = np.unique(picks[picks >= 0])
    if np.any(picks < -1) or np.any(picked >= whole):
        raise ValueError(f"attention: row {row} selects {picks.tolist()} where {whole} whole blocks are seen")
    at = np.concatenate([(picked[:, None] * block + np.arange(block)).reshape(-1), np.arange(whole * block, n)])
    return at[at >= first]


def _attend(q: F64, k: F64, v: F64, scale: float) -> tuple[F64, F64]:
    """`q[kv, group, d]`, `k[kv, n, d]`, `v[kv, n, dv]` -> out `[kv, group, dv]`, lse `[kv, group]`."""
    x = scale * (q @ k.swapaxes(1, 2))
    m = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(x - m)
    z = np.sum(e, axis=-1, keepdims=True)
    nothing = m == -np.inf
    return np.where(nothing, 0, (e @ v) / z), np.where(nothing, -np.inf, m + np.log(z))[..., 0]


@attention.requires
def _(
    q: TensorType, keys: TensorType, values: TensorType, cu_seqlens: TensorType, past: TensorType,
    block_table: TensorType, selected: TensorType | None, *, scale: float, every: int, block: int, window: int,
) -> bool | str:  # fmt: skip
    if every < 1 or block < 1:
        return f"every and block must be at least 1, got {every} and {block}"
    return window >= 0 or f"window must be at least 0, got {window}"


@attention.conditions
def _(
    q: Array, keys: Array, values: Array, cu_seqlens: Array, past: Array, block_table: Array, selected: Array | None, *,
    scale: float, every: int, block: int, window: int,
) -> None:  # fmt: skip
    check_pages(cu_seqlens, past, block_table, keys, len(q), every=every, writes=False)
    for s, rows in spans(cu_seqlens, len(q)) if selected is not None else ():
        for t in range(rows.start, rows.stop):
            _chosen(selected[t], (int(past[s]) + t - rows.start + 1) // every, block, 0, t)  # type: ignore[index]


@attention.costs
def _(
    q: TensorType,
    keys: TensorType,
    values: TensorType,
    cu_seqlens: TensorType,
    past: TensorType,
    block_table: TensorType,
    selected: TensorType | None,
    *,
    scale: float,
    every: int,
    block: int,
    window: int,
) -> Cost:
    """For sequences that fill their page tables, of which a window or a selection sees a part."""
    (tokens, heads, d), dv, kv = q.shape, values.shape[3], keys.shape[2]
    full = block_table.shape[1] * keys.shape[1]
    seen = min(full, window) if window else full
    if selected is not None:
        seen = min(seen, selected.shape[1] * block + block - 1)
    read = block_table.shape[0] * seen * kv * (d + dv) * 4
    return Cost(2 * tokens * heads * seen * (d + dv), q.nbytes + read + 4 * tokens * heads * (dv + 1))


@op(
    "*outs[tokens, heads, dv], *lses[tokens, heads], sinks?[heads]:weight -> out[tokens, heads, dv], lse[tokens, heads]"
)
@np.errstate(all="ignore")
def merge_attention(outs: tuple[F32, ...], lses: tuple[F32, ...], sinks: Any = None) -> tuple[F32, F32]:
    """Attention over the union of several sets of keys, from the `out` and `lse` of each.

    lse = ln(sum_i e^(lses_i) + e^(sinks)), out = sum_i e^(lses_i - lse) outs_i. A sink is a logit a head that takes
    part in the sum and has no value (gpt-oss, DeepSeek-V4). A set whose lse is -inf saw nothing: its out is not read.
    Where nothing was seen, and there is no sink, out is 0 and lse -inf. NaN in an lse, or in an out that counts,
    gives NaN. Dao et al., arXiv 2205.14135, join the blocks of one softmax so.
    """
    parts = [wide(x) for x in lses] + ([] if sinks is None else [np.broadcast_to(wide(sinks), lses[0].shape)])
    m = np.max(parts, axis=0)
    nothing = m == -np.inf
    total = np.zeros(m.shape)
    for x in parts:
        total += np.where(nothing, 0, np.exp(x - m))
    lse = np.where(nothing, -np.inf, m + np.log(total))
    out = np.zeros(outs[0].shape)
    for o, x in zip(outs, parts, strict=False):
        weight = np.exp(x - lse)[..., None]
        out += np.where((x == -np.inf)[..., None], 0, weight * wide(o))
    return narrow(out), narrow(lse)
