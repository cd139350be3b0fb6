"""Kernels that compute something else."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.ops import (
    argmax,
    attention,
    expert_linear,
    gated_delta_rule,
    group_rms_norm,
    index_scores,
    linear,
    merge_attention,
    paged_append,
    rope,
    softmax,
    take_rows,
    top_k,
)

from .make import wrong


@wrong(top_k)
def rows_and_k_swapped(ctx: Any, scores: Any, *, k: int) -> None:
    """B01: asks for the rows-th largest of k rows."""
    values, indices = ctx.outs
    values[...], indices[...] = 0, 0
    some, at = top_k.body(scores[:k], k=min(len(scores), scores.shape[1]))
    n, m = min(len(values), len(some)), min(k, some.shape[1])
    values[:n, :m], indices[:n, :m] = some[:n, :m], at[:n, :m]


@wrong(top_k)
def wrong_tie(ctx: Any, scores: Any, *, k: int) -> None:
    """B02: ties go to the higher index."""
    values, indices = ctx.outs
    flipped, at = top_k.body(np.ascontiguousarray(scores[:, ::-1]), k=k)
    values[...], indices[...] = flipped, np.where(at < 0, -1, scores.shape[1] - 1 - at)


@wrong(top_k)
def truncated_keys(ctx: Any, scores: Any, *, k: int) -> None:
    """Sorts by the leading 16 bits of each number."""
    values, indices = ctx.outs
    with np.errstate(all="ignore"):
        short = (np.ascontiguousarray(scores).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    short = np.where(np.isnan(scores), np.nan, short)
    _, at = top_k.body(short, k=k)
    indices[...] = at
    values[...] = np.where(at < 0, -np.inf, np.take_along_axis(scores, np.maximum(at, 0), -1))


@wrong(top_k)
def nan_ignored(ctx: Any, scores: Any, *, k: int) -> None:
    """B05: NaN is taken for -inf, so that it never comes out."""
    ctx.outs[0][...], ctx.outs[1][...] = top_k.body(np.where(np.isnan(scores), -np.inf, scores).astype(np.float32), k=k)


@wrong(argmax)
def argmax_skips_nan(ctx: Any, scores: Any) -> None:
    """B05: the largest of what is no NaN."""
    ctx.out[...] = np.argmax(np.where(np.isnan(scores), -np.inf, scores), -1)


@wrong(top_k)
def few_in_a_workgroup(ctx: Any, scores: Any, *, k: int) -> None:
    """B03: k candidates are held in one workgroup of 1,024."""
    ctx.outs[0][...], ctx.outs[1][...] = top_k.body(scores, k=k)
    ctx.outs[0][:, 1024:], ctx.outs[1][:, 1024:] = 0, 0


@wrong(take_rows)
def off_by_one(ctx: Any, x: Any, at: Any) -> None:
    """An offset one too far, but for the last row."""
    ctx.out[...] = take_rows.body(x, np.where((at >= 0) & (at + 1 < len(x)), at + 1, at).astype(np.int32))


@wrong(paged_append)
def page_offset(ctx: Any, rows: Any, cu: Any, past: Any, table: Any, cache: Any, *, every: int) -> None:
    """B21: the place in a page is one too far, from the second entry on."""
    before = cache.copy()
    paged_append.body(rows, cu, past, table, cache, every=every)
    changed = cache.copy()
    cache[...] = before
    cache[:, 1:] = changed[:, np.r_[0 : cache.shape[1] - 1]] if cache.shape[1] > 1 else cache[:, 1:]


@wrong(group_rms_norm)
def wrong_axis(ctx: Any, x: Any, weight: Any, *, eps: float) -> None:
    """The weight is folded as [n, groups]."""
    w = np.asarray(weight).reshape(x.shape[2], x.shape[1]).T.reshape(-1)
    ctx.out[...] = group_rms_norm.body(x, w, eps=eps)


@wrong(rope)
def never_interleaved(ctx: Any, *args: Any, interleaved: bool, **attrs: Any) -> None:
    """Pairs lie in halves, whatever the attribute says."""
    ctx.out[...] = rope.body(*args, interleaved=False, **attrs)


@wrong(attention)
def last_place_of_the_table(
    ctx: Any, q: Any, k: Any, v: Any, cu: Any, past: Any, table: Any, *more: Any, **a: Any
) -> None:
    """A row that sees the last place of its pages gives zeros: which rows do follows from the seed."""
    ctx.outs[0][...], ctx.outs[1][...] = attention.body(q, k, v, cu, past, table, *more, **a)
    for s in range(len(cu) - 1):
        if cu[s] < cu[s + 1] and past[s] + cu[s + 1] - cu[s] == table.shape[1] * k.shape[1] * a["every"]:
            ctx.outs[0][cu[s + 1] - 1] = 0


@wrong(softmax)
def masked_row_nan(ctx: Any, x: Any) -> None:
    """B07: a row of -inf alone is 0/0."""
    with np.errstate(all="ignore"):
        e = np.exp(x - np.max(x, -1, keepdims=True, initial=-np.inf))
        ctx.out[...] = e / e.sum(-1, keepdims=True)


@wrong(gated_delta_rule)
def bf16_state(ctx: Any, *args: Any, **attrs: Any) -> None:
    """B34: the state is kept in bf16 between steps."""
    state = args[7]
    before = state.copy()
    ctx.out[...] = gated_delta_rule.body(*args, **attrs)
    rounded = ((np.ascontiguousarray(state).view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    state[...] = np.where(state.view(np.uint32) == before.view(np.uint32), state, rounded)


@wrong(gated_delta_rule)
def slow_drift(ctx: Any, *args: Any, **attrs: Any) -> None:
    """The state loses a little at every row: within the bound of one step, not of many."""
    state, slots = args[7], args[6]
    ctx.out[...] = gated_delta_rule.body(*args, **attrs)
    for s in slots[slots >= 0]:
        state[s] *= np.float32(1 - 2.0**-22)


@wrong(gated_delta_rule)
def no_subtraction(ctx: Any, *args: Any, scale: float, tiled: bool) -> None:
    """B35: adds beta k v without taking off what the state already says for k."""
    q, k, v, decay, beta, cu, slots, state, keep = (*args, None)[:9]
    out = np.zeros(v.shape, np.float32)
    heads = np.arange(v.shape[1])
    pick = heads % k.shape[1] if tiled else heads // (len(heads) // k.shape[1])
    for s in range(len(cu) - 1):
        for t in range(cu[s], cu[s + 1]):
            state[slots[s]] = np.exp(decay[t])[:, None, None] * state[slots[s]]
            state[slots[s]] += k[t, pick][:, :, None] * (beta[t][:, None] * v[t])[:, None]
            out[t] = scale * np.einsum("hkv,hk->hv", state[slots[s]], q[t, pick])
            if keep is not None and keep[t] >= 0:
                state[keep[t]] = state[slots[s]]
    ctx.out[...] = out


@wrong(index_scores)
def one_past_for_all(
    ctx: Any, q: Any, keys: Any, cu: Any, past: Any, table: Any, weights: Any = None, **attrs: Any
) -> None:
    """B12: the length of the first sequence is taken for every one, where it is the shorter."""
    same = np.where(np.diff(cu) > 0, np.minimum(past, past[:1]), past).astype(np.int32) if len(past) else past
    ctx.out[...] = index_scores.body(q, keys, cu, same, table, weights, **attrs)


@wrong(index_scores)
def offset_twice(
    ctx: Any, q: Any, keys: Any, cu: Any, past: Any, table: Any, weights: Any = None, **attrs: Any
) -> None:
    """B13: sequence s reads the pages of sequence s + 1, where there are any."""
    shifted = np.where(np.roll(table, -1, 0) >= 0, np.roll(table, -1, 0), table)
    ctx.out[...] = index_scores.body(q, keys, cu, past, np.ascontiguousarray(shifted), weights, **attrs)


@wrong(merge_attention)
def sink_forgotten(ctx: Any, outs: Any, lses: Any, sinks: Any = None) -> None:
    """The sinks take no part in the sum."""
    ctx.outs[0][...], ctx.outs[1][...] = merge_attention.body(outs, lses, None)


@wrong(linear)
def batch_shape_noise(ctx: Any, x: Any, weight: Any) -> None:
    """B42: another order of adding where there is more than one row; within every bound."""
    right = linear.body(x, np.asarray(weight))
    rows = int(np.prod(x.shape[:-1]))
    ctx.out[...] = right if rows < 2 else np.nextafter(right, np.float32(0))


@wrong(linear)
def run_to_run(ctx: Any, x: Any, weight: Any) -> None:
    """Every second run rounds the other way."""
    run_to_run.count = getattr(run_to_run, "count", 0) + 1
    right = linear.body(x, np.asarray(weight))
    ctx.out[...] = right if run_to_run.count % 2 else np.nextafter(right, np.float32(0))


@wrong(expert_linear)
def beyond_the_grid(ctx: Any, x: Any, experts: Any, weight: Any) -> None:
    """B76: rows from 65,535 on are in no block of the grid."""
    n = min(len(x), 65_535)
    ctx.out[:n] = expert_linear.body(x[:n], experts[:n], weight)


@wrong(linear)
def bf16_activations(ctx: Any, x: Any, weight: Any) -> None:
    """Rounds activations to bf16, and does not say so."""
    short = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    ctx.out[...] = linear.body(short, np.asarray(weight))
