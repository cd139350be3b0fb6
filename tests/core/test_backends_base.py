"""The base classes of backends: what a fallback moves, to the byte; where arrays lie; versions of states; prologue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.backend import AddressedTarget, HostMemory, KernelTable, ManagedTarget, Storage
from trueup.core.backend.managed import ManagedMemory
from trueup.core.errors import ArgumentError
from trueup.core.graph import Graph
from trueup.core.ops import embed, paged_append
from trueup.core.plan import PlanOptions, build_plan
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.core.weight import Weight

Array = np.ndarray[Any, Any]
FALLBACK = PlanOptions(allow_fallback=True)
CAPACITY = Capacity(slots=5, pages=6, page=4)


def i32(*values: Any) -> Array:
    return np.array(values, np.int32)


class Spy(HostMemory):
    """Host memory that counts what crosses, and which rows."""

    def __init__(self) -> None:
        self.read: list[tuple[tuple[int, ...], int]] = []
        self.written: list[tuple[tuple[int, ...], int]] = []
        self.down = self.up = 0

    def start(self) -> None:
        self.read, self.written, self.down, self.up = [], [], 0, 0

    def read_rows(self, handle: Any, rows: Sequence[int]) -> Array:
        out = super().read_rows(handle, rows)
        self.read.append((tuple(rows), out.nbytes))
        return out

    def write_rows(self, handle: Any, rows: Sequence[int], array: Array) -> None:
        self.written.append((tuple(rows), array.nbytes))
        super().write_rows(handle, rows, array)

    def upload(self, handle: Any, array: Array) -> None:
        self.up += array.nbytes
        super().upload(handle, array)

    def download(self, handle: Any) -> Array:
        out = super().download(handle)
        self.down += out.nbytes
        return out

    @property
    def moved(self) -> int:
        return self.down + self.up + sum(n for _, n in self.read) + sum(n for _, n in self.written)


class Recorder:
    """Runs a graph whose every op is refused, and says what moved for it."""

    def __init__(self, kit: Any, g: Graph) -> None:
        self.kit, self.graph, self.memory = kit, g, Spy()
        self.target = AddressedTarget("bare", kit.device, KernelTable(), self.memory)
        self.plan = build_plan(g, self.target, FALLBACK)
        self.states = {n: kit.start(s) for n, s in g.states.items()}
        self.storage = kit.storage(self.plan, self.target, self.states)
        self.executable: Any = self.target.compile(self.plan, self.storage)

    def run(self, **inputs: Array) -> dict[str, Array]:
        """One step; what the step itself uploads and downloads is not counted."""
        (step,) = self.executable.steps
        self.memory.start()
        for name, handle in self.executable.inputs.items():
            handle[...] = inputs[name]
        before = self.executable.fallback_bytes
        step()
        assert self.executable.fallback_bytes - before == self.memory.moved, "every byte is counted, once"
        outputs = {n: h.copy() for n, h in self.executable.outputs.items()}
        want = self.kit.run(self.graph, self.kit.reference(), inputs, self.states)
        self.states = want.states
        assert {n: a.tobytes() for n, a in outputs.items()} == {n: a.tobytes() for n, a in want.outputs.items()}
        for n, a in want.states.items():
            assert self.storage.states[n].tobytes() == a.tobytes(), n
        return outputs


# -- fallback: what moves ----------------------------------------------------------------------------------------------


def conv(kit: Any) -> Any:
    @kit.local("x[seqs, n], slots[seqs]:i32, &tail[slot, n], keep?[seqs]:i32 -> out[seqs, n]")
    def step(x: Any, slots: Any, tail: Any, keep: Any = None) -> Any:
        out = x.copy()
        for i, s in enumerate(slots):
            if s >= 0:
                out[i] += tail[s]
                tail[s] = x[i]
                if keep is not None and keep[i] >= 0:
                    tail[keep[i]] = x[i] * 2
        return out

    return step


def test_only_named_slots_move_and_only_changed_ones_back(kit: Any) -> None:
    g = Graph(CAPACITY)
    x, slots, keep = g.input("x", 3, 6), g.input("slots", 3, dtype="i32"), g.input("keep", 3, dtype="i32")
    g.output("y", conv(kit)(x, slots, g.state("tail", PerSequence((6,))), keep))
    r, row, values = Recorder(kit, g), 6 * 4, 2 * (3 * 6 * 4) + 2 * (3 * 4)
    a = np.arange(100, 118, dtype=np.float32).reshape(3, 6)
    r.run(x=a, slots=i32(4, 1, -1), keep=i32(-1, 2, 3))
    assert r.memory.read == [((1, 2, 3, 4), 4 * row)]
    assert r.memory.written == [((1, 2, 4), 3 * row)], "keep[2] names slot 3, of a sequence that is none"
    assert r.memory.moved == values + 7 * row
    r.run(x=a, slots=i32(4, 1, -1), keep=i32(-1, 2, 3))
    assert r.memory.written == [], "nothing changed, nothing moves back"
    r.run(x=a, slots=i32(-1, -1, -1), keep=i32(-1, -1, -1))
    assert r.memory.read == r.memory.written == [] and r.memory.moved == values, "no sequence, no row"
    nan = np.full((3, 6), np.nan, np.float32)
    r.run(x=nan, slots=i32(0, 1, 2), keep=i32(-1, -1, -1))
    r.run(x=nan, slots=i32(0, 1, 2), keep=i32(-1, -1, -1))
    assert r.memory.written == [], "the same bits of NaN are no change"
    r.run(x=-np.zeros((3, 6), np.float32), slots=i32(0, 1, 2), keep=i32(-1, -1, -1))
    r.run(x=np.zeros((3, 6), np.float32), slots=i32(0, 1, 2), keep=i32(-1, -1, -1))
    assert r.memory.written == [((0, 1, 2), 3 * row)], "-0 is another number than 0"


def test_absent_indices_name_nothing(kit: Any) -> None:
    g = Graph(CAPACITY)
    x, slots = g.input("x", 1, 6), g.input("slots", 1, dtype="i32")
    g.output("y", conv(kit)(x, slots, g.state("tail", PerSequence((6,)))))
    r = Recorder(kit, g)
    r.run(x=np.ones((1, 6), np.float32), slots=i32(3))
    assert r.memory.read == [((3,), 24)] and r.memory.written == [((3,), 24)]


def test_only_pages_of_the_table_move(kit: Any) -> None:
    """The op of the tree that every cache is written by, and an op that takes one cache as keys and as values."""
    g = Graph(CAPACITY)
    rows, cu = g.input("rows", 5, 2), g.input("cu", 3, dtype="i32")
    past, table = g.input("past", 2, dtype="i32"), g.input("table", 2, 3, dtype="i32")
    paged_append(rows, cu, past, table, g.state("cache", PerToken((2,))))
    r, page, values = Recorder(kit, g), 4 * 2 * 4, 5 * 2 * 4 + 3 * 4 + 2 * 4 + 6 * 4
    a = np.arange(100, 110, dtype=np.float32).reshape(5, 2)
    step = {"cu": i32(0, 3, 4), "past": i32(6, 0), "table": i32([5, 2, 0], [3, -1, -1])}
    r.run(rows=a, **step)
    assert r.memory.read == [((0, 2, 3, 5), 4 * page)]
    assert r.memory.written == [((0, 2, 3), 3 * page)], "page 5 lies before what is written"
    assert r.memory.moved == values + 7 * page

    @kit.local(
        "q[seqs, n], keys[pages, entries, n], values[pages, entries, n], block_table[seqs, blocks]:i32 -> o[seqs, n]"
    )
    def attend(q: Any, keys: Any, values: Any, block_table: Any) -> Any:
        out = q.copy()
        for s, b in np.ndindex(block_table.shape):
            if block_table[s, b] >= 0:
                out[s] += (keys[block_table[s, b]] * values[block_table[s, b]]).sum(0)
        return out

    g = Graph(CAPACITY)
    cache = g.state("cache", PerToken((2,)))
    g.output("o", attend(g.input("q", 2, 2), cache, cache, g.input("table", 2, 3, dtype="i32")))
    r = Recorder(kit, g)
    r.run(q=np.ones((2, 2), np.float32), table=i32([5, 2, -1], [2, -1, -1]))
    assert r.memory.read == [((2, 5), 2 * page)], "one state at two places moves once"
    assert r.memory.written == []


def test_regions_of_states_move_by_their_rows(kit: Any) -> None:
    """Indices count in the region that the op is given."""
    g = Graph(CAPACITY)
    x, slots = g.input("x", 2, 3), g.input("slots", 2, dtype="i32")
    tail = g.state("tail", PerSequence((6,)))
    g.output("y", conv(kit)(x, slots, tail.view(0, 2, 5).view(1, 1, 4)))
    r = Recorder(kit, g)
    r.run(x=np.ones((2, 3), np.float32), slots=i32(2, 0))
    assert r.memory.read == [((2, 4), 48)] and r.memory.written == [((2, 4), 48)]


def test_a_state_without_indices_moves_by_the_rows_of_its_region(kit: Any) -> None:
    g = Graph(CAPACITY)
    kit.ops.put(g.input("x", 2, 6), g.state("s", PerSequence((6,))).view(0, 1, 3))
    r = Recorder(kit, g)
    r.run(x=np.ones((2, 6), np.float32))
    assert r.memory.read == [((1, 2), 48)] and r.memory.written == [((1, 2), 48)]

    @kit.local("x[n], &s[slot, n] ->")
    def no_slots(x: Any, s: Any) -> None:
        s[1] += x

    g = Graph(CAPACITY)
    no_slots(g.input("x", 6), g.state("s", PerSequence((6,))))
    r = Recorder(kit, g)
    r.run(x=np.ones(6, np.float32))
    assert r.memory.read == [((0, 1, 2, 3, 4), 120)] and r.memory.written == [((1,), 24)]


def test_two_regions_of_one_state_are_both_written(kit: Any) -> None:
    """In the same rows: neither may be lost to the other."""

    @kit.local("x[a, b], &s[slot, b], &t[slot, b], r[slot, c] -> out[a, c]")
    def both(x: Any, s: Any, t: Any, r: Any) -> Any:
        s += x
        t -= x
        return r[: len(x)] * 2

    g = Graph(CAPACITY)
    x, s = g.input("x", 5, 2), g.state("s", PerSequence((6,)))
    g.output("y", both(x, s.view(1, 0, 2), s.view(1, 2, 4), s.view(1, 4, 6)))
    r = Recorder(kit, g)
    r.run(x=np.ones((5, 2), np.float32))
    assert r.memory.read == [((0, 1, 2, 3, 4), 120)] and r.memory.written == [((0, 1, 2, 3, 4), 120)]


def test_regions_of_other_rows_of_one_state(kit: Any) -> None:
    g = Graph(CAPACITY)
    s = g.state("s", PerSequence((6,)))
    g.output("y", kit.ops.carry(s.view(0, 0, 2), s.view(0, 3, 5)))
    r = Recorder(kit, g)
    r.run()
    assert r.memory.read == [((0, 1, 3, 4), 96)] and r.memory.written == [((3, 4), 48)]


@pytest.mark.parametrize("width", [(0,), (0, 3), ()])
def test_narrow_states(kit: Any, width: tuple[int, ...]) -> None:
    """Width 0, as the tail of a convolution of one tap; and a number for each slot."""
    axes = "".join(f", {n}" for n in "nm"[: len(width)])

    @kit.local(f"slots[seqs]:i32, &s[slot{axes}] ->")
    def count(slots: Any, s: Any) -> None:
        for i in slots:
            s[i] += 1

    g = Graph(CAPACITY)
    count(g.input("slots", 2, dtype="i32"), g.state("s", PerSequence(width)))
    Recorder(kit, g).run(slots=i32(3, 1))


def test_an_index_outside_is_an_error_and_nothing_is_written(kit: Any) -> None:
    g = Graph(CAPACITY)
    x, slots = g.input("x", 2, 6), g.input("slots", 2, dtype="i32")
    conv(kit)(x, slots, g.state("tail", PerSequence((6,))))
    r = Recorder(kit, g)
    for index in (5, 2**31 - 1):
        with pytest.raises(ValueError, match=rf"#0 step: an index names row {index} of state tail, of 5 rows"):
            r.run(x=np.ones((2, 6), np.float32), slots=i32(0, index))
        assert r.memory.written == [] and np.array_equal(r.storage.states["tail"], r.states["tail"])


def test_what_is_below_minus_1_stays_so(kit: Any) -> None:
    """The body judges it, as it does on the reference."""

    @kit.local("slots[seqs]:i32, s[slot, n] -> out[seqs]:i32")
    def echo(slots: Any, s: Any) -> Any:
        return np.where(slots < 0, slots, 0).astype(np.int32)

    g = Graph(CAPACITY)
    g.output("y", echo(g.input("slots", 3, dtype="i32"), g.state("s", PerSequence((6,)))))
    r = Recorder(kit, g)
    assert r.run(slots=i32(-1, 0, -7))["y"].tolist() == [-1, 0, -7]


def test_a_body_that_fails_leaves_the_state(kit: Any) -> None:
    for returned in (np.zeros(3, np.float32), None, ValueError("no")):

        def body(x: Any, s: Any) -> Any:
            s += 1
            if isinstance(returned, Exception):  # noqa: B023
                raise returned  # noqa: B023
            return returned  # noqa: B023

        broken = kit.local("x[n], &s[a, n] -> out[n, n]")(body)

        g = Graph(CAPACITY)
        broken(g.input("x", 6), g.state("s", PerSequence((6,))))
        r = Recorder(kit, g)
        with pytest.raises((ArgumentError, ValueError)):
            r.run(x=np.ones(6, np.float32))
        assert np.array_equal(r.storage.states["s"], r.states["s"]) and not r.memory.written


@given(st.data())
def test_any_indices_are_moved_right(kit: Any, data: st.DataObject) -> None:
    """Random slots, with repeats and -1, through random regions of two states, on both kinds of memory."""

    @kit.local(
        "x[seqs, n], slots[seqs]:i32, block_table[seqs, blocks]:i32, &s[slot, n], keep[seqs]:i32, t[slot, m], "
        "&c[pages, entries, n] -> out[seqs, n]"
    )
    def step(x: Any, slots: Any, block_table: Any, s: Any, keep: Any, t: Any, c: Any) -> Any:
        out = x.copy()
        for i, slot in enumerate(slots):
            if slot >= 0:
                out[i] = out[i] * np.float32(0.5) + s[slot] + t[slot, 0]
                s[slot] = out[i]
            if keep[i] >= 0:
                s[keep[i]] = out[i] - 1
            for b in block_table[i]:
                if b >= 0:
                    out[i] -= c[b, 0]
                    c[b, -1] = out[i]
        return out

    g = Graph(CAPACITY)
    s, t, c = (
        g.state(n, k) for n, k in zip("stc", (PerSequence((6,)), PerSequence((6,)), PerToken((6,))), strict=True)
    )
    seqs = data.draw(st.integers(0, 4), "sequences")
    n = data.draw(st.integers(1, 6), "n")
    low = data.draw(st.integers(0, 4), "first slot")
    slots = data.draw(st.integers(1, 5 - low), "slots")
    at = data.draw(st.integers(0, 6 - n), "first column")
    s = s.view(0, low, low + slots).view(1, at, at + n)
    t = t.view(0, low, low + slots)
    c = c.view(2, at, at + n).view(0, 0, pages := data.draw(st.integers(1, 6), "pages"))
    i = lambda name, *shape: g.input(name, *shape, dtype="i32")
    g.output("y", step(g.input("x", seqs, n), i("slots", seqs), i("table", seqs, 2), s, i("keep", seqs), t, c))

    def indices(rows: int, *shape: int) -> Array:
        size = int(np.prod(shape))
        drawn = data.draw(st.lists(st.integers(-1, rows - 1), min_size=size, max_size=size))
        return np.array(drawn, np.int32).reshape(shape)

    inputs = {
        "x": np.arange(seqs * n, dtype=np.float32).reshape(seqs, n), "slots": indices(slots, seqs),
        "table": indices(pages, seqs, 2), "keep": indices(slots, seqs),
    }  # fmt: skip
    want = kit.run(g, kit.reference(), inputs).bits
    for make in (kit.addressed, kit.managed):
        assert kit.run(g, make(g, without=(step,)), inputs, options=FALLBACK).bits == want


def test_weights_and_constants_are_read_as_the_host_holds_them(kit: Any) -> None:
    """A fallback of a table's rows dequantizes those rows, and moves no weight."""
    w = Weight("w", TensorType((50, 32), "q8_0"), np.random.default_rng(0).integers(0, 60, (50, 34), np.uint8))

    @kit.local("x[n], c[n]:i32, w[m, k]:weight -> out[n]:f32")
    def look_up(x: Any, c: Any, w: Any) -> Any:
        assert type(c) is np.ndarray
        return x + np.asarray(w[c])[:, 0]

    g = Graph()
    ids = g.input("ids", 3, dtype="i32")
    rows = embed(g.weight(w), ids)
    g.output("y", look_up(kit.ops.scale(g.input("x", 3), by=2.0), g.constant("c", i32(3, 1, 2)), g.weight(w)))
    g.output("rows", rows)
    inputs = {"ids": i32(4, 49, 0), "x": np.ones(3, np.float32)}
    want = kit.run(g, kit.reference(), inputs)
    for make in (kit.addressed, kit.managed):
        ran = kit.run(g, make(without=(embed, look_up)), inputs, options=FALLBACK)
        assert ran.bits == want.bits
    assert ran.executable.fallback_bytes == 12 + 3 * 32 * 4 + 12 + 12 + 2 * 12
    for make in (kit.addressed, kit.managed):
        assert kit.run(g, make(g), inputs).bits == want.bits, "and so does a body as a kernel"


def test_a_weight_at_a_plain_parameter_is_an_array(kit: Any) -> None:
    @kit.local("x[a, b] -> out[a, b]")
    def clipped(x: Any) -> Any:
        return x.clip(0, 2)

    g = Graph()
    w, c = g.weight(Weight.of("w", np.full((2, 3), 3, np.float32))), g.constant("c", np.ones((2, 3), np.float32))
    with g.prologue():
        host = clipped(w)
    g.output("y", kit.ops.mix(kit.ops.mix(clipped(w), clipped(c)), host))
    assert clipped(w.data).max() == 2
    want = kit.run(g, kit.reference(), {}).bits
    for make in (kit.addressed, kit.managed):
        assert kit.run(g, make(g), {}).bits == want
        assert kit.run(g, make(), {}, options=FALLBACK).bits == want


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["addressed", "managed"])
def test_inputs_are_held_to_their_types(kit: Any, kind: str) -> None:
    g = Graph()
    g.output("y", kit.ops.mix(g.input("x", 2, 3), g.inputs["x"]))
    good = {"x": np.zeros((2, 3), np.float32), "more": np.zeros(1)}
    ran = kit.run(g, getattr(kit, kind)(g), good)
    for bad, message in [
        ({}, r"input x: f32\[2, 3\] is missing"),
        ({"x": np.zeros((1, 3), np.float32)}, r"input x must be f32\[2, 3\], got f32\[1, 3\]"),
        ({"x": np.zeros((), np.float32)}, r"input x must be f32\[2, 3\], got f32\[\]"),
        ({"x": np.zeros((2, 3))}, r"input x must be f32\[2, 3\], got f64\[2, 3\]"),
        ({"x": np.zeros((2, 3), bool)}, r"input x must be f32\[2, 3\], got no trueup type for NumPy's bool"),
        ({"x": [[0, 0, 0], [0, 0, 0]]}, r"input x must be f32\[2, 3\], got i64\[2, 3\]"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ran.executable.run(bad)


# -- addressed ---------------------------------------------------------------------------------------------------------


def test_views_outside_the_arena(kit: Any) -> None:
    """Of an input, of a constant, of a prologue's result, and views of those; kernels see the strides of the types."""
    seen = []
    ops = kit.ops

    @kit.local("x[a, b] -> out[a, b]")
    def see(x: Any) -> Any:
        seen.append(TensorType.of(x).strides)
        return np.ascontiguousarray(x) + np.float32(1)

    g = Graph()
    x = g.input("x", 4, 6)
    c = g.constant("c", np.arange(24, dtype=np.float32).reshape(4, 6))
    with g.prologue():
        p = ops.scale(x, by=2.0)
        q = ops.part(p, start=1, size=4)
    views = [ops.turned(x), ops.part(ops.turned(x), start=1, size=2), ops.back(x), ops.turned(ops.back(x)), q,
             ops.part(q, start=2, size=2), ops.turned(c), ops.back(ops.part(c, start=0, size=3))]  # fmt: skip
    for i, v in enumerate(views):
        g.output(f"o{i}", see(v))
        g.output(f"v{i}", v) if v.storage is not c else None
    inputs = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    want = kit.run(g, kit.reference(), inputs).bits
    for target in (kit.addressed(g), kit.managed(g)):
        seen.clear()
        assert kit.run(g, target, inputs).bits == want
        if isinstance(target, AddressedTarget):
            assert seen == [v.type.strides for v in views]


def test_results_begin_poisoned(kit: Any) -> None:
    """A kernel that leaves a part of its result unwritten is seen at once."""
    t = KernelTable()

    @kit.local("x[n] -> f[n], i[n]:i32, none[0]")
    def lazy(x: Any) -> Any: ...

    @t.implements(lazy)
    def _(ctx: Any, x: Any) -> None:
        assert [o.shape for o in ctx.outs] == [(3,), (3,), (0,)] and [str(y) for y in ctx.types][1] == "i32[3]"
        ctx.outs[0][0] = 1

    g = Graph()
    for n, v in zip("fin", lazy(g.input("x", 3)), strict=True):
        g.output(n, v)
    target = AddressedTarget("t", kit.device, t)
    target.poison = True
    out = kit.run(g, target, {"x": np.zeros(3, np.float32)}, steps=3).outputs
    assert out["f"].view(np.uint32).tolist() == [0x3F800000, 0xFFFFFFFF, 0xFFFFFFFF]
    assert out["i"].tolist() == [-1, -1, -1] and out["n"].shape == (0,)


def test_the_only_result(kit: Any) -> None:
    t = KernelTable()

    @t.implements(kit.ops.two)
    def _(ctx: Any, x: Any) -> None:
        ctx.out[...] = x

    g = Graph()
    g.output("y", kit.ops.two(g.input("x", 3))[0])
    with pytest.raises(ValueError, match="too many values"):
        kit.run(g, AddressedTarget("t", kit.device, t), {"x": np.zeros(3, np.float32)})


@pytest.mark.parametrize("kind", [AddressedTarget, ManagedTarget])
def test_what_a_kernel_raises_says_which_kernel_it_was(kit: Any, kind: Any) -> None:
    t = KernelTable()

    @t.implements(kit.ops.two)
    def halves(*args: Any) -> None:
        raise KeyError("no such program")

    g = Graph()
    g.output("y", kit.ops.two(g.input("x", 3))[0])
    with pytest.raises(KeyError) as e:
        kit.run(g, kind("t", kit.device, t), {"x": np.zeros(3, np.float32)})
    assert e.value.__notes__ == ["in kernel halves of t, #0 two(x: f32[3])"]


@pytest.mark.fault("B78")
@pytest.mark.parametrize("kind", ["addressed", "managed"])
@pytest.mark.parametrize("shape", [(0, 6), (4, 0), (0, 0)])
def test_tensors_of_nothing(kit: Any, kind: str, shape: tuple[int, int]) -> None:
    ops, g = kit.ops, Graph(CAPACITY)
    x = g.input("x", *shape)
    with g.prologue():
        p = ops.scale(x, by=2.0)
    a, b = ops.two(ops.mix(x, p))
    s = g.state("s", PerSequence((0,)))
    for n, v in {"a": a, "b": b, "turned": ops.turned(a), "folded": ops.folded(ops.turned(a)), "x": x, "p": p}.items():
        g.output(n, v)
    g.output("s", ops.look(s))
    ops.put(ops.part(g.input("y", 5, 3), start=3, size=0), s)
    inputs = {"x": np.zeros(shape, np.float32), "y": np.zeros((5, 3), np.float32)}
    for options in (PlanOptions(), FALLBACK):
        without = () if options is not FALLBACK else (ops.two, ops.put, ops.look, ops.mix)
        out = kit.run(g, getattr(kit, kind)(g, without=without), inputs, options=options).outputs
        assert {n: v.shape for n, v in out.items()} == {n: v.type.shape for n, v in g.outputs.items()}


@pytest.mark.fault("B78")
def test_host_memory_of_nothing_and_of_blocks() -> None:
    m = HostMemory()
    h = m.allocate(TensorType((0, 4)))
    m.upload(h, np.zeros((0, 4), np.float32))
    assert m.download(h).shape == (0, 4) and m.read_rows(h, []).shape == (0, 4)
    m.write_rows(h, [], np.zeros((0, 4), np.float32))
    m.copy_rows(h, [], [])
    m.fill_rows(h, [], 1.0)
    m.free(h)
    assert m.allocate(TensorType((3, 64), "q8_0")).nbytes == 3 * 2 * 34


@pytest.mark.parametrize("memory", [HostMemory(), ManagedMemory()])
def test_rows_of_memory(memory: Any) -> None:
    h = memory.allocate(TensorType((5, 2), "i32"))
    memory.upload(h, np.arange(10, dtype=np.int32).reshape(5, 2))
    memory.copy_rows(h, [4, 3], [0, 1])
    memory.fill_rows(h, [1], 7)
    memory.write_rows(h, [2, 0], i32([20, 21], [22, 23]))
    assert memory.download(h).tolist() == [[22, 23], [7, 7], [20, 21], [2, 3], [0, 1]]
    assert memory.read_rows(h, [3, 3, 0]).tolist() == [[2, 3], [2, 3], [22, 23]]
    memory.download(h)[:] = 0
    memory.read_rows(h, [0])[:] = 0
    assert memory.download(h).tolist()[0] == [22, 23], "what is downloaded is a copy"


def test_weights_are_prepared_once(kit: Any) -> None:
    made: list[str] = []

    class Target(AddressedTarget):
        def prepare_weight(self, weight: Weight) -> Any:
            made.append(weight.name)
            return np.asarray(weight)

    g = Graph()
    w = g.weight(Weight.of("w", np.ones((2, 3), np.float32)))
    g.output("y", kit.ops.mix(kit.ops.scale(w, by=2.0), kit.ops.mix(w, w)))
    t = KernelTable()
    t.body(kit.ops.mix)
    t.body(kit.ops.scale)
    target, storage = Target("t", kit.device, t), Storage()
    for _ in range(2):
        target.compile(build_plan(g, target), storage).run({})
    assert made == ["w"]


# -- managed -----------------------------------------------------------------------------------------------------------


def managed_graph(kit: Any) -> Graph:
    g = Graph(CAPACITY)
    s = g.state("s", PerSequence((6,)))
    g.output("y", kit.ops.stir(g.input("x", 5, 3), s.view(1, 1, 4)))
    return g


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x, s: None, r"the kernel of #0 stir returned 0 arrays, expected 1 results and 1 states"),
        (lambda x, s: x, r"the kernel of #0 stir returned 1 arrays, expected 1 results and 1 states"),
        (lambda x, s: (x, s, s), r"the kernel of #0 stir returned 3 arrays, expected 1 results and 1 states"),
        (lambda x, s: (x, s[:, :2]), r"the kernel of #0 stir returned \[5, 2\] for %s\[1:1:4\]: f32\[5, 3\]"),
        (lambda x, s: (x[:1], s), r"the kernel of #0 stir returned \[1, 3\] for %stir.0: f32\[5, 3\]"),
        (lambda x, s: (x, None), r"the kernel of #0 stir returned NoneType for %s\[1:1:4\]"),
        (lambda x, s: ([x], s), r"the kernel of #0 stir returned list for %stir.0"),
    ],
)
def test_managed_kernels_return_what_they_must(kit: Any, kernel: Any, message: str) -> None:
    g, t = managed_graph(kit), KernelTable()
    t.implements(kit.ops.stir)(kernel)
    plan = build_plan(g, target := ManagedTarget("m", kit.device, t))
    storage = kit.storage(plan, target, {"s": kit.start(g.states["s"])})
    with pytest.raises(TypeError, match=message):
        target.compile(plan, storage).run({"x": np.zeros((5, 3), np.float32)})
    assert np.array_equal(storage.states["s"].value, kit.start(g.states["s"])), "and the state is as it was"


def test_a_list_of_results_is_as_good_as_a_tuple(kit: Any) -> None:
    g, t = managed_graph(kit), KernelTable()
    t.implements(kit.ops.stir)(lambda x, s: list(kit.managed_body(kit.ops.stir)(x, s)))
    inputs = {"x": np.ones((5, 3), np.float32)}
    ran = kit.run(g, ManagedTarget("m", kit.device, t), inputs)
    assert ran.bits == kit.run(g, kit.reference(), inputs).bits


def test_managed_states_are_versions(kit: Any) -> None:
    """A write makes a new array; one that is held elsewhere, as a checkpoint may, keeps what it had."""
    g = managed_graph(kit)
    for without in ((), (kit.ops.stir,)):
        target = kit.managed(g, without=without)
        plan = build_plan(g, target, FALLBACK)
        storage = kit.storage(plan, target, {"s": kit.start(g.states["s"])})
        held = storage.states["s"].value
        executable = target.compile(plan, storage)
        executable.run({"x": np.ones((5, 3), np.float32)})
        assert storage.states["s"].value is not held and np.array_equal(held, kit.start(g.states["s"]))
        assert not held.flags.writeable and not storage.states["s"].value.flags.writeable


# -- the prologue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reference", "addressed", "managed"])
def test_states_of_the_prologue_stay_on_the_host(kit: Any, kind: str) -> None:
    ops, g = kit.ops, Graph(CAPACITY)
    x, s = g.input("x", 5, 3), g.state("s", PerSequence((6,)))
    with g.prologue():
        p = ops.stir(x, s.view(1, 2, 5))
        q = ops.part(ops.look(s), start=0, size=3)
    g.output("y", ops.mix(p, q))
    target = getattr(kit, kind)(g)
    plan = build_plan(g, target)
    array = kit.start(g.states["s"])
    executable = target.compile(plan, Storage({}, {"s": array}))
    inputs = {"x": np.ones((5, 3), np.float32)}
    for _ in range(3):
        out = executable.run(inputs)["y"]
    want = kit.run(g, kit.reference(), inputs, steps=3)
    assert array.tobytes() == want.states["s"].tobytes() and out.tobytes() == want.outputs["y"].tobytes()
    assert [n.op.name for n in plan.order] == ["mix"]


def test_a_step_that_is_all_prologue(kit: Any) -> None:
    g = Graph()
    with g.prologue():
        g.output("y", kit.ops.scale(g.input("x", 3), by=2.0))
    for target in kit.targets(g):
        out = kit.run(g, target, {"x": np.ones(3, np.float32)}).outputs
        assert out["y"].tolist() == [2, 2, 2]


def test_executables_close(kit: Any) -> None:
    freed = []

    class Memory(HostMemory):
        def free(self, handle: Any) -> None:
            freed.append(handle.shape)

    g = Graph()
    with g.prologue():
        p = kit.ops.scale(g.input("x", 3), by=2.0)
    g.output("y", kit.ops.scale(p, by=2.0))
    kit.run(g, kit.addressed(g, memory=Memory()), {"x": np.ones(3, np.float32)}).executable.close()
    assert freed == [(3,), (3,)]
