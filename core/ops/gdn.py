"""Gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464): the recurrence, its decay, and its chunked form.

A head keeps a matrix S [dk, dv], float32 between rows whatever the activations' type (rounding it to less ruins it
within a few hundred rows). `decay` is the logarithm of the paper's alpha, at most 0. Value head h uses the key head h
mod kheads where `tiled`, else h // rep.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.op import Cost, op
from trueup.core.types import TensorType

from ._arrays import F32, F64, Array, narrow, wide
from ._sequences import check_slots, kept, placed, spans


@op("a[tokens, heads], bias[heads]:weight, rate[heads]:weight -> decay[tokens, heads]")
@np.errstate(all="ignore")
def gdn_decay(a: F32, bias: Any, rate: Any) -> F32:
    """rate · softplus(a + bias): the logarithm of a head's decay. `rate` is stored as -exp(A_log), so it is at most 0.

    In float64, rounded once. a = -inf gives 0 (nothing is forgotten), a = inf gives -inf (all is).
    """
    return narrow(wide(rate) * np.logaddexp(0, wide(a) + wide(bias)))


@op(
    "q[tokens, kheads, dk], k[tokens, kheads, dk], v[tokens, rep*kheads, dv], decay[tokens, rep*kheads], "
    "beta[tokens, rep*kheads], cu_seqlens[seqs+1]:i32, slots[seqs]:i32, &state[slot, rep*kheads, dk, dv], "
    "keep?[tokens]:i32 -> out[tokens, rep*kheads, dv]"
)
@np.errstate(all="ignore")
def gated_delta_rule(
    q: F32,
    k: F32,
    v: F32,
    decay: F32,
    beta: F32,
    cu_seqlens: Array,
    slots: Array,
    state: F32,
    keep: Array | None = None,
    *,
    scale: float,
    tiled: bool,
) -> F32:
    """For each row of a sequence, in order, and each head:

    S = e^decay S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q.

    What the decayed state already says for k is taken off v before it is written. A row is computed in float64, S
    rounded to float32 after it and out read from the rounded S: the state between rows is what it is between steps,
    and any split of a sequence into steps gives the same bits. The state after row t also goes to slot keep[t],
    unless that is -1.

    beta = 0 writes nothing, decay = -inf forgets all. NaN reaches its head of its sequence and stays there. Padding
    rows give zeros.
    """
    out, pick = np.zeros(v.shape, np.float32), _key_heads(q, v, tiled)
    for slot, rows in placed(cu_seqlens, slots, state, len(v)):
        wanted = dict(kept(keep, rows, state))
        s = state[slot].copy()
        for t in range(rows.start, rows.stop):
            key, query = wide(k[t, pick]), wide(q[t, pick])
            s64 = np.exp(wide(decay[t]))[:, None, None] * s
            d = wide(beta[t])[:, None] * (v[t] - _read(s64, key))
            s = narrow(s64 + key[:, :, None] * d[:, None])
            out[t] = narrow(scale * _read(wide(s), query))
            if t in wanted:
                state[wanted[t]] = s
        state[slot] = s
    return out


@gated_delta_rule.conditions
def _(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, cu_seqlens: Array, slots: Array, state: Array,
    keep: Array | None, *, scale: float, tiled: bool,
) -> None:  # fmt: skip
    check_slots(cu_seqlens, slots, state, len(v), keep)


@gated_delta_rule.costs
def _(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    decay: TensorType,
    beta: TensorType,
    cu_seqlens: TensorType,
    slots: TensorType,
    state: TensorType,
    keep: TensorType | None,
    *,
    scale: float,
    tiled: bool,
) -> Cost:
    """A decay, two reads and a write of S a row; each sequence's S in and out of memory once."""
    tokens, heads, dv = v.shape
    dk, rows = q.shape[2], q.nbytes + k.nbytes + 2 * v.nbytes + decay.nbytes + beta.nbytes
    return Cost(7 * tokens * heads * dk * dv, rows + 2 * slots.shape[0] * heads * dk * dv * 4)


_CHUNK = 64
"""Rows of a chunk where the rule is decomposed, as in flash-linear-attention."""


@gated_delta_rule.decompose
def _(
    q: Any,
    k: Any,
    v: Any,
    decay: Any,
    beta: Any,
    cu_seqlens: Any,
    slots: Any,
    state: Any,
    keep: Any = None,
    *,
    scale: float,
    tiled: bool,
) -> Any:
    """The chunked form: equal but for rounding."""
    w, u = chunk_wy(k, v, decay, beta, cu_seqlens, chunk=_CHUNK, tiled=tiled)
    return chunk_delta_scan(q, k, w, u, decay, cu_seqlens, slots, state, keep, chunk=_CHUNK, scale=scale, tiled=tiled)


@op(
    "k[tokens, kheads, dk], v[tokens, rep*kheads, dv], decay[tokens, rep*kheads], beta[tokens, rep*kheads], "
    "cu_seqlens[seqs+1]:i32 -> w[tokens, rep*kheads, dk], u[tokens, rep*kheads, dv]"
)
@np.errstate(all="ignore")
def chunk_wy(k: F32, v: F32, decay: F32, beta: F32, cu_seqlens: Array, *, chunk: int, tiled: bool) -> tuple[F32, F32]:
    """What each row writes to the state, as d = u - S^T w of the state S before its chunk.

    Chunks of `chunk` rows are cut from the first row of each sequence in the step. With E_ti = e^(sum of decay i+1 …
    t), and E_t = e^(sum of decay from the chunk's start … t), forward substitution gives, over i < t in the chunk:
    w_t = beta_t (E_t k_t - sum_i E_ti (k_t·k_i) w_i),  u_t = beta_t (v_t - sum_i E_ti (k_t·k_i) u_i).

    This is the WY form of a product of Householder-like matrices (Yang et al., arXiv 2406.06484), decayed as in arXiv
    2412.06464. The sums of decays are of the rows between, never differences of sums from the start: no cancellation,
    and -inf is fine. In float64, rounded once. Rows depend on earlier rows of their chunk alone; padding rows give
    zeros.
    """
    pick = _key_heads(k, v, tiled)
    w, u = np.zeros((*v.shape[:2], k.shape[2]), np.float32), np.zeros(v.shape, np.float32)
    for _, rows in spans(cu_seqlens, len(v)):
        for part in _chunks(rows, chunk):
            key, fade = wide(k[part][:, pick]), _fades(wide(decay[part]))
            value, b = wide(v[part]), wide(beta[part])
            ws, us = np.zeros(key.shape), np.zeros(value.shape)
            for t in range(len(key)):
                a = fade[t, 1 : t + 1] * np.sum(key[t] * key[:t], axis=-1)  # [t, heads]
                ws[t] = b[t, :, None] * (fade[t, 0][:, None] * key[t] - np.sum(a[..., None] * ws[:t], axis=0))
                us[t] = b[t, :, None] * (value[t] - np.sum(a[..., None] * us[:t], axis=0))
            w[part], u[part] = narrow(ws), narrow(us)
    return w, u


@chunk_wy.requires
def _(
    k: TensorType,
    v: TensorType,
    decay: TensorType,
    beta: TensorType,
    cu_seqlens: TensorType,
    *,
    chunk: int,
    tiled: bool,
) -> bool | str:
    return chunk >= 1 or f"chunk must be at least 1, got {chunk}"


@chunk_wy.conditions
def _(k: Array, v: Array, decay: Array, beta: Array, cu_seqlens: Array, *, chunk: int, tiled: bool) -> None:
    list(spans(cu_seqlens, len(v)))


@op(
    "q[tokens, kheads, dk], k[tokens, kheads, dk], w[tokens, rep*kheads, dk], u[tokens, rep*kheads, dv], "
    "decay[tokens, rep*kheads], cu_seqlens[seqs+1]:i32, slots[seqs]:i32, &state[slot, rep*kheads, dk, dv], "
    "keep?[tokens]:i32 -> out[tokens, rep*kheads, dv]"
)
@np.errstate(all="ignore")
def chunk_delta_scan(
    q: F32,
    k: F32,
    w: F32,
    u: F32,
    decay: F32,
    cu_seqlens: Array,
    slots: Array,
    state: F32,
    keep: Array | None = None,
    *,
    chunk: int,
    scale: float,
    tiled: bool,
) -> F32:
    """The delta rule from chunk to chunk, with w and u of chunk_wy for the same chunks.

    With S the state before a chunk, d_i = u_i - S^T w_i, and E as in chunk_wy (E_tt = 1):
    S_t = E_t S + sum of E_ti k_i d_i^T over i <= t in the chunk;  out_t = scale S_t^T q_t.

    S is rounded to float32 at the end of each chunk, so a split into steps elsewhere gives other bits (within
    rounding). State, keep, padding and heads are as in gated_delta_rule.
    """
    out, pick = np.zeros(u.shape, np.float32), _key_heads(q, u, tiled)
    for slot, rows in placed(cu_seqlens, slots, state, len(u)):
        wanted = dict(kept(keep, rows, state))
        s = wide(state[slot])
        for part in _chunks(rows, chunk):
            key, query, fade = wide(k[part][:, pick]), wide(q[part][:, pick]), _fades(wide(decay[part]))
            d = wide(u[part]) - np.einsum("hkv,thk->thv", s, wide(w[part]))
            for t in range(len(key)):
                a = fade[t, 1 : t + 2] * np.sum(query[t] * key[: t + 1], axis=-1)  # [t+1, heads]
                now = fade[t, 0][:, None] * _read(s, query[t]) + np.sum(a[..., None] * d[: t + 1], axis=0)
                out[part.start + t] = narrow(scale * now)
                if part.start + t in wanted:
                    state[wanted[part.start + t]] = narrow(_after(s, key, d, fade, t))
            s = wide(narrow(_after(s, key, d, fade, len(key) - 1)))
        state[slot] = narrow(s)
    return out


@chunk_delta_scan.requires
def _(
    q: TensorType, k: TensorType, w: TensorType, u: TensorType, decay: TensorType, cu_seqlens: TensorType,
    slots: TensorType, state: TensorType, keep: TensorType | None, *, chunk: int, scale: float, tiled: bool,
) -> bool | str:  # fmt: skip
    return chunk >= 1 or f"chunk must be at least 1, got {chunk}"


@chunk_delta_scan.conditions
def _(
    q: Array, k: Array, w: Array, u: Array, decay: Array, cu_seqlens: Array, slots: Array, state: Array,
    keep: Array | None, *, chunk: int, scale: float, tiled: bool,
) -> None:  # fmt: skip
    check_slots(cu_seqlens, slots, state, len(u), keep)


def _after(s: F64, key: F64, d: F64, fade: F64, t: int) -> F64:
    """The state after row t of a chunk that began with s."""
    faded = fade[t, 1 : t + 2, :, None] * key[: t + 1]
    after: F64 = fade[t, 0][:, None, None] * s + np.einsum("thk,thv->hkv", faded, d[: t + 1])
    return after


def _fades(decay: F64) -> F64:
    """`decay[rows, heads]` -> E `[rows, rows+1, heads]`: E[t, 0] from the chunk's start on, E[t, i+1] from row i on."""
    rows, heads = decay.shape
    total = np.full((rows, rows + 1, heads), -np.inf)
    for t in range(rows):
        total[t, : t + 1] = (total[t - 1, : t + 1] if t else 0) + decay[t]
        total[t, t + 1] = 0
    return np.exp(total)


def _read(s: F64, x: F64) -> F64:
    """S^T x a head: `s[heads, dk, dv]`, `x[heads, dk]` -> `[heads, dv]`."""
    y: F64 = (x[:, None] @ s)[:, 0]
    return y


def _key_heads(k: Array, v: Array, tiled: bool) -> Array:
    """The key head of each value head."""
    heads, count = np.arange(v.shape[1]), max(k.shape[1], 1)
    picked: Array = heads % count if tiled else heads // max(len(heads) // count, 1)
    return picked


def _chunks(rows: slice, size: int) -> list[slice]:
    return [slice(a, min(a + size, rows.stop)) for a in range(rows.start, rows.stop, size)]
