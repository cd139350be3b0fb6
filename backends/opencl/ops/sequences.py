"""Ops that walk the sequences of a step: convolutions and delays with their tails, the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pyopencl as cl

from trueup.backends.opencl.executable import Recorder
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import (
    ANYHOW,
    DeviceTensor,
    Rows,
    first_no,
    lies,
    pieces,
    rows,
    strides,
    typed,
    values,
)
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
"""Rows of a chunk of the delta rule; `CHUNK_ROWS` in gdn.cl."""


def convolve(
    ctx: Recorder,
    x: Any,
    weight: Any,
    cu: Any,
    slots: Any,
    tail: Any,
    keep: Any,
    taps: int,
    dilation: int,
    gain: float | None = None,
) -> None:
    """The convolution, or without a weight the mean, with silu where there is a `gain`; then the tails."""
    tokens, n = x.type.shape
    gate = (False, 0.0) if gain is None else (True, float(gain))
    where = cu, slots.type.size, slots, tail, tail.type.shape[0], *strides(tail.type)[:2]
    args = taps, dilation, *gate, rows(x), values(weight), *where, ctx.out
    ctx.flat("causal_conv", tokens, n, *args, *ctx.fault)
    push(ctx, x, cu, slots, tail, keep)


def push(ctx: Recorder, x: Any, cu: Any, slots: Any, tail: Any, keep: Any) -> None:
    """The tails after the step's rows, and after those that `keep` names."""
    (slot_count, size), seqs, steps = tail.type.shape[:2], slots.type.size, strides(tail.type)[:2]
    for part, into, _, n in by_pieces(x, tail) if size else ():
        args = size, x.itemsize, part, cu, seqs, slots, into, slot_count, *steps, keep
        ctx.over("tail_push", seqs, n, x.type.shape[0], n, *args, *ctx.fault)


def by_pieces(x: DeviceTensor, tail: DeviceTensor) -> Iterator[tuple[Rows, DeviceTensor, int, int]]:
    """Rows of x and of a state as far as both lie side by side: each part, where it begins in a row, and how wide it is."""
    lie = rows(x, 1)
    for at, start, n in pieces(tail.type, 2):
        yield replace(lie, tensor=lie.tensor.at(start, x.type)), tail.at(at, tail.type), start, n


def register(kernels: KernelTable, tuning: Tuning) -> None:
    @kernels.implements(causal_conv, when=lies(causal_conv, x=1, tail=2))
    def _(
        ctx: Recorder, x: Any, weight: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, dilation: int
    ) -> None:
        convolve(ctx, x, weight, cu, slots, tail, keep, weight.type.shape[1], dilation)

    @kernels.implements(trailing_mean, when=lies(trailing_mean, x=1, tail=2))
    def _(ctx: Recorder, x: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, every: int) -> None:
        convolve(ctx, x, None, cu, slots, tail, keep, every, 1)

    late = lies(delay, x=1, tail=ANYHOW)

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
        where = cu, slots.type.size, slots
        for part, held, start, n in by_pieces(x, tail):
            lie = held, tail.type.shape[0], *strides(tail.type)[:2], ctx.out.at(start, x.type), prod(width)
            ctx.flat("delay", tokens, n, by, x.itemsize, part, *where, *lie, *ctx.fault)
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
        given = rows(q), rows(k), rows(v), rows(decay), rows(beta), cu, seqs
        into = state, state.type.shape[0], *steps, keep, tiled, scale, ctx.out
        wide = tuning.columns_held(dk)
        if not wide:
            count = max(seqs, 1) * heads * -(-dv // tuning.vector)
            ctx.items("gated_delta_rule", count, tokens, key_heads, heads, dk, dv, *given, slots, *into, 0, *ctx.fault)
            return
        sizes, tiles = (tokens, key_heads, heads, dk, dv), heads * -(-dv // wide)
        held = cl.LocalMemory(4 * dk * wide or 4)
        least = tuning.prompt if tokens >= tuning.prompt else 0
        sums = cl.LocalMemory(8 * tuning.side)
        args = *sizes, *given, slots, *into, least, wide, held, sums
        ctx.sides("gated_delta_rule_shared", max(seqs, 1) * tiles, *args, *ctx.fault)
        if not least:
            return
        found = [
            typed(ctx.scratch(4 * n), TensorType((n,)))
            for n in (tokens * heads * dk, tokens * heads * dv, tokens * heads * CHUNK, tokens * heads)
        ]
        chunks = tokens // CHUNK + min(seqs, tokens // least)
        ctx.sides("delta_chunks", chunks * heads, *sizes, *given, tiled, least, *found)
        given = rows(q), rows(k), rows(decay), cu, seqs, slots
        args = *sizes, *given, *into, least, *found, wide, held, cl.LocalMemory(4 * CHUNK * wide)
        ctx.sides("delta_scan", seqs * tiles, *args, *ctx.fault)

    def within(op: Op, **layouts: int) -> Any:
        lie = lies(op, **layouts)
        return lambda *types, chunk, **attrs: first_no(chunk >= 1 or f"chunk is {chunk}, below 1", lie(*types))

    def products(
        ctx: Recorder, x: Any, k: Any, decay: Any, cu: Any, heads: int, chunk: int, tiled: bool, whole: bool
    ) -> tuple[DeviceTensor, ...]:
        """Products of rows within their chunks, and how much is left of a chunk's start at each row; see gdn.cl."""
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
        count = tokens * heads * (-(-dk // tuning.vector) + -(-dv // tuning.vector))
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
        count = max(seqs, 1) * heads * -(-dv // tuning.vector)
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
