"""Every state that the graphs declare × everything that is done with a sequence, after rounds that reject.

What each part must be after n tokens of a text is what a session holds that was fed them one by one, never drafted for: bit
for bit, as the backend gives a sequence the same in every batch. What is free is poisoned.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.core.state import PerSequence, PerToken
from trueup.runtime import Engine, Sampler, Session
from trueup.runtime.speculation import Job, Speculator
from trueup.runtime.state import StateError

STARTS = (5, 3, 8, 2)
WAYS = ("snapshots", "replay")
DEPTH = 4
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [])
States = dict[str, NDArray[Any]]
Drafting = Callable[..., Speculator]


class Truth:
    """The greedy text after each prompt, and all states and the head's next drafts after each of its tokens."""

    def __init__(self, e: Engine) -> None:
        self.e, self.texts = e, []
        for i, p in enumerate(PROMPTS):
            start = p or [7]
            said = [t for piece in e.generate(start, max_tokens=18, ignore_eos=True) for t in piece.tokens]
            self.texts.append([*start, *said])
            assert said, i
        self._after: dict[tuple[int, ...], tuple[States, list[int]]] = {}

    def after(self, tokens: list[int]) -> tuple[States, list[int]]:
        if tuple(tokens) not in self._after:
            with self.e.session() as s:
                for n in range(len(tokens) + 1):
                    drafts = self.e.draft([(s, 11)], depth=3)[0].tolist()
                    self._after[tuple(tokens[:n])] = self.e.bundle.export(s.sequence), drafts
                    if n < len(tokens):
                        s.feed(tokens[n : n + 1], logits=None)
        return self._after[tuple(tokens)]

    def check(self, s: Session, tokens: list[int], what: str = "") -> None:
        """The session holds these tokens and what they leave in every part; and the head drafts what it then must."""
        assert s.tokens == tokens and len(s) == len(tokens), what
        assert len(s.sequence.pages) == -(-len(s) // self.e.capacity.page), (
            f"pages are held for rows that are gone, {what}"
        )
        states, drafts = self.after(tokens)
        got = self.e.bundle.export(s.sequence)
        assert got.keys() == states.keys() == self.e.bundle.kinds.keys()
        for name, part in got.items():
            np.testing.assert_array_equal(part, states[name], err_msg=f"{name} {what}", strict=True)
        assert self.e.draft([(s, 11)], depth=3)[0].tolist() == drafts, what


@pytest.fixture(scope="module")
def truth(drafting_engine: Engine) -> Truth:
    return Truth(drafting_engine)


def one_round(spec: Speculator, sessions: list[Session], texts: list[list[int]], depths: list[int]) -> list[int]:
    """A round in which session i drafts `depths[i]` tokens; how many were accepted of each."""
    jobs = [Job(s, t[len(s)], Sampler(), most=d) for s, t, d in zip(sessions, texts, depths, strict=True)]
    turns = spec.round(jobs)
    assert [t.drafted for t in turns] == depths
    for s, text, turn in zip(sessions, texts, turns, strict=True):
        at = len(s) - turn.drafted
        assert [c.token for c in turn.chosen] == text[at : at + turn.accepted + 1]
    spec.commit(turns, [t.accepted + 1 for t in turns])
    return [t.accepted for t in turns]


def test_which_parts_there_are(drafting_engine: Engine) -> None:
    """The bundle holds what the step's graph declares, by which this file goes; of each kind some."""
    kinds = drafting_engine.bundle.kinds
    assert sum(isinstance(k, PerToken) for k in kinds.values()) >= 6
    assert sum(isinstance(k, PerSequence) for k in kinds.values()) >= 10
    for part in ("blk.0.conv", "blk.0.delta", "ngram", "positions", "residual"):
        assert part in kinds
    assert {k.every for k in kinds.values() if isinstance(k, PerToken)} >= {1, 4}
    assert drafting_engine.bundle.poison


# -- one sequence: undone to every row, then everything that can be done with it ---------------------------------------


def nothing(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    pass


def goes_on(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    n = len(s)
    row = s.feed(text[n : n + 2])
    t.check(s, text[: n + 2])
    assert int(row.argmax()) == text[n + 2]


def resets(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    """And a new prompt in the same slot: no row of the last one is paired with it."""
    s.reset()
    t.check(s, [])
    for state in ("residual", "blk.0.conv", "blk.0.delta"):
        assert not t.e.bundle.export(s.sequence)[state].any()
    other = t.texts[1]
    s.feed(other[:3], logits=None)
    t.check(s, other[:3])


def forks(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    n = len(s)
    with s.fork() as f:
        f.feed([17], logits=None)
        t.check(s, text[:n], "of which another was forked")
        s.feed(text[n : n + 1], logits=None)
        t.check(f, [*text[:n], 17], "the fork")
        t.check(s, text[: n + 1])


def checkpoints(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    n, c = len(s), s.checkpoint()
    s.feed(text[n : n + 2], logits=None)
    later = s.checkpoint()
    s.restore(c)
    t.check(s, text[:n])
    with pytest.raises(StateError, match="void"):
        s.restore(later)
    s.drop(c)


def saves(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    path = tmp / "s.safetensors"
    s.save(path)
    with t.e.session(path) as loaded:
        t.check(loaded, text[: len(s)], "loaded")
        loaded.feed(text[len(s) : len(s) + 1], logits=None)
        t.check(loaded, text[: len(s) + 1], "loaded, gone on")


def gives_its_slot(t: Truth, s: Session, text: list[int], tmp: Path) -> None:
    slot = s.sequence.slot
    s.close()
    with t.e.session() as new:
        assert new.sequence.slot == slot
        t.check(new, [])
        new.feed(t.texts[1][:3], logits=None)
        t.check(new, t.texts[1][:3])


OPERATIONS = (nothing, goes_on, resets, forks, checkpoints, saves, gives_its_slot)


@pytest.mark.fault("B46", "B48", "B50")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("right", range(DEPTH + 1))
def test_every_part_after_every_operation(
    truth: Truth, drafting: Drafting, scripted: Any, tmp_path: Path, way: str, right: int
) -> None:
    spec = drafting(scripted(truth.texts, lambda _: right), DEPTH, way)
    for text, start in ((truth.texts[0], 5), (truth.texts[1], 3)):
        for operation in OPERATIONS:
            with truth.e.session() as s:
                s.feed(text[:start], logits=None)
                assert one_round(spec, [s], [text], [DEPTH]) == [right]
                truth.check(s, text[: start + 1 + right], f"{right} of {DEPTH} by {way}")
                operation(truth, s, text, tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_of_before_a_round(truth: Truth, drafting: Drafting, scripted: Any, way: str) -> None:
    """One that the user took stays good through rounds that reject, and brings back what was there."""
    text = truth.texts[0]
    spec = drafting(scripted(truth.texts, lambda call: call % 3), DEPTH, way)
    with truth.e.session() as s:
        s.feed(text[:5], logits=None)
        c = s.checkpoint()
        for _ in range(3):
            one_round(spec, [s], [text], [DEPTH])
        s.restore(c)
        truth.check(s, text[:5])
        one_round(spec, [s], [text], [DEPTH])
        truth.check(s, text[: len(s)])


# -- several sequences -------------------------------------------------------------------------------------------------


@pytest.mark.fault("B49")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rejections_in_every_subset(truth: Truth, drafting: Drafting, scripted: Any, way: str, count: int) -> None:
    """Different depths in one round; each sequence is what it would be alone. Slots and pages are mixed up in between."""
    depths, texts = [3, 1, 4, 2][:count], truth.texts[:count]
    for subset in product((False, True), repeat=count):
        order = iter(subset)
        spec = drafting(scripted(texts, lambda _, o=order: 0 if next(o) else 8), DEPTH, way)
        sessions = [truth.e.session() for _ in texts]
        if sum(subset) % 2:
            truth.e.bundle.free_slots.reverse()
            truth.e.bundle.free_pages.reverse()
        for s, text, n in zip(sessions, texts, STARTS, strict=False):
            s.feed(text[:n], logits=None)
        accepted = one_round(spec, sessions, texts, depths)
        assert accepted == [0 if rejected else d for rejected, d in zip(subset, depths, strict=True)]
        for s, text, n, a in zip(sessions, texts, STARTS, accepted, strict=False):
            truth.check(s, text[: n + 1 + a], f"{subset} by {way}")
        for s in sessions:
            s.close()


@pytest.mark.fault("B48")
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_rounds(truth: Truth, drafting: Drafting, scripted: Any, way: str) -> None:
    """Three sequences, random numbers of right tokens, depths and cuts by the caller; no part of any is ever off."""
    rng = np.random.default_rng(3)
    spec = drafting(scripted(truth.texts, lambda _: int(rng.integers(0, 4))), DEPTH, way)
    texts = truth.texts[:3]
    sessions = [truth.e.session() for _ in texts]
    for _ in range(100):
        for s, text, n in zip(sessions, texts, STARTS, strict=False):
            if not len(s) or len(s) + DEPTH + 2 > len(text):
                s.reset()
                s.feed(text[:n], logits=None)
        jobs = [Job(s, t[len(s)], Sampler(), most=3) for s, t in zip(sessions, texts, strict=True)]
        turns = spec.round(jobs)
        spec.commit(turns, [1 + int(rng.integers(0, t.accepted + 1)) for t in turns])
        s, text = sessions[k := int(rng.integers(0, 3))], texts[k]
        truth.check(s, text[: len(s)], way)
    for s in sessions:
        s.close()
