"""How a step is made of sequences, read on the host and checked. A table that names what is not there is a ValueError."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def spans(cu_seqlens: Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """`(sequence, first row, end)` of each that has rows."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens or ends != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0 to at most {tokens} tokens, got {ends}")
    return ((s, a, b) for s, (a, b) in enumerate(zip(ends, ends[1:], strict=False)) if a < b)


def placed(cu_seqlens: Tensor, slots: Tensor, state: Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """`(slot, first row, end)` of each sequence that has rows."""
    named = slots.tolist()
    for s, a, b in spans(cu_seqlens, tokens):
        if not 0 <= named[s] < len(state):
            raise ValueError(f"sequence {s} has rows and slot {named[s]}, of {len(state)} slots")
        yield named[s], a, b


def kept(keep: Tensor | None, a: int, b: int, state: Tensor) -> list[tuple[int, int]]:
    """`(row, slot)` for the rows after which the state is wanted in a slot of its own, too."""
    if keep is None:
        return []
    named = keep[a:b].tolist()
    for i, slot in enumerate(named):
        if not -1 <= slot < len(state):
            raise ValueError(f"keep[{a + i}] is {slot}, of {len(state)} slots")
    return [(a + i, slot) for i, slot in enumerate(named) if slot >= 0]


def shift(state: Tensor, slot: int, history: Tensor, a: int, b: int, keep: Tensor | None) -> None:
    """Of `history`, the tail before the step and then its rows, the last become the tail; those after a kept row go there."""
    size = state.shape[1]
    for row, other in kept(keep, a, b, state):
        state[other] = history[row - a + 1 : row - a + 1 + size]
    state[slot] = history[len(history) - size :]


def places(cache: Tensor, block_table: Tensor, s: int, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Page and place of each of these entries of a sequence."""
    block = torch.div(entries, cache.shape[1], rounding_mode="floor")
    if len(block) and int(block.max()) >= block_table.shape[1]:
        raise ValueError(f"sequence {s} needs page {int(block.max())} of a table of {block_table.shape[1]}")
    page = block_table[s].long()[block]
    if bool(((page < 0) | (page >= len(cache))).any()):
        raise ValueError(f"sequence {s} needs pages {sorted(set(page.tolist()))}, of {len(cache)}")
    return page, entries % cache.shape[1]


def entries(cache: Tensor, block_table: Tensor, s: int, count: int) -> Tensor:
    """The first entries of a sequence, in order."""
    return cache[places(cache, block_table, s, torch.arange(count, device=cache.device))]


def length(past: Tensor, s: int, rows: int) -> int:
    """Tokens of a sequence after the step."""
    before = int(past[s])
    if before < 0:
        raise ValueError(f"sequence {s} has a past of {before} tokens")
    return before + rows
