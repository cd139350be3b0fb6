"""A round of speculative decoding: draft, verify in one step, keep what the model itself chose.

Every token that a round gives is one that the model chose at its position. A round commits at least one token, and rows
that were kept are never judged again, so it can't go in circles on a device whose results depend on the batch's shape.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from trueup.runtime.sampling import NonFiniteLogits, Sampled, Sampler, uniform
from trueup.runtime.state import OutOfState

from .acceptance import Draw, verify
from .depth import DepthController
from .drafter import Draft, Drafter, Request, SpeculationWarning
from .rollback import WAYS, Choice, Rows, Way

if TYPE_CHECKING:
    from trueup.runtime.engine import Engine
    from trueup.runtime.session import Session

PATIENCE = 64
"""Rounds after which a drafter whose proposals are hardly ever accepted is given up."""


@dataclass(frozen=True)
class Job:
    """One sequence's part in a round: its session, its next token, chosen but not fed, and how tokens are chosen.

    `choice` numbers the outputs of a prompt; at most `most` tokens are drafted.
    """

    session: Session
    token: int
    sampler: Sampler
    choice: int = 0
    most: int = 1 << 30


@dataclass(frozen=True, eq=False)
class Turn:
    """What a round gives a sequence: tokens the model chose, in order. The first `accepted` were drafted, and are fed."""

    chosen: tuple[Sampled, ...]
    accepted: int = 0
    drafted: int = 0


@dataclass
class _Round:
    """A round between `round` and `commit`: its rows, where any were drafted, and what it took so far."""

    rows: Rows | None
    deepest: int
    seconds: float
    setup: bool


@dataclass
class Tally:
    """What was drafted and accepted so far, in all and by position in the draft."""

    rounds: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.rounds += 1
        self.tokens += len(turn.chosen)
        for counts, n in ((self.drafted, turn.drafted), (self.accepted, turn.accepted)):
            counts.extend([0] * (n - len(counts)))
            for i in range(n):
                counts[i] += 1


class Speculator:
    """Runs rounds on an engine with a drafter. `depth`: tokens drafted in a round, or "auto"; `most` bounds "auto"."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        *,
        depth: int | Literal["auto"],
        most: int,
        rollback: Way | Literal["auto"] = "auto",
    ) -> None:
        self.engine, self.drafter, self.tally = engine, drafter, Tally()
        self.depth, self.most = depth, most
        self.rollback = Choice(rollback)
        self.controller = DepthController(most) if depth == "auto" else None
        self.given_up = ""
        """Why drafting was given up, if it was."""
        self._rounds: dict[Turn, _Round] = {}
        """Of each round that is not committed yet: several threads may be between the two."""

    def close(self) -> None:
        self.drafter.close()

    def round(self, jobs: Sequence[Job]) -> list[Turn]:
        """Draft for each job, feed its token and the draft in one step, and judge; `commit` has to follow.

        Where there is no room for drafts (pages, slots), plain decoding goes on. Raises as `Engine.step`; ValueError or
        what the drafter raises, where that goes wrong, and nothing has changed then; NonFiniteLogits where a job's first
        row gives no distribution: then of each job its token has been fed, as in plain decoding, and no draft.
        """
        with self.engine._lock:
            started, built = time.perf_counter(), self.engine.plans_built
            rows, logits, drafts = self._run(jobs)
            deepest = max(len(d) for d in drafts)
            try:
                turns = [self._judge(j, d, r) for j, d, r in zip(jobs, drafts, logits, strict=True)]
            except BaseException:
                if rows is not None:
                    _settle(rows, [1] * len(jobs))
                raise
            done = _Round(rows, deepest, time.perf_counter() - started, self.engine.plans_built > built)
            self._rounds |= dict.fromkeys(turns, done)
            return turns

    def commit(self, turns: Sequence[Turn], rows: Sequence[int]) -> None:
        """Of each job's fed rows, its token and the draft, the first `rows` stay; at most 1 + the turn's accepted.

        All turns of a round at once, and once. ValueError where that is not so; the first row alone stays then."""
        with self.engine._lock:
            done = self._rounds.get(turns[0]) if turns else None
            if done is None or [t for t, r in self._rounds.items() if r is done] != list(turns):
                raise ValueError("these are not the turns of a round that waits to be committed")
            for t in turns:
                del self._rounds[t]
            started, built = time.perf_counter(), self.engine.plans_built
            wrong = [
                f"{n} rows can't stay where {turn.accepted} of the draft were accepted"
                for turn, n in zip(turns, rows, strict=False)
                if not 1 <= n <= 1 + max(turn.accepted, len(turn.chosen) - 1)
            ]
            if len(rows) != len(turns):
                wrong = [f"{len(rows)} numbers of rows for {len(turns)} turns"]
            if done.rows is not None:
                _settle(done.rows, [1] * len(turns) if wrong else rows)
            if wrong:
                raise ValueError(wrong[0])
            done.seconds += time.perf_counter() - started
            done.setup |= self.engine.plans_built > built
            if done.rows is not None and not done.setup:
                self.rollback.took(done.rows.way, done.deepest + 1, done.seconds)
            self._learn(turns, done)

    def _run(self, jobs: Sequence[Job]) -> tuple[Rows | None, list[NDArray[np.float32]], list[Draft]]:
        """Draft and feed: the rows, where any were drafted, their logits, and the drafts."""
        try:
            drafts = self._drafts(jobs)
            deepest = max(len(d) for d in drafts)
            if deepest:
                work = [(j.session, [j.token, *d.tokens]) for j, d in zip(jobs, drafts, strict=True)]
                rows: Rows = WAYS[self.rollback.way(deepest + 1)](self.engine, work)
                try:
                    return rows, rows.run(), drafts
                except BaseException:
                    rows.drop()
                    raise
        except OutOfState:  # the drafts' rows; those of plain decoding may still have room
            pass
        return None, self.engine.step([(j.session, [j.token]) for j in jobs]), [Draft(())] * len(jobs)

    def _drafts(self, jobs: Sequence[Job]) -> list[Draft]:
        depths = [self._depth(j) for j in jobs]
        if not any(depths):
            return [Draft(())] * len(jobs)
        asked = [i for i, d in enumerate(depths) if d]
        requests = [_request(jobs[i], depths[i]) for i in asked]
        drafts = [Draft(())] * len(jobs)
        proposals = self.drafter.propose(requests)
        if len(proposals) != len(requests):
            raise ValueError(f"drafter {self.drafter.name} gave {len(proposals)} drafts for {len(requests)} requests")
        for i, d in zip(asked, proposals, strict=True):
            if not isinstance(d, Draft):
                raise ValueError(f"drafter {self.drafter.name} gave {type(d).__name__}, expected a Draft")
            drafts[i] = self._within(d).cut(depths[i])
        return drafts

    def _within(self, draft: Draft) -> Draft:
        """The draft up to its first token that the model does not have."""
        vocab = self.engine.vocab_size
        return draft.cut(next((i for i, t in enumerate(draft.tokens) if not 0 <= t < vocab), len(draft)))

    def _depth(self, job: Job) -> int:
        room = self.engine.context - len(job.session) - 1
        limit = min(job.most, room, self.engine.batch - 1)
        if self.given_up or limit < 1:
            return 0
        if self.controller is not None:
            return self.controller.depth(limit)
        return min(int(self.depth), limit)

    def _judge(self, job: Job, draft: Draft, logits: NDArray[np.float32]) -> Turn:
        fed = len(job.session) - len(draft)
        try:
            chosen, accepted = verify(logits, draft, job.sampler, _draw(job, fed))
        except NonFiniteLogits as e:
            raise NonFiniteLogits(f"after {fed} tokens on backend {self.engine.target.name}: {e}", e.position) from None
        return Turn(chosen, accepted, len(draft))

    def _learn(self, turns: Sequence[Turn], done: _Round) -> None:
        for turn in turns:
            self.tally.add(turn)
            if self.controller is not None:
                seconds = done.seconds if turn.drafted == done.deepest else None
                self.controller.observe(turn.drafted, turn.accepted, seconds, setup=done.setup)
        drafted, accepted = sum(self.tally.drafted), sum(self.tally.accepted)
        if not self.given_up and self.tally.rounds >= PATIENCE and drafted >= PATIENCE and accepted < 0.01 * drafted:
            self.given_up = (
                f"{accepted} of {drafted} tokens drafted by {self.drafter.name} were accepted: it seems to be made for "
                "another model, to be converted wrongly, or not to suit this text; decoding goes on without it"
            )
            warnings.warn(self.given_up, SpeculationWarning, stacklevel=3)


def _settle(rows: Rows, kept: Sequence[int]) -> None:
    try:
        rows.keep(kept)
    finally:
        rows.drop()


def _draw(job: Job, fed: int) -> Draw:
    """Random numbers for tokens chosen after `fed` tokens and more; the first is that of row 0."""
    seed = job.sampler.seed or 0
    return lambda row, purpose: uniform(seed, job.choice, fed + row, purpose)


def _request(job: Job, depth: int) -> Request:
    return Request(job.session, job.token, depth, job.sampler, _draw(job, len(job.session) + 1))
