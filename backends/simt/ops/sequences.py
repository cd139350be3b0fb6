"""Ops that walk the sequences of a step: convolutions and delays with their tails, the gated delta rule."""

from __future__ import annotations

from math import prod
from typing import Any

from trueup.backends.simt.executable import Recorder
from trueup.backends.simt.tuning import SIDE, Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import DeviceTensor, first_no, lies, rows, strides, typed, values
from trueup.core.op import Op
from trueup.core.ops import (
    causal_conv,
    chunk_delta_scan,
    chunk_wy,
    delay,
    gated_delta_rule,
    ngram_rows,
    trailing_mean,
)
from trueup.core.types import TensorType

CHUNK = 32
"""Rows of a chunk of the delta rule; `CHUNK_ROWS` in the gdn file."""


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
            ctx.items("tail_keep", tokens * n, tokens, n, *args, keep, *ctx.fault)
        ctx.items("tail_push", seqs * n, tokens, n, *args, *ctx.fault)

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
        (tokens, key_heads, dk), (_, heads, dv), seqs = q.type.shape, v.type.shape, slots.type.size
        steps = strides(state.type)[:3]
        given = rows(q), rows(k), rows(v), rows(decay), rows(beta), cu, seqs
        into = state, state.type.shape[0], *steps, keep, tiled, scale, ctx.out
        wide = tuning.columns_held(dk)
        if not wide:
            count = max(seqs, 1) * heads * dv
            ctx.items("gated_delta_rule", count, tokens, key_heads, heads, dk, dv, *given, slots, *into, 0, *ctx.fault)
            return
        sizes, tiles = (tokens, key_heads, heads, dk, dv), heads * -(-dv // wide)
        least = tuning.prompt if tokens >= tuning.prompt else 0
        held = 4 * dk * wide
        args = *sizes, *given, slots, *into, least, wide, *ctx.fault
        ctx.blocks("gated_delta_rule_shared", max(seqs, 1) * tiles, *args, threads=SIDE, shared=held + 8 * SIDE)
        if not least:
            return
        found = [
            typed(ctx.scratch(4 * n), TensorType((n,)))
            for n in (tokens * heads * dk, tokens * heads * dv, tokens * heads * CHUNK, tokens * heads)
        ]
        chunks = tokens // CHUNK + min(seqs, tokens // least)
        ctx.blocks("delta_chunks", chunks * heads, *sizes, *given, tiled, least, *found, threads=SIDE)
        scanned = rows(q), rows(k), rows(decay), cu, seqs, slots, *into, least, *found, wide
        ctx.blocks(
            "delta_scan", seqs * tiles, *sizes, *scanned, *ctx.fault, threads=SIDE, shared=held + 4 * CHUNK * wide
        )

    def within(op: Op, **layouts: int) -> Any:
        lie = lies(op, **layouts)
        return lambda *types, chunk, **attrs: first_no(chunk >= 1 or f"chunk is {chunk}, below 1", lie(*types))

    def products(
        ctx: Recorder, x: Any, k: Any, decay: Any, cu: Any, heads: int, chunk: int, tiled: bool, whole: bool
    ) -> tuple[DeviceTensor, ...]:
        """Products of rows within their chunks, and how much is left of a chunk's start at each row; see the gdn file."""
        tokens, key_heads, dk = x.type.shape
        sizes = tokens * heads * chunk, tokens * heads
        found = tuple(typed(ctx.scratch(4 * n), TensorType((n,))) for n in sizes)
        args = rows(x), rows(k), rows(decay), cu, cu.type.size - 1, chunk, tiled, whole, *found
        ctx.items("chunk_products", tokens * heads, tokens, key_heads, heads, dk, *args)
        return found

    @kernels.implements(chunk_wy, when=within(chunk_wy, k=2, v=2, decay=1, beta=1))
    def _(ctx: Recorder, k: Any, v: Any, decay: Any, beta: Any, cu: Any, *, chunk: int, tiled: bool) -> None:
        (tokens, key_heads, dk), (_, heads, dv) = k.type.shape, v.type.shape
        found = products(ctx, k, k, decay, cu, heads, chunk, tiled, False)
        args = rows(k), rows(v), rows(beta), cu, cu.type.size - 1, chunk, tiled, *found, *ctx.outs
        count = tokens * heads * (dk + dv)
        ctx.items("chunk_wy", count, tokens, key_heads, heads, dk, dv, *args, *ctx.fault)

    @kernels.implements(chunk_delta_scan, when=within(chunk_delta_scan, q=2, k=2, w=2, u=2, decay=1, state=3))
    def _(
        ctx: Recorder,
        q: Any,
        k: Any,
        w: Any,
        u: Any,
        decay: Any,
        cu: Any,
        slots: Any,
        state: Any,
        keep: Any = None,
        *,
        chunk: int,
        scale: float,
        tiled: bool,
    ) -> None:
        (tokens, key_heads, dk), (_, heads, dv), seqs = q.type.shape, u.type.shape, slots.type.size
        found = products(ctx, q, k, decay, cu, heads, chunk, tiled, True)
        rest = typed(ctx.scratch(4 * u.type.size), u.type)
        given = rows(q), rows(k), rows(w), rows(u), rows(decay), cu, seqs, slots, state, state.type.shape[0]
        args = *strides(state.type)[:3], keep, chunk, tiled, scale, *found, rest, ctx.out
        count = max(seqs, 1) * heads * dv
        ctx.items("chunk_delta_scan", count, tokens, key_heads, heads, dk, dv, *given, *args, *ctx.fault)

    @kernels.implements(ngram_rows, when=lies(ngram_rows, ids=1, context=2))
    def _(
        ctx: Recorder,
        ids: Any,
        cu: Any,
        slots: Any,
        multipliers: Any,
        offsets: Any,
        sizes: Any,
        context: Any,
        keep: Any = None,
        *,
        eos: int,
    ) -> None:
        tokens, heads, size = ids.type.size, sizes.type.size, multipliers.type.size - 1
        where = context, context.type.shape[0], *strides(context.type)[:2]
        args = rows(ids, 1), cu, slots.type.size, slots, multipliers, offsets, sizes, *where, eos, ctx.out
        ctx.flat("ngram_rows", tokens, heads, size, heads // size if size else 1, *args, *ctx.fault)
        push(ctx, ids, cu, slots, context, keep)
