"""Kernels and targets that are wrong as those of public reports were: docs/faults.md names them by the ids given here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trueup.core.backend import AddressedTarget, HostMemory
from trueup.core.ops import (
    attention,
    causal_conv,
    embed,
    expert_linear,
    gated_rms_norm,
    index_scores,
    linear,
    merge_attention,
    normalize,
    paged_append,
    rms_norm,
    silu,
    softmax,
    top_k,
)
from trueup.core.types import TensorType

from .make import backend, bodies, wrong

GRID = 65_535


@wrong(top_k)
def two_thousand_in_a_workgroup(ctx: Any, scores: Any, *, k: int) -> None:
    """B03: 2,048 candidates are held, enough for a budget of 2,048 and not for its unfinished block."""
    ctx.outs[0][...], ctx.outs[1][...] = top_k.body(scores, k=k)
    ctx.outs[0][:, 2048:], ctx.outs[1][:, 2048:] = 0, 0


@wrong(top_k)
def lanes_of_padding(ctx: Any, scores: Any, *, k: int) -> None:
    """B06: a row is filled up to a power of two with the lowest number, which comes before -inf."""
    rows, n = scores.shape
    full = np.full((rows, 1 << max(n - 1, 0).bit_length()), np.finfo(np.float32).min, np.float32)
    full[:, :n] = scores
    ctx.outs[0][...], ctx.outs[1][...] = top_k.body(full, k=k)


@wrong(top_k)
def first_for_every_choice(ctx: Any, scores: Any, *, k: int) -> None:
    """B08: in a row of NaN the first is taken k times."""
    values, at = top_k.body(scores, k=k)
    ctx.outs[0][...], ctx.outs[1][...] = values, np.where(np.isnan(scores).all(-1, keepdims=True), 0, at)


@wrong(top_k)
def short_index(ctx: Any, scores: Any, *, k: int) -> None:
    """B76: indices are kept in 16 bits."""
    values, at = top_k.body(scores, k=k)
    ctx.outs[0][...], ctx.outs[1][...] = values, np.where(at < 0, at, at & 0xFFFF)


@wrong(top_k)
def right_once(ctx: Any, scores: Any, *, k: int) -> None:
    """B23: what it computes after the first call is NaN."""
    ctx.outs[0][...], ctx.outs[1][...] = top_k.body(scores, k=k)
    if getattr(right_once, "called", False):
        ctx.outs[0][...] = np.nan
    right_once.called = True


@wrong(softmax)
def finite_mask(ctx: Any, x: Any) -> None:
    """B07: what is below -5e4 is taken for masked."""
    ctx.out[...] = softmax.body(np.where(x < -5e4, np.float32(-np.inf), x))


@wrong(attention)
def unseen_row_nan(ctx: Any, q: Any, keys: Any, values: Any, cu: Any, *more: Any, **attrs: Any) -> None:
    """B07: a query that sees nothing is 0/0."""
    out, lse = attention.body(q, keys, values, cu, *more, **attrs)
    out[: cu[-1]] = np.where((lse == -np.inf)[..., None], np.nan, out)[: cu[-1]]
    ctx.outs[0][...], ctx.outs[1][...] = out, lse


@wrong(merge_attention)
def empty_parts_nan(ctx: Any, outs: Any, lses: Any, sinks: Any = None) -> None:
    """B07: -inf less -inf, where no part saw anything."""
    out, lse = merge_attention.body(outs, lses, sinks)
    ctx.outs[0][...] = np.where((lse == -np.inf)[..., None], np.nan, out)
    ctx.outs[1][...] = lse


@wrong(normalize)
def not_normalized(ctx: Any, x: Any, *, floor: float) -> None:
    """B10: weights as they come."""
    ctx.out[...] = x


@wrong(normalize)
def divided_by_zero(ctx: Any, x: Any, *, floor: float) -> None:
    """B10: a row that sums to nothing is 0/0."""
    with np.errstate(all="ignore"):
        right = normalize.body(x, floor=floor)
        ctx.out[...] = np.where(np.maximum(x.sum(-1, keepdims=True, dtype=np.float64), floor) == 0, np.nan, right)


@wrong(expert_linear)
def some_rows_wanted(ctx: Any, x: Any, experts: Any, weight: Any) -> None:
    """B09: the number of tokens is not asked whether it is 0."""
    assert 1024 // len(x) >= 0, "rows of a workgroup"
    ctx.out[...] = expert_linear.body(x, experts, weight)


@wrong(attention)
def one_past_for_attention(ctx: Any, q: Any, k: Any, v: Any, cu: Any, past: Any, *more: Any, **attrs: Any) -> None:
    """B12: the length of the first sequence is taken for every one, where it is the shorter."""
    shorter = np.where(np.diff(cu) > 0, np.minimum(past, past[:1]), past).astype(np.int32)
    same = past if (*more, None)[1] is not None else shorter  # a selection could name blocks that are not whole then
    ctx.outs[0][...], ctx.outs[1][...] = attention.body(q, k, v, cu, same, *more, **attrs)


@wrong(attention)
def masked_by_zero(ctx: Any, q: Any, k: Any, v: Any, cu: Any, past: Any, table: Any, *more: Any, **attrs: Any) -> None:
    """B16: whole pages are read, and what lies beyond the sequence counts nothing times its value."""
    out, lse = attention.body(q, k, v, cu, past, table, *more, **attrs)
    with np.errstate(all="ignore"):
        for s in range(len(cu) - 1):
            named = v[table[s][table[s] >= 0]]
            if cu[s] < cu[s + 1] and named.size:
                nothing = (named * np.float32(0)).sum(axis=(0, 1))
                out[cu[s] : cu[s + 1]] += np.repeat(nothing, out.shape[1] // len(nothing), 0)
    ctx.outs[0][...], ctx.outs[1][...] = out, lse


@wrong(paged_append)
def one_table_for_all(ctx: Any, rows: Any, cu: Any, past: Any, table: Any, cache: Any, *, every: int) -> None:
    """B17: entries are found by position alone, in the pages of the first sequence where it has them."""
    table = np.where(table[:1] >= 0, table[:1], table) if len(table) else table
    paged_append.body(rows, cu, past, np.ascontiguousarray(table), cache, every=every)


@wrong(index_scores)
def no_relu(ctx: Any, q: Any, keys: Any, *more: Any, **attrs: Any) -> None:
    """B19: heads that disagree cancel."""
    with np.errstate(all="ignore"):
        right = index_scores.body(q, keys, *more, **attrs)
        mirrored = index_scores.body(-q, keys, *more, **attrs)
        ctx.out[...] = np.where(right == -np.inf, right, right - mirrored)


@wrong(index_scores)
def unfinished_block(ctx: Any, q: Any, keys: Any, cu: Any, past: Any, *more: Any, every: int, scale: float) -> None:
    """B19: a block is a candidate from its first token on, where the table holds it."""
    early = past.copy()
    room = more[0].shape[1] * keys.shape[1] * every
    for s in range(len(cu) - 1):
        held = (more[0][s] >= 0).sum() * keys.shape[1] * every
        if past[s] + every - 1 + cu[s + 1] - cu[s] <= min(room, held):
            early[s] += every - 1
    ctx.out[...] = index_scores.body(q, keys, cu, early, *more, every=every, scale=scale)


@wrong(attention)
def tail_forgotten(
    ctx: Any, q: Any, k: Any, v: Any, cu: Any, past: Any, table: Any, selected: Any = None, **attrs: Any
) -> None:
    """B19: only selected blocks are seen; the unfinished one is not."""
    out, lse = attention.body(q, k, v, cu, past, table, selected, **attrs)
    whole = attrs["block"] * attrs["every"]
    for s in range(len(cu) - 1 if selected is not None else 0):
        for t in range(cu[s], cu[s + 1]):
            last = (int(past[s]) + t - int(cu[s]) + 1) // whole * whole - 1
            out[t], lse[t] = 0, -np.inf
            if last >= 0:
                row, at = slice(t, t + 1), np.array([last], np.int32)
                one = np.array([0, 1], np.int32)
                out[row], lse[row] = attention.body(q[row], k, v, one, at, table[s : s + 1], selected[row], **attrs)
    ctx.outs[0][...], ctx.outs[1][...] = out, lse


@wrong(causal_conv)
def padding_as_rows(ctx: Any, x: Any, weight: Any, cu: Any, *more: Any, **attrs: Any) -> None:
    """B32: padding belongs to the last sequence."""
    longer = cu.copy()
    if len(cu) > 1 and cu[-1] > cu[-2]:
        longer[-1] = len(x)
    ctx.out[...] = causal_conv.body(x, weight, longer, *more, **attrs)


@wrong(gated_rms_norm)
def gate_before_norm(ctx: Any, x: Any, gate: Any, weight: Any, *, eps: float, activation: str) -> None:
    """B35: the gate opens before the norm."""
    with np.errstate(all="ignore"):
        opened = 1 / (1 + np.exp(-gate.astype(np.float64)))
        gated = x * (opened if activation == "sigmoid" else gate * opened)
    ctx.out[...] = rms_norm.body(gated.astype(np.float32), weight, eps=eps)


@wrong(gated_rms_norm)
def one_plus_weight(ctx: Any, x: Any, gate: Any, weight: Any, **attrs: Any) -> None:
    """B35: the weight of a gated norm is taken as those of the others in its checkpoint are, as 1 + w."""
    ctx.out[...] = gated_rms_norm.body(x, gate, np.asarray(weight) + np.float32(1), **attrs)


@wrong(causal_conv)
def kept_before_the_row(
    ctx: Any, x: Any, weight: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, **attrs: Any
) -> None:
    """B46: slot keep[t] holds the state before row t."""
    if keep is not None:
        first = np.isin(np.arange(len(keep)), cu[:-1])
        keep = np.where(first[: len(keep)] | (np.arange(len(keep)) + 1 >= len(keep)), keep, np.roll(keep, -1))
        keep = keep.astype(np.int32)
    ctx.out[...] = causal_conv.body(x, weight, cu, slots, tail, keep, **attrs)


@wrong(linear)
def columns_beyond_the_grid(ctx: Any, x: Any, weight: Any) -> None:
    """B76: columns from 65,535 on are in no block of the grid."""
    ctx.out[..., :GRID] = linear.body(x, np.asarray(weight)[:GRID])


@wrong(embed)
def smallest_scale_is_zero(ctx: Any, table: Any, ids: Any) -> None:
    """B67: the lowest bytes of an exponent scale are taken for 0."""
    out = embed.body(table, ids)
    ctx.out[...] = np.where(np.abs(out) < 2.0**-122, 0, out) if table.type.dtype == "mxfp4" else out


@wrong(paged_append)
def appends_beyond_the_grid(ctx: Any, rows: Any, cu: Any, *more: Any, **attrs: Any) -> None:
    """B76: rows from 65,535 on are in no block of the grid."""
    paged_append.body(rows[:GRID], np.minimum(cu, GRID), *more, **attrs)


@wrong(index_scores)
def entries_beyond_the_grid(ctx: Any, q: Any, keys: Any, *more: Any, **attrs: Any) -> None:
    """B76: entries from 65,535 on are in no block of the grid."""
    ctx.out[:, :GRID] = index_scores.body(q, keys, *more, **attrs)[:, :GRID]


@wrong(silu)
def input_handed_on(ctx: Any, x: Any, *, scale: float) -> None:
    """B84: where the kernel for strided rows does not build, the input is the result."""
    ctx.out[...] = silu.body(x, scale=scale) if x.flags.c_contiguous else x


class NoEmptyBuffers(HostMemory):
    """As APIs whose buffers have at least a byte."""

    def allocate(self, type: TensorType) -> Any:
        if not type.nbytes:
            raise ValueError("invalid buffer size: 0")
        return super().allocate(type)


class Nothingless(AddressedTarget):
    """B78: has no buffer for a tensor of nothing."""

    def __init__(self, name: str, device: Any, kernels: Any) -> None:
        super().__init__(name, device, kernels, NoEmptyBuffers())


backend("no_empty_buffers", bodies(), Nothingless)


class Leaking(AddressedTarget):
    """B79: scratch of a step is given back at its end, which an error does not reach."""

    def compile(self, plan: Any, storage: Any) -> Any:
        exe = super().compile(plan, storage)
        run = exe.run

        def with_scratch(inputs: Any) -> Any:
            scratch = self.memory.allocate(TensorType((64,), "f32"))
            out = run(inputs)
            self.memory.free(scratch)
            return out

        exe.run = with_scratch
        return exe


backend("leaking_after_errors", bodies(), Leaking)


class ByTensor(AddressedTarget):
    """B38: a write waits for those before it that name the very same region; regions that overlap in part do not."""

    def compile(self, plan: Any, storage: Any) -> Any:
        order = list(plan.order)
        for i in range(1, len(order)):
            a, b = order[i - 1], order[i]
            if not a.outputs and b.effects and not _linked(a, b):
                order[i - 1], order[i] = b, a
        return super().compile(replace(plan, order=order), storage)


def _linked(a: Any, b: Any) -> bool:
    """Whether b needs a's results, or one of their effects names the same region."""
    named = {str(s) for s, _ in a.effects}
    return any(str(s) in named for s, _ in b.effects)


backend("overlaps_ignored", bodies(), ByTensor)
