"""Attention over a paged cache, and the joining of several.

MLX's fused attention is not used: it gives no logarithm of its sum, and NaN where a query sees nothing.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from trueup.backends.metal.checks import require
from trueup.backends.metal.steps import Ints, entries, flat, length, places, spans
from trueup.backends.metal.weights import Prepared, plain
from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()

ROWS = 256
"""Queries that meet all entries of their sequence at once."""
ELEMENTS = 1 << 24
"""Entries of keys that are gathered at once where each query has its own."""


@kernels.implements(ops.attention)
def attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    cu_seqlens: mx.array,
    past: mx.array,
    block_table: mx.array,
    selected: mx.array | None,
    *,
    scale: float,
    every: int,
    block: int,
    window: int,
) -> tuple[mx.array, mx.array]:
    """Part by part of the rows, all sequences after one another; what is padding is added as zeros."""
    (tokens, heads, d), kv, dv = q.shape, keys.shape[2], values.shape[3]
    if not heads or not tokens:
        return mx.zeros((tokens, heads, dv)), mx.zeros((tokens, heads))
    queries, outs, lses, done = q.reshape(tokens, kv, heads // kv, d), [], [], 0
    for s, a, b in spans(cu_seqlens, tokens):
        end = length(past, s, b - a)
        counts = np.arange(end - (b - a) + 1, end + 1) // every
        if selected is None:
            found = _dense(queries[a:b], keys, values, block_table, s, counts, scale, window)
        else:
            at = places(keys, block_table, s, np.arange(counts[-1]))
            found = _sparse(queries[a:b], keys, values, at, counts, selected[a:b], scale, block, window)
        outs += [o for o, _ in found]
        lses += [z for _, z in found]
        done = b
    outs.append(mx.zeros((tokens - done, kv, heads // kv, dv)))
    lses.append(mx.zeros((tokens - done, kv, heads // kv)))
    return mx.concatenate(outs).reshape(tokens, heads, dv), mx.concatenate(lses).reshape(tokens, heads)


def _dense(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    block_table: mx.array,
    s: int,
    counts: Ints,
    scale: float,
    window: int,
) -> list[tuple[mx.array, mx.array]]:
    """Rows of one sequence that see `counts[rows]` entries, or the last `window` of these."""
    starts = np.maximum(counts - window, 0) if window else np.zeros_like(counts)
    low = int(starts[0])
    k = entries(keys, block_table, s, low, int(counts[-1])).transpose(1, 2, 0)[:, None]  # [kv, 1, d, n]
    v = entries(values, block_table, s, low, int(counts[-1])).transpose(1, 0, 2)[:, None]  # [kv, 1, n, dv]
    apart = len(counts) > 1 and v.size and not mx.all(mx.isfinite(v)).item()  # 0 times what is not seen must be 0
    out = []
    for first in range(0, len(counts), 1 if apart else ROWS):
        rows = slice(first, min(first + (1 if apart else ROWS), len(counts)))
        a, b = int(starts[rows][0]) - low, int(counts[rows][-1]) - low
        at = np.arange(a, b) + low
        seen = (at >= starts[rows, None]) & (at < counts[rows, None])
        x = scale * (q[rows].transpose(1, 2, 0, 3) @ k[..., a:b])  # [kv, group, rows, n]
        o, z = _weigh(mx.where(mx.array(seen), x, -mx.inf), v[..., a:b, :])
        out.append((o.transpose(2, 0, 1, 3), z.transpose(2, 0, 1)))
    return out


def _sparse(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    at: Ints,
    counts: Ints,
    picks: mx.array,
    scale: float,
    block: int,
    window: int,
) -> list[tuple[mx.array, mx.array]]:
    """Rows of one sequence, whose entries lie at `at[entries]`: each query gathers the blocks that it picked, and the
    unfinished one."""
    whole = mx.array((counts // block).astype(np.int32))[:, None]
    require(
        mx.all((picks >= -1) & (picks < whole)),
        lambda: f"attention: blocks {np.array(picks).tolist()} where {(counts // block).tolist()} whole ones are seen",
    )
    starts = np.maximum(counts - window, 0) if window else np.zeros_like(counts)
    picks = mx.sort(picks, axis=1)
    again = mx.concatenate([mx.zeros((len(counts), 1), mx.bool_), picks[:, 1:] == picks[:, :-1]], axis=1)
    named = mx.where(again[:, : picks.shape[1]] | (picks < 0) | (picks >= whole), -1, picks)
    inside = mx.arange(block)
    entry = mx.where(named[..., None] < 0, -1, named[..., None] * block + inside).reshape(len(counts), -1)
    rest = mx.array(((counts // block) * block).astype(np.int32))[:, None] + inside[: block - 1]
    entry = mx.concatenate([entry, rest], axis=1)
    seen = (entry >= mx.array(starts.astype(np.int32))[:, None]) & (entry < mx.array(counts.astype(np.int32))[:, None])
    kv, m = keys.shape[2], entry.shape[1]
    if not len(at) or not m:
        nothing = mx.zeros((len(counts), kv, q.shape[2], values.shape[3]))
        return [(nothing, mx.full(nothing.shape[:-1], -mx.inf))]
    where = mx.array(at)[mx.clip(entry, 0, len(at) - 1)]
    step, out = max(1, ELEMENTS // max(1, m * kv * max(keys.shape[3], values.shape[3]))), []
    for first in range(0, len(counts), step):
        rows = slice(first, first + step)
        there = seen[rows, None, None, :]
        k = flat(keys)[where[rows]].transpose(0, 2, 3, 1)  # [rows, kv, d, m]
        v = mx.where(seen[rows, :, None, None], flat(values)[where[rows]], 0.0).transpose(0, 2, 1, 3)
        o, z = _weigh(mx.where(there, scale * (q[rows] @ k), -mx.inf), v)
        out.append((o, z))
    return out


def _weigh(x: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
    """Scores `x[..., rows, n]`, -inf where nothing is seen, of `v[..., n, dv]`: out `[..., rows, dv]`, lse `[..., rows]`."""
    if not x.shape[-1]:
        return mx.zeros((*x.shape[:-1], v.shape[-1])), mx.full(x.shape[:-1], -mx.inf)
    top = x.max(axis=-1, keepdims=True)
    nothing = top == -mx.inf
    e = mx.exp(x - mx.where(nothing, 0.0, top))
    z = e.sum(axis=-1, keepdims=True)
    out = mx.where(nothing, 0.0, (e @ v) / z)
    return out, mx.where(nothing, -mx.inf, top + mx.log(z)).squeeze(-1)


@kernels.implements(ops.merge_attention)
def merge_attention(
    outs: tuple[mx.array, ...], lses: tuple[mx.array, ...], sinks: Prepared | None
) -> tuple[mx.array, mx.array]:
    parts = mx.stack(lses)
    every = parts if sinks is None else mx.concatenate([parts, mx.broadcast_to(plain(sinks), (1, *parts.shape[1:]))])
    top = every.max(axis=0)
    nothing = top == -mx.inf
    top = mx.where(nothing, 0.0, top)
    total = mx.exp(every - top).sum(axis=0)
    weights = (mx.exp(parts - top) / total)[..., None]
    out = mx.where((parts == -mx.inf)[..., None], 0.0, weights * mx.stack(outs)).sum(axis=0)
    return out, mx.where(nothing, -mx.inf, top + mx.log(total))
