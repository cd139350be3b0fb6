"""Generation: when it ends, what it says then, and that a seed is all that chance depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.models import Model
from trueup.runtime import ContextFull, Engine, NonFiniteLogits, OutOfState, Piece, Sampler, Session, Usage
from trueup.runtime.generate import generate

Make = Callable[..., Engine]


def tokens(pieces: list[Piece]) -> list[int]:
    return [t for p in pieces for t in p.tokens]


def text(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces)


def run(engine: Engine, prompt: Any, **options: Any) -> list[Piece]:
    """All pieces; only the last says why it ended."""
    pieces = list(engine.generate(prompt, **options))
    assert all(p.finish_reason is None and p.usage is None and p.stop is None for p in pieces[:-1])
    assert all(len(p.tokens) == len(p.logprobs) == 1 for p in pieces[:-1])
    assert pieces[-1].finish_reason is not None
    assert pieces[-1].usage == Usage(pieces[-1].usage.prompt_tokens, len(tokens(pieces)))  # type: ignore[union-attr]
    return pieces


def greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    """The best token of each row, one after the other."""
    out: list[int] = []
    with engine.session() as s:
        logits = s.feed(prompt)
        while len(out) < n:
            out.append(int(np.argmax(logits)))
            logits = s.feed(out[-1:])
    return out


@pytest.fixture(scope="module")
def bundled() -> Iterator[Engine]:
    e = trueup.load(backend="reference", context=64, sequences=2)
    yield e
    e.close()


@pytest.fixture
def ends_with(random_model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the random model's tokenizer other fields."""

    def change(**fields: Any) -> None:
        monkeypatch.setitem(random_model.__dict__, "tokenizer", replace(random_model.tokenizer, **fields))

    return change


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_no_tokens_wanted(make: Make, ids: list[int]) -> None:
    e = make()
    with e.session() as s:
        assert run(e, ids[:7], max_tokens=0, session=s) == [
            Piece("", finish_reason="length", usage=Usage(prompt_tokens=7, completion_tokens=0))
        ]
        assert s.tokens == ids[:7]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_as_many_tokens_as_wanted(make: Make, ids: list[int], n: int) -> None:
    e = make()
    with e.session() as s:
        pieces = run(e, ids[:7], max_tokens=n, session=s, ignore_eos=True)
        assert tokens(pieces) == greedy(e, ids[:7], n)
        assert pieces[-1].finish_reason == "length" and pieces[-1].usage == Usage(7, n)
        assert s.tokens == ids[:7] + tokens(pieces), "all that was chosen has been fed"


@pytest.mark.fault("B26")
@pytest.mark.parametrize("prompt", [13, 15, 16])
def test_the_context_ends(make: Make, ids: list[int], prompt: int) -> None:
    e = make(context=16)
    with e.session() as s:
        pieces = run(e, ids[:prompt], session=s, ignore_eos=True)
        assert pieces[-1].finish_reason == "length" and pieces[-1].usage == Usage(prompt, 16 - prompt)
        assert len(s) == 16
    assert tokens(pieces) == greedy(make(), ids[:prompt], 16 - prompt)


def test_a_prompt_beyond_the_context(make: Make, ids: list[int]) -> None:
    e = make(context=16)
    with pytest.raises(ContextFull, match="0 tokens and 17 more exceed the context of 16"):
        list(e.generate(ids[:17]))
    assert len(e.bundle.free_slots) == e.capacity.slots


def test_an_end_token_ends_and_is_not_shown(make: Make, ids: list[int], ends_with: Callable[..., None]) -> None:
    e = make()
    path = greedy(e, ids[:7], 6)
    assert path[4] not in path[:4]
    ends_with(eos_ids=frozenset({path[4], 1023}))
    with e.session() as s:
        pieces = run(e, ids[:7], session=s, max_tokens=20)
        assert tokens(pieces) == path[:4] and pieces[-1].finish_reason == "stop" and pieces[-1].stop is None
        assert pieces[-1].usage == Usage(7, 4)
        assert s.tokens == ids[:7] + path[:4]
    assert tokens(run(e, ids[:7], max_tokens=6, ignore_eos=True)) == path
    assert run(e, ids[:7], max_tokens=4)[-1].finish_reason == "length", "it was not asked for"
    ends_with(eos_ids=frozenset({path[0]}))
    assert run(e, ids[:7], max_tokens=4) == [Piece("", finish_reason="stop", usage=Usage(7, 0))]


PROMPT = "import os\n\ndef "


def test_text_of_the_bundled_model(bundled: Engine) -> None:
    """The pieces' text is the tokens' text, as it would be read at once."""
    pieces = run(bundled, PROMPT, max_tokens=14)
    prompt = bundled.model.tokenizer.encode(PROMPT)
    assert tokens(pieces) == greedy(bundled, prompt, 14)
    assert text(pieces) == b"".join(map(bundled.model.tokenizer.token_bytes, tokens(pieces))).decode()
    assert pieces[-1].usage == Usage(len(prompt), 14)
    assert tokens(run(bundled, prompt, max_tokens=14)) == tokens(pieces)


@pytest.mark.parametrize("at, length", [(0, 1), (3, 4), (9, 7), (20, 2)])
def test_a_stop_string_ends_and_is_not_shown(bundled: Engine, at: int, length: int) -> None:
    """Wherever it lies, within a token or across several; of the text before it nothing is missing."""
    whole = run(bundled, PROMPT, max_tokens=14)
    full = text(whole)
    stop = full[at : at + length]
    with bundled.session() as s:
        pieces = run(bundled, PROMPT, max_tokens=14, stop=["never", stop], session=s)
        n = len(tokens(pieces))
        assert text(pieces) == full[: full.index(stop)]
        assert pieces[-1].finish_reason == "stop" and pieces[-1].stop == stop
        assert tokens(pieces) == tokens(whole)[:n]
        said = [b"".join(map(bundled.model.tokenizer.token_bytes, tokens(whole)[:k])).decode() for k in (n - 1, n)]
        assert stop not in said[0] and stop in said[1], "it ends with the token that completes the stop"
        assert s.tokens == bundled.model.tokenizer.encode(PROMPT) + tokens(pieces)


def test_a_stop_string_that_never_comes_holds_nothing_back(bundled: Engine) -> None:
    full = text(run(bundled, PROMPT, max_tokens=10))
    pieces = run(bundled, PROMPT, max_tokens=10, stop=full[-3:] + "never")
    assert text(pieces) == full and pieces[-1].finish_reason == "length" and pieces[-1].stop is None


def test_a_stop_string_in_the_last_token(bundled: Engine) -> None:
    whole = run(bundled, PROMPT, max_tokens=10)
    stop = whole[-2].text[-1:] or text(whole)[-1:]
    full = text(whole)
    n = next(i for i in range(1, 11) if stop in text(whole[:i]))
    pieces = run(bundled, PROMPT, max_tokens=n, stop=stop)
    assert pieces[-1].finish_reason == "stop" and text(pieces) == full[: full.index(stop)]


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_goes_on(make: Make, ids: list[int]) -> None:
    e = make()
    with e.session() as s:
        first = tokens(run(e, ids[:7], max_tokens=3, session=s, ignore_eos=True))
        second = run(e, ids[50:53], max_tokens=3, session=s, ignore_eos=True)
        assert second[-1].usage == Usage(3, 3)
        assert tokens(second) == greedy(e, ids[:7] + first + ids[50:53], 3)
        assert s.sequence.slot >= 0


@pytest.mark.fault("B92")
def test_an_iterator_that_is_dropped_gives_its_session_back(make: Make, ids: list[int]) -> None:
    e = make(sequences=1, checkpoints=0)
    for dropped in range(3):
        pieces = e.generate(ids[:5], ignore_eos=True)
        for _ in range(dropped):
            next(pieces)
        if dropped:
            with pytest.raises(OutOfState):
                e.session()
        pieces.close()  # type: ignore[attr-defined]
        assert len(e.bundle.free_slots) == 1
        assert len(e.bundle.free_pages) == e.capacity.pages
    with e.session() as s:
        pieces = e.generate(ids[:5], session=s, ignore_eos=True)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        assert s.tokens == ids[:5] and s.feed(ids[5:6]).shape == (1024,)


def test_an_error_gives_the_session_back(make: Make, ids: list[int]) -> None:
    e = make()
    with pytest.raises(ValueError, match="lies outside the vocabulary"):
        list(e.generate([1, 5000]))
    assert len(e.bundle.free_slots) == e.capacity.slots


def test_begin_of_text_stands_at_the_beginning_only(make: Make, ids: list[int], ends_with: Callable[..., None]) -> None:
    e = make()
    plain = e.model.tokenizer.encode("ab")
    with pytest.raises(ValueError, match="there are no tokens"):
        list(e.generate("", max_tokens=1))
    ends_with(bos_id=17, add_bos=True)
    with e.session() as s:
        for prompt, fed in (("ab", [17, *plain]), ("ab", plain)):
            before = list(s.tokens)
            run(e, prompt, max_tokens=0, session=s)
            assert s.tokens == before + fed
        with pytest.raises(ValueError, match="there are no tokens"):
            run(e, "", session=s)
    ends_with(bos_id=17)
    with e.session() as s:
        run(e, "", max_tokens=0, session=s)
        assert s.tokens == [17]


# -- chance ------------------------------------------------------------------------------------------------------------

CHANCE = dict(max_tokens=6, temperature=1.5, top_p=0.99, ignore_eos=True)


def test_a_seed_gives_the_same_tokens(make: Make, ids: list[int]) -> None:
    """However the prompt is cut into steps, whatever else runs, and from wherever it goes on."""
    e = make()
    want = tokens(run(e, ids[:21], seed=5, **CHANCE))
    assert tokens(run(e, ids[:21], seed=5, **CHANCE)) == want
    assert tokens(run(make(batch=4), ids[:21], seed=5, **CHANCE)) == want
    noise = e.generate(ids[40:45], seed=5, **CHANCE)
    pieces = e.generate(ids[:21], seed=5, **CHANCE)
    mixed = []
    for p in pieces:
        mixed.append(p)
        next(noise, None)
    assert tokens(mixed) == want
    assert tokens(run(e, ids[:21] + want[:4], seed=5, **CHANCE | {"max_tokens": 2})) == want[4:]
    with e.session() as s:
        s.feed(ids[:10], logits=None)
        assert tokens(run(e, ids[10:21], seed=5, session=s, **CHANCE)) == want
    others = {tuple(tokens(run(e, ids[:21], seed=n, **CHANCE))) for n in range(3)}
    assert len(others) == 3 and tuple(want) not in others
    assert len({tuple(tokens(run(e, ids[:21], **CHANCE))) for _ in range(3)}) > 1, (
        "without a seed it is another each time"
    )


@pytest.mark.fault("B88")
def test_choices_of_a_prompt_differ(make: Make, ids: list[int]) -> None:
    e = make()
    sampler = Sampler(temperature=1.5, seed=3)

    def choice(n: int, session: Session) -> list[int]:
        return tokens(
            list(generate(session, e.model, ids[4:5], sampler=sampler, max_tokens=5, choice=n, ignore_eos=True))
        )

    with e.session() as s:
        s.feed(ids[:4], logits=None)
        forks = [s.fork() for _ in range(4)]
    outs = [choice(n, f) for n, f in zip((0, 1, 2, 0), forks, strict=True)]
    assert outs[0] == outs[3] == tokens(run(e, ids[:5], max_tokens=5, temperature=1.5, seed=3, ignore_eos=True))
    assert len({tuple(o) for o in outs}) == 3


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "top_k": 50, "seed": 1}])
def test_logprobs_are_those_of_the_plain_softmax(make: Make, ids: list[int], options: dict[str, Any]) -> None:
    e = make()
    pieces = run(e, ids[:9], max_tokens=6, ignore_eos=True, **options)
    rows = e.logits(ids[:9] + tokens(pieces))[8:-1].astype(np.float64)
    z = rows - rows.max(1, keepdims=True)
    want = (z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(6), tokens(pieces)]
    got = [x for p in pieces for x in p.logprobs]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(sum(got), want.sum(), rtol=1e-12)


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "an empty stop string"),
        ({"stop": ["a", ""]}, "an empty stop string"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Make, options: dict[str, Any], message: str) -> None:
    e = make()
    with pytest.raises(ValueError, match=message):
        e.generate([1], **options)
    assert len(e.bundle.free_slots) == e.capacity.slots


@pytest.mark.fault("B23")
def test_logits_that_are_not_finite_say_where_and_by_whom(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    e = make()
    executable = e.executable

    class Broken:
        def __init__(self, shape: Any) -> None:
            self.inner = executable(shape)

        def run(self, inputs: Any) -> Any:
            out = self.inner.run(inputs)
            out["logits"][:, 3] = np.nan
            return out

    monkeypatch.setattr(e, "executable", Broken)
    with pytest.raises(NonFiniteLogits, match=r"after 4 tokens on backend reference: logits\[3\] is NaN"):
        list(e.generate([1, 2, 3, 4]))
    assert len(e.bundle.free_slots) == e.capacity.slots
