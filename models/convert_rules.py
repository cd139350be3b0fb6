"""The words in which an architecture's conversion table is written: rules from checkpoint tensors to GGUF tensors.

It knows shapes by axis names and arrays as float32. It reads no file, and knows no architecture and no storage type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Dims = Mapping[str, int]
Transform = Callable[..., tuple[Array, ...]]


class ConvertError(ValueError):
    """A checkpoint that can't be converted: says what was found, what was expected, and where."""


@dataclass(frozen=True)
class Named:
    """A tensor in a rule: its name below the scope's prefix, and its axes, outermost first.

    `parts` names the count of tensors `name.format(0) …` that are one tensor cut along its first axis, or is empty.
    """

    name: str
    axes: tuple[str, ...]
    parts: str = ""

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The axes in numbers; -1 stands for `...`, an axis of any size."""
        return tuple(-1 if a == "..." else _size(a, dims) for a in self.axes)


@dataclass(frozen=True)
class Rule:
    """Sources to targets. `transform(dims, *sources)` gives the targets; without one, the source is the target."""

    sources: tuple[Named, ...]
    targets: tuple[Named, ...]
    transform: Transform | None = None


def rule(text: str, transform: Transform | None = None) -> Rule:
    """A rule from its text: `"a.weight[out, in] -> b.weight[out, in]"`.

    Axes are names, numbers, `*` and `+` of them, or `...` for a size that is found in the file. `*part_{}[n: ..., row]`
    is a tensor cut along its first axis into the parts `part_0`, `part_1`, … of which there are `n`.
    """
    left, right = text.split(" -> ")
    return Rule(_parse(left), _parse(right), transform)


@dataclass(frozen=True)
class Constant:
    """A checkpoint's integers that become the metadata key `key` and no tensor."""

    source: Named
    key: str

    @classmethod
    def of(cls, text: str) -> Constant:
        """From its text: `"buffer[n] -> some.key"`."""
        left, key = text.split(" -> ")
        return cls(_parse(left)[0], key)


@dataclass(frozen=True)
class Scope:
    """Where rules apply: a prefix of the checkpoint's names, and a prefix of the GGUF's."""

    source: str
    target: str
    rules: tuple[Rule, ...]
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True)
class Key:
    """A metadata entry below the architecture's prefix. `kind` is GGUF's type: `u32`, `f32`, `i32[]`, `u64[]`, …"""

    name: str
    kind: str
    value: Any


Mtp = bool | Literal["only"]
"""Whether the multi-token-prediction block is converted too, or alone."""


@dataclass(frozen=True)
class Plan:
    """What one checkpoint's configuration asks for: sizes by axis name, keys, and which rules apply where.

    `left_out` are prefixes of tensors that are known and on purpose not converted, with the reason. `check` gets the
    constants by key and the target shapes by name, and raises where they contradict each other.
    """

    dims: dict[str, int]
    keys: list[Key]
    scopes: list[Scope]
    vocab_size: int
    left_out: dict[str, str] = field(default_factory=dict)
    check: Callable[[Mapping[str, list[int]], Mapping[str, tuple[int, ...]]], None] = lambda constants, shapes: None


Drawn = NDArray[np.float32]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Drawn]


@dataclass(frozen=True)
class Proportions:
    """For files with random weights: configurations by name, the keys of those settings that commands name by themselves,
    settings beyond those of the presets, and by pattern of a GGUF name how its values are drawn (else as a matrix that
    keeps the size of what it multiplies)."""

    presets: Mapping[str, Mapping[str, Any]]
    draws: tuple[tuple[str, Draw], ...]
    layers: str
    experts: str
    vocab: str
    context: str
    more: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Conversion:
    """An architecture's conversion: its GGUF name, the `model_type`s it takes, and the table behind `plan`.

    `canonical` maps a checkpoint's tensor name to the one that the rules use. `f32` are regular expressions of GGUF
    names that are stored as float32 in every file type, as every tensor of one axis is.
    """

    architecture: str
    model_types: frozenset[str]
    f32: tuple[str, ...]
    canonical: Callable[[str], str]
    plan: Callable[[Mapping[str, Any], Mtp], Plan]
    proportions: Proportions | None = None


def one_plus(dims: Dims, gamma: Array) -> tuple[Array, ...]:
    """A zero-centred norm weight as the final multiplier."""
    return (np.float32(1) + gamma,)


def minus_exp(dims: Dims, log: Array) -> tuple[Array, ...]:
    """-exp(x), computed in float64 and rounded once."""
    return ((-np.exp(log.astype(np.float64))).astype(np.float32),)


def squeeze_middle(dims: Dims, x: Array) -> tuple[Array, ...]:
    """A depthwise convolution's [channels, 1, taps] as [channels, taps]."""
    return (x[:, 0, :],)


def side_by_side(dims: Dims, *parts: Array) -> tuple[Array, ...]:
    """Matrices that act on consecutive pieces of one input, as one matrix: joined along the input axis."""
    return (np.concatenate(parts, axis=-1),)


def _parse(text: str) -> tuple[Named, ...]:
    found = []
    for star, name, inner in re.findall(r"(\*?)([\w.{}]+)\[([^\]]*)\]", text):
        parts, _, axes = inner.rpartition(":")
        if bool(star) != bool(parts):
            raise ValueError(f"rule {text!r}: a star and a count of parts go together")
        found.append(Named(name, tuple(a.strip() for a in axes.split(",")), parts.strip()))
    if not found:
        raise ValueError(f"rule {text!r} names no tensor")
    return tuple(found)


def _size(axis: str, dims: Dims) -> int:
    return sum(prod(int(f) if f.isdecimal() else dims[f] for f in term.split("*")) for term in axis.split("+"))
