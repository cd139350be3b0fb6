"""The table of the CPU backend: which native function runs which op, and the NumPy bodies that stand in for the rest.

A kernel gets arrays and `CpuWeight`s and writes into `ctx.outs`. Conditions say what a native function can't read.
"""

from __future__ import annotations

from typing import Any

from trueup.core.backend import Context, KernelTable
from trueup.core.op import OPS
from trueup.core.ops import (
    attention,
    expert_combine,
    expert_linear,
    gated_delta_rule,
    index_scores,
    linear,
    top_k,
)
from trueup.core.types import TensorType

from . import _native as native

kernels = KernelTable()


def stored(weight: TensorType) -> bool | str:
    """Whether native functions read weights of this type."""
    return weight.dtype in native.DTYPES or f"no native kernel reads {weight.dtype}"


def contiguous(*types: TensorType | None) -> bool | str:
    """Whether these lie row by row."""
    strided = [t for t in types if t is not None and not t.contiguous]
    return not strided or f"{strided[0]} is not contiguous"


def packed_rows(t: TensorType) -> bool | str:
    """Whether entries of the last axis lie side by side, which is all that native functions ask of strides."""
    return t.strides is None or t.shape[-1] <= 1 or t.strides[-1] == 1 or f"the last axis of {t} is strided"


def _linear(x: TensorType, weight: TensorType) -> bool | str:
    reads = stored(weight)
    if reads is not True:
        return reads
    return packed_rows(x) if len(x.shape) == 2 else contiguous(x)


@kernels.implements(linear, when=_linear)
def _(ctx: Context, x: Any, weight: Any) -> None:
    out = ctx.out
    native.linear(out.reshape(_rows(out), out.shape[-1]), x.reshape(_rows(x), x.shape[-1]), weight.data, weight.dtype)


@kernels.implements(expert_linear, when=lambda x, experts, weight: stored(weight))
def _(ctx: Context, x: Any, experts: Any, weight: Any) -> None:
    native.expert_linear(ctx.out, x, experts, weight.data, weight.dtype)


@kernels.implements(expert_combine, when=lambda h, experts, mix, weight: stored(weight))
def _(ctx: Context, h: Any, experts: Any, mix: Any, weight: Any) -> None:
    native.expert_combine(ctx.out, h, experts, mix, weight.data, weight.dtype)


@kernels.implements(attention)
def _(ctx: Context, *args: Any, **attrs: Any) -> None:
    native.attention(*ctx.outs, *args, **attrs)


@kernels.implements(index_scores)
def _(ctx: Context, *args: Any, **attrs: Any) -> None:
    native.index_scores(ctx.out, *args, **attrs)


@kernels.implements(gated_delta_rule)
def _(ctx: Context, *args: Any, **attrs: Any) -> None:
    native.gated_delta_rule(ctx.out, *args, **attrs)


@kernels.implements(top_k)
def _(ctx: Context, scores: Any, *, k: int) -> None:
    native.top_k(*ctx.outs, scores, k)


def _rows(array: Any) -> int:
    """Number of rows: the product of the leading axes, also where there are no columns."""
    n = 1
    for size in array.shape[:-1]:
        n *= size
    return n


for _op in OPS.values():
    if not _op.view:
        kernels.body(_op)
