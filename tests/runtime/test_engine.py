"""Steps of several sequences against each sequence alone: on the reference every comparison is bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trueup.backends.reference import ReferenceTarget
from trueup.core.backend import Context, Device, HostMemory
from trueup.core.ops import attention, linear, ngram_rows
from trueup.core.state import PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.runtime import ContextFull, Engine, OutOfState, Session, StateError
from trueup.runtime import engine as engine_module

Make = Callable[..., Engine]
Array = NDArray[Any]


class Alone:
    """What sequences give by themselves, each in one step of an engine of its own; every answer is kept."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[tuple[int, ...], tuple[Array, dict[str, Array]]] = {}

    def __call__(self, tokens: list[int]) -> tuple[Array, dict[str, Array]]:
        """Logits at every position, and all states after the last."""
        key = tuple(tokens)
        if key not in self.known:
            with self.engine.session() as s:
                logits = s.feed(tokens, logits="all")
                self.known[key] = logits, self.engine.bundle.export(s.sequence)
        return self.known[key]

    def check(self, session: Session, logits: Array | None = None) -> None:
        """The session's states, and the logits of its last rows, are those of its tokens alone."""
        want, states = self(session.tokens)
        if logits is not None:
            assert np.array_equal(logits, want[len(want) - len(logits) :])
        same(session.engine.bundle.export(session.sequence), states)


def same(a: dict[str, Array], b: dict[str, Array]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture
def alone(make: Make) -> Alone:
    return Alone(make(sequences=1))


def books(engine: Engine, *sessions: Session) -> Any:
    """All that a refused call must leave as it was: contents, free lists, and each session's fields."""
    b = engine.bundle
    arrays = {n: b._memories[n].download(a).tobytes() for n, a in b._arrays.items()}
    fields = [(s.tokens[:], vars(s.sequence) | {"pages": s.sequence.pages[:]}) for s in sessions]
    return arrays, b.free_slots[:], b.free_pages[:], b.references[:], fields


def scrambled(engine: Engine, n: int) -> list[Session]:
    """Sessions whose slots fall, and on pages that were others' before."""
    made = [engine.session() for _ in range(2 * n)]
    for s in made:
        s.feed([3] * 9, logits=None)
    for s in made[::2]:
        s.close()
    for s in made[1::2]:
        s.reset()
    return made[::-2]


# -- several sequences in a step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["reference", "bodies"])
def test_ragged_steps_equal_each_sequence_alone(make: Make, alone: Alone, ids: list[int], target: str) -> None:
    """Three sequences, any number of rows in each step, padding, a fork in the middle of a page."""
    e = make(target, sequences=6)
    a, b, c = scrambled(e, 3)
    text = {a: ids, b: ids[100:], c: ids[50:]}
    assert [s.sequence.slot for s in (a, b, c)] == [5, 3, 1]
    seen: dict[Session, list[Array]] = {a: [], b: [], c: []}

    def step(*work: tuple[Session, list[int]]) -> None:
        for (s, _), logits in zip(work, e.step(work, logits="all"), strict=True):
            seen.setdefault(s, []).append(logits)

    for lengths in [(30, 5, 1), (1, 1, 20), (9, 0, 3), (3, 9, 0), (1, 13, 13), (2, 1, 6)]:
        step(*((s, text[s][len(s) : len(s) + n]) for s, n in zip((c, a, b), lengths, strict=True)))
    f = b.fork()
    assert len(b) % e.capacity.page and f.sequence.pages == b.sequence.pages
    step((f, ids[:7]), (a, ids[60:61]), (b, ids[20:25]))
    for s, logits in seen.items():
        alone.check(s, np.concatenate(logits))


@pytest.mark.fault("B12")
@pytest.mark.parametrize("pasts, rows", [((9, 22), 1), ((9, 22), 2), ((35, 36), 2), ((8, 7), 1)])
def test_each_sequence_has_its_own_past(
    make: Make, alone: Alone, ids: list[int], pasts: tuple[int, int], rows: int
) -> None:
    """As many rows as sequences too, where one axis could pass for the other."""
    e = make()
    sessions = [e.session(), e.session()]
    for s, n in zip(sessions, pasts, strict=True):
        s.feed(ids[n : 2 * n], logits=None)
    for s, logits in zip(sessions, e.step([(s, ids[:rows]) for s in sessions], logits="all"), strict=True):
        alone.check(s, logits)


@pytest.mark.fault("B13", "B17")
def test_interleaved_pages_do_not_mix(make: Make, alone: Alone, ids: list[int]) -> None:
    """Two sequences from position 0 that take pages in turn."""
    e = make(page=4)
    a, b = e.session(), e.session()
    for i in range(0, 40, 4):
        a.feed(ids[i : i + 4], logits=None)
        b.feed(ids[60 + i : 64 + i], logits=None)
    assert set(np.diff(a.sequence.pages)) == {2}
    alone.check(b, b.feed(ids[:5], logits="all"))
    alone.check(a, a.feed(ids[5:6], logits="all"))


@pytest.mark.fault("B42")
@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_any_split_gives_the_same_bits(make: Make, alone: Alone, ids: list[int], size: int) -> None:
    e = make()
    s = e.session()
    logits = [s.feed(ids[i : i + size][: 45 - i], logits="all") for i in range(0, 45, size)]
    alone.check(s, np.concatenate(logits))


@pytest.mark.fault("B32")
def test_places_without_a_sequence(make: Make, alone: Alone, ids: list[int]) -> None:
    """Nine sequences take a plan for ten, and its padded rows are no one's."""
    e = make(sequences=9)
    sessions = [e.session() for _ in range(9)]
    for n in (1, 2):
        work = [(s, ids[i : i + n + (i == 4)]) for i, s in enumerate(sessions)]
        for s, logits in zip(sessions, e.step(work, logits="all"), strict=True):
            alone.check(s, logits)
    assert {(s.tokens, s.seqs) for s in e.plans()} == {(10, 10), (20, 10)}


@pytest.mark.fault("B42")
def test_other_rows_do_not_matter(make: Make, alone: Alone, ids: list[int]) -> None:
    """A sequence among noise, in every place of the step."""
    e = make(sequences=5)
    for place in range(4):
        s, noise = e.session(), [e.session() for _ in range(3)]
        for step, n in enumerate((7, 1, 3)):
            work = [(x, [(11 * step + i) % 1000] * (i + 1)) for i, x in enumerate(noise)]
            work.insert(place, (s, ids[len(s) : len(s) + n]))
            alone.check(s, e.step(work, logits="all")[place])
        for x in (s, *noise):
            x.close()


@pytest.mark.fault("B24")
def test_forks_go_on_as_one(make: Make, alone: Alone, ids: list[int]) -> None:
    """Three forks and their origin, five greedy tokens each: in one step, and one after the other."""
    e = make(sequences=5)
    s = e.session()
    logits = s.feed(ids[:43])
    forks = [s.fork() for _ in range(3)]
    assert all(f.sequence.pages == s.sequence.pages and f.tokens == s.tokens for f in forks)
    best = [int(logits.argmax())] * 4
    for _ in range(4):
        rows = e.step([(x, [t]) for x, t in zip((s, *forks), best, strict=True)])
        best = [int(r[0].argmax()) for r in rows]
        assert len(set(best)) == 1
    for x in (*forks, s):
        alone.check(x)
    forks[1].feed(ids[50:60], logits=None)
    s.close()
    for x in (forks[2], forks[1], forks[0]):
        x.feed(ids[60:64], logits=None)
        alone.check(x)


@pytest.mark.fault("B25")
@settings(max_examples=max(1, settings().max_examples // 12))
@given(data=st.data())
def test_any_story_of_sequences(make_story: Any, ids: list[int], data: st.DataObject) -> None:
    """Steps of any sequences, forks, checkpoints and returns to them, in any order: each as if it had been alone."""
    e, alone = make_story
    sessions: list[Session] = [e.session()]
    marks: list[tuple[Session, Any]] = []
    try:
        for _ in range(data.draw(st.integers(2, 6), label="operations")):
            what = data.draw(st.sampled_from(["step", "step", "fork", "mark", "return", "reset"]), label="operation")
            s = data.draw(st.sampled_from(sessions), label="session")
            if what == "step":
                count = data.draw(st.integers(1, len(sessions)), label="sequences")
                chosen = data.draw(st.permutations(sessions), label="order")[:count]
                lengths = [data.draw(st.integers(1, 14), label="tokens") for _ in chosen]
                starts = [data.draw(st.integers(0, 150), label="from") for _ in chosen]
                work = [(x, ids[i : i + n]) for x, i, n in zip(chosen, starts, lengths, strict=True)]
                for x, logits in zip(chosen, e.step(work, logits="all"), strict=True):
                    alone.check(x, logits)
            elif what == "fork" and len(sessions) < 4:
                sessions.append(s.fork())
            elif what == "mark" and len(marks) < 4:
                marks.append((s, s.checkpoint()))
            elif what == "return" and marks:
                x, c = data.draw(st.sampled_from(marks), label="checkpoint")
                if c.slot is not None:
                    x.restore(c)
            elif what == "reset":
                s.reset()
        for s in sessions:
            if s.tokens:
                alone.check(s)
    finally:
        for s in sessions:
            s.close()
    assert len(e.bundle.free_slots) == e.capacity.slots
    assert len(e.bundle.free_pages) == e.capacity.pages


@pytest.fixture(scope="module")
def make_story(random_model: Any) -> Any:
    """An engine and its `Alone`, for all examples of a property."""
    from trueup.backends.reference import Reference

    backend = Reference()
    engines = [
        Engine(random_model, backend.open(backend.devices()[0]), context=256, page=8, sequences=4) for _ in range(2)
    ]
    engines[0].bundle.poison = True
    yield engines[0], Alone(engines[1])
    for e in engines:
        e.close()


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["reference", "bodies"])
def test_restores_after_wrong_continuations(make: Make, alone: Alone, ids: list[int], target: str) -> None:
    """Lengths on and off multiples of a block (4) and a page (8), within and beyond the budget of 32."""
    e = make(target)
    s = e.session()
    whole, _ = alone(ids[:60])
    for at in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 34, 35, 36):
        s.feed(ids[len(s) : at], logits=None)
        c = s.checkpoint()
        for wrong in (1, 3, 6, 12) if target == "reference" else (3,):
            s.feed([(977 * at + wrong + i) % 1024 for i in range(wrong)], logits=None)
            s.restore(c)
            assert s.tokens == ids[:at] and len(e.bundle.free_pages) == e.capacity.pages - -(-at // 8)
            alone.check(s)
        assert np.array_equal(s.feed(ids[at : at + 5], logits="all"), whole[at : at + 5])
        s.restore(c)
        s.drop(c)


def test_restore_beside_a_fork(make: Make, alone: Alone, ids: list[int]) -> None:
    e = make()
    s = e.session()
    s.feed(ids[:34], logits=None)
    c = s.checkpoint()
    twin = s.fork()
    s.feed(ids[100:107], logits=None)
    s.restore(c)
    for x in (s, twin):
        alone.check(x, x.feed(ids[34:50], logits="all"))
    later = s.checkpoint()
    s.restore(c)
    with pytest.raises(StateError, match="void"):
        s.restore(later)
    with pytest.raises(StateError, match="another's"):
        twin.restore(c)


@pytest.mark.parametrize("rejecting", [(), (1,), (0, 2), (0, 1, 2)])
def test_rollback_of_some_of_several(make: Make, alone: Alone, ids: list[int], rejecting: tuple[int, ...]) -> None:
    """Drafts of different depths are checked in one step; those rejected go back, the others stay."""
    e = make(sequences=3, checkpoints=3)
    sessions = scrambled(e, 3)
    starts = (0, 70, 130)
    for s, start, n in zip(sessions, starts, (13, 34, 21), strict=True):
        s.feed(ids[start : start + n], logits=None)
    for depth in (1, 4):
        marks = [s.checkpoint() for s in sessions]
        drafts = []
        for i, (s, start) in enumerate(zip(sessions, starts, strict=True)):
            right = ids[start + len(s) : start + len(s) + depth + i]
            drafts.append([*right[:-1], 5] if i in rejecting else right)
        e.step(list(zip(sessions, drafts, strict=True)), logits=None)
        for i in rejecting:
            sessions[i].restore(marks[i])
            sessions[i].feed(drafts[i][:-1], logits=None) if drafts[i][:-1] else None
        for s, m in zip(sessions, marks, strict=True):
            s.drop(m)
            alone.check(s)


@pytest.mark.fault("B24")
def test_every_state_of_a_sequence_matters(make: Make, ids: list[int]) -> None:
    """A restore that left out any one of them would be seen in what comes next."""
    e = make()
    s = e.session()
    s.feed(ids[:38], logits=None)
    c = s.checkpoint()

    def goes_on() -> list[bytes]:
        """The next logits, and what the tokens leave in the pages."""
        logits = s.feed(ids[38:41], logits="all")
        states = e.bundle.export(s.sequence)
        return [logits.tobytes(), *(states[n].tobytes() for n, k in e.bundle.kinds.items() if isinstance(k, PerToken))]

    want = goes_on()
    names = [n for n, k in e.bundle.kinds.items() if isinstance(k, PerSequence)]
    assert len(names) == 13
    for name in names:
        memory, array, slot = e.bundle._memories[name], e.bundle._arrays[name], s.sequence.slot
        stale = memory.read_rows(array, [slot])
        s.restore(c)
        assert not np.array_equal(memory.read_rows(array, [slot]), stale), name
        memory.write_rows(array, [slot], stale)
        assert goes_on() != want, name
    s.restore(c)
    assert goes_on() == want


# -- a slot's next owner -----------------------------------------------------------------------------------------------


@pytest.mark.fault("B16", "B31")
@pytest.mark.parametrize("how", ["close", "reset", "restore"])
def test_nothing_is_left_of_the_last_sequence(make: Make, alone: Alone, ids: list[int], how: str) -> None:
    e = make(sequences=1, checkpoints=1)
    s = e.session()
    start = s.checkpoint() if how == "restore" else None
    s.feed(ids[:50], logits=None)
    slot = s.sequence.slot
    if how == "close":
        s.close()
        s = e.session()
    elif how == "reset":
        s.reset()
    else:
        s.restore(start)
    kinds = e.bundle.kinds
    for name, value in e.bundle.export(s.sequence).items():
        assert np.all(value == getattr(kinds[name], "fill", 0)), name
    assert how == "close" or s.sequence.slot == slot
    alone.check(s, s.feed(ids[80:110], logits="all"))


# -- what is refused changes nothing -----------------------------------------------------------------------------------

WRONG = [
    ("outside", ValueError, "token 1024 at 1 lies outside the vocabulary of 1024", [1, 1024], "last"),
    ("negative", ValueError, "token -1 at 0 lies outside", [-1], "last"),
    ("huge", ValueError, "token 1099511627776 at 0", [2**40], "last"),
    ("beyond 64 bits", ValueError, "must be a list of integers", [2**80], "last"),
    ("floats", ValueError, "must be a list of integers, got float64", [1.0], "last"),
    ("bools", ValueError, "must be a list of integers, got bool", [True], "last"),
    ("two axes", ValueError, "must be a list of integers", [[1, 2]], "last"),
    ("text", ValueError, "must be a list of integers", "abc", "last"),
    ("no tokens", ValueError, "there are no tokens, so there is no last row", [], "last"),
    ("rows", ValueError, "logits must be 'last', 'all' or None, got 'some'", [1], "some"),
    ("context", ContextFull, "9 tokens and 248 more exceed the context of 256", [1] * 248, "last"),
]


@pytest.mark.parametrize("error, message, tokens, logits", [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_change_nothing(
    make: Make, ids: list[int], error: Any, message: str, tokens: Any, logits: Any
) -> None:
    e = make()
    good, s = e.session(), e.session()
    good.feed(ids[:3], logits=None)
    s.feed(ids[:9], logits=None)
    before = books(e, good, s)
    with pytest.raises(error, match=message):
        e.step([(good, [1, 2]), (s, tokens)], logits=logits)
    assert books(e, good, s) == before


def test_sessions_that_are_no_good_change_nothing(make: Make) -> None:
    e, other = make(), make()
    good, closed, foreign = e.session(), e.session(), other.session()
    closed.close()
    before = books(e, good)
    for work, error, message in [
        ([(good, [1]), (good, [2])], ValueError, "a session is given twice"),
        ([(good, [1]), (foreign, [2])], ValueError, "belongs to another engine"),
        ([(good, [1]), (closed, [2])], StateError, "was freed"),
    ]:
        with pytest.raises(error, match=message):
            e.step(work)
        assert books(e, good) == before
    assert issubclass(ContextFull, ValueError)
    closed.close()


def test_pages_for_one_of_two_change_nothing(make: Make, ids: list[int]) -> None:
    """What all sequences of a step need is there, or none gets anything."""
    e = make(context=64, sequences=2)
    a, b = e.session(), e.session()
    a.feed(ids[:40], logits=None)
    f = a.fork()
    b.close()
    before = books(e, a, f)
    with pytest.raises(OutOfState, match="pages of 8 tokens are wanted"):
        e.step([(a, ids[:20]), (f, ids[:24])])
    assert books(e, a, f) == before
    f.close()
    assert a.feed(ids[40:64]).shape == (1024,)
    with pytest.raises(ContextFull, match="64 tokens and 1 more exceed the context of 64"):
        a.feed([1])


def test_slots_run_out(make: Make) -> None:
    e = make(sequences=1, checkpoints=1)
    s = e.session()
    c = s.checkpoint()
    for call in (e.session, s.fork, s.checkpoint):
        with pytest.raises(OutOfState, match="all 2 slots"):
            call()
    s.drop(c)
    s.fork().close()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"context": 0}, "context must lie in 1 … 4096, the model's context length, got 0"),
        ({"context": 4097}, "context must lie in 1 … 4096"),
        ({"sequences": 0}, "sequences must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"page": 0}, "page must be at least 1, got 0"),
        ({"checkpoints": -1}, "checkpoints must be at least 0, got -1"),
    ],
)
def test_engine_options(make: Make, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_pages_hold_whole_blocks(make: Make) -> None:
    assert [make(page=n, context=40, sequences=1).capacity.page for n in (1, 4, 5, 8)] == [4, 4, 8, 8]


# -- rows of logits ----------------------------------------------------------------------------------------------------


def test_rows_of_logits(make: Make, alone: Alone, ids: list[int]) -> None:
    e = make(batch=16)
    a, b, c = e.session(), e.session(), e.session()
    last = e.step([(a, ids[:21]), (b, ids[:5])])
    assert [x.shape for x in last] == [(1, 1024), (1, 1024)] and last[0].dtype == np.float32
    nothing = e.step([(c, ids[:21])], logits=None)
    assert [x.shape for x in nothing] == [(0, 1024)]
    every = e.step([(a, ids[21:50]), (b, []), (c, ids[21:22])], logits="all")
    assert [x.shape for x in every] == [(29, 1024), (0, 1024), (1, 1024)]
    want, _ = alone(ids[:50])
    assert np.array_equal(last[0], want[20:21]) and np.array_equal(last[1], want[4:5])
    assert np.array_equal(every[0], want[21:]) and np.array_equal(every[2], want[21:22])
    assert a.feed(ids[50:51]).shape == (1024,)
    assert a.feed(ids[51:53], logits="all").shape == (2, 1024)
    assert a.feed(ids[53:54], logits=None) is None
    assert e.step([]) == [] and b.feed([], logits=None) is None
    assert np.array_equal(e.logits(ids[:50]), want)


@pytest.mark.parametrize("batch", [1, 9, 16])
def test_steps_have_at_most_batch_rows(make: Make, ids: list[int], batch: int) -> None:
    """Padding included: a device with a limit gets no larger plan."""
    e = make(batch=batch)
    sessions = [e.session() for _ in range(3)]
    e.step([(s, ids[:n]) for s, n in zip(sessions, (9, 2, 11), strict=True)], logits="all")
    assert e.plans() and all(s.tokens <= batch and s.outs <= batch for s in e.plans())


def test_block_tables_grow(make: Make, alone: Alone, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the narrowest table another plan is used, and nothing else changes."""
    monkeypatch.setattr(engine_module, "TABLE_TOKENS", 16)
    e = make(page=4)
    s, short = e.session(), e.session()
    for n in (15, 3, 47, 5):
        alone.check(s, s.feed(ids[len(s) : len(s) + n], logits="all"))
    for x, logits in zip((short, s), e.step([(short, ids[5:8]), (s, ids[70:73])], logits="all"), strict=True):
        alone.check(x, logits)
    assert {shape.blocks for shape in e.plans()} == {4, 16, 64}
    monkeypatch.undo()
    widths = {n: make(context=4096, page=8, sequences=s)._table_width(n) for n, s in ((1, 4), (512, 4), (513, 99))}
    assert widths == {1: 512, 512: 512, 513: 611}


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_is_built_once(make: Make, ids: list[int]) -> None:
    e = make()
    s = e.session()
    s.feed(ids[:9], logits=None)
    s.feed(ids[9:10])
    built = e.plans_built
    for t in ids[10:14]:
        s.feed([t])
    e.session().feed(ids[:10], logits=None)  # padded to the plan of nine
    assert e.plans_built == built == 2 == len(e.plans())


def test_plans_used_longest_ago_are_closed(make: Make, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PLANS_KEPT", 2)
    e = make()
    s = e.session()
    for n in (1, 2, 1, 3):
        s.feed(ids[:n])
    assert [p.tokens for p in e.plans()] == [1, 3]
    s.feed(ids[:2])
    assert e.plans_built == 4 and [p.tokens for p in e.plans()] == [3, 2]


@pytest.mark.fault("B40")
@pytest.mark.parametrize("target", ["reference", "bodies"])
def test_kept_plans_change_no_bits(make: Make, ids: list[int], target: str) -> None:
    """Decoding, checkpoints, going back, more sequences: with plans kept and with each made anew."""

    def story(keep: bool) -> list[Any]:
        e = make(target)
        s = e.session()
        out: list[Any] = []

        def step(*work: tuple[Session, list[int]]) -> None:
            if not keep:
                e._plans.clear()
            out.extend(e.step(list(work), logits="all"))

        step((s, ids[:35]))
        step((s, ids[35:36]))
        c = s.checkpoint()
        step((s, ids[36:37]))
        step((s, ids[40:41]))
        s.restore(c)
        t = s.fork()
        step((s, ids[36:37]), (t, ids[50:51]))
        step((t, ids[51:52]))
        return [
            *(x.tobytes() for x in out),
            *(x.tobytes() for y in (s, t) for x in e.bundle.export(y.sequence).values()),
        ]

    assert story(True) == story(False)


# -- faults ------------------------------------------------------------------------------------------------------------


class Breaking:
    """Lets the n-th call of an op's kernel on the `bodies` target raise."""

    def __init__(self, engine: Engine, op: Any) -> None:
        self.left = -1
        (kernel,) = engine.target.kernels.kernels[op]  # type: ignore[attr-defined]

        def run(ctx: Context, *args: Any, **attrs: Any) -> None:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("the device is lost")
            kernel.run(ctx, *args, **attrs)

        engine.target.kernels.kernels[op] = [type(kernel)(kernel.name, run)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", [linear, attention])
def test_kernel_that_raises_in_a_step(make: Make, alone: Alone, ids: list[int], op: Any) -> None:
    """Its sequences wait for a checkpoint or a reset; the others, and the memory, are as before."""
    e = make("bodies")
    breaking = Breaking(e, op)
    a, b, other = e.session(), e.session(), e.session()
    for s in (a, b, other):
        s.feed(ids[:11], logits=None)
    c = a.checkpoint()
    pages = len(e.bundle.free_pages)
    breaking.left = 2
    with pytest.raises(RuntimeError, match="the device is lost"):
        e.step([(a, ids[11:31]), (b, ids[11:31])])
    assert len(e.bundle.free_pages) == pages
    assert a.tokens == b.tokens == ids[:11] and len(a) == len(b) == 11
    for s in (a, b):
        for call in (lambda s=s: s.feed([1]), s.fork, s.checkpoint, lambda s=s: s.save("never")):
            with pytest.raises(StateError, match=r"a step failed \(RuntimeError: the device is lost\)"):
                call()
    alone.check(other, other.feed(ids[11:15], logits="all"))
    a.restore(c)
    b.reset()
    b.feed(ids[:11], logits=None)
    for s in (a, b):
        alone.check(s, s.feed(ids[11:31], logits="all"))


def test_prologue_that_raises(make: Make, alone: Alone, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    e = make()
    s = e.session()
    s.feed(ids[:5], logits=None)
    c = s.checkpoint()

    def lost(*args: Any, **attrs: Any) -> Any:
        raise RuntimeError("no table")

    with monkeypatch.context() as m:
        m.setattr(ngram_rows, "body", lost)
        with pytest.raises(RuntimeError, match="no table"):
            s.feed(ids[5:9])
    with pytest.raises(StateError, match="no table"):
        s.feed(ids[5:9])
    s.restore(c)
    alone.check(s, s.feed(ids[5:9], logits="all"))


def test_fault_in_a_later_step_keeps_what_ran(make: Make, alone: Alone, ids: list[int]) -> None:
    """More rows than a batch: the first steps count, for their tokens as for their states."""
    e = make("bodies", batch=8)
    breaking = Breaking(e, attention)
    a, b = e.session(), e.session()
    breaking.left = 2 * 2 + 1  # two attention layers a step: the third step fails
    with pytest.raises(RuntimeError, match="lost"):
        e.step([(a, ids[:6]), (b, ids[:18])], logits=None)
    assert (a.tokens, b.tokens) == (ids[:6], ids[:10]) and (len(a), len(b)) == (6, 10)
    alone.check(a, a.feed(ids[6:9], logits="all"))
    with pytest.raises(StateError, match="lost"):
        b.feed([1])
    b.reset()
    assert len(e.bundle.free_pages) == e.capacity.pages - 2


def test_plan_that_cannot_be_made_leaves_the_session_as_it_was(make: Make, alone: Alone, ids: list[int]) -> None:
    e = make("bodies")
    s = e.session()
    s.feed(ids[:7], logits=None)
    before = books(e, s)
    kernels = e.target.kernels.kernels  # type: ignore[attr-defined]
    kept, kernels[attention] = kernels[attention], []
    with pytest.raises(Exception, match="no kernel for attention"):
        s.feed(ids[7:20])
    assert books(e, s) == before and len(e.plans()) == 1
    kernels[attention] = kept
    alone.check(s, s.feed(ids[7:20], logits="all"))


class Metered(HostMemory):
    """Memory with room for so many allocations, that knows how many are held."""

    def __init__(self, left: int) -> None:
        self.left, self.held = left, 0

    def allocate(self, type: TensorType) -> Array:
        if self.left == 0:
            raise MemoryError("no room")
        self.left -= 1
        self.held += 1
        return super().allocate(type)

    def free(self, handle: Array) -> None:
        self.held -= 1


@pytest.mark.fault("B79")
def test_engine_without_room_takes_nothing(make: Make) -> None:
    """Whichever allocation fails, those before it are given back."""
    model, states = make().model, 18
    for room in range(states + 1):
        target = ReferenceTarget(Device("NumPy", "cpu"))
        target.memory = memory = Metered(room)
        if room < states:
            with pytest.raises(MemoryError, match="no room"):
                Engine(model, target)
        else:
            Engine(model, target).close()
        assert (memory.left, memory.held) == (0, 0)


@pytest.mark.fault("B79")
def test_step_without_room_takes_nothing(make: Make, alone: Alone, ids: list[int]) -> None:
    """A plan takes storage for its inputs; where that fails the session is as it was, and can go on later."""
    target = make("bodies").target
    target.memory = memory = Metered(10**6)
    e = make(target)
    s = e.session()
    s.feed(ids[:7], logits=None)
    held, before = memory.held, books(e, s)
    for room in range(3):
        memory.left = room
        with pytest.raises(MemoryError, match="no room"):
            s.feed(ids[7:20])
        assert (memory.held, books(e, s)) == (held, before)
    memory.left = 10**6
    alone.check(s, s.feed(ids[7:20], logits="all"))
    e.close()
    assert memory.held == 0


def test_closed_engine_says_so(make: Make, ids: list[int]) -> None:
    e = make()
    s = e.session()
    s.feed(ids[:3])
    e.close()
    e.close()
    for call in (e.session, lambda: s.feed([1]), s.fork, s.checkpoint, s.reset):
        with pytest.raises(StateError, match="engine is closed"):
            call()
    s.close()


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B92")
def test_threads_get_what_they_would_get_alone(make: Make, ids: list[int]) -> None:
    """Four threads on one engine, three generations each, some dropped half way."""
    e = make(sequences=4, checkpoints=0)
    prompts = [ids[10 * i : 10 * i + 3 + i] for i in range(4)]
    options = dict(max_tokens=5, temperature=1.0, ignore_eos=True)

    def run(i: int, seed: int) -> list[int]:
        return [t for p in e.generate(prompts[i], seed=seed, **options) for t in p.tokens]

    want = {(i, seed): run(i, seed) for i in range(4) for seed in range(2)}
    got: dict[Any, Any] = {}

    def work(i: int) -> None:
        try:
            for seed in range(2):
                got[i, seed] = run(i, seed)
                dropped = e.generate(prompts[i], seed=seed, **options)
                next(dropped)
                dropped.close()
        except BaseException as error:
            got[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert got == want
    assert len(e.bundle.free_slots) == 4 and len(e.bundle.free_pages) == e.capacity.pages


@pytest.mark.fault("B92")
def test_one_step_at_a_time(make: Make, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables share storage: a step of one thread waits for another's."""
    e = make()
    executable, running, met = e.executable, threading.Lock(), []

    class Slow:
        def __init__(self, shape: Any) -> None:
            self.inner = executable(shape)

        def run(self, inputs: Any) -> Any:
            if not running.acquire(blocking=False):
                met.append(inputs)
                return self.inner.run(inputs)
            try:
                time.sleep(0.01)
                return self.inner.run(inputs)
            finally:
                running.release()

    monkeypatch.setattr(e, "executable", Slow)
    sessions = [e.session() for _ in range(4)]
    threads = [threading.Thread(target=lambda s=s: [s.feed([t]) for t in ids[:3]]) for s in sessions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not met and all(s.tokens == ids[:3] for s in sessions)
