"""Arrays of strings as they lie in a file, decoded where they are read. Knows bytes and offsets, no keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np


class StringArray(Sequence[str]):
    """A read-only list of str over its bytes; a vocabulary of 248,320 costs its bytes and eight more a string.

    `raw` holds, for each string, eight zero bytes (where its length stood) and its UTF-8; `ends[i]` is where string i
    ends. Zero bytes end any unfinished character, so that one decoding of `raw` judges every string by itself:
    UnicodeDecodeError, with `start` a position in `raw`, where one is invalid.
    """

    __slots__ = ("_ends", "_raw")

    def __init__(self, raw: bytes, ends: array[int]) -> None:
        raw.decode()
        self._raw, self._ends = raw, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self._ends))[index]
        return self._raw[(self._ends[i - 1] if i else 0) + 8 : self._ends[i]].decode()

    def __iter__(self) -> Iterator[str]:
        raw, start = self._raw, 8
        for end in self._ends:
            yield raw[start:end].decode()
            start = end + 8

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self._raw == other._raw and self._ends == other._ends
        return NotImplemented if not isinstance(other, list | tuple) else list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        more = ", …" if len(self) > 4 else ""
        return f"StringArray({len(self)}: [{', '.join(map(repr, self[:4]))}{more}])"


def blank_lengths(raw: np.ndarray, ends: array[int]) -> None:
    """Zero the eight bytes before each string of `raw` (uint8, changed in place)."""
    at = np.zeros(len(ends), np.int64)
    at[1:] = np.frombuffer(ends, np.int64)[:-1]
    for k in range(8):
        raw[at + k] = 0
