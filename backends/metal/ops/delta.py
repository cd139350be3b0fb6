"""Gated DeltaNet: row by row for few rows, in chunks for many. Sequences of a step go side by side.

Sequences are sorted by length, falling, so that those that still have rows are always the first ones of the state's copy.
"""

from __future__ import annotations

from copy import copy

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trueup.backends.metal.steps import Ints, kept, placed, spans
from trueup.backends.metal.weights import Prepared, plain
from trueup.core import ops
from trueup.core.backend import KernelTable

from .elementwise import softplus_of

kernels = KernelTable()

ROW_BY_ROW = 64
"""Rows of a step up to which the recurrence runs as it is written; above, the plan takes it apart into chunks."""


@kernels.implements(ops.gdn_decay)
def gdn_decay(a: mx.array, bias: Prepared, rate: Prepared) -> mx.array:
    return plain(rate) * softplus_of(a + plain(bias))


def _spread(x: mx.array, heads: int, tiled: bool) -> mx.array:
    """`x[tokens, kheads, d]`, of each value head the key head that it uses: `[tokens, heads, d]`."""
    count = max(x.shape[1], 1)
    at = np.arange(heads) % count if tiled else np.arange(heads) // max(heads // count, 1)
    return x[:, mx.array(at)] if heads else mx.zeros((x.shape[0], 0, x.shape[2]))


def _gather(x: mx.array, at: Ints) -> mx.array:
    """Rows `x[at]`, zeros where `at` is -1."""
    real = mx.array((at >= 0).reshape(*at.shape, *[1] * (x.ndim - 1)))
    return mx.where(real, x[mx.array(np.maximum(at, 0))], 0.0)


def _write(state: mx.array, to: dict[int, mx.array]) -> mx.array:
    """A version of the state with these slots replaced."""
    if not to or not state.size:
        return state
    out = copy(state)
    out[mx.array(np.array(list(to), np.int32))] = mx.stack(list(to.values()))
    return out


def _read(s: mx.array, x: mx.array) -> mx.array:
    """S^T x a head: `s[seqs, heads, dk, dv]`, `x[seqs, heads, dk]` -> `[seqs, heads, dv]`."""
    return (x[..., None, :] @ s).squeeze(-2)


@kernels.implements(
    ops.gated_delta_rule,
    when=lambda q, *_, **__: q.shape[0] <= ROW_BY_ROW or f"{q.shape[0]} rows: more than {ROW_BY_ROW} go in chunks",
)
def gated_delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    cu_seqlens: mx.array,
    slots: mx.array,
    state: mx.array,
    keep: mx.array | None,
    *,
    scale: float,
    tiled: bool,
) -> tuple[mx.array, mx.array]:
    tokens, heads, dv = v.shape
    found = sorted(placed(cu_seqlens, slots, state, tokens), key=lambda s: s[1] - s[2])
    wanted = kept(keep, state, max((b for _, _, b in found), default=0))
    if not found or not v.size:
        return mx.zeros(v.shape), state
    query, key = _spread(q, heads, tiled), _spread(k, heads, tiled)
    fade, to, outs, order = mx.exp(decay)[..., None, None], {}, [], []
    s = state[mx.array(np.array([slot for slot, _, _ in found], np.int32))]
    for i in range(found[0][2] - found[0][1]):
        rows = [a + i for _, a, b in found if a + i < b]
        for j in range(len(rows), s.shape[0]):
            to[found[j][0]] = s[j]
        at, s = mx.array(np.array(rows, np.int32)), s[: len(rows)] * fade[mx.array(np.array(rows, np.int32))]
        d = beta[at][..., None] * (v[at] - _read(s, key[at]))
        s = s + key[at][..., None] * d[..., None, :]
        outs.append(scale * _read(s, query[at]))
        order += rows
        to.update((wanted[t], s[j]) for j, t in enumerate(rows) if t in wanted)
    to.update((found[j][0], s[j]) for j in range(s.shape[0]))
    back = np.full(tokens, -1)
    back[order] = np.arange(len(order))
    return _gather(mx.concatenate(outs), back), _write(state, to)


# -- chunks ------------------------------------------------------------------------------------------------------------


def _fades(decay: mx.array) -> tuple[mx.array, mx.array]:
    """`decay[..., n]`: e^(sum of rows 0 … t) `[..., n]`, and e^(sum of rows i+1 … t) `[..., t, i]`, 0 above the diagonal.

    Sums, not differences of sums: -inf is fine.
    """
    n = decay.shape[-1]
    below, to = np.tri(n, k=-1, dtype=bool), np.tri(n, dtype=bool)
    each = mx.where(mx.array(below), decay[..., None], 0.0)
    between = mx.where(mx.array(to), mx.cumsum(each, axis=-2), -mx.inf)
    return mx.exp(mx.cumsum(decay, axis=-1)), mx.exp(between)


def _chunks(a: int, b: int, size: int) -> NDArray[np.int64]:
    """The rows a … b-1 in chunks, `[chunks, size]`, filled up with -1."""
    rows = np.full(-(-(b - a) // size) * size, -1)
    rows[: b - a] = np.arange(a, b)
    return rows.reshape(-1, size)


def _by_heads(x: mx.array, at: Ints) -> mx.array:
    """Rows of chunks, heads first: `x[tokens, heads, ...]`, `at[chunks, size]` -> `[chunks, heads, size, ...]`."""
    return _gather(x, at).swapaxes(1, 2)


def _by_rows(x: mx.array, at: Ints, tokens: int) -> mx.array:
    """What `_by_heads` made back as `[tokens, heads, ...]`; zeros in the rows of no chunk."""
    back = np.full(tokens, -1)
    back[at[at >= 0]] = np.flatnonzero(at >= 0)
    rows = x.swapaxes(1, 2)
    return _gather(rows.reshape(-1, *rows.shape[2:]), back)


@kernels.implements(ops.chunk_wy)
def chunk_wy(
    k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, cu_seqlens: mx.array, *, chunk: int, tiled: bool
) -> tuple[mx.array, mx.array]:
    """(1 + A) [w u] = beta [E k, v], A strictly lower: forward substitution, all chunks of all sequences at once."""
    (tokens, heads, dv), dk = v.shape, k.shape[2]
    found = [_chunks(a, b, chunk) for _, a, b in spans(cu_seqlens, tokens)]
    if not found or not heads or not dk + dv:
        return mx.zeros((tokens, heads, dk)), mx.zeros(v.shape)
    at = np.concatenate(found)[:, : max(int((f >= 0).sum(1).max()) for f in found)]
    key, value = _by_heads(_spread(k, heads, tiled), at), _by_heads(v, at)
    gain = _by_heads(beta, at)[..., None]
    start, between = _fades(_by_heads(decay, at))
    solved = gain * mx.concatenate([start[..., None] * key, value], axis=-1)
    lower = gain * between * (key @ key.swapaxes(-1, -2))
    for t in range(1, at.shape[1]):
        solved[:, :, t] = solved[:, :, t] - (lower[:, :, t, None, :t] @ solved[:, :, :t]).squeeze(-2)
    return _by_rows(solved[..., :dk], at, tokens), _by_rows(solved[..., dk:], at, tokens)


@kernels.implements(ops.chunk_delta_scan)
def chunk_delta_scan(
    q: mx.array,
    k: mx.array,
    w: mx.array,
    u: mx.array,
    decay: mx.array,
    cu_seqlens: mx.array,
    slots: mx.array,
    state: mx.array,
    keep: mx.array | None,
    *,
    chunk: int,
    scale: float,
    tiled: bool,
) -> tuple[mx.array, mx.array]:
    tokens, heads, dv = u.shape
    found = sorted(placed(cu_seqlens, slots, state, tokens), key=lambda s: s[1] - s[2])
    wanted = kept(keep, state, max((b for _, _, b in found), default=0))
    if not found or not u.size:
        return mx.zeros(u.shape), state
    query, key = _spread(q, heads, tiled), _spread(k, heads, tiled)
    cut = [_chunks(a, b, chunk) for _, a, b in found]
    s = state[mx.array(np.array([slot for slot, _, _ in found], np.int32))]
    to: dict[int, mx.array] = {}
    outs, order = [], []
    for i in range(len(cut[0])):
        at = np.stack([c[i] for c in cut if i < len(c)])
        at = at[:, : int((at >= 0).sum(1).max())]
        to.update((found[j][0], s[j]) for j in range(len(at), s.shape[0]))
        s = s[: len(at)]
        qc, kc = _by_heads(query, at), _by_heads(key, at)
        start, between = _fades(_by_heads(decay, at))
        real = mx.array(at >= 0)[:, None, :, None]
        d = mx.where(real, _by_heads(u, at) - _by_heads(w, at) @ s, 0.0)
        now = start[..., None] * (qc @ s) + _causal(between * (qc @ kc.swapaxes(-1, -2)), d)
        outs += list(scale * now)
        order += list(at)

        def after(j: int, t: int, s=s, kc=kc, d=d, start=start, between=between) -> mx.array:
            """The state of sequence j after row t of this chunk."""
            faded = between[j, :, t, : t + 1, None] * kc[j, :, : t + 1]
            return start[j, :, t, None, None] * s[j] + faded.swapaxes(-1, -2) @ d[j, :, : t + 1]

        to.update(
            (wanted[row], after(j, t)) for j, rows in enumerate(at) for t, row in enumerate(rows) if row in wanted
        )
        s = mx.stack([after(j, int((rows >= 0).sum()) - 1) for j, rows in enumerate(at)])
    to.update((found[j][0], s[j]) for j in range(s.shape[0]))
    back = np.concatenate(order)
    rows = mx.concatenate([o.swapaxes(0, 1) for o in outs])  # [rows of chunks, heads, dv]
    places = np.full(tokens, -1)
    places[back[back >= 0]] = np.flatnonzero(back >= 0)
    return _gather(rows, places), _write(state, to)


def _causal(p: mx.array, d: mx.array) -> mx.array:
    """Row t of `p[..., rows, rows]`, up to t, times these rows of `d[..., rows, dv]`."""
    n = d.shape[-2]
    if mx.all(mx.isfinite(d)).item():
        return mx.where(mx.array(np.tri(n, dtype=bool)), p, 0.0) @ d
    return mx.concatenate([p[..., t : t + 1, : t + 1] @ d[..., : t + 1, :] for t in range(n)], axis=-2)
