"""The same rows in other company: a call cut, permuted, padded or split, whose results follow from the first call's.

What holds for a backend that claims to be batch-invariant: a row's bits depend neither on the other rows, nor on their
number, nor on padding, nor on how a sequence is split into steps. Knows ops; runs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.signature import Param
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .build import Call, build, is_state
from .spaces import attribute_choices, change, legal

Array = NDArray[Any]

NO_SPLIT = frozenset({"chunk_delta_scan", "chunk_wy"})
"""Ops whose bits may depend on where a step begins, as their docstrings say."""


def row_axis(call: Call) -> str:
    """The name of the axis along which results are made row by row ("..." for its first axis), or ""."""
    op = call.op
    if op.view or not op.results or not op.results[0].axes or "cu_seqlens" in call.args:
        return ""
    first = op.results[0].axes[0].text
    if first == "...":
        return first if call.recipe.dots else ""
    return first if first in ("rows", "tokens", "outs") else ""


def _leads(p: Param, axis: str) -> bool:
    return bool(p.axes) and p.axes[0].text == axis


def _take(call: Call, axis: str, pick: Any) -> dict[str, Any]:
    """Arguments with `pick` applied to each that has the axis first."""
    args = dict(call.args)
    for p in call.op.params:
        a = args[p.name]
        if a is None or isinstance(a, Weight) or not _leads(p, axis):
            continue
        args[p.name] = tuple(map(pick, a)) if isinstance(a, tuple) else pick(a)
    return args


def rows(call: Call, index: Array) -> Call:
    """The call with rows picked by index along its row axis."""
    return Call(call.recipe, call.op, _take(call, row_axis(call), lambda a: np.ascontiguousarray(a[index])), call.attrs)


def sibling(call: Call) -> Call:
    """Other weights and values, and where there is one that changes no shape, another attribute."""
    recipe = call.recipe.but(seed=call.recipe.seed + 2_000_003)
    for name in call.op.attributes:
        for value in attribute_choices(call.op, name):
            if value == recipe.attrs[name]:
                continue
            other = legal(change(recipe, attrs={name: value}))
            if dict(other.axes) == dict(recipe.axes) and _shapes(made := build(other)) == _shapes(call):
                return made
    return build(recipe)


def _shapes(call: Call) -> list[str]:
    return [str(TensorType.of(a)) for a in call.args.values() if a is not None and not isinstance(a, tuple)]


def alone(call: Call, s: int) -> Call:
    """One sequence of the step by itself."""
    a, b = call.sequences[s]
    args = _take(call, "tokens", lambda x: x[a:b].copy())
    args.update(_seqs(call, lambda x: x[s : s + 1].copy()))
    args["cu_seqlens"] = np.array([0, b - a], np.int32)
    return _whole(Call(call.recipe, call.op, args, call.attrs))


def part(call: Call, first: int, last: int) -> Call:
    """Rows first:last of a call of one sequence, as a step of its own; `past` moves on."""
    args = _take(call, "tokens", lambda x: x[first:last].copy())
    args["cu_seqlens"] = np.array([0, last - first], np.int32)
    if "past" in args:
        args["past"] = args["past"] + np.int32(first)
    return _whole(Call(call.recipe, call.op, args, call.attrs))


def padded(call: Call, extra: int) -> Call:
    """With rows of padding (NaN, or -1) at the end, and a place without a sequence."""

    def more(x: Array) -> Array:
        odd: Any = np.nan if x.dtype.kind == "f" else -1
        return np.concatenate([x, np.full((extra, *x.shape[1:]), odd, x.dtype)])

    args = _take(call, "tokens", more)
    cu = call.args["cu_seqlens"]
    args["cu_seqlens"] = np.concatenate([cu, cu[-1:]])
    fill = {"past": 0}
    for p in call.op.params:
        if p.axes and p.axes[0].text == "seqs":
            x = call.args[p.name]
            args[p.name] = np.concatenate([x, np.full((1, *x.shape[1:]), fill.get(p.name, -1), x.dtype)])
    return _whole(Call(call.recipe, call.op, args, call.attrs))


def _seqs(call: Call, pick: Any) -> dict[str, Any]:
    return {p.name: pick(call.args[p.name]) for p in call.op.params if p.axes and p.axes[0].text == "seqs"}


def _whole(call: Call) -> Call:
    """With states of its own."""
    for p in call.op.params:
        if is_state(p) and call.args[p.name] is not None:
            call.args[p.name] = call.args[p.name].copy()
    return call
