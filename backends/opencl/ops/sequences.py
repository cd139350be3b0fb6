"""Ops that walk the sequences of a step: convolutions and delays with their tails, the gated delta rule."""

from __future__ import annotations

from math import prod
from typing import Any

from trueup.backends.opencl.executable import Recorder
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.ops import causal_conv, delay, gated_delta_rule, trailing_mean

from .layout import first_no, lies, rows, strides
from .weights import values


def register(kernels: KernelTable, tuning: Tuning) -> None:
    def convolve(
        ctx: Recorder, x: Any, weight: Any, cu: Any, slots: Any, tail: Any, keep: Any, taps: int, dilation: int
    ) -> None:
        tokens, n = x.type.shape
        slot_step, row_step = strides(tail.type)[:2]
        args = values(weight), cu, slots.type.size, slots, tail, tail.type.shape[0], slot_step, row_step, ctx.out
        ctx.flat("causal_conv", tokens, n, taps, dilation, rows(x), *args, *ctx.fault)
        push(ctx, x, cu, slots, tail, keep)

    def push(ctx: Recorder, x: Any, cu: Any, slots: Any, tail: Any, keep: Any) -> None:
        (tokens, *width), (slot_count, size) = x.type.shape, tail.type.shape[:2]
        n, seqs, (slot_step, row_step) = prod(width), slots.type.size, strides(tail.type)[:2]
        if not size:
            return
        args = size, x.itemsize, rows(x, 1), cu, seqs, slots, tail, slot_count, slot_step, row_step
        if keep is not None:
            ctx.over("tail_keep", tokens, n, tokens, n, *args, keep, *ctx.fault)
        ctx.over("tail_push", seqs, n, tokens, n, *args, *ctx.fault)

    @kernels.implements(causal_conv, when=lies(causal_conv, x=1, tail=2))
    def _(
        ctx: Recorder, x: Any, weight: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, dilation: int
    ) -> None:
        convolve(ctx, x, weight, cu, slots, tail, keep, weight.type.shape[1], dilation)

    @kernels.implements(trailing_mean, when=lies(trailing_mean, x=1, tail=2))
    def _(ctx: Recorder, x: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, every: int) -> None:
        convolve(ctx, x, None, cu, slots, tail, keep, every, 1)

    late = lies(delay, x=1, tail=2)

    @kernels.implements(
        delay,
        when=lambda x, cu, slots, tail, keep, *, by: first_no(
            tail.dtype == x.dtype or f"the tail is of {tail.dtype}, x of {x.dtype}",
            x.element.plain or f"elements of {x} have no address",
            late(x, cu, slots, tail, keep),
        ),
    )
    def _(ctx: Recorder, x: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, by: int) -> None:
        tokens, *width = x.type.shape
        slot_step, row_step = strides(tail.type)[:2]
        args = by, x.itemsize, rows(x, 1), cu, slots.type.size, slots, tail, tail.type.shape[0], slot_step, row_step
        ctx.flat("delay", tokens, prod(width), *args, ctx.out, *ctx.fault)
        push(ctx, x, cu, slots, tail, keep)

    @kernels.implements(gated_delta_rule, when=lies(gated_delta_rule, q=2, k=2, v=2, decay=1, beta=1, state=3))
    def _(
        ctx: Recorder,
        q: Any,
        k: Any,
        v: Any,
        decay: Any,
        beta: Any,
        cu: Any,
        slots: Any,
        state: Any,
        keep: Any = None,
        *,
        scale: float,
        tiled: bool,
    ) -> None:
        tokens, key_heads, dk = q.type.shape
        heads, dv, seqs = *v.type.shape[1:], slots.type.size
        steps = strides(state.type)[:3]
        given = rows(q), rows(k), rows(v), rows(decay), rows(beta), cu, seqs, slots
        args = state, state.type.shape[0], *steps, keep, tiled, scale, ctx.out
        count = max(seqs, 1) * heads * -(-dv // tuning.vector)
        ctx.items("gated_delta_rule", count, tokens, key_heads, heads, dk, dv, *given, *args, *ctx.fault)
