"""Fusions: several ops in one launch, with the bits that they have one by one.

Around products with weights: what reads the same rows, and what is done with each product's entries. Beside these a
router, a residual's write and norm, a convolution and its activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from trueup.backends.opencl.executable import Recorder
from trueup.backends.opencl.programs import NATIVE
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import as_weight, first_no, lies, readable_rows, rows, typed, values
from trueup.core.ops import (
    add,
    causal_conv,
    expert_linear,
    gdn_decay,
    group_rms_norm,
    hc_read,
    hc_write,
    linear,
    normalize,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    swiglu,
    top_k,
)
from trueup.core.types import TensorType

from .linear import shared
from .sequences import convolve
from .topk import SHORT

PARTS = 5
"""Products in one launch; `PART` in fused.cl."""
AS_IT_IS, SILU, SIGMOID, DECAY, SWIGLU = range(5)


def stored(weight: Any) -> Any:
    """An argument of a fusion that stands where a weight does."""
    return as_weight(weight)


@dataclass(frozen=True)
class Part:
    """A product and what is done with its entries."""

    weight: Any
    kind: int = AS_IT_IS
    a: float = 0.0
    other: Any = None
    bias: Any = None
    rate: Any = None


def one_format(*weights: TensorType) -> bool | str:
    """Whether one program reads them all."""
    formats = {w.dtype if w.dtype in NATIVE else "f32" for w in weights}
    if len(formats) > 1:
        return f"weights of {', '.join(sorted(formats))}, of which a launch reads one"
    odd = next((w for w in weights if not w.contiguous), None)
    return odd is None or f"the weight {odd} is not contiguous"


def in_rows(*tensors: TensorType) -> bool | str:
    odd = next((t for t in tensors if not readable_rows(t, len(t.shape) - 1)), None)
    return odd is None or f"{odd} does not lie in rows"


def register(kernels: KernelTable, tuning: Tuning) -> None:
    tiles = (1, "row"), (tuning.tile // 2, "some"), (tuning.tile, "rows")

    def tile_of(count: int) -> tuple[int, str]:
        return next(t for t in tiles if t[0] >= count or t is tiles[-1])

    def together(ctx: Recorder, x: Any, *parts: Part) -> None:
        """The products of the rows of x, part i to the i-th result."""
        n, count = x.type.shape[-1], prod(x.type.shape[:-1])
        weights = [stored(p.weight) for p in parts]
        sizes = [w.type.shape[0] for w in weights]
        columns = tuning.columns(n, max(sizes))
        wide = sum(-(-m // columns) for m in sizes)
        given: list[Any] = []
        for p, w, m, out in zip(parts, weights, sizes, ctx.outs, strict=True):
            other = None if p.other is None else stored(p.other).stored
            given += [m, p.kind, float(p.a), w.stored, other]
            given += [None if v is None else values(stored(v)) for v in (p.bias, p.rate)] + [out]
        for _ in range(PARTS - len(parts)):
            given += [0, AS_IT_IS, 0.0, None, None, None, None, None]
        tile, name = tile_of(count)
        groups = -(-count // tile) * wide
        args = count, n, wide, columns, rows(x), weights[0].row_bytes, *given
        ctx.groups(f"parts_{name}", groups, *args, format=weights[0].format)

    def reads(x: TensorType, *weights: TensorType) -> bool | str:
        count = prod(x.shape[:-1])
        few = count <= tuning.tile or f"{count} rows: from {tuning.tile} on a launch costs little beside its work"
        return first_no(few, in_rows(x), one_format(*weights))

    # -- products of the same rows; where two patterns fit, the larger is tried first --------------------------------------

    @kernels.fuses(
        lambda x, a, b, alpha, bias, rate, beta: (
            linear(x, a), linear(x, b), gdn_decay(linear(x, alpha), bias, rate), sigmoid(linear(x, beta))
        ),
        when=lambda x, a, b, alpha, bias, rate, beta: reads(x, a, b, alpha, beta),
    )  # fmt: skip
    def delta_inputs(ctx: Recorder, x: Any, a: Any, b: Any, alpha: Any, bias: Any, rate: Any, beta: Any) -> None:
        together(ctx, x, Part(a), Part(b), Part(alpha, DECAY, bias=bias, rate=rate), Part(beta, SIGMOID))

    @kernels.fuses(
        lambda x, a, b, c, d, e: (linear(x, a), linear(x, b), linear(x, c), linear(x, d), linear(x, e)), when=reads
    )
    def five_linears(ctx: Recorder, x: Any, *weights: Any) -> None:
        together(ctx, x, *map(Part, weights))

    @kernels.fuses(lambda x, down, b, *, scale: (silu(linear(x, down), scale=scale), linear(x, b)),
                   when=lambda x, down, b, *, scale: reads(x, down, b))  # fmt: skip
    def silu_linear_and_linear(ctx: Recorder, x: Any, down: Any, b: Any, *, scale: float) -> None:
        together(ctx, x, Part(down, SILU, scale), Part(b))

    @kernels.fuses(lambda x, a, b: (linear(x, a), sigmoid(linear(x, b))), when=reads)
    def linear_and_sigmoid_linear(ctx: Recorder, x: Any, a: Any, b: Any) -> None:
        together(ctx, x, Part(a), Part(b, SIGMOID))

    @kernels.fuses(lambda x, gate, up, *, limit: swiglu(linear(x, gate), linear(x, up), limit=limit),
                   when=lambda x, gate, up, *, limit: reads(x, gate, up))  # fmt: skip
    def swiglu_linears(ctx: Recorder, x: Any, gate: Any, up: Any, *, limit: float) -> None:
        together(ctx, x, Part(gate, SWIGLU, limit, up))

    @kernels.fuses(lambda x, w, *, scale: silu(linear(x, w), scale=scale), when=lambda x, w, *, scale: reads(x, w))
    def silu_linear(ctx: Recorder, x: Any, w: Any, *, scale: float) -> None:
        together(ctx, x, Part(w, SILU, scale))

    @kernels.fuses(lambda x, w: sigmoid(linear(x, w)), when=reads)
    def sigmoid_linear(ctx: Recorder, x: Any, w: Any) -> None:
        together(ctx, x, Part(w, SIGMOID))

    @kernels.fuses(lambda x, a, b: (linear(x, a), linear(x, b)), when=reads)
    def two_linears(ctx: Recorder, x: Any, a: Any, b: Any) -> None:
        together(ctx, x, Part(a), Part(b))

    # -- streams -------------------------------------------------------------------------------------------------------

    @kernels.fuses(
        lambda normed, low, up: hc_read(normed, linear(low, up)),
        when=lambda normed, low, up: first_no(in_rows(normed), reads(low, up)),
    )
    def read_streams(ctx: Recorder, normed: Any, low: Any, up: Any) -> None:
        (count, streams, n), width, weight = normed.type.shape, low.type.shape[-1], stored(up)
        columns = tuning.columns(width * max(streams, 1), n)
        wide, (tile, name) = -(-n // columns), tile_of(count)
        args = (
            count,
            width,
            wide,
            columns,
            rows(low),
            weight.stored,
            weight.row_bytes,
            n,
            streams,
            rows(normed),
            ctx.out,
        )
        ctx.groups(f"read_{name}", -(-count // tile) * wide, *args, format=weight.format)

    def write_and_norm(residual: Any, y: Any, inject: Any, weight: Any, *, eps: Any) -> Any:
        written = hc_write(residual, y, inject)
        return written, group_rms_norm(written, weight, eps=eps)

    @kernels.fuses(
        write_and_norm,
        when=lambda residual, y, inject, weight, *, eps: first_no(
            in_rows(residual, y, inject), eps >= 0 or f"eps is {eps}, below 0"
        ),
    )
    def write_streams_and_norm(ctx: Recorder, residual: Any, y: Any, inject: Any, weight: Any, *, eps: float) -> None:
        (count, streams, n), w = residual.type.shape, values(stored(weight))
        if n:
            args = streams, rows(residual), rows(y), rows(inject), w, 1 / n, sqrt(eps), *ctx.outs
            ctx.groups("write_norm", count * streams, count * streams, n, *args)

    # -- experts -------------------------------------------------------------------------------------------------------

    def likeliest(scores: Any, *, k: Any, floor: Any) -> Any:
        chances, chosen = top_k(softmax(scores), k=k)
        return normalize(chances, floor=floor), chosen

    @kernels.fuses(
        likeliest,
        when=lambda scores, *, k, floor: first_no(
            in_rows(scores), len(scores.shape) == 2 or f"scores of {len(scores.shape)} axes",
            0 < k <= scores.shape[-1] <= SHORT or f"{k} of {scores.shape[-1]} candidates, of which {SHORT} are short",
        ),
    )  # fmt: skip
    def route(ctx: Recorder, scores: Any, *, k: int, floor: float) -> None:
        (count, n), f32 = scores.type.shape, TensorType
        chances = typed(ctx.scratch(4 * count * n), f32((count, n)))
        best = typed(ctx.scratch(4 * count * k), f32((count, k)))
        ctx.groups("route", count, count, n, k, rows(scores), chances, best, float(floor), *ctx.outs)

    @kernels.fuses(
        lambda x, experts, gate, up, *, limit: swiglu(
            expert_linear(x, experts, gate), expert_linear(x, experts, up), limit=limit
        ),
        when=lambda x, experts, gate, up, *, limit: first_no(
            in_rows(x), experts.contiguous or f"experts is {experts}, which is not contiguous", one_format(gate, up),
            not shared(tuning, experts.size, gate.shape[0]) or "so many rows go to an expert that they share its reading",
        ),
    )  # fmt: skip
    def swiglu_experts(ctx: Recorder, x: Any, experts: Any, gate: Any, up: Any, *, limit: float) -> None:
        g, u, (tokens, k) = stored(gate), stored(up), experts.type.shape
        count, m, n = g.type.shape
        columns = tuning.columns(2 * n, m)
        args = (
            tokens * k,
            k,
            n,
            m,
            count,
            columns,
            rows(x),
            experts,
            g.stored,
            u.stored,
            g.row_bytes,
            float(limit),
            ctx.out,
        )
        ctx.groups("expert_swiglu", tokens * k * -(-m // columns), *args, *ctx.fault, format=g.format)

    @kernels.fuses(lambda a, x, scale: add(a, scale_rows(x, scale)), when=lambda a, x, scale: in_rows(a, x, scale))
    def add_scaled(ctx: Recorder, a: Any, x: Any, scale: Any) -> None:
        ctx.flat("add_scaled", *x.type.shape, rows(a), rows(x), rows(scale), ctx.out)

    # -- convolution ---------------------------------------------------------------------------------------------------

    lie = lies(causal_conv, x=1, tail=2)

    @kernels.fuses(
        lambda x, weight, cu, slots, tail, keep, *, dilation, scale: silu(
            causal_conv(x, weight, cu, slots, tail, keep, dilation=dilation), scale=scale
        ),
        when=lambda *types, dilation, scale: lie(*types),
    )
    def silu_conv(
        ctx: Recorder, x: Any, weight: Any, cu: Any, slots: Any, tail: Any, keep: Any, *, dilation: int, scale: float
    ) -> None:
        w = stored(weight)
        convolve(ctx, x, w, cu, slots, tail, keep, w.type.shape[1], dilation, scale)
