"""The state bundle: everything that an engine's graphs declare, for all its sequences.

Per-token states lie in pages, shared between forks until one writes; per-sequence states in slots, of which a checkpoint is
one more. Every operation walks the declarations, so a state that a new architecture adds can't be forgotten. Knows memory
and declarations; knows no model and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import HostMemory, Memory, Storage
from trueup.core.state import Capacity, PerSequence, PerToken, StateKind


class StateError(RuntimeError):
    """A checkpoint that is void, a saved state of another model, a sequence that was freed or left half-written."""


class OutOfState(MemoryError):
    """All slots or pages are in use; says which, and how many there are."""


@dataclass(eq=False)
class Checkpoint:
    """A point to return to: a length, and a slot with the per-sequence rows as they were. Void once `slot` is None."""

    length: int
    slot: int | None


@dataclass(eq=False)
class Snapshots:
    """Slots for a step's rows of one sequence, all but the last: slot i receives the per-sequence rows after row i.

    `length` is the sequence's before the step. Void once `slots` is empty.
    """

    length: int
    slots: list[int]

    def keep(self, rows: int) -> list[int]:
        """The `keep` input of the step's `rows` rows: the last one's state is the sequence's own."""
        return [*self.slots, *[-1] * (rows - len(self.slots))]


@dataclass(eq=False)
class Sequence:
    """What a sequence holds: its slot, its pages in order, its length in tokens, and its live checkpoints."""

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    fault: str = ""
    """Why its states can't be trusted, after a step that failed; restoring a checkpoint clears it."""


class Bundle:
    """All states of an engine. Methods either do all of what they say or raise and change nothing."""

    def __init__(
        self, kinds: Mapping[str, StateKind], capacity: Capacity, memory: Memory, *, host: Iterable[str] = ()
    ) -> None:
        """`kinds`: the declarations by name; `host`: those that the prologue uses and that stay on the host.

        MemoryError where the device has no room; what was allocated by then is given back.
        """
        self.kinds, self.capacity, host = dict(kinds), capacity, frozenset(host)
        self._memories: dict[str, Memory] = dict.fromkeys(self.kinds, memory) | dict.fromkeys(host, HostMemory())
        self._arrays: dict[str, Any] = {}
        self.closed = False
        try:
            for name, kind in self.kinds.items():
                self._arrays[name] = self._memories[name].allocate(kind.storage(capacity))
        except BaseException:
            self.close()
            raise
        self.storage = Storage(
            states={n: a for n, a in self._arrays.items() if n not in host},
            host_states={n: a for n, a in self._arrays.items() if n in host},
        )
        self.free_slots = list(range(capacity.slots))[::-1]
        self.free_pages = list(range(capacity.pages))[::-1]
        self.references = [0] * capacity.pages
        self.poison = False
        """Fill what is freed with NaN (or -1), so that a read of it is seen; for tests."""

    def close(self) -> None:
        """Give the storage back; closing twice is nothing. Sequences are dead then: they can only be freed."""
        self.closed = True
        while self._arrays:
            name, array = self._arrays.popitem()
            self._memories[name].free(array)

    def _open(self) -> None:
        if self.closed:
            raise StateError("the states were given back: the engine is closed")

    @property
    def truncatable(self) -> bool:
        """Whether a sequence can be cut to any length: only where no state belongs to the sequence as a whole."""
        return not any(isinstance(k, PerSequence) for k in self.kinds.values())

    def _walk(self, kind: type[StateKind]) -> Iterator[tuple[str, Any, Memory, Any]]:
        for name, k in self.kinds.items():
            if isinstance(k, kind):
                yield name, k, self._memories[name], self._arrays[name]

    # -- slots and pages -----------------------------------------------------------------------------------------------

    def _take_slot(self, *, copy_of: int | None = None) -> int:
        if not self.free_slots:
            raise OutOfState(f"all {self.capacity.slots} slots are in use, by sequences and their checkpoints")
        slot = self.free_slots[-1]
        for _, kind, memory, array in self._walk(PerSequence):
            if copy_of is None:
                memory.fill_rows(array, [slot], kind.fill)
            else:
                memory.copy_rows(array, [slot], [copy_of])
        return self.free_slots.pop()

    def _give_slot(self, slot: int) -> None:
        self._poison(PerSequence, slot)
        self.free_slots.append(slot)

    def _take_page(self, *, copy_of: int | None = None) -> int:
        if not self.free_pages:
            raise OutOfState(f"all {self.capacity.pages} pages of {self.capacity.page} tokens are in use")
        page = self.free_pages[-1]
        if copy_of is not None:
            for _, _, memory, array in self._walk(PerToken):
                memory.copy_rows(array, [page], [copy_of])
        self.free_pages.pop()
        self.references[page] = 1
        return page

    def _give_page(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            self._poison(PerToken, page)
            self.free_pages.append(page)

    def _poison(self, kind: type[StateKind], row: int) -> None:
        if self.poison and not self.closed:
            for _, k, memory, array in self._walk(kind):
                memory.fill_rows(array, [row], float("nan") if k.dtype.startswith(("f", "bf")) else -1)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def create(self) -> Sequence:
        """A new sequence, with every state at its start value."""
        self._open()
        return Sequence(self._take_slot())

    def fork(self, s: Sequence) -> Sequence:
        """A sequence that goes on from where `s` is. Pages are shared; rows of per-sequence states are copied."""
        self._usable(s)
        slot = self._take_slot(copy_of=s.slot)
        for p in s.pages:
            self.references[p] += 1
        return Sequence(slot, list(s.pages), s.length)

    def free(self, s: Sequence) -> None:
        """Give back all that a sequence holds; freeing twice is nothing."""
        if s.slot < 0:
            return
        for c in list(s.checkpoints):
            self.drop(s, c)
        for p in s.pages:
            self._give_page(p)
        self._give_slot(s.slot)
        s.slot, s.pages, s.length = -1, [], 0

    def reset(self, s: Sequence) -> None:
        """Back to an empty sequence; its checkpoints are void."""
        self._open()
        if s.slot < 0:
            raise StateError("the sequence was freed")
        for c in list(s.checkpoints):
            self.drop(s, c)
        for p in s.pages:
            self._give_page(p)
        s.pages, s.length, s.fault = [], 0, "its reset failed"
        for _, kind, memory, array in self._walk(PerSequence):
            memory.fill_rows(array, [s.slot], kind.fill)
        s.fault = ""

    def reserve(self, s: Sequence, tokens: int) -> None:
        """Room for `tokens` more; pages that the step will write and that others share are copied first."""
        self.reserve_all([(s, tokens)])

    def reserve_all(self, work: Iterable[tuple[Sequence, int]]) -> None:
        """Room for several sequences' next tokens, each given with their number: for all, or OutOfState and for none."""
        work = list(work)
        for s, _ in work:
            self._usable(s)
        wanted = self._pages_wanted(work)
        if wanted > len(self.free_pages):
            raise OutOfState(
                f"{wanted} pages of {self.capacity.page} tokens are wanted, "
                f"{len(self.free_pages)} of {self.capacity.pages} are free"
            )
        for s, tokens in work:
            for i in self._written(s, tokens):
                if i == len(s.pages):
                    s.pages.append(self._take_page())
                elif self.references[s.pages[i]] > 1:
                    copy = self._take_page(copy_of=s.pages[i])
                    self._give_page(s.pages[i])
                    s.pages[i] = copy

    def _written(self, s: Sequence, tokens: int) -> range:
        """Which of a sequence's pages, in order, its next tokens are written to."""
        page = self.capacity.page
        return range(s.length // page, -(-(s.length + tokens) // page) if tokens else 0)

    def _pages_wanted(self, work: Iterable[tuple[Sequence, int]]) -> int:
        """New pages and copies of shared ones. Of those that share a page, the last to write needs no copy."""
        wanted, references = 0, list(self.references)
        for s, tokens in work:
            for i in self._written(s, tokens):
                if i >= len(s.pages):
                    wanted += 1
                elif references[s.pages[i]] > 1:
                    references[s.pages[i]] -= 1
                    wanted += 1
        return wanted

    def trim(self, s: Sequence) -> None:
        """Give back the pages that lie wholly beyond the sequence's length, as a step that failed leaves them."""
        kept = -(-s.length // self.capacity.page)
        while len(s.pages) > kept:
            self._give_page(s.pages.pop())

    def _usable(self, s: Sequence) -> None:
        self._open()
        if s.slot < 0:
            raise StateError("the sequence was freed")
        if s.fault:
            raise StateError(
                f"the states of the sequence can't be trusted: {s.fault}; restore a checkpoint or reset it"
            )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def checkpoint(self, s: Sequence) -> Checkpoint:
        """A point that `restore` returns to: a copy of the per-sequence rows, and the length."""
        self._usable(s)
        c = Checkpoint(s.length, self._take_slot(copy_of=s.slot))
        s.checkpoints.append(c)
        return c

    def restore(self, s: Sequence, c: Checkpoint) -> None:
        """Back to a checkpoint. Those of greater length become void: what they stand on may now be overwritten."""
        self._open()
        if c not in s.checkpoints or c.slot is None:
            raise StateError(
                "the checkpoint is void: it was dropped, or its sequence went back behind it, or it is another's"
            )
        s.fault = "its restoring failed"
        for _, _, memory, array in self._walk(PerSequence):
            memory.copy_rows(array, [s.slot], [c.slot])
        s.fault = ""
        self._cut(s, c.length)

    def drop(self, s: Sequence, c: Checkpoint) -> None:
        """Give a checkpoint's slot back; dropping a void one is nothing."""
        if c in s.checkpoints and c.slot is not None:
            s.checkpoints.remove(c)
            self._give_slot(c.slot)
            c.slot = None

    # -- speculation ---------------------------------------------------------------------------------------------------

    def snapshots(self, s: Sequence, rows: int) -> Snapshots:
        """Slots for the states after each of the next `rows` rows but the last, for all or OutOfState."""
        self._usable(s)
        if rows - 1 > len(self.free_slots):
            raise OutOfState(
                f"{rows - 1} slots are wanted for snapshots, {len(self.free_slots)} of {self.capacity.slots} are free"
            )
        return Snapshots(s.length, [self.free_slots.pop() for _ in range(rows - 1)])

    def settle(self, s: Sequence, snapshots: Snapshots, rows: int) -> None:
        """Only the first `rows` rows of the step happened: the sequence takes their snapshot's slot. Others are given back."""
        self._usable(s)
        ran = s.length - snapshots.length
        if not 1 <= rows <= ran:
            raise StateError(f"{rows} rows of a step of {ran} can't be kept")
        if rows < ran and rows > len(snapshots.slots):
            raise StateError(f"there is no snapshot after row {rows - 1}; there are {len(snapshots.slots)}")
        if rows < ran:
            kept = snapshots.slots[rows - 1]
            snapshots.slots[rows - 1], s.slot = s.slot, kept
            self._cut(s, snapshots.length + rows)
        self.discard(snapshots)

    def discard(self, snapshots: Snapshots) -> None:
        """Give the slots back; the sequence stays where the step left it."""
        while snapshots.slots:
            self._give_slot(snapshots.slots.pop())

    def borrow(self, s: Sequence, names: Iterable[str]) -> int:
        """A slot with copies of these per-sequence states and nothing else of worth, for a graph that may spoil them."""
        self._usable(s)
        if not self.free_slots:
            raise OutOfState(f"all {self.capacity.slots} slots are in use, by sequences and their checkpoints")
        slot = self.free_slots[-1]
        for name in names:
            self._memories[name].copy_rows(self._arrays[name], [slot], [s.slot])
        return self.free_slots.pop()

    def give_back(self, slot: int) -> None:
        """The end of `borrow`."""
        self._give_slot(slot)

    def _cut(self, s: Sequence, length: int) -> None:
        """Shorten a sequence whose per-sequence states are those of that length."""
        s.length = length
        self.trim(s)
        for c in [c for c in s.checkpoints if c.length > length]:
            self.drop(s, c)

    # -- a sequence's states as arrays ---------------------------------------------------------------------------------

    def export(self, s: Sequence) -> dict[str, NDArray[Any]]:
        """Every state of a sequence in logical order: entries [length // every, …] per token, rows […] per sequence."""
        self._usable(s)
        out: dict[str, NDArray[Any]] = {}
        for name, kind, memory, array in self._walk(PerToken):
            entries = memory.read_rows(array, s.pages).reshape(-1, *kind.width)
            out[name] = entries[: s.length // kind.every].copy()
        for name, _, memory, array in self._walk(PerSequence):
            out[name] = memory.read_rows(array, [s.slot])[0].copy()
        return out

    def restart(self, arrays: Mapping[str, NDArray[Any]], length: int) -> Sequence:
        """A new sequence with exported states; StateError names a part that is missing, left over or of another type."""
        self.check_export(arrays, length)
        s = self.create()
        try:
            self.reserve(s, length)
            for name, kind, memory, array in self._walk(PerToken):
                entries = self.capacity.page // kind.every
                paged = np.zeros((len(s.pages) * entries, *kind.width), arrays[name].dtype)
                paged[: len(arrays[name])] = arrays[name]
                memory.write_rows(array, s.pages, paged.reshape(len(s.pages), entries, *kind.width))
            for name, _, memory, array in self._walk(PerSequence):
                memory.write_rows(array, [s.slot], arrays[name][None])
        except BaseException:
            self.free(s)
            raise
        s.length = length
        return s

    def check_export(self, arrays: Mapping[str, NDArray[Any]], length: int) -> None:
        """StateError where these are not all the states of a sequence of this length."""
        missing, extra = sorted(self.kinds.keys() - arrays.keys()), sorted(arrays.keys() - self.kinds.keys())
        if missing or extra:
            raise StateError(
                "the saved state "
                + " and ".join(
                    [f"lacks {', '.join(missing)}"] * bool(missing)
                    + [f"has the unknown {', '.join(extra)}"] * bool(extra)
                )
            )
        for name, kind in self.kinds.items():
            shape = (length // kind.every, *kind.width) if isinstance(kind, PerToken) else kind.width
            found, want = arrays[name], kind.storage(self.capacity).element.numpy
            if found.shape != shape or found.dtype != want:
                raise StateError(
                    f"state {name} is {found.dtype}{list(found.shape)} in the saved state, "
                    f"expected {np.dtype(want)}{list(shape)}"
                )
