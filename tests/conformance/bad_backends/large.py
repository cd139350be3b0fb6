"""Kernels that are right up to the sizes that tests like to use, and have no room for those of models."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.ops import (
    attention,
    causal_conv,
    delay,
    expert_combine,
    expert_linear,
    gated_delta_rule,
    index_scores,
    linear,
    rms_norm,
)

from .make import wrong


@wrong(linear)
def long_rows_cut(ctx: Any, x: Any, weight: Any) -> None:
    """4,096 entries of a row are held."""
    n = min(x.shape[-1], 4096)
    ctx.out[...] = linear.body(np.ascontiguousarray(x[..., :n]), np.ascontiguousarray(np.asarray(weight)[:, :n]))


@wrong(linear)
def long_quantized_rows_cut(ctx: Any, x: Any, weight: Any) -> None:
    """As long as rows are, blocks after 4,096 entries are not read."""
    w = np.array(weight)
    if not weight.type.element.plain:
        w[:, 4096:] = 0
    ctx.out[...] = linear.body(x, w)


@wrong(rms_norm)
def wide_norm_unfinished(ctx: Any, x: Any, weight: Any = None, *, eps: float) -> None:
    """A workgroup of 1,024 takes four entries each."""
    ctx.out[...] = rms_norm.body(x, weight, eps=eps)
    ctx.out[..., 4096:] = x[..., 4096:]


@wrong(causal_conv)
def few_taps(ctx: Any, x: Any, weight: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, **attrs: Any) -> None:
    """The last 8 taps are held in registers."""
    w = np.array(weight)
    w[:, : max(w.shape[1] - 8, 0)] = 0
    ctx.out[...] = causal_conv.body(x, w, cu, slots, tail, keep, **attrs)


@wrong(delay)
def short_delay(ctx: Any, x: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, by: int) -> None:
    """Rows of 64 before are known."""
    ctx.out[...] = delay.body(x, cu, slots, tail, keep, by=by)
    if by > 64:
        ctx.out[...] = 0


@wrong(attention)
def few_heads(ctx: Any, q: Any, *args: Any, **attrs: Any) -> None:
    """64 heads are in the grid."""
    ctx.outs[0][...], ctx.outs[1][...] = attention.body(q, *args, **attrs)
    ctx.outs[0][:, 64:] = 0


@wrong(attention)
def narrow_window(ctx: Any, *args: Any, window: int, **attrs: Any) -> None:
    """A window of 64 entries is held."""
    ctx.outs[0][...], ctx.outs[1][...] = attention.body(*args, window=min(window, 64), **attrs)


@wrong(attention)
def few_picks(
    ctx: Any, q: Any, k: Any, v: Any, cu: Any, past: Any, table: Any, picks: Any = None, **attrs: Any
) -> None:
    """2,048 picks of a row are read."""
    picks = None if picks is None else np.ascontiguousarray(picks[:, :2048])
    ctx.outs[0][...], ctx.outs[1][...] = attention.body(q, k, v, cu, past, table, picks, **attrs)


@wrong(expert_linear)
def few_experts(ctx: Any, x: Any, experts: Any, weight: Any) -> None:
    """Counts for 256 experts are held."""
    ctx.out[...] = expert_linear.body(x, np.where(experts >= 256, -1, experts).astype(np.int32), weight)


@wrong(expert_combine)
def few_choices(ctx: Any, h: Any, experts: Any, mix: Any, weight: Any) -> None:
    """8 experts of a row are added."""
    mix = mix.copy()
    mix[:, 8:] = 0
    ctx.out[...] = expert_combine.body(h, experts, mix, weight)


@wrong(gated_delta_rule)
def narrow_values(ctx: Any, *args: Any, **attrs: Any) -> None:
    """128 columns of the state are in the grid's blocks."""
    ctx.out[...] = gated_delta_rule.body(*args, **attrs)
    ctx.out[..., 128:] = 0


@wrong(index_scores)
def few_pages(ctx: Any, q: Any, keys: Any, cu: Any, past: Any, table: Any, *args: Any, **attrs: Any) -> None:
    """A table's first 64 pages are held for every row but the first."""
    ctx.out[...] = index_scores.body(q, keys, cu, past, table, *args, **attrs)
    ctx.out[1:, 64 * keys.shape[1] :] = 0
