"""How kernels are shaped for a device, from its limits. No kernel and no driver here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SIDE = 128
"""Threads that share a head's state; `SIDE` in the gdn file."""
TILE = 8
"""Rows that share one pass over a weight row; `TILE` in the linear file."""
SEGMENT = 8192
"""Entries of a row that top_k gives a block where there are few rows."""
PROMPT = 64
"""Rows of a sequence from which the delta rule goes in chunks."""


@dataclass(frozen=True)
class Tuning:
    """`room` bytes of shared memory for a block, `few` rows leave processors idle, and sequences of `prompt` rows and more
    go through the delta rule in chunks; never where that is 0: then a row's bits do not depend on where its step began.
    A block holds `warps` where each of them does a column of its own, and `near` bytes of top_k's keys at most."""

    room: int
    few: int
    prompt: int = PROMPT
    warps: int = 4
    near: int = 40 * 1024

    @classmethod
    def of(cls, attributes: Mapping[str, int], *, invariant: bool = False) -> Tuning:
        """From a driver's attributes."""
        room = attributes["max_shared_memory_per_block"]
        return cls(room, max(1, attributes["multiprocessor_count"]), 0 if invariant else PROMPT)

    def columns_held(self, n: int) -> int:
        """How many columns of n entries a block keeps in its shared memory: a power of 2, and 0 where that is no help."""
        fixed = 4 * (32 * 32 + 3 * 32 + 2 * SIDE)
        room = (self.room - fixed) // (4 * (n + 32))
        wide = min(32, 1 << (room.bit_length() - 1) if room > 0 else 0)
        return wide if wide >= 4 else 0


def row_threads(n: int) -> int:
    """Threads of a block that does a row of n entries: about 4 entries each, whole warps, 256 at most. By the row's own size
    alone: the order of its sum depends on nothing else."""
    return min(256, max(32, 1 << (max(n, 1) // 4 - 1).bit_length() if n > 4 else 32))
