"""Undoing the rows of a verify step that were not confirmed. Two ways, both exact; the states are those that the bundle
declares, none is named here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from trueup.runtime.state import Checkpoint, Snapshots

if TYPE_CHECKING:
    from trueup.runtime.engine import Engine
    from trueup.runtime.session import Session

Way = Literal["snapshots", "replay"]


class Rows(ABC):
    """The rows of one verify step, until it is known how many of them stay."""

    way: ClassVar[Way]

    def __init__(self, engine: Engine, work: Sequence[tuple[Session, Sequence[int]]]) -> None:
        self.engine, self.work = engine, list(work)

    @abstractmethod
    def run(self) -> list[NDArray[np.float32]]:
        """Run the step; for each session the logits of all its rows, float32 [rows, vocab]."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Only so many rows of each session happened, one at least; once, after `run`. The rows that stay are final: no
        logits of them are asked for again."""

    @abstractmethod
    def drop(self) -> None:
        """Give back what is held; after `keep` nothing is."""

    def _check(self, rows: Sequence[int]) -> None:
        for n, (_, tokens) in zip(rows, self.work, strict=True):
            if not 1 <= n <= len(tokens):
                raise ValueError(f"a round must keep 1 … {len(tokens)} of its rows, got {n}")


class SnapshotRows(Rows):
    """The step itself writes the states after each row, and the sequence takes the slot of the last row that stays."""

    way = "snapshots"

    def __init__(self, engine: Engine, work: Sequence[tuple[Session, Sequence[int]]]) -> None:
        super().__init__(engine, work)
        self._snapshots: list[Snapshots] = []

    def run(self) -> list[NDArray[np.float32]]:
        for session, tokens in self.work:
            self._snapshots.append(self.engine.bundle.snapshots(session.sequence, len(tokens)))
        return self.engine.step(self.work, logits="all", snapshots=self._snapshots)

    def keep(self, rows: Sequence[int]) -> None:
        self._check(rows)
        for n, snapshots, (session, _) in zip(rows, self._snapshots, self.work, strict=True):
            self.engine.bundle.settle(session.sequence, snapshots, n)
            del session.tokens[len(session) :]

    def drop(self) -> None:
        for s in self._snapshots:
            self.engine.bundle.discard(s)


class ReplayRows(Rows):
    """A checkpoint before the step; where rows are undone, it is restored and the rows that stay run again, unjudged."""

    way = "replay"

    def __init__(self, engine: Engine, work: Sequence[tuple[Session, Sequence[int]]]) -> None:
        super().__init__(engine, work)
        self._checkpoints: list[tuple[Session, Checkpoint]] = []

    def run(self) -> list[NDArray[np.float32]]:
        for session, _ in self.work:
            self._checkpoints.append((session, session.checkpoint()))
        return self.engine.step(self.work, logits="all")

    def keep(self, rows: Sequence[int]) -> None:
        self._check(rows)
        again = []
        for n, (session, c), (_, tokens) in zip(rows, self._checkpoints, self.work, strict=True):
            if n < len(tokens):
                session.restore(c)
                again.append((session, tokens[:n]))
        if again:
            self.engine.step(again, logits=None)
        self.drop()

    def drop(self) -> None:
        while self._checkpoints:
            session, c = self._checkpoints.pop()
            session.drop(c)


WAYS: dict[Way, type[Rows]] = {cls.way: cls for cls in (SnapshotRows, ReplayRows)}


class Choice:
    """Which way is taken: the one that was asked for, or the one whose rounds take less time on this device.

    Snapshots come first, as they need no further plan. Replay is tried once rounds of so many rows have become usual, and
    the slower way again now and then, since what a replay costs depends on how much is accepted.
    """

    USUAL = 32
    TRIES = 3
    EVERY = 256

    def __init__(self, asked: Way | Literal["auto"] = "auto") -> None:
        if asked != "auto" and asked not in WAYS:
            raise ValueError(f"rollback must be 'auto', 'snapshots' or 'replay', got {asked!r}")
        self.asked = asked
        self._rounds: dict[int, int] = {}
        self._tries: dict[int, int] = {}
        self._seconds: dict[tuple[Way, int], deque[float]] = {}

    def way(self, rows: int) -> Way:
        """The way for a step of so many rows."""
        if self.asked != "auto":
            return self.asked
        done = self._rounds[rows] = self._rounds.get(rows, 0) + 1
        if done < self.USUAL:
            return "snapshots"
        best, other = sorted(WAYS, key=lambda w: self._cost(w, rows))
        if (done - self.USUAL) % self.EVERY == 0:  # what is known of the other may have changed
            self._seconds.pop((other, rows), None)
            self._tries[rows] = 4 * self.TRIES  # plans are compiled in the first
        if not self._known(other, rows) and self._tries[rows]:
            self._tries[rows] -= 1
            return other
        return best

    def took(self, way: Way, rows: int, seconds: float) -> None:
        """What a round of this way took, where no plan was compiled in it."""
        self._seconds.setdefault((way, rows), deque(maxlen=2 * self.TRIES + 1)).append(seconds)

    def _known(self, way: Way, rows: int) -> bool:
        return len(self._seconds.get((way, rows), ())) >= self.TRIES

    def _cost(self, way: Way, rows: int) -> float:
        return median(self._seconds[way, rows]) if self._known(way, rows) else float("inf")
