"""From a recipe to a call: the arrays themselves. The same recipe gives the same bits. Knows ops; knows no backend."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.dtypes import DTYPES
from trueup.core.op import Op
from trueup.core.signature import Param
from trueup.core.types import TensorType

from . import faults
from .adversarial import FILLS, values
from .errors import KitError
from .indices import Making, make
from .recipe import Recipe
from .spaces import find, space
from .weights import weight

Array = NDArray[Any]


@dataclass
class Call:
    """A call of an op on arrays. `args`: per parameter an array, a Weight, a tuple of arrays, or None."""

    recipe: Recipe
    op: Op
    args: dict[str, Any]
    attrs: dict[str, Any]
    written: dict[str, Any] | None = None
    """The states as the call left them, where it was made by `propagate`."""

    def states(self) -> Iterator[tuple[Param, Array]]:
        """Arguments that are states: those that the op writes, and those in pages that it reads."""
        for p in self.op.params:
            if is_state(p) and self.args[p.name] is not None:
                yield p, self.args[p.name]

    def types(self) -> tuple[TensorType, ...]:
        """The results' types."""
        given = [
            tuple(map(TensorType.of, g)) if isinstance(g, tuple) else g if g is None else TensorType.of(g)
            for g in self.args.values()
        ]
        return self.op.signature.infer(given, self.attrs)

    def copy(self) -> Call:
        """With arrays of its own where an op may write."""
        args = dict(self.args)
        for p, a in self.states():
            args[p.name] = a.copy()
        return Call(self.recipe, self.op, args, self.attrs)

    def reference(self) -> tuple[tuple[Array, ...], dict[str, Array]]:
        """Results of the op's body, and its states after."""
        c = self.copy()
        out = c.op(*c.args.values(), **c.attrs)
        results = () if out is None else out if isinstance(out, tuple) else (out,)
        return results, {p.name: a for p, a in c.states() if p.mutates}

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """First and last row of each sequence of the step."""
        cu = self.args["cu_seqlens"]
        return [(int(cu[s]), int(cu[s + 1])) for s in range(len(cu) - 1)]


def is_state(p: Param) -> bool:
    """Whether an argument is a state: written, or read from pages."""
    return p.mutates or (bool(p.axes) and p.axes[0].text == "pages")


def build(r: Recipe) -> Call:
    """The call that a recipe describes; KitError for an op that is none."""
    op = find(r.op)
    sizes = {**r.axes, **r.attrs}
    integers = {k: v for k, v in sizes.items() if type(v) is int}
    made: dict[str, Any] = {}
    for p in op.params:
        if p.name in r.absent:
            made[p.name] = None
            continue
        shape = _shape(p, integers, r.dots)
        if p.variadic:
            made[p.name] = tuple(_one(op, p, shape, r, sizes, made, i) for i in range(r.parts))
        else:
            made[p.name] = _one(op, p, shape, r, sizes, made, 0)
    for name, lay in r.lays.items():
        if lay.startswith("same:"):
            made[name] = made[lay.removeprefix("same:")]
    call = Call(r, op, made, dict(r.attrs))
    if op.name in ("paged_append", "delay"):  # the state is of the rows' type
        state = "cache" if op.name == "paged_append" else "tail"
        made[state] = _cast(made[state], next(iter(made.values())).dtype)
    _poison_unnamed(call)
    return faults.FAULTS[r.fault](call) if r.fault else call


def _shape(p: Param, integers: dict[str, int], dots: tuple[int, ...]) -> tuple[int, ...]:
    out: list[int] = []
    for a in p.axes:
        out += dots if a.dots else (a.value(integers),)
    return tuple(out)


def _one(
    op: Op, p: Param, shape: tuple[int, ...], r: Recipe, sizes: dict[str, Any], made: dict[str, Any], part: int
) -> Any:
    rng = np.random.default_rng([r.seed, zlib.crc32(f"{p.name}.{part}".encode())])
    dtype = r.types.get(p.name, p.dtype if p.dtype in DTYPES else "f32")
    how = r.fills.get(p.name, "normal")
    if dtype in ("i32", "i64") and how not in FILLS:
        found = make(p.name, Making(r, sizes, made, shape, rng, space(op).reads_shared))
        if found is None:
            found = rng.integers(0, 8, size=shape)
        return np.ascontiguousarray(found, DTYPES[dtype].numpy).reshape(shape)
    if how not in FILLS:
        raise KitError(f"{op.name}: there is no filling '{how}' for {p.name}; known are {', '.join(sorted(FILLS))}")
    array = values(how, shape, rng)
    if p.dtype == "weight":
        return weight(p.name, shape, dtype, array, rng)
    return _cast(array, np.dtype(DTYPES[dtype].numpy))


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Numbers as another type; as integers a thousand times them, without NaN and within range."""
    with np.errstate(all="ignore"):
        if dtype.kind == "i" and array.dtype.kind == "f":
            array = np.nan_to_num(array * 1000, posinf=2**30, neginf=-(2**30)).clip(-(2**30), 2**30)
        return array.astype(dtype)


def _poison_unnamed(call: Call) -> None:
    """What a state holds where no sequence of the step may look, in pages of its own too: NaN, or the largest integer."""
    for p, a in call.states():
        named = set()
        for who in ("block_table",) if p.axes[0].text == "pages" else ("slots",):
            named.update(call.args[who].ravel().tolist())
        rest = [i for i in range(len(a)) if i not in named]
        odd: Any = np.nan if a.dtype.kind == "f" else np.iinfo(a.dtype).max
        a[rest] = odd
        if p.axes[0].text == "pages":
            a[~_held(call, a.shape[:2])] = odd


def _held(call: Call, shape: tuple[int, int]) -> Array:
    """Which entries of the pages belong to a sequence, at the end of the step."""
    held, table = np.zeros(shape, bool), call.args["block_table"]
    for s, (a, b) in enumerate(call.sequences):
        e = np.arange((int(call.args["past"][s]) + b - a) // call.attrs.get("every", 1) if a < b else 0)
        held[table[s, e // shape[1]], e % shape[1]] = True
    return held
