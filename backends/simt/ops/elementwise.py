"""Elementwise ops, norms, softmax and hyper-connections."""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

from trueup.backends.simt.executable import Recorder
from trueup.backends.simt.tuning import Tuning, row_threads
from trueup.core.backend import KernelTable
from trueup.core.backend.recorded import DeviceTensor, first_no, lies, rows, values
from trueup.core.op import Op
from trueup.core.ops import (
    add,
    clamp,
    gated_rms_norm,
    gdn_decay,
    group_rms_norm,
    hc_read,
    hc_write,
    l2_norm,
    mul,
    normalize,
    ple_gate,
    rms_norm,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    softplus,
    swiglu,
)


def shape_of(*tensors: DeviceTensor) -> tuple[int, int]:
    """Rows and their length, for an elementwise kernel: one long row where nothing is strided."""
    type = tensors[0].type
    if all(t.type.contiguous for t in tensors):
        return 1, type.size
    return prod(type.shape[:-1]), type.shape[-1]


def spread(tensor: DeviceTensor, count: int) -> Any:
    """The tensor as `count` rows; the whole as one where that is all there are."""
    return rows(tensor, 0) if count == 1 and tensor.type.contiguous else rows(tensor)


def register(kernels: KernelTable, tuning: Tuning) -> None:
    def unary(op: Op, kernel: str, numbers: Any) -> None:
        @kernels.implements(op, when=lies(op, x=-1))
        def _(ctx: Recorder, x: Any, **attrs: float) -> None:
            count, n = shape_of(x)
            ctx.flat(kernel, count, n, spread(x, count), ctx.out, *map(float, numbers(**attrs)))

    def binary(op: Op, kernel: str, first: str, second: str, numbers: Any) -> None:
        @kernels.implements(op, when=lies(op, **{first: -1, second: -1}))
        def _(ctx: Recorder, a: Any, b: Any, **attrs: float) -> None:
            count, n = shape_of(a, b)
            ctx.flat(kernel, count, n, spread(a, count), spread(b, count), ctx.out, *map(float, numbers(**attrs)))

    unary(sigmoid, "sigmoid", lambda: (0, 0))
    unary(silu, "silu", lambda scale: (scale, 0))
    unary(softplus, "softplus", lambda: (0, 0))
    unary(clamp, "clamp_between", lambda low, high: (low, high))
    binary(add, "add", "a", "b", lambda: (0, 0))
    binary(mul, "multiply", "a", "b", lambda: (0, 0))
    binary(swiglu, "swiglu", "gate", "up", lambda limit: (-limit, limit))

    @kernels.implements(scale_rows, when=lies(scale_rows, x=-1, scale=-1))
    def _(ctx: Recorder, x: Any, scale: Any) -> None:
        ctx.flat("scale_rows", *x.type.shape, rows(x), rows(scale), ctx.out)

    @kernels.implements(gdn_decay, when=lies(gdn_decay, a=-1))
    def _(ctx: Recorder, a: Any, bias: Any, rate: Any) -> None:
        ctx.flat("gdn_decay", *a.type.shape, rows(a), values(bias), values(rate), ctx.out)

    @kernels.implements(hc_read, when=lies(hc_read, normed=-1, gate=-1))
    def _(ctx: Recorder, normed: Any, gate: Any) -> None:
        count, streams, n = normed.type.shape
        ctx.flat("hc_read", count, n, streams, rows(normed), rows(gate), ctx.out)

    @kernels.implements(hc_write, when=lies(hc_write, residual=-1, y=-1, inject=-1))
    def _(ctx: Recorder, residual: Any, y: Any, inject: Any) -> None:
        count, streams, n = residual.type.shape
        ctx.flat("hc_write", count * streams, n, streams, rows(residual), rows(y), rows(inject), ctx.out)

    def norm(
        ctx: Recorder, x: Any, weight: Any, groups: int, eps: float, *, mean: bool, gate: Any = None, kind: int = 0
    ) -> None:
        count, n = prod(x.type.shape[:-1]), x.type.shape[-1]
        if n:
            share = 1 / n if mean else 1.0
            args = rows(x), values(weight), rows(x if gate is None else gate), kind, ctx.out, share, sqrt(eps)
            ctx.blocks("norm_rows", count, count, n, groups, *args, threads=row_threads(n))

    def positive(op: Op, **layouts: int) -> Any:
        lie = lies(op, **layouts)
        return lambda *types, eps: first_no(eps >= 0 or f"eps is {eps}, below 0", lie(*types))

    @kernels.implements(rms_norm, when=positive(rms_norm, x=-1))
    def _(ctx: Recorder, x: Any, weight: Any = None, *, eps: float) -> None:
        norm(ctx, x, weight, 1, eps, mean=True)

    @kernels.implements(group_rms_norm, when=positive(group_rms_norm, x=-1))
    def _(ctx: Recorder, x: Any, weight: Any, *, eps: float) -> None:
        norm(ctx, x, weight, x.type.shape[1], eps, mean=True)

    @kernels.implements(l2_norm, when=positive(l2_norm, x=-1))
    def _(ctx: Recorder, x: Any, *, eps: float) -> None:
        norm(ctx, x, None, 1, eps, mean=False)

    gated = positive(gated_rms_norm, x=-1, gate=-1)

    @kernels.implements(
        gated_rms_norm,
        when=lambda *types, activation, eps: first_no(
            activation in ("sigmoid", "silu") or f"activation is {activation!r}, neither 'sigmoid' nor 'silu'",
            gated(*types, eps=eps),
        ),
    )
    def _(ctx: Recorder, x: Any, gate: Any, weight: Any, *, eps: float, activation: str) -> None:
        norm(ctx, x, weight, 1, eps, mean=True, gate=gate, kind=1 if activation == "sigmoid" else 2)

    @kernels.implements(softmax, when=lies(softmax, x=-1))
    def _(ctx: Recorder, x: Any) -> None:
        count = prod(x.type.shape[:-1])
        if x.type.shape[-1]:
            ctx.blocks(
                "softmax", count, count, x.type.shape[-1], rows(x), ctx.out, threads=row_threads(x.type.shape[-1])
            )

    @kernels.implements(normalize, when=lies(normalize, x=-1))
    def _(ctx: Recorder, x: Any, *, floor: float) -> None:
        count, n = prod(x.type.shape[:-1]), x.type.shape[-1]
        if n:
            ctx.blocks("normalize_rows", count, count, n, rows(x), ctx.out, floor, threads=row_threads(n))

    @kernels.implements(ple_gate, when=lies(ple_gate, key=-1, query=-1, value=-1))
    def _(ctx: Recorder, key: Any, query: Any, value: Any) -> None:
        count, streams, n = key.type.shape
        if n:
            args = rows(key), rows(query), rows(value), ctx.out, sqrt(n)
            ctx.blocks("ple_gate", count * streams, count * streams, n, streams, *args, threads=row_threads(n))
