"""The table of the CPU backend: which native function runs which op, and the NumPy bodies that stand in for the rest.

A kernel gets arrays and `CpuWeight`s and writes into `ctx.outs`. Conditions say what a native function can't read.
"""

from __future__ import annotations

from typing import Any

from trueup.core.backend import Context, KernelTable
from trueup.core.backend.recorded import first_no
from trueup.core.op import OPS, Op
from trueup.core.ops import (
    add,
    argmax,
    attention,
    causal_conv,
    clamp,
    concat,
    contiguous,
    delay,
    embed,
    expert_combine,
    expert_linear,
    gated_delta_rule,
    gated_rms_norm,
    gdn_decay,
    group_rms_norm,
    hc_read,
    hc_write,
    index_scores,
    l2_norm,
    linear,
    mul,
    ngram_rows,
    normalize,
    paged_append,
    ple_gate,
    repeat_streams,
    rms_norm,
    rope,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    softplus,
    swiglu,
    take_rows,
    top_k,
    trailing_mean,
)
from trueup.core.types import TensorType

from . import _native as native

MOST_AXES = 9
"""Axes of an array whose rows native functions count through."""

kernels = KernelTable()


def stored(weight: TensorType) -> bool | str:
    """Whether native functions read weights of this type."""
    return weight.dtype in native.DTYPES or f"no native kernel reads {weight.dtype}"


def row_major(*types: TensorType | None) -> bool | str:
    """Whether these lie row by row."""
    strided = [t for t in types if t is not None and not t.contiguous]
    return not strided or f"{strided[0]} is not contiguous"


def packed_rows(t: TensorType) -> bool | str:
    """Whether entries of the last axis lie side by side, which is all that native functions ask of strides."""
    return t.strides is None or t.shape[-1] <= 1 or t.strides[-1] == 1 or f"the last axis of {t} is strided"


def rounds(ctx: Context) -> bool:
    """Whether products may round their activations to int8."""
    return bool(getattr(ctx.target, "rounds", False))


def _linear(x: TensorType, weight: TensorType) -> bool | str:
    reads = stored(weight)
    if reads is not True:
        return reads
    return packed_rows(x) if len(x.shape) == 2 else row_major(x)


@kernels.implements(linear, when=_linear)
def _(ctx: Context, x: Any, weight: Any) -> None:
    out = ctx.out
    rows = x.reshape(_rows(x), x.shape[-1])
    native.linear(out.reshape(_rows(out), out.shape[-1]), rows, weight.data, weight.dtype, rounds(ctx))


@kernels.implements(expert_linear, when=lambda x, experts, weight: stored(weight))
def _(ctx: Context, x: Any, experts: Any, weight: Any) -> None:
    native.expert_linear(ctx.out, x, experts, weight.data, weight.dtype, rounds(ctx))


@kernels.implements(expert_combine, when=lambda h, experts, mix, weight: stored(weight))
def _(ctx: Context, h: Any, experts: Any, mix: Any, weight: Any) -> None:
    native.expert_combine(ctx.out, h, experts, mix, weight.data, weight.dtype, rounds(ctx))


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


@kernels.implements(embed, when=lambda table, ids: first_no(stored(table), row_major(ids)))
def _(ctx: Context, table: Any, ids: Any) -> None:
    native.embed(ctx.out.reshape(ids.size, ctx.out.shape[-1]), table.data, table.dtype, ids.reshape(-1))


def whole(op: Op, when: Any = None) -> None:
    """Register a native function that takes the op's results and arguments as they are, of any type."""
    function = getattr(native, op.name)

    def run(ctx: Context, *args: Any, **attrs: Any) -> None:
        function(*ctx.outs, *args, **attrs)

    kernels.implements(op, when=when, name=op.name)(run)


whole(argmax, lambda scores: packed_rows(scores))
whole(concat)
whole(contiguous)
whole(delay)
whole(ngram_rows, lambda *types, eos: first_no(row_major(*types[:6]), packed_rows(types[6]), row_major(types[7])))
whole(paged_append)
whole(repeat_streams)
whole(take_rows)


def row_by_row(*types: TensorType | None, **attrs: Any) -> bool | str:
    """Whether native functions can walk all of these by rows."""
    for t in types:
        if t is None:
            continue
        if not 1 <= len(t.shape) <= MOST_AXES:
            return f"{t} has {len(t.shape)} axes, expected 1 to {MOST_AXES}"
        packed = packed_rows(t)
        if packed is not True:
            return packed
    return True


def direct(op: Op, function: Any) -> None:
    """Register a native function that takes the op's arguments as they are, weights as float32 values."""
    weights = [i for i, p in enumerate(op.params) if p.dtype == "weight"]

    def run(ctx: Context, *args: Any, **attrs: Any) -> None:
        if weights:
            given = list(args)
            for i in weights:
                given[i] = None if args[i] is None else args[i].values
            args = tuple(given)
        function(ctx.out, *args, **attrs)

    kernels.implements(op, when=row_by_row, name=op.name)(run)


for _op in (
    add,
    causal_conv,
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
    rope,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    softplus,
    swiglu,
    trailing_mean,
):
    direct(_op, getattr(native, _op.name))


def _rows(array: Any) -> int:
    """Number of rows: the product of the leading axes, also where there are no columns."""
    n = 1
    for size in array.shape[:-1]:
        n *= size
    return n


for _op in OPS.values():
    if not _op.view:
        kernels.body(_op)
