"""A table of which a step reads a few rows: the system is told to read just those, all at once, before they are touched.

Without advice each row of a large memory-mapped table faults by itself, and the system reads around it what no one needs.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.weight import Weight

SMALL = 16 << 20
"""Bytes up to which a table is left to the system, which soon holds all of it anyway."""


class RowTable(Weight):
    """A weight over a memory map, read by rows; `advised` says whether the system takes advice about it."""

    __slots__ = ("_map", "_start", "advised")

    def __init__(self, weight: Weight, *, small: int = SMALL) -> None:
        super().__init__(weight.name, weight.type, weight.data)
        self._map, self._start = _mapping(weight.data)
        self.advised = self._map is not None and weight.ndim == 2 and weight.data.nbytes > small
        if self.advised:
            self._advise("MADV_RANDOM", np.array([0]), np.array([weight.data.nbytes]))

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if self.advised and isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.size:
            self.prefetch(rows)
        return super().__getitem__(rows)

    def prefetch(self, rows: NDArray[Any]) -> int:
        """Ask for the pages of these rows, each once, neighbours together; returns the bytes asked for."""
        width = self.data.shape[1]
        at = np.unique(rows[(rows >= 0) & (rows < len(self))].astype(np.int64)) * width
        first, last = (at + self._start) // mmap.PAGESIZE, (at + self._start + width - 1) // mmap.PAGESIZE
        if not at.size or not width:
            return 0
        new = np.flatnonzero(first[1:] > last[:-1] + 1) + 1  # where a run of pages ends and another begins
        begins = first[np.concatenate([[0], new])] * mmap.PAGESIZE - self._start
        ends = (last[np.concatenate([new - 1, [at.size - 1]])] + 1) * mmap.PAGESIZE - self._start
        self._advise("MADV_WILLNEED", begins, ends)
        return int((ends - begins).sum())

    def _advise(self, advice: str, begins: NDArray[Any], ends: NDArray[Any]) -> None:
        """Give advice about ranges of the table's bytes, widened to whole pages; nothing where the system has no madvise."""
        option = getattr(mmap, advice, None)
        if option is None or self._map is None:
            return
        size = len(self._map)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            start = max(0, begin + self._start) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(option, start, min(size, end + self._start) - start)


def _mapping(data: NDArray[np.uint8]) -> tuple[mmap.mmap | None, int]:
    """The memory map that an array lies in, and the byte at which; None for an array that lies elsewhere."""
    root = data
    while isinstance(root.base, np.ndarray):
        root = root.base
    owner: Any = root.base.obj if isinstance(root.base, memoryview) else root.base
    if not isinstance(owner, mmap.mmap):
        return None, 0
    return owner, data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
