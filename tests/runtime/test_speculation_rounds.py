"""Rounds on a whole model: stubs that are right for every number of tokens, several sequences, every state after every round,
endings inside a block, drafters that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from trueup.runtime import Engine
from trueup.runtime.engine import open_target
from trueup.runtime.sampling import NonFiniteLogits, Sampler
from trueup.runtime.speculation import Draft, Job, SpeculationWarning, Speculator
from trueup.runtime.state import StateError

Make = Callable[..., Engine]
WAYS = ("snapshots", "replay")
PROMPT = [3, 1, 4, 1, 5]


class Stub:
    """Drafts the text that is said to follow, right for `right(call)` tokens."""

    name = "stub"

    def __init__(self, texts: dict[int, list[int]], right: Callable[[int], int]) -> None:
        self.texts, self.right, self.calls = texts, right, 0

    def propose(self, requests: Sequence[Any]) -> list[Draft]:
        out = []
        for r in requests:
            n, self.calls = self.right(self.calls), self.calls + 1
            at = len(r.session) + 1
            known = (self.texts[id(r.session)] if id(r.session) in self.texts else self.texts[0])[at : at + r.depth]
            known = [*known, *[0] * (r.depth - len(known))]
            out.append(Draft(tuple(t if i < n else (t + 1) % 1024 for i, t in enumerate(known))))
        return out

    def close(self) -> None:
        return None


def speculator(e: Engine, drafter: Any, depth: int, way: str = "snapshots") -> Speculator:
    e.speculator = Speculator(e, drafter, depth=depth, most=depth, rollback=way)  # type: ignore[arg-type]
    return e.speculator


def plain(e: Engine, prompt: list[int], n: int, **more: Any) -> list[int]:
    return [t for p in e.generate(prompt, max_tokens=n, ignore_eos=True, speculate=False, **more) for t in p.tokens]


@pytest.fixture
def engine(drafting_engine: Engine) -> Iterator[Engine]:
    yield drafting_engine
    drafting_engine.speculator = None


@pytest.mark.parametrize("depth", [1, 3, 5, 8])
def test_stubs_right_for_every_number_of_tokens(engine: Engine, depth: int) -> None:
    """B44, B46: the text of plain decoding for every j, and a token at least in each round."""
    want = plain(engine, PROMPT, 20)
    for way in WAYS:
        s = speculator(engine, Stub({0: PROMPT + want}, lambda call: call % (depth + 1)), depth, way)
        got = [t for p in engine.generate(PROMPT, max_tokens=20, ignore_eos=True) for t in p.tokens]
        assert got == want, way
        assert s.tally.tokens >= s.tally.rounds and max(s.tally.accepted, default=0) > 0


@pytest.mark.parametrize("way", WAYS)
def test_every_state_of_several_sequences_after_each_round(engine: Engine, way: str) -> None:
    """B46, B48, B49, B50: three sequences in one round, each rejecting elsewhere; all parts are those of a solo run."""
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    texts = [p + plain(engine, p, 14) for p in prompts]
    sessions = [engine.session() for _ in prompts]
    for s, p in zip(sessions, prompts, strict=True):
        s.feed(p, logits=None)
    turns = list(product((0, 1, 3), repeat=3))
    script = [n for k in (5, 13, 21, 26) for n in turns[k]]
    stub = Stub({id(s): t for s, t in zip(sessions, texts, strict=True)}, lambda call: script[call])
    spec = speculator(engine, stub, 3, way)
    for _ in range(2):
        jobs = [
            Job(s, t[len(s)], Sampler(), most=2 + i % 2) for i, (s, t) in enumerate(zip(sessions, texts, strict=True))
        ]
        made = spec.round(jobs)
        spec.commit(made, [t.accepted + 1 for t in made])
        for s, text in zip(sessions, texts, strict=True):
            assert s.tokens == text[: len(s)]
            with engine.session() as solo:
                for t in s.tokens:
                    solo.feed([t], logits=None)
                theirs = engine.bundle.export(solo.sequence)
                for name, part in engine.bundle.export(s.sequence).items():
                    np.testing.assert_array_equal(part, theirs[name], err_msg=f"{name} after {len(s)} tokens, {way}")
    assert {"residual", "ngram", "positions"} <= engine.bundle.kinds.keys()
    for s in sessions:
        s.close()
    assert len(engine.bundle.free_slots) == engine.capacity.slots


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_less_may_be_kept_than_was_accepted(engine: Engine, way: str, kept: int) -> None:
    want = plain(engine, PROMPT, 12)
    with engine.session() as s:
        s.feed(PROMPT, logits=None)
        spec = speculator(engine, Stub({0: PROMPT + want}, lambda _: 3), 3, way)
        (turn,) = spec.round([Job(s, want[0], Sampler())])
        assert turn.accepted == 3
        spec.commit([turn], [kept])
        assert s.tokens == (PROMPT + want)[: len(PROMPT) + kept]
        row = s.feed([want[kept]])
        assert int(row.argmax()) == want[kept + 1]


def test_rows_that_were_not_accepted_cannot_be_kept(engine: Engine) -> None:
    with engine.session() as s:
        s.feed(PROMPT, logits=None)
        spec = speculator(engine, Stub({0: [7] * 40}, lambda _: 0), 3)
        (turn,) = spec.round([Job(s, 9, Sampler())])
        with pytest.raises(ValueError, match="rows can't stay"):
            spec.commit([turn], [turn.accepted + 2])
        assert len(engine.bundle.free_slots) == engine.capacity.slots - 1
        snapshots = engine.bundle.snapshots(s.sequence, 3)
        with pytest.raises(StateError, match="can't be kept"):
            engine.bundle.settle(s.sequence, snapshots, 1)
        engine.bundle.discard(snapshots)


def endings(e: Engine, n: int, **options: Any) -> list[Any]:
    """Plain and speculative: pieces' text, tokens, log-probabilities, reason, stop, usage, and how the session goes on."""
    out = []
    for speculate in (False, True):
        with e.session() as s:
            pieces = list(e.generate(PROMPT, max_tokens=n, session=s, speculate=speculate, **options))
            last = pieces[-1]
            fed = list(s.tokens)
            rest = s.feed([7]) if len(s) < e.context else None
            out.append(
                (
                    "".join(p.text for p in pieces), [t for p in pieces for t in p.tokens], last.finish_reason, last.stop,
                    last.usage, fed, None if rest is None else rest.tolist(),
                    [round(x, 4) for p in pieces for x in p.logprobs],
                )
            )  # fmt: skip
    return out


@pytest.mark.parametrize("n", range(1, 8))
def test_max_tokens_at_every_offset_of_a_block(engine: Engine, n: int) -> None:
    """B52."""
    want = plain(engine, PROMPT, 12)
    speculator(engine, Stub({0: PROMPT + want}, lambda _: 4), 4)
    a, b = endings(engine, n, ignore_eos=True)
    assert a == b and a[2] == "length"


@pytest.mark.parametrize("at", range(6))
def test_an_end_token_at_every_offset_of_a_block(engine: Engine, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B52: nothing after it leaks, and it is not fed."""
    want = plain(engine, PROMPT, 12)
    first = want.index(want[at])
    ends = replace(engine.model.tokenizer, eos_ids=frozenset({want[at]}))
    monkeypatch.setattr(engine.model, "tokenizer", ends, raising=False)
    speculator(engine, Stub({0: PROMPT + want}, lambda _: 4), 4)
    a, b = endings(engine, 12)
    assert a == b and a[2] == "stop" and a[1] == want[:first]


@pytest.mark.parametrize("at", range(5))
def test_a_stop_text_at_every_offset_of_a_block(engine: Engine, at: int) -> None:
    """B52."""
    want = plain(engine, PROMPT, 12)
    text = engine.model.tokenizer.decode([want[at]])
    assert text.strip("\ufffd")
    speculator(engine, Stub({0: PROMPT + want}, lambda _: 4), 4)
    a, b = endings(engine, 12, stop=text, ignore_eos=True)
    assert a == b and a[2] == "stop"


@pytest.mark.parametrize("context", range(8, 15))
def test_a_full_context_at_every_offset_of_a_block(make: Make, context: int) -> None:
    e = make(open_target("cpu", {}), snapshots=9, sequences=2, context=context, page=4)
    want = plain(e, PROMPT, 30)
    assert len(want) == context - len(PROMPT)
    speculator(e, Stub({0: PROMPT + want}, lambda _: 4), 4)
    a, b = endings(e, 30, ignore_eos=True)
    assert a == b and a[2] == "length" and len(a[5]) == context


class Rude:
    """A drafter that does what it must not."""

    name = "rude"

    def __init__(self, made: Callable[[Any], Any]) -> None:
        self.made = made

    def propose(self, requests: Sequence[Any]) -> Any:
        return self.made(requests)

    def close(self) -> None:
        return None


@pytest.mark.parametrize(
    "made, text",
    [
        (lambda r: [Draft((10**6, 2))] * len(r), ""),
        (lambda r: [Draft((-1,))] * len(r), ""),
        (lambda r: [Draft(tuple(range(99)))] * len(r), ""),
        (lambda r: [Draft(())] * len(r), ""),
        (lambda r: [], "gave 0 drafts for 1 requests"),
        (lambda r: 1 // 0, "division"),
    ],
)
def test_drafters_that_misbehave(engine: Engine, made: Any, text: str) -> None:
    """What can be cut is cut; the rest is an error, and the session stays as it was."""
    want = plain(engine, PROMPT, 8)
    speculator(engine, Rude(made), 3)
    if not text:
        assert [t for p in engine.generate(PROMPT, max_tokens=8, ignore_eos=True) for t in p.tokens] == want
        return
    with engine.session() as s:
        s.feed(PROMPT, logits=None)
        with pytest.raises((ValueError, ZeroDivisionError), match=text):
            assert engine.speculator is not None
            engine.speculator.round([Job(s, want[0], Sampler())])
        assert s.tokens == PROMPT and int(s.feed([want[0]]).argmax()) == want[1]
    assert len(engine.bundle.free_slots) == engine.capacity.slots


def test_a_drafter_that_is_never_right_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """B53: a warning with the likely cause, and the text goes on unchanged."""
    monkeypatch.setattr("trueup.runtime.speculation.rounds.PATIENCE", 6)
    want = plain(engine, PROMPT, 16)
    s = speculator(engine, Stub({0: PROMPT + want}, lambda _: 0), 3)
    with pytest.warns(
        SpeculationWarning, match="0 of .* tokens drafted by stub were accepted: it seems to be made for another"
    ):
        got = [t for p in engine.generate(PROMPT, max_tokens=16, ignore_eos=True) for t in p.tokens]
    assert got == want and s.given_up and sum(s.tally.drafted[:1]) == 6


def test_rows_that_give_nothing_are_met_where_plain_decoding_meets_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, right = plain(engine, PROMPT, 10), engine.step
    speculator(engine, Stub({0: PROMPT + want}, lambda _: 3), 3)

    def broken(work: Any, **more: Any) -> Any:
        before = [len(s) for s, _ in work]
        out = right(work, **more)
        for o, n, (_, tokens) in zip(out, before, work, strict=True):
            for i in range(len(o)):
                if n + len(tokens) - len(o) + i >= len(PROMPT) + 5:
                    o[i] = np.nan
        return out

    monkeypatch.setattr(engine, "step", broken)
    got: list[int] = []
    with pytest.raises(NonFiniteLogits, match=f"after {len(PROMPT) + 6} tokens on backend cpu"):
        for p in engine.generate(PROMPT, max_tokens=10, ignore_eos=True):
            got += p.tokens
    assert got == want[:6]


class Shaped:
    """Makes a step's results depend on its number of rows: the runner-up gains 1e-3 where there are two."""

    def __init__(self, e: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        right = e.step

        def step(work: Any, **more: Any) -> Any:
            out = right(work, **more)
            for o, (_, tokens) in zip(out, work, strict=True):
                if len(tokens) == 2:
                    for row in o:
                        row[np.argsort(row)[-2]] += 1e-3
            return out

        monkeypatch.setattr(e, "step", step)


@pytest.mark.parametrize("way", WAYS)
def test_a_device_whose_results_depend_on_the_batch_makes_progress(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """B43: what was accepted is final; a replay judges nothing, so no round repeats another."""
    want = plain(engine, PROMPT, 20)
    s = speculator(engine, Stub({0: PROMPT + want}, lambda call: (2, 1, 0)[call % 3]), 3, way)
    Shaped(engine, monkeypatch)
    got = [t for p in engine.generate(PROMPT, max_tokens=20, ignore_eos=True) for t in p.tokens]
    assert len(got) == 20 and s.tally.rounds <= 20


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_iterator_leaves_no_more_than_it_handed_out(engine: Engine, way: str) -> None:
    """Dropped inside a block that was accepted, too: the session holds what plain decoding would have left there."""
    want = plain(engine, PROMPT, 12)
    speculator(engine, Stub({0: PROMPT + want}, lambda call: (3, 1, 0, 2)[call % 4]), 3, way)
    ends = set()
    for taken in range(1, 13):
        with engine.session() as s:
            pieces, got = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, session=s), []
            for _ in range(taken):
                got += next(pieces).tokens
            pieces.close()  # type: ignore[attr-defined]
            assert s.tokens == [*PROMPT, *got[:-1]] and len(s) == len(s.tokens)
            assert got[:12] == want[: len(got)]
            ends.add(len(got))
            assert int(s.feed(got[-1:]).argmax()) == plain(engine, PROMPT, len(got) + 1)[-1]
    assert max(ends) > 12, "blocks of several tokens were met"
