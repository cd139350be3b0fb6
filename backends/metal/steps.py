"""How a step is made of sequences, slots and pages, read on the host and checked before anything is queued.

These tensors are inputs of a plan, so that reading them waits for nothing. A table that names what is not there is a
ValueError. Indices are NumPy's, as MLX checks none on the device.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


def host(a: mx.array) -> Ints:
    """An integer tensor on the host."""
    return np.array(a)


def spans(cu_seqlens: mx.array, tokens: int) -> list[tuple[int, int, int]]:
    """`(sequence, first row, end)` of each that has rows."""
    ends = host(cu_seqlens).tolist()
    if ends[0] != 0 or ends[-1] > tokens or ends != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0 to at most {tokens} tokens, got {ends}")
    return [(s, a, b) for s, (a, b) in enumerate(zip(ends, ends[1:], strict=False)) if a < b]


def placed(cu_seqlens: mx.array, slots: mx.array, state: mx.array, tokens: int) -> list[tuple[int, int, int]]:
    """`(slot, first row, end)` of each sequence that has rows."""
    named, found = host(slots).tolist(), spans(cu_seqlens, tokens)
    for s, _, _ in found:
        if not 0 <= named[s] < state.shape[0]:
            raise ValueError(f"sequence {s} has rows and slot {named[s]}, of {state.shape[0]} slots")
    return [(named[s], a, b) for s, a, b in found]


def kept(keep: mx.array | None, state: mx.array, tokens: int) -> dict[int, int]:
    """`{row: slot}` of the rows after which the state is wanted in a slot of its own, too."""
    if keep is None or not tokens:
        return {}
    named = host(keep)[:tokens].tolist()
    for row, slot in enumerate(named):
        if not -1 <= slot < state.shape[0]:
            raise ValueError(f"keep[{row}] is {slot}, of {state.shape[0]} slots")
    return {row: slot for row, slot in enumerate(named) if slot >= 0}


def length(past: mx.array, s: int, rows: int) -> int:
    """Tokens of a sequence after the step."""
    before = int(host(past)[s])
    if before < 0:
        raise ValueError(f"sequence {s} has a past of {before} tokens")
    return before + rows


def places(cache: mx.array, block_table: mx.array, s: int, entries: Ints) -> Ints:
    """Where each of these entries of a sequence lies, counted over all entries of all pages."""
    pages, size = cache.shape[:2]
    block, at = np.divmod(entries.astype(np.int64), size)
    if block.max(initial=-1) >= block_table.shape[1]:
        raise ValueError(f"sequence {s} needs page {int(block.max())} of a table of {block_table.shape[1]}")
    page = host(block_table)[s].astype(np.int64)[block]
    if np.any((page < 0) | (page >= pages)):
        raise ValueError(f"sequence {s} needs pages {np.unique(page).tolist()}, of {pages}")
    return page * size + at


def flat(cache: mx.array) -> mx.array:
    """`cache[pages, entries, ...]` as `[pages*entries, ...]`."""
    return cache.reshape(cache.shape[0] * cache.shape[1], *cache.shape[2:])


def entries(cache: mx.array, block_table: mx.array, s: int, first: int, end: int) -> mx.array:
    """The entries first … end-1 of a sequence, in order, `[end-first, ...]`."""
    at = places(cache, block_table, s, np.arange(end))[first:]
    return flat(cache)[mx.array(at)]
