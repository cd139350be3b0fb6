"""Ops that move values without computing: rows chosen, repeated, joined, made contiguous, stored in pages; and rope."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from trueup.backends.simt.executable import Recorder
from trueup.backends.simt.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import first_no, joined, lies, rows, strides
from trueup.core.ops import concat, contiguous, paged_append, repeat_streams, rope, take_rows
from trueup.core.types import TensorType

AXES = 8
"""Axes, joined as far as they lie as one, that `contiguous` can copy."""


def plain(*types: TensorType) -> bool | str:
    """Whether elements can be addressed."""
    wrong = [t for t in types if not t.element.plain]
    return not wrong or f"elements of {wrong[0]} have no address"


def register(kernels: KernelTable, tuning: Tuning) -> None:
    @kernels.implements(repeat_streams, when=lies(repeat_streams, x=-1))
    def _(ctx: Recorder, x: Any, *, streams: int) -> None:
        count, n = x.type.shape
        ctx.flat("copy_rows", count * streams, n, 4, rows(x), streams, ctx.out, n)

    @kernels.implements(concat, when=lies(concat, a=-1, b=-1))
    def _(ctx: Recorder, a: Any, b: Any) -> None:
        count, wide = prod(a.type.shape[:-1]), a.type.shape[-1] + b.type.shape[-1]
        for part, first in ((a, 0), (b, a.type.shape[-1])):
            ctx.flat(
                "copy_rows", count, part.type.shape[-1], 4, rows(part), 1, ctx.out.at(first, part.type), wide
            )  # fmt: skip

    take = lies(take_rows, x=1)

    @kernels.implements(take_rows, when=lambda x, at: first_no(plain(x), take(x, at)))
    def _(ctx: Recorder, x: Any, at: Any) -> None:
        n = prod(x.type.shape[1:])
        args = x.itemsize, rows(x, 1), x.type.shape[0], at, ctx.out
        ctx.flat("take_rows", at.type.size, n, *args, *ctx.fault)

    @kernels.implements(
        contiguous,
        when=lambda x: first_no(
            plain(x), len(joined(x, 0, len(x.shape))) <= AXES or f"{x} lies in more than {AXES} axes"
        ),
    )
    def _(ctx: Recorder, x: Any) -> None:
        axes = joined(x.type, 0, len(x.type.shape)) if x.type.size else []
        axes = [(1, 0)] * (AXES - len(axes)) + axes
        shape, by = (np.array([a[i] for a in axes], np.int64).tobytes() for i in (0, 1))
        ctx.items("contiguous", x.type.size, x.type.size, x.itemsize, x, shape, by, ctx.out)

    append = lies(paged_append, rows=1, cache=2)

    @kernels.implements(
        paged_append,
        when=lambda given, cu, past, table, cache, *, every: first_no(
            cache.dtype == given.dtype or f"the cache is of {cache.dtype}, the rows of {given.dtype}",
            plain(given),
            append(given, cu, past, table, cache),
        ),
    )
    def _(ctx: Recorder, given: Any, cu: Any, past: Any, table: Any, cache: Any, *, every: int) -> None:
        (tokens, *width), (pages, entries, *_) = given.type.shape, cache.type.shape
        seqs, blocks = table.type.shape
        page_step, entry_step = strides(cache.type)[:2]
        args = rows(given, 1), cu, seqs, past, table, blocks, cache, pages, entries, page_step, entry_step, every
        ctx.flat("paged_append", tokens, prod(width), given.itemsize, *args, *ctx.fault)

    turning = lies(rope, x=-1)

    @kernels.implements(
        rope,
        when=lambda x, positions, freqs, component, *, start, **attrs: first_no(
            0 <= start <= x.shape[2] - 2 * freqs.shape[0]
            or f"{freqs.shape[0]} pairs from dim {start} on leave a head of {x.shape[2]}",
            turning(x, positions, freqs, component),
        ),
    )
    def _(
        ctx: Recorder,
        x: Any,
        positions: Any,
        freqs: Any,
        component: Any,
        *,
        start: int,
        interleaved: bool,
        inverse: bool,
    ) -> None:
        tokens, heads, d = x.type.shape
        pairs = freqs.type.size
        args = (
            rows(x),
            positions,
            positions.type.shape[1],
            freqs,
            component,
            pairs,
            ctx.out,
            start,
            interleaved,
            inverse,
        )
        ctx.items("rope", tokens * (d - pairs), tokens, heads, d, *args, *ctx.fault)
