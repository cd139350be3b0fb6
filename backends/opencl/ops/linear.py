"""Products with weights, and what experts do with them."""

from __future__ import annotations

from math import prod
from typing import Any

from trueup.backends.opencl.executable import Recorder
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import DeviceTensor, RecordedWeight, Rows, lies, rows, typed
from trueup.core.ops import embed, expert_combine, expert_linear, linear
from trueup.core.types import TensorType

from .weights import FORMATS, label, reads


def register(kernels: KernelTable, tuning: Tuning) -> None:
    for format in FORMATS:
        _register(kernels, tuning, format)


def shared(tuning: Tuning, pairs: int, experts: int) -> bool:
    """Whether so many rows go to so few experts that it pays to put those of one expert together."""
    return pairs * 2 >= tuning.tile * experts


def _register(kernels: KernelTable, tuning: Tuning, format: str | None) -> None:
    def when(op: Any, weight: int, **layouts: int) -> Any:
        lie = lies(op, **layouts)

        def holds(*types: TensorType, **attrs: Any) -> bool | str:
            answer = lie(*types, **attrs)
            return reads(format, types[weight].dtype) if answer is True else answer

        return holds

    tiles = (1, "linear_row"), (tuning.tile // 2, "linear_some"), (tuning.tile, "linear_rows")

    @kernels.implements(linear, when=when(linear, 1, x=-1), name=label("linear", format))
    def _(ctx: Recorder, x: Any, weight: RecordedWeight) -> None:
        (m, n), count = weight.type.shape, prod(x.type.shape[:-1])
        columns = tuning.columns(n, m)
        tile, kernel = next(t for t in tiles if t[0] >= count or t is tiles[-1])
        groups = -(-count // tile) * -(-m // columns)
        args = count, n, m, columns, rows(x), weight.stored, weight.row_bytes, ctx.out
        ctx.groups(kernel, groups, *args, format=weight.format)

    def products(ctx: Recorder, x: Rows, share: int, experts: Any, weight: RecordedWeight, out: DeviceTensor) -> None:
        """Each pair's product with its expert; row p // share of x is pair p's. Pairs without one are left out."""
        (count, m, n), pairs = weight.type.shape, experts.type.size
        tiles = -(-pairs // tuning.tile) + min(count, pairs)
        counts, order, table = (
            typed(ctx.scratch(4 * size), TensorType((size,), "i32")) for size in (count, pairs, 3 * tiles)
        )
        ctx.items("expert_counts", count, pairs, count, experts, counts, *ctx.fault, format=weight.format)
        ctx.items("expert_tiles", count, pairs, count, tiles, experts, counts, order, table, format=weight.format)
        columns = tuning.columns(n, m)
        args = share, n, m, columns, x, order, table, weight.stored, weight.row_bytes, out
        ctx.groups("expert_products", tiles * -(-m // columns), tiles, *args, format=weight.format)

    @kernels.implements(expert_linear, when=when(expert_linear, 2, x=-1), name=label("expert_linear", format))
    def _(ctx: Recorder, x: Any, experts: Any, weight: RecordedWeight) -> None:
        (count, m, n), (tokens, k) = weight.type.shape, experts.type.shape
        if shared(tuning, tokens * k, count):
            products(ctx, rows(x), k, experts, weight, ctx.out)
            ctx.flat("expert_none", tokens * k, m, experts, ctx.out, format=weight.format)
            return
        columns = tuning.columns(n, m)
        args = tokens * k, k, n, m, count, columns, rows(x), experts, weight.stored, weight.row_bytes, ctx.out
        groups = tokens * k * -(-m // columns)
        ctx.groups("expert_linear", groups, *args, *ctx.fault, format=weight.format)

    @kernels.implements(
        expert_combine, when=when(expert_combine, 3, h=-1, mix=-1), name=label("expert_combine", format)
    )
    def _(ctx: Recorder, h: Any, experts: Any, mix: Any, weight: RecordedWeight) -> None:
        (count, n, m), (tokens, k) = weight.type.shape, experts.type.shape
        if shared(tuning, tokens * k, count):
            each = typed(ctx.scratch(4 * tokens * k * n), TensorType((tokens, k, n)))
            products(ctx, rows(h), 1, experts, weight, each)
            ctx.flat("expert_sum", tokens, n, k, count, experts, rows(mix), each, ctx.out, format=weight.format)
            return
        columns = tuning.columns(m * max(k, 1), n)
        args = tokens, k, n, m, count, columns, rows(h), experts, rows(mix), weight.stored, weight.row_bytes, ctx.out
        ctx.groups("expert_combine", tokens * -(-n // columns), *args, *ctx.fault, format=weight.format)

    @kernels.implements(embed, when=when(embed, 0), name=label("embed", format))
    def _(ctx: Recorder, table: RecordedWeight, ids: Any) -> None:
        vocab, n = table.type.shape
        args = vocab, table.stored, table.row_bytes, ids, ctx.out
        ctx.over("embed", ids.type.size, -(-n // 16), ids.type.size, n, *args, *ctx.fault, format=table.format)
