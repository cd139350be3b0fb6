"""Attention over pages, the joining of several, and the indexer's scores."""

from __future__ import annotations

from typing import Any

from trueup.backends.simt.executable import Recorder
from trueup.backends.simt.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import DeviceTensor, Rows, lies, rows, strides, typed, values
from trueup.core.ops import attention, index_scores, merge_attention
from trueup.core.types import TensorType


def register(kernels: KernelTable, tuning: Tuning) -> None:
    @kernels.implements(attention, when=lies(attention, q=2, keys=3, values=3))
    def _(
        ctx: Recorder,
        q: Any,
        keys: Any,
        held: Any,
        cu: Any,
        past: Any,
        table: Any,
        selected: Any = None,
        *,
        scale: float,
        every: int,
        block: int,
        window: int,
    ) -> None:
        (tokens, heads, d), (pages, entries, kv, dv), (seqs, blocks) = q.type.shape, held.type.shape, table.type.shape
        out, lse = ctx.outs
        picks, width = None, 0
        if selected is not None:
            width = selected.type.shape[1]
            picks = typed(ctx.scratch(selected.type.nbytes), selected.type)
            args = selected, cu, seqs, past, every, block, picks
            ctx.flat("attention_picks", tokens, width, *args, *ctx.fault)
        where = pages, entries, cu, seqs, past, table, blocks, picks, width, every, block, window
        lie = rows(q), keys, *strides(keys.type)[:3], held, *strides(held.type)[:3]
        ctx.blocks("attention", tokens * heads, tokens, heads, kv, d, dv, *lie, *where, scale, out, lse, *ctx.fault
        )  # fmt: skip

    @kernels.implements(index_scores, when=lies(index_scores, q=2, keys=2, weights=1))
    def _(
        ctx: Recorder,
        q: Any,
        keys: Any,
        cu: Any,
        past: Any,
        table: Any,
        weights: Any = None,
        *,
        every: int,
        scale: float,
    ) -> None:
        (tokens, heads, d), (pages, entries, _) = q.type.shape, keys.type.shape
        seqs, blocks = table.type.shape
        weight = (None, 1, 0, 0) if weights is None else rows(weights)
        args = (
            rows(q),
            keys,
            *strides(keys.type)[:2],
            pages,
            entries,
            cu,
            seqs,
            past,
            table,
            blocks,
            weight,
            every,
            scale,
        )
        n = blocks * entries
        ctx.items("index_scores", tokens * n, tokens, heads, d, *args, ctx.out, *ctx.fault)

    @kernels.implements(merge_attention, when=lies(merge_attention, outs=2, lses=1))
    def _(ctx: Recorder, outs: tuple[Any, ...], lses: tuple[Any, ...], sinks: Any = None) -> None:
        out, lse = ctx.outs
        tokens, heads, n = out.type.shape
        count = tokens * heads
        parts = [scalars(x) for x in lses]
        sink = values(sinks)
        if sink is not None:
            parts.append(Rows(sink, heads, 0, 1))
        scratch = ctx.scratch(8 * count)
        most, total = (typed(scratch, TensorType((2 * count,))).at(i * count, lse.type) for i in (0, 1))
        for i, x in enumerate(parts):
            ctx.items("merge_most", count, count, x, most, i == 0)
        for i, x in enumerate(parts):
            ctx.items("merge_sum", count, count, x, most, total, i == 0)
        ctx.items("merge_lse", count, count, most, total, lse)
        for i, (x, part) in enumerate(zip(outs, parts, strict=False)):
            ctx.flat("merge_part", count, n, rows(x), part, most, total, out, i == 0)


def scalars(lse: DeviceTensor) -> Rows:
    """A number for each (token, head), as rows of one."""
    by = strides(lse.type)
    return Rows(lse, max(lse.type.shape[1], 1), by[0], by[1])
