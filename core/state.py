"""Declarations of state: what a graph keeps between steps. Says shapes and start values; holds nothing."""

from __future__ import annotations

from dataclasses import dataclass

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

    def storage(self, capacity: Capacity) -> TensorType:
        return TensorType((capacity.slots, *self.width), self.dtype)


StateKind = PerToken | PerSequence
