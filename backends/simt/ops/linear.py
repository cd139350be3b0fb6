"""Products with weights, and what experts do with them."""

from __future__ import annotations

from math import prod
from typing import Any

from trueup.backends.simt.executable import Recorder
from trueup.backends.simt.programs import NATIVE
from trueup.backends.simt.tuning import TILE, Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import DeviceTensor, Rows, lies, rows, typed
from trueup.core.ops import embed, expert_combine, expert_linear, linear
from trueup.core.types import TensorType

FORMATS = (*NATIVE, None)
"""For each a kernel of its own; None stands for all types that are expanded to float32."""


def label(op: str, format: str | None) -> str:
    """What plans call a kernel that reads this type of weight."""
    return f"{op} {format}" if format else f"{op}, weight expanded to f32"


def reads(format: str | None, dtype: str) -> bool | str:
    """Whether the kernel for `format` is the one for a weight of this type."""
    return (dtype not in NATIVE if format is None else dtype == format) or f"reads {format}, not {dtype}"


def register(kernels: KernelTable, tuning: Tuning) -> None:
    for format in FORMATS:
        _register(kernels, tuning, format)


def _register(kernels: KernelTable, tuning: Tuning, format: str | None) -> None:
    def when(op: Any, weight: int, **layouts: int) -> Any:
        lie = lies(op, **layouts)

        def holds(*types: TensorType, **attrs: Any) -> bool | str:
            answer = lie(*types, **attrs)
            return reads(format, types[weight].dtype) if answer is True else answer

        return holds

    @kernels.implements(linear, when=when(linear, 1, x=-1), name=label("linear", format))
    def _(ctx: Recorder, x: Any, weight: Any) -> None:
        (m, n), count = weight.type.shape, prod(x.type.shape[:-1])
        tile = next((t for t in (1, 2, 4) if t >= count), TILE)
        args = count, n, m, rows(x), weight.stored, weight.row_bytes, ctx.out
        ctx.warps(f"linear_{tile}", -(-count // tile) * m, *args, format=weight.format)

    def shared(pairs: int, experts: int) -> bool:
        """Whether so many rows go to so few experts that it pays to put those of one expert together."""
        return pairs * 2 >= TILE * experts

    def products(ctx: Recorder, x: Rows, share: int, experts: Any, weight: Any, out: DeviceTensor) -> None:
        """Each pair's product with its expert; row p // share of x is pair p's. Pairs without one are left out."""
        (count, m, n), pairs = weight.type.shape, experts.type.size
        tiles = -(-pairs // TILE) + min(count, pairs)
        counts, order, table = (
            typed(ctx.scratch(4 * size), TensorType((size,), "i32")) for size in (count, pairs, 3 * tiles)
        )
        ctx.items("expert_counts", count, pairs, count, experts, counts, *ctx.fault, format=weight.format)
        ctx.items("expert_tiles", count, pairs, count, tiles, experts, counts, order, table, format=weight.format)
        args = share, n, m, x, order, table, weight.stored, weight.row_bytes, out
        ctx.warps("expert_products", tiles * m, tiles, *args, format=weight.format)

    @kernels.implements(expert_linear, when=when(expert_linear, 2, x=-1), name=label("expert_linear", format))
    def _(ctx: Recorder, x: Any, experts: Any, weight: Any) -> None:
        (count, m, n), (tokens, k) = weight.type.shape, experts.type.shape
        if shared(tokens * k, count):
            products(ctx, rows(x), k, experts, weight, ctx.out)
            ctx.flat("expert_none", tokens * k, m, experts, ctx.out, format=weight.format)
            return
        args = tokens * k, k, n, m, count, rows(x), experts, weight.stored, weight.row_bytes, ctx.out
        ctx.warps("expert_linear", tokens * k * m, *args, *ctx.fault, format=weight.format)

    @kernels.implements(
        expert_combine, when=when(expert_combine, 3, h=-1, mix=-1), name=label("expert_combine", format)
    )
    def _(ctx: Recorder, h: Any, experts: Any, mix: Any, weight: Any) -> None:
        (count, n, m), (tokens, k) = weight.type.shape, experts.type.shape
        if shared(tokens * k, count):
            each = typed(ctx.scratch(4 * tokens * k * n), TensorType((tokens, k, n)))
            products(ctx, rows(h), 1, experts, weight, each)
            ctx.flat("expert_sum", tokens, n, k, count, experts, rows(mix), each, ctx.out, format=weight.format)
            return
        args = tokens, k, n, m, count, rows(h), experts, rows(mix), weight.stored, weight.row_bytes, ctx.out
        ctx.warps("expert_combine", tokens * n, *args, *ctx.fault, format=weight.format)

    @kernels.implements(embed, when=when(embed, 0), name=label("embed", format))
    def _(ctx: Recorder, table: Any, ids: Any) -> None:
        vocab, n = table.type.shape
        args = vocab, table.stored, table.row_bytes, ids, ctx.out
        ctx.items("embed", ids.type.size * -(-n // 16), ids.type.size, n, *args, *ctx.fault, format=table.format)
