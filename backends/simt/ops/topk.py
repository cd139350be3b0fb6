"""Choosing the largest, in three regimes."""

from __future__ import annotations

from typing import Any

from trueup.backends.simt.executable import Recorder
from trueup.backends.simt.tuning import SEGMENT, Tuning, row_threads
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import lies, rows, typed
from trueup.core.ops import argmax, top_k
from trueup.core.types import TensorType

SHORT = 256
"""Entries up to which each counts those before it; `SHORT` in the topk file."""
GROUPS = 256
"""Blocks that share the rows; each has room for its keys."""
WIDE = 512
"""Threads of a block that does a long row; the bound of its kernels."""


def register(kernels: KernelTable, tuning: Tuning) -> None:
    lie = lies(top_k, scores=-1)

    @kernels.implements(
        top_k,
        when=lambda scores, *, k: (
            lie(scores) if k <= scores.shape[1] else f"k is {k}, which exceeds the {scores.shape[1]} candidates"
        ),
    )
    def _(ctx: Recorder, scores: Any, *, k: int) -> None:
        (count, n), (values, indices) = scores.type.shape, ctx.outs
        if not count * k:
            return
        if n <= SHORT:
            ctx.blocks("top_k_short", count, count, n, k, rows(scores), values, indices, threads=row_threads(n))
            return
        segments = -(-n // SEGMENT)
        if count >= tuning.few or segments < 2 or 4 * k > SEGMENT:
            choose(ctx, count, 1, n, n, k, rows(scores), None, values, indices)
            return
        wide = segments * k
        first = ctx.scratch(4 * count * wide), ctx.scratch(4 * count * wide)
        value, index = (typed(t, TensorType((count, wide), d)) for t, d in zip(first, ("f32", "i32"), strict=True))
        choose(ctx, count * segments, segments, SEGMENT, n, k, rows(scores), None, value, index)
        choose(ctx, count, 1, wide, wide, k, rows(value), index, values, indices)

    def choose(
        ctx: Recorder, count: int, segments: int, length: int, n: int, k: int, scores: Any, origin: Any, *outs: Any
    ) -> None:
        room = 1 << (k - 1).bit_length()
        groups = min(count, GROUPS)
        near = 8 * room if 8 * room <= tuning.near else 0
        work = None if near else typed(ctx.scratch(8 * groups * room), TensorType((groups * room,), "i64"))
        args = count, groups, segments, length, n, k, scores, origin, *outs, work, room
        ctx.blocks("top_k_long", groups, *args, threads=WIDE, shared=near)

    lie_in = lies(argmax, scores=-1)

    @kernels.implements(
        argmax, when=lambda scores: lie_in(scores) if scores.shape[1] else f"{scores.shape[0]} rows of 0 candidates"
    )
    def _(ctx: Recorder, scores: Any) -> None:
        count, n = scores.type.shape
        threads = WIDE if n > 8 * WIDE else row_threads(n)
        ctx.blocks("argmax", count, count, n, rows(scores), ctx.out, threads=threads)
