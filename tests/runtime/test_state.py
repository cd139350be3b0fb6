"""The bundle against a model of it in plain Python: what each sequence must hold after any sequence of operations.

A step is played by writing a number, its tag, for each token: the entry or row that a token leaves behind in a state is
made of the tag, so that contents tell whose they are. Everything that is free is poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle as Drawn,
)
from hypothesis.stateful import (
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from trueup.core.backend import HostMemory
from trueup.core.backend.managed import ManagedMemory
from trueup.core.state import Capacity, PerSequence, PerToken, StateKind
from trueup.core.types import TensorType
from trueup.runtime import Bundle, Checkpoint, OutOfState, StateError
from trueup.runtime.state import Sequence

CAPACITY = Capacity(slots=6, pages=9, page=4)
KINDS: dict[str, StateKind] = {
    "keys": PerToken((2,)),
    "halves": PerToken((1, 3), dtype="f16"),
    "ids": PerToken((), dtype="i32"),
    "pairs": PerToken((2,), every=2),
    "blocks": PerToken((1,), every=4),
    "tail": PerSequence((2, 2)),
    "gate": PerSequence((3,), fill=float("-inf")),
    "context": PerSequence((2,), dtype="i32", fill=7),
    "hashed": PerSequence((1,), dtype="i32", fill=9),
}
HOST = ("hashed",)
PER_TOKEN = [n for n, k in KINDS.items() if isinstance(k, PerToken)]
PER_SEQUENCE = [n for n, k in KINDS.items() if isinstance(k, PerSequence)]
MEMORIES = {"host": HostMemory, "managed": ManagedMemory}


def numpy_type(kind: StateKind) -> Any:
    return kind.storage(CAPACITY).element.numpy


def left_by(name: str, tag: int) -> int:
    """What a token of this tag leaves in a state; exact in float16."""
    return tag + 37 * list(KINDS).index(name)


def expected(name: str, tags: list[int]) -> NDArray[Any]:
    """A state of a sequence of these tokens, by its declaration alone."""
    kind = KINDS[name]
    if isinstance(kind, PerToken):
        ends = [left_by(name, t) for i, t in enumerate(tags) if (i + 1) % kind.every == 0]
        return np.broadcast_to(
            np.array(ends, numpy_type(kind)).reshape(-1, *[1] * len(kind.width)), (len(ends), *kind.width)
        )
    return np.full(kind.width, left_by(name, tags[-1]) if tags else kind.fill, numpy_type(kind))


def poisoned(bundle: Bundle) -> Bundle:
    """The bundle with poison on, and all of it poisoned to begin with."""
    bundle.poison = True
    for name, array in bundle._arrays.items():
        kind = bundle.kinds[name]
        rows = range(bundle.capacity.pages if isinstance(kind, PerToken) else bundle.capacity.slots)
        bundle._memories[name].fill_rows(array, rows, float("nan") if kind.dtype.startswith("f") else -1)
    return bundle


def bundle_on(memory: Any) -> Bundle:
    return poisoned(Bundle(KINDS, CAPACITY, memory, host=HOST))


def put(bundle: Bundle, name: str, row: int, place: int | None, value: Any) -> None:
    """Write one entry of a page, or a slot's row, as a kernel would."""
    memory, array = bundle._memories[name], bundle._arrays[name]
    part = memory.read_rows(array, [row])
    part[0 if place is None else (0, place)] = value
    memory.write_rows(array, [row], part)


def write(bundle: Bundle, s: Sequence, tags: list[int], *, all_but: str = "") -> None:
    """A step: room is reserved, each token leaves its mark in every state, the sequence grows."""
    bundle.reserve(s, len(tags))
    for i, tag in enumerate(tags, s.length):
        for name, kind in KINDS.items():
            if name == all_but:
                continue
            if isinstance(kind, PerToken):
                if (i + 1) % kind.every == 0:
                    page, place = divmod(i, CAPACITY.page)
                    put(bundle, name, s.pages[page], place // kind.every, left_by(name, tag))
            else:
                put(bundle, name, s.slot, None, left_by(name, tag))
    s.length += len(tags)


def check(bundle: Bundle, s: Sequence, tags: list[int]) -> None:
    """Every declared state of the sequence is what its tokens left."""
    got = bundle.export(s)
    assert got.keys() == KINDS.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(array, expected(name, tags), err_msg=name, strict=True)


def everything(bundle: Bundle) -> tuple[Any, ...]:
    """Contents and books of a bundle, to compare."""
    arrays = {n: bundle._memories[n].download(a).tobytes() for n, a in bundle._arrays.items()}
    return arrays, list(bundle.free_slots), list(bundle.free_pages), list(bundle.references)


def fields(s: Sequence) -> tuple[Any, ...]:
    return s.slot, list(s.pages), s.length, list(s.checkpoints), s.fault


@dataclass(eq=False)
class Held:
    """A sequence beside what it should hold."""

    sequence: Sequence
    tags: list[int] = field(default_factory=list)
    faulty: bool = False
    freed: bool = False


@dataclass(eq=False)
class Mark:
    """A checkpoint beside what it should bring back."""

    held: Held
    checkpoint: Checkpoint
    tags: list[int]
    void: bool = False


class Machine(RuleBasedStateMachine):
    """Any order of operations, wrong ones too, on a bundle that is nearly always full."""

    memory: Callable[[], Any] = HostMemory
    sequences = Drawn("sequences")
    marks = Drawn("marks")
    exports = Drawn("exports")

    @initialize()
    def start(self) -> None:
        self.b = bundle_on(type(self).memory())
        self.held: list[Held] = []
        self.made: list[Mark] = []
        self.tag = 0

    # -- what the model says -------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Held]:
        return [h for h in self.held if not h.freed]

    @property
    def live_marks(self) -> list[Mark]:
        return [m for m in self.made if not m.void]

    def slots_left(self) -> int:
        return CAPACITY.slots - len(self.living) - len(self.live_marks)

    def pages_left(self) -> int:
        return CAPACITY.pages - len({p for h in self.living for p in h.sequence.pages})

    def pages_for(self, h: Held, tokens: int) -> int:
        """Pages that a step needs: those that begin in it, and a copy of its first where another sequence has that."""
        n, page = len(h.tags), CAPACITY.page
        new = -(-(n + tokens) // page) - -(-n // page)
        shared = n % page and any(h.sequence.pages[-1] in o.sequence.pages for o in self.living if o is not h)
        return new + bool(shared and tokens)

    def new_tags(self, tokens: int) -> list[int]:
        self.tag += tokens
        return list(range(self.tag - tokens, self.tag))

    def void(self, marks: list[Mark]) -> None:
        for m in marks:
            m.void = True

    def of(self, h: Held) -> list[Mark]:
        return [m for m in self.live_marks if m.held is h]

    def refused(self, error: type[Exception], call: Callable[[], Any]) -> None:
        """The call raises this, and nothing has changed."""
        before = everything(self.b), [fields(h.sequence) for h in self.held]
        with pytest.raises(error):
            call()
        assert (everything(self.b), [fields(h.sequence) for h in self.held]) == before

    def attempt(self, ok: bool, error: type[Exception], call: Callable[[], Any]) -> Any:
        return call() if ok else self.refused(error, call)

    def add(self, s: Sequence, tags: list[int]) -> Held:
        h = Held(s, list(tags))
        self.held.append(h)
        return h

    # -- operations ----------------------------------------------------------------------------------------------------

    @rule(target=sequences)
    def create(self) -> Any:
        s = self.attempt(self.slots_left() > 0, OutOfState, self.b.create)
        return self.add(s, []) if s else multiple()

    @rule(target=sequences, h=sequences)
    def fork(self, h: Held) -> Any:
        unusable = h.freed or h.faulty
        error = StateError if unusable else OutOfState
        s = self.attempt(not unusable and self.slots_left() > 0, error, lambda: self.b.fork(h.sequence))
        if s is None:
            return multiple()
        assert s.pages == h.sequence.pages, "a fork copies no page"
        return self.add(s, h.tags)

    @rule(h=sequences, tokens=st.integers(0, 9))
    def step(self, h: Held, tokens: int) -> None:
        if h.freed or h.faulty:
            return self.refused(StateError, lambda: self.b.reserve(h.sequence, tokens))
        if self.pages_for(h, tokens) > self.pages_left():
            return self.refused(OutOfState, lambda: self.b.reserve(h.sequence, tokens))
        left = self.pages_left() - self.pages_for(h, tokens)
        whole = h.sequence.pages[: len(h.tags) // CAPACITY.page]
        tags = self.new_tags(tokens)
        write(self.b, h.sequence, tags)
        h.tags += tags
        assert self.pages_left() == left, "pages are copied where, and only where, they are shared"
        assert h.sequence.pages[: len(whole)] == whole, "a full page is never copied"
        return None

    @rule(a=sequences, b=sequences, m=st.integers(0, 5), n=st.integers(0, 5))
    def step_together(self, a: Held, b: Held, m: int, n: int) -> None:
        """Room for two: for both or for none."""
        if a is b or a.freed or b.freed or a.faulty or b.faulty:
            return
        lone = self.pages_for(a, m) + self.pages_for(b, n)
        both = m and n and len(a.tags) % CAPACITY.page and len(b.tags) % CAPACITY.page
        last = a.sequence.pages[-1:]
        if both and last == b.sequence.pages[-1:] and self.b.references[last[0]] == 2:
            lone -= 1  # the two share a page with no one else: one copies, the other keeps it
        work = [(a.sequence, m), (b.sequence, n)]
        if lone > self.pages_left():
            return self.refused(OutOfState, lambda: self.b.reserve_all(work))
        left = self.pages_left() - lone
        self.b.reserve_all(work)
        for h, tokens in ((a, m), (b, n)):
            tags = self.new_tags(tokens)
            write(self.b, h.sequence, tags)
            h.tags += tags
        assert self.pages_left() == left

    @rule(h=sequences, tokens=st.integers(1, 6))
    def step_that_fails(self, h: Held, tokens: int) -> None:
        """A kernel writes half of its marks and raises; the runtime marks the sequence and gives back its pages."""
        if h.freed or h.faulty or self.pages_for(h, tokens) > self.pages_left():
            return
        length = h.sequence.length
        write(self.b, h.sequence, self.new_tags(tokens), all_but="tail")
        h.sequence.length, h.sequence.fault, h.faulty = length, "a kernel failed", True
        self.b.trim(h.sequence)

    @rule(target=marks, h=sequences)
    def checkpoint(self, h: Held) -> Any:
        unusable = h.freed or h.faulty
        error = StateError if unusable else OutOfState
        c = self.attempt(not unusable and self.slots_left() > 0, error, lambda: self.b.checkpoint(h.sequence))
        if c is None:
            return multiple()
        self.made.append(Mark(h, c, list(h.tags)))
        return self.made[-1]

    @rule(m=marks)
    def restore(self, m: Mark) -> None:
        h = m.held
        if m.void:
            return self.refused(StateError, lambda: self.b.restore(h.sequence, m.checkpoint))
        self.b.restore(h.sequence, m.checkpoint)
        h.tags, h.faulty = list(m.tags), False
        self.void([o for o in self.of(h) if len(o.tags) > len(m.tags)])
        return None

    @rule(m=marks, h=sequences)
    def restore_anothers(self, m: Mark, h: Held) -> None:
        if m.held is not h:
            self.refused(StateError, lambda: self.b.restore(h.sequence, m.checkpoint))

    @rule(m=marks)
    def drop(self, m: Mark) -> None:
        self.b.drop(m.held.sequence, m.checkpoint)
        m.void = True

    @rule(h=sequences)
    def reset(self, h: Held) -> None:
        if h.freed:
            return self.refused(StateError, lambda: self.b.reset(h.sequence))
        self.b.reset(h.sequence)
        self.void(self.of(h))
        h.tags, h.faulty = [], False
        return None

    @rule(h=sequences)
    def free(self, h: Held) -> None:
        self.void(self.of(h))
        h.freed = True
        self.b.free(h.sequence)

    @rule(target=exports, h=sequences)
    def export(self, h: Held) -> Any:
        if h.freed or h.faulty:
            self.refused(StateError, lambda: self.b.export(h.sequence))
            return multiple()
        return self.b.export(h.sequence), list(h.tags)

    @rule(
        target=sequences, saved=consumes(exports), wrong=st.sampled_from(["", "", "", "lacks", "more", "long", "type"])
    )
    def restart(self, saved: Any, wrong: str) -> Any:
        arrays, tags = saved
        if wrong:
            arrays = dict(arrays)
            name = list(KINDS)[len(tags) % len(KINDS)]
            if wrong == "lacks":
                del arrays[name]
            elif wrong == "more":
                arrays["other"] = arrays[name]
            elif wrong == "long":
                arrays[name] = np.concatenate(
                    [arrays[name], np.zeros((1, *arrays[name].shape[1:]), arrays[name].dtype)]
                )
            else:
                arrays[name] = arrays[name].astype(np.float64)
            self.refused(StateError, lambda: self.b.restart(arrays, len(tags)))
            return multiple()
        ok = self.slots_left() > 0 and -(-len(tags) // CAPACITY.page) <= self.pages_left()
        s = self.attempt(ok, OutOfState, lambda: self.b.restart(arrays, len(tags)))
        return self.add(s, tags) if s else multiple()

    # -- what must hold whenever ---------------------------------------------------------------------------------------

    @invariant()
    def contents(self) -> None:
        for h in self.living:
            assert h.sequence.length == len(h.tags)
            assert bool(h.sequence.fault) == h.faulty
            if not h.faulty:
                check(self.b, h.sequence, h.tags)
        for m in self.live_marks:
            for name in PER_SEQUENCE:
                row = self.b._memories[name].read_rows(self.b._arrays[name], [m.checkpoint.slot])[0]
                np.testing.assert_array_equal(row, expected(name, m.tags), err_msg=name, strict=True)

    @invariant()
    def nothing_lost_or_shared_wrongly(self) -> None:
        b = self.b
        slots = [h.sequence.slot for h in self.living] + [m.checkpoint.slot for m in self.live_marks]
        assert sorted(slots + b.free_slots) == list(range(CAPACITY.slots))
        users = [p for h in self.living for p in h.sequence.pages]
        assert b.references == [users.count(p) for p in range(CAPACITY.pages)]
        assert sorted(set(users) | set(b.free_pages)) == list(range(CAPACITY.pages))
        assert len(b.free_pages) + len(set(users)) == CAPACITY.pages
        for h in self.living:
            assert len(h.sequence.pages) == len(set(h.sequence.pages)) == -(-len(h.tags) // CAPACITY.page)
            assert h.sequence.checkpoints == [m.checkpoint for m in self.of(h)]

    @invariant()
    def free_is_poisoned(self) -> None:
        b = self.b
        for name, kind in KINDS.items():
            rows = b.free_pages if isinstance(kind, PerToken) else b.free_slots
            values = b._memories[name].read_rows(b._arrays[name], rows)
            assert np.all(np.isnan(values) if kind.dtype.startswith("f") else values == -1), name


@pytest.mark.parametrize("memory", MEMORIES)
def test_any_order_of_operations(memory: str) -> None:
    class On(Machine):
        pass

    On.memory = MEMORIES[memory]
    examples = settings().max_examples // (2 if memory == "host" else 5)
    run_state_machine_as_test(
        On, settings=settings(max_examples=max(1, examples), stateful_step_count=40, deadline=None)
    )


# -- every state by every operation: one that an operation leaves out is seen ------------------------------------------


class Forgetful:
    """Memory that leaves out an operation on one state, as a hand-kept list would."""

    def __init__(self, inner: Any, name: str, operation: str) -> None:
        self.inner, self.name, self.operation = inner, name, operation
        self.forgotten: Any = None
        self.times = 0
        self.active = False

    def allocate(self, type: TensorType) -> Any:
        handle = self.inner.allocate(type)
        if type == KINDS[self.name].storage(CAPACITY) and self.forgotten is None:
            self.forgotten = handle
        return handle

    def __getattr__(self, operation: str) -> Any:
        call = getattr(self.inner, operation)

        def maybe(handle: Any, *args: Any) -> Any:
            if self.active and operation == self.operation and handle is self.forgotten:
                self.times += 1
                return None
            return call(handle, *args)

        return maybe


def forked(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3, 4, 5])
    memory.active = True
    return b.fork(s), [1, 2, 3, 4, 5]


def fork_written(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3])
    f = b.fork(s)
    memory.active = True
    b.reserve(f, 1)
    memory.active = False
    write(b, s, [8])
    write(b, f, [4])
    return f, [1, 2, 3, 4]


def checkpointed(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3])
    memory.active = True
    c = b.checkpoint(s)
    memory.active = False
    write(b, s, [4, 5])
    b.restore(s, c)
    return s, [1, 2, 3]


def restored(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3])
    c = b.checkpoint(s)
    write(b, s, [4, 5])
    memory.active = True
    b.restore(s, c)
    return s, [1, 2, 3]


def reset(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3])
    memory.active = True
    b.reset(s)
    return s, []


def created(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    memory.active = True
    return b.create(), []


def slot_reused(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3])
    b.free(s)
    memory.active = True
    return b.create(), []


def restarted(b: Bundle, memory: Any) -> tuple[Sequence, list[int]]:
    s = b.create()
    write(b, s, [1, 2, 3, 4, 5])
    arrays = b.export(s)
    b.free(s)
    memory.active = True
    return b.restart(arrays, 5), [1, 2, 3, 4, 5]


MATRIX = [
    *[(op, "copy_rows", n) for op in (forked, checkpointed, restored) for n in PER_SEQUENCE],
    *[(op, "fill_rows", n) for op in (reset, created, slot_reused) for n in PER_SEQUENCE],
    *[
        (fork_written, "copy_rows", n) for n in ("keys", "halves", "ids", "pairs")
    ],  # the last entry of blocks is unfinished
    *[(restarted, "write_rows", n) for n in KINDS],
]


@pytest.mark.fault("B24", "B27", "B31")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "operation", [forked, fork_written, checkpointed, restored, reset, created, slot_reused, restarted]
)
def test_operation_leaves_every_state_right(operation: Any, memory: str) -> None:
    inner = Forgetful(MEMORIES[memory](), "keys", "none")
    b = poisoned(Bundle(KINDS, CAPACITY, inner, host=()))
    check(b, *operation(b, inner))


@pytest.mark.fault("B24")
@pytest.mark.parametrize("operation, call, name", MATRIX, ids=[f"{o.__name__}-{n}" for o, _, n in MATRIX])
def test_forgotten_state_is_seen(operation: Any, call: str, name: str) -> None:
    inner = Forgetful(HostMemory(), name, call)
    b = poisoned(Bundle(KINDS, CAPACITY, inner, host=()))
    s, tags = operation(b, inner)
    assert inner.times, "the operation walks this state"
    with pytest.raises(AssertionError, match=name):
        check(b, s, tags)


# -- one by one --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=MEMORIES)
def bundle(request: pytest.FixtureRequest) -> Iterator[Bundle]:
    b = bundle_on(MEMORIES[request.param]())
    yield b
    b.close()


def test_fork_shares_pages_and_copies_the_last_once(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, list(range(10)))
    forks = [bundle.fork(s) for _ in range(3)]
    assert all(f.pages == s.pages for f in forks)
    assert len(bundle.free_pages) == CAPACITY.pages - 3
    for i, f in enumerate([s, *forks]):
        write(bundle, f, [20 + i])
    assert len(bundle.free_pages) == CAPACITY.pages - 3 - 3, "the last to write keeps the page"
    assert {f.pages[2] for f in (s, *forks)} == {*s.pages[2:], *(f.pages[2] for f in forks)}
    for i, f in enumerate([s, *forks]):
        assert f.pages[:2] == s.pages[:2]
        check(bundle, f, [*range(10), 20 + i])


def test_no_tokens_copy_no_page(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, [1, 2, 3])
    f = bundle.fork(s)
    bundle.reserve(f, 0)
    assert f.pages == s.pages


def test_reserve_says_what_is_wanted_and_there(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, list(range(30)))
    with pytest.raises(OutOfState, match=r"2 pages of 4 tokens are wanted, 1 of 9 are free"):
        bundle.reserve(s, 8)
    assert len(s.pages) == 8


def test_rooms_for_several_are_given_together_or_not_at_all(bundle: Bundle) -> None:
    a, b = bundle.create(), bundle.create()
    write(bundle, a, list(range(20)))
    before = everything(bundle), fields(a), fields(b)
    with pytest.raises(OutOfState):
        bundle.reserve_all([(a, 8), (b, 12)])
    assert (everything(bundle), fields(a), fields(b)) == before


def test_two_that_share_a_page_need_one_copy(bundle: Bundle) -> None:
    a, other = bundle.create(), bundle.create()
    write(bundle, a, [1, 2, 3])
    b = bundle.fork(a)
    write(bundle, other, list(range(4 * (CAPACITY.pages - 2))))
    assert len(bundle.free_pages) == 1
    bundle.reserve_all([(a, 1), (b, 1)])
    assert a.pages != b.pages
    write(bundle, a, [4])
    write(bundle, b, [5])
    check(bundle, a, [1, 2, 3, 4])
    check(bundle, b, [1, 2, 3, 5])


def test_restart_without_room_takes_nothing(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, list(range(20)))
    arrays = bundle.export(s)
    before = everything(bundle)
    with pytest.raises(OutOfState):
        bundle.restart(arrays, 20)
    assert everything(bundle) == before


def test_slots_are_shared_by_sequences_and_checkpoints(bundle: Bundle) -> None:
    s = bundle.create()
    marks = [bundle.checkpoint(s) for _ in range(CAPACITY.slots - 1)]
    for call in (bundle.create, lambda: bundle.fork(s), lambda: bundle.checkpoint(s)):
        with pytest.raises(OutOfState, match="6 slots"):
            call()
    bundle.drop(s, marks[0])
    bundle.drop(s, marks[0])
    bundle.create()


def test_checkpoints_of_equal_length_outlive_each_other(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, [1, 2])
    a, b = bundle.checkpoint(s), bundle.checkpoint(s)
    write(bundle, s, [3])
    later = bundle.checkpoint(s)
    bundle.restore(s, a)
    bundle.restore(s, b)
    with pytest.raises(StateError, match="void"):
        bundle.restore(s, later)
    check(bundle, s, [1, 2])


def test_fault_is_named_until_a_checkpoint_or_reset(bundle: Bundle) -> None:
    s = bundle.create()
    c = bundle.checkpoint(s)
    for clear in (lambda: bundle.restore(s, c), lambda: bundle.reset(s)):
        s.fault = "kernel rope failed"
        for call in (bundle.fork, bundle.checkpoint, bundle.export, lambda s: bundle.reserve(s, 1)):
            with pytest.raises(StateError, match=r"kernel rope failed; restore a checkpoint or reset it"):
                call(s)
        clear()
        bundle.reserve(s, 0)


def test_fault_stays_where_restoring_fails() -> None:
    class Failing(HostMemory):
        left = 10**9

        def copy_rows(self, handle: Any, to: Any, source: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("device lost")
            super().copy_rows(handle, to, source)

    memory = Failing()
    b = bundle_on(memory)
    s = b.create()
    write(b, s, [1, 2, 3])
    c = b.checkpoint(s)
    write(b, s, [4])
    memory.left = 1
    with pytest.raises(RuntimeError, match="device lost"):
        b.restore(s, c)
    with pytest.raises(StateError, match="restoring failed"):
        b.export(s)
    memory.left = 10**9
    b.restore(s, c)
    check(b, s, [1, 2, 3])


@pytest.mark.parametrize("call", ["fork", "checkpoint", "write"])
def test_a_copy_that_fails_takes_nothing(call: str) -> None:
    class Failing(HostMemory):
        left = 10**9

        def copy_rows(self, handle: Any, to: Any, source: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("device lost")
            super().copy_rows(handle, to, source)

    for n in range(2):
        memory = Failing()
        b = bundle_on(memory)
        s = b.create()
        write(b, s, [1, 2, 3])
        f = b.fork(s)
        books = everything(b)[1:], fields(s), fields(f)
        memory.left = n
        with pytest.raises(RuntimeError, match="device lost"):
            b.reserve(f, 1) if call == "write" else getattr(b, call)(s)
        assert (everything(b)[1:], fields(s), fields(f)) == books
        check(b, s, [1, 2, 3])
        check(b, f, [1, 2, 3])


@pytest.mark.parametrize("missing", KINDS)
def test_restart_names_what_is_missing(bundle: Bundle, missing: str) -> None:
    s = bundle.create()
    write(bundle, s, [1, 2, 3])
    arrays = bundle.export(s)
    del arrays[missing]
    before = everything(bundle)
    with pytest.raises(StateError, match=f"lacks {missing}"):
        bundle.restart(arrays, 3)
    assert everything(bundle) == before


def test_restart_names_type_and_shape(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, [1, 2, 3])
    arrays = bundle.export(s)
    with pytest.raises(StateError, match=r"state keys is float32\[3, 2\] in the saved state, expected float32\[4, 2\]"):
        bundle.restart(arrays, 4)
    arrays["keys"] = arrays["keys"].astype(np.float16)
    with pytest.raises(StateError, match=r"state keys is float16\[3, 2\] in the saved state, expected float32\[3, 2\]"):
        bundle.restart(arrays, 3)


@pytest.mark.fault("B26")
def test_truncatable_only_without_states_of_the_whole_sequence() -> None:
    assert not Bundle(KINDS, CAPACITY, HostMemory()).truncatable
    assert Bundle({n: KINDS[n] for n in PER_TOKEN}, CAPACITY, HostMemory()).truncatable


def test_host_states_lie_on_the_host() -> None:
    b = Bundle(KINDS, CAPACITY, ManagedMemory(), host=iter(HOST))
    assert b.storage.host_states.keys() == {"hashed"}
    assert isinstance(b.storage.host_states["hashed"], np.ndarray)
    assert b.storage.states.keys() == KINDS.keys() - {"hashed"}


class Metered(HostMemory):
    """Memory with room for so many allocations, that knows what is held."""

    def __init__(self, room: int) -> None:
        self.room, self.held = room, 0

    def allocate(self, type: TensorType) -> NDArray[Any]:
        if not self.room:
            raise MemoryError(f"no room for {type}")
        self.room -= 1
        self.held += 1
        return super().allocate(type)

    def free(self, handle: NDArray[Any]) -> None:
        self.held -= 1


@pytest.mark.fault("B79")
@pytest.mark.parametrize("n", range(len(KINDS)))
def test_allocation_that_fails_gives_back_the_others(n: int) -> None:
    memory = Metered(n)
    with pytest.raises(MemoryError, match="no room for"):
        Bundle(KINDS, CAPACITY, memory)
    assert memory.held == 0
    memory.room = len(KINDS)
    b = Bundle(KINDS, CAPACITY, memory)
    assert memory.held == len(KINDS)
    b.close()
    b.close()
    assert memory.held == 0


def test_closed_bundle_only_frees(bundle: Bundle) -> None:
    s = bundle.create()
    write(bundle, s, [1])
    c = bundle.checkpoint(s)
    bundle.close()
    for call in (
        bundle.create,
        lambda: bundle.fork(s),
        lambda: bundle.reserve(s, 1),
        lambda: bundle.reset(s),
        lambda: bundle.checkpoint(s),
        lambda: bundle.restore(s, c),
        lambda: bundle.export(s),
    ):
        with pytest.raises(StateError, match="engine is closed"):
            call()
    bundle.free(s)
    bundle.free(s)
