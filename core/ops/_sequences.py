"""How ops walk the sequences of a step, their slots and their pages, with every index checked. Holds no op.

A step packs rows of several sequences: `cu_seqlens[seqs+1]` says where each begins and ends. Rows from
`cu_seqlens[-1]` on are padding: they are never read, they write no state and reach no other row. A sequence without
rows is not touched; its slot and pages may be -1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ._arrays import Array


def spans(cu_seqlens: Array, tokens: int) -> Iterator[tuple[int, slice]]:
    """Every sequence that has rows, and which; ValueError where `cu_seqlens` falls, misses 0 or passes `tokens`."""
    if cu_seqlens[0] != 0 or cu_seqlens[-1] > tokens or np.any(np.diff(cu_seqlens) < 0):
        raise ValueError(f"cu_seqlens must rise from 0 to at most {tokens} tokens, got {cu_seqlens.tolist()}")
    for s in range(len(cu_seqlens) - 1):
        if cu_seqlens[s] < cu_seqlens[s + 1]:
            yield s, slice(int(cu_seqlens[s]), int(cu_seqlens[s + 1]))


def placed(cu_seqlens: Array, slots: Array, state: Array, tokens: int) -> Iterator[tuple[int, slice]]:
    """The slot and the rows of every sequence that has rows; ValueError for a slot outside `state`."""
    for s, rows in spans(cu_seqlens, tokens):
        slot = int(slots[s])
        if not 0 <= slot < len(state):
            raise ValueError(f"sequence {s} has rows {rows.start}:{rows.stop} and slot {slot}, of {len(state)} slots")
        yield slot, rows


def kept(keep: Array | None, rows: slice, state: Array) -> Iterator[tuple[int, int]]:
    """`(row, slot)` for each of the rows whose state is also wanted in a slot of its own; -1 wants none."""
    if keep is None:
        return
    for t in range(rows.start, rows.stop):
        slot = int(keep[t])
        if not -1 <= slot < len(state):
            raise ValueError(f"keep[{t}] is {slot}, of {len(state)} slots")
        if slot >= 0:
            yield t, slot


def push(state: Array, slot: int, history: Array, rows: slice, keep: Array | None) -> None:
    """`history` is the tail before the step, oldest first, then the step's rows: its last entries become the tail.

    The tail after row t goes to slot `keep[t]` too.
    """
    size = state.shape[1]
    for t, other in kept(keep, rows, state):
        first = t - rows.start + 1
        state[other] = history[first : first + size]
    state[slot] = history[len(history) - size :]


def pages(block_table: Array, seq: int, entry: Array, cache: Array) -> tuple[Array, Array]:
    """Page and place in the page of each entry of a sequence; ValueError where the table holds no such page."""
    block, place = np.divmod(entry, cache.shape[1])
    if np.any(block >= block_table.shape[1]):
        raise ValueError(f"sequence {seq} needs page {int(block.max())} of a table of {block_table.shape[1]}")
    page = block_table[seq, block]
    wrong = (page < 0) | (page >= len(cache))
    if np.any(wrong):
        i = int(np.argmax(wrong))
        raise ValueError(f"sequence {seq}: page {int(block[i])} is {int(page[i])}, of {len(cache)} pages")
    return page, place


def gather(cache: Array, block_table: Array, seq: int, entries: int) -> Array:
    """The first entries of a sequence in order, `[entries, …]`: a copy."""
    found: Array = cache[pages(block_table, seq, np.arange(entries), cache)]
    return found


def check_slots(cu_seqlens: Array, slots: Array, state: Array, tokens: int, keep: Array | None) -> None:
    """ValueError where a slot is no slot, or where two writes of the step go to one: of two sequences, or of `keep`."""
    taken: dict[int, str] = {}
    for s, (slot, _) in enumerate(placed(cu_seqlens, slots, state, tokens)):
        if slot in taken:
            raise ValueError(f"two sequences of one step have slot {slot}")
        taken[slot] = f"sequence {s}"
    for _, rows in spans(cu_seqlens, tokens):
        for t, slot in kept(keep, rows, state):
            if slot in taken:
                raise ValueError(f"keep[{t}] names slot {slot}, which {taken[slot]} writes in the same step")
            taken[slot] = f"keep[{t}]"


def check_pages(
    cu_seqlens: Array, past: Array, block_table: Array, cache: Array, tokens: int, *, every: int, writes: bool
) -> None:
    """ValueError where a page that the step needs is none, or one sequence writes a page that another writes too."""
    taken: dict[int, int] = {}
    for s, rows in spans(cu_seqlens, tokens):
        last = length(past, s, rows)
        page, _ = pages(block_table, s, np.arange(last // every), cache)
        if not writes:
            continue
        for p in np.unique(page[int(past[s]) // every :]).tolist():
            if p in taken:
                raise ValueError(f"sequences {taken[p]} and {s} write to one page, {p}")
            taken[p] = s


def length(past: Array, seq: int, rows: slice) -> int:
    """Tokens of the sequence after the step; ValueError for a negative past."""
    before = int(past[seq])
    if before < 0:
        raise ValueError(f"sequence {seq} has a past of {before} tokens")
    after: int = before + rows.stop - rows.start
    return after
