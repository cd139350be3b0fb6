"""Declarations of state: what a graph keeps between steps. Says shapes and start values; holds nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .dtypes import DTYPES
from .types import TensorType


@dataclass(frozen=True)
class Capacity:
    """What an engine allocates once: `slots` rows of per-sequence state, `pages` pages of `page` tokens."""

    slots: int
    pages: int
    page: int

    def __post_init__(self) -> None:
        for name in ("slots", "pages", "page"):
            n = getattr(self, name)
            if type(n) is not int or n < 1:
                raise ValueError(f"capacity: {name} must be a positive integer, got {n!r}")


@dataclass(frozen=True)
class PerToken:
    """An entry of shape `width` for every `every` tokens, in pages that sequences share until one of them writes.

    In an op it is `[pages, entries, *width]` with `block_table[seqs, blocks]` naming the pages of each sequence in
    order. The entry of tokens `i*every … (i+1)*every - 1` is written at the row of the last of them.
    """

    width: tuple[int, ...]
    every: int = 1
    dtype: str = "f32"

    def __post_init__(self) -> None:
        _check(self.width, self.dtype, 0)
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"a state has an entry for every 1 or more tokens, got every={self.every!r}")

    def storage(self, capacity: Capacity) -> TensorType:
        if capacity.page % self.every:
            raise ValueError(
                f"a page of {capacity.page} tokens is not a whole number of entries of {self.every} tokens"
            )
        return TensorType((capacity.pages, capacity.page // self.every, *self.width), self.dtype)


@dataclass(frozen=True)
class PerSequence:
    """A row of shape `width` for every sequence, in a slot table; a new sequence starts from `fill`.

    In an op it is `[slot, *width]` with `slots[seqs]` naming each sequence's row. A checkpoint is a slot too.
    """

    width: tuple[int, ...]
    dtype: str = "f32"
    fill: float = 0

    def __post_init__(self) -> None:
        _check(self.width, self.dtype, self.fill)

    def storage(self, capacity: Capacity) -> TensorType:
        return TensorType((capacity.slots, *self.width), self.dtype)


def _check(width: tuple[int, ...], dtype: str, fill: float) -> None:
    """ValueError where a state can't be stored so: it is read and written element by element, by NumPy too."""
    if not isinstance(width, tuple):
        raise ValueError(f"the width of a state is a tuple of sizes, got {width!r}")
    TensorType(width, dtype)
    if DTYPES[dtype].numpy is None:
        raise ValueError(f"a state can't be of {dtype}, which has no NumPy type")
    element = np.dtype(DTYPES[dtype].numpy)
    limits = np.iinfo(element) if element.kind in "iu" else None
    if limits and not (float(fill).is_integer() and limits.min <= fill <= limits.max):
        raise ValueError(f"a state of {dtype} can't start from {fill!r}")


StateKind = PerToken | PerSequence
