"""Choosing the largest, in three regimes."""

from __future__ import annotations

from typing import Any

from trueup.backends.opencl.executable import Recorder
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import lies, rows, typed
from trueup.core.ops import argmax, top_k
from trueup.core.types import TensorType

SHORT = 256
"""Entries up to which each counts those before it; `SHORT` in topk.cl."""
GROUPS = 256
"""Groups that share the rows; each has room for its keys."""


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
            ctx.groups("top_k_short", count, count, n, k, rows(scores), values, indices)
            return
        segments = -(-n // tuning.segment)
        if count >= tuning.few or segments < 2 or 4 * k > tuning.segment:
            choose(ctx, count, 1, n, n, k, rows(scores), None, values, indices)
            return
        wide = segments * k
        first = ctx.scratch(4 * count * wide), ctx.scratch(4 * count * wide)
        value, index = (typed(t, TensorType((count, wide), d)) for t, d in zip(first, ("f32", "i32"), strict=True))
        choose(ctx, count * segments, segments, tuning.segment, n, k, rows(scores), None, value, index)
        choose(ctx, count, 1, wide, wide, k, rows(value), index, values, indices)

    def choose(
        ctx: Recorder, count: int, segments: int, length: int, n: int, k: int, scores: Any, origin: Any, *outs: Any
    ) -> None:
        room = 1 << (k - 1).bit_length()
        groups = min(count, GROUPS)
        work = typed(ctx.scratch(8 * groups * room), TensorType((groups * room,), "i64"))
        ctx.groups("top_k_long", groups, count, groups, segments, length, n, k, scores, origin, *outs, work, room)

    lie_in = lies(argmax, scores=-1)

    @kernels.implements(
        argmax, when=lambda scores: lie_in(scores) if scores.shape[1] else f"{scores.shape[0]} rows of 0 candidates"
    )
    def _(ctx: Recorder, scores: Any) -> None:
        count, n = scores.type.shape
        ctx.groups("argmax", count, count, n, rows(scores), ctx.out)
