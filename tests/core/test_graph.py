"""Graphs: order of effects held against sets of elements, equal calls, prologue, fingerprint, verifier."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.errors import ArgumentError, GraphError
from trueup.core.graph import Graph, Node, State, Value
from trueup.core.op import Op
from trueup.core.passes.verify import topological, verify
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.core.weight import Weight


def local(signature: str, **kwargs: Any) -> Callable[[Callable[..., Any]], Op]:
    """An op outside the registry."""
    return lambda body: Op(signature, body, **kwargs)


@local("s[...]:any -> out[]:f32")
def read(s: Any) -> Any:
    return np.float32(s.sum())


@local("x[], &s[...]:any ->")
def write(x: Any, s: Any) -> None:
    s[...] += x


@local("r[a, b], &w[c, d] -> out[]")
def move(r: Any, w: Any) -> Any:
    w[...] = r.sum()
    return np.float32(r.sum())


@local("x[...], y[...] -> out[...]")
def add(x: Any, y: Any) -> Any:
    return x + y


@local("x[...] -> out[...]")
def scaled(x: Any, *, by: float = 1.0, times: int = 1) -> Any:
    return x * np.float32(by)


@local("x[..., n]:any -> out[..., size]", view=True)
def part(x: Any, *, start: int, size: int) -> Any:
    return x[..., start : start + size]


@local("x[..., n]:any -> out[..., n]", view=True)
def reversed_columns(x: Any) -> Any:
    return x[..., ::-1]


@local("x[a, b] -> out[b, a]", view=True)
def transposed(x: Any) -> Any:
    return x.T


@local("x[a, b] -> out[a*b]", view=True)
def flat(x: Any) -> Any:
    return x.reshape(-1)


CAPACITY = Capacity(slots=4, pages=4, page=4)


def buffer(g: Graph, name: str = "buf", *width: int) -> State:
    return g.state(name, PerSequence(width or (8,)))


# -- effects -----------------------------------------------------------------------------------------------------------


def test_kinds_of_order() -> None:
    g = Graph(CAPACITY)
    s, x = buffer(g), g.input("x")
    read(s)
    write(x, s)
    read(s)
    read(s)
    write(x, s)
    write(x, s)
    r0, w1, r2, r3, w4, w5 = g.nodes
    e = g.edges()
    assert e[r0] == set()
    assert e[w1] == {r0}, "a write after a read"
    assert e[r2] == e[r3] == {w1}, "reads after a write, in no order between them"
    assert e[w4] >= {r2, r3}
    assert e[w5] == {w4}, "a write after a write"


@pytest.mark.fault("B38")
def test_two_views_of_one_buffer() -> None:
    """buf[8]: write [0:4], read [2:6], write [4:8]; and what does not overlap has no order."""
    g = Graph(CAPACITY)
    buf, x = buffer(g, "buf", 8), g.input("x")
    write(x, buf.view(1, 0, 4))
    read(buf.view(1, 2, 6))
    write(x, buf.view(1, 4, 8))
    read(buf.view(1, 0, 2))
    w, r, w2, r2 = g.nodes
    e = g.edges()
    assert e == {w: set(), r: {w}, w2: {r}, r2: {w}}


def test_views_of_views_count_from_the_state() -> None:
    g = Graph(CAPACITY)
    buf = buffer(g, "buf", 8, 6)
    v = buf.view(1, 2, 7).view(2, 1, 5).view(1, 1, 3)
    assert v.region == ((0, 4), (3, 5), (1, 5)) and v.type.shape == (4, 2, 4)
    assert v.type.strides == (48, 6, 1) and v.root is buf
    assert buf.view(0, 1, 3).type.contiguous, "whole rows lie side by side"
    assert np.shares_memory(v.slice(a := np.zeros((4, 8, 6))), a) and v.slice(a).shape == (4, 2, 4)
    assert buf.view(1, 2, 7).view(1, 1, 3) is buf.view(1, 3, 5), "one region is one value"
    assert buf.view(1, 0, 8).view(0, 0, 4) is buf


@pytest.mark.parametrize(
    ("axis", "start", "stop", "message"),
    [
        (1, 0, 9, "state buf: the view 0:9 of axis 1 leaves its 8 entries"),
        (1, -1, 3, "state buf: the view -1:3 of axis 1 leaves its 8 entries"),
        (1, 3, 3, "state buf: the view 3:3 of axis 1 leaves its 8 entries"),
        (1, 4, 3, "state buf: the view 4:3 of axis 1 leaves its 8 entries"),
        (2, 0, 1, r"state buf: f32\[4, 8\] has no axis 2"),
        (-1, 0, 1, r"state buf: f32\[4, 8\] has no axis -1"),
    ],
)
def test_views_that_leave(axis: int, start: int, stop: int, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        buffer(Graph(CAPACITY)).view(axis, start, stop)


def test_a_view_of_a_view_may_not_leave_it() -> None:
    v = buffer(Graph(CAPACITY)).view(1, 2, 6)
    with pytest.raises(GraphError, match=r"state buf\[1:2:6\]: the view 0:5 of axis 1 leaves its 4 entries"):
        v.view(1, 0, 5)


@dataclass
class Access:
    """What a node touches, as sets of elements found by slicing an array of element numbers."""

    reads: dict[str, set[int]] = field(default_factory=dict)
    writes: dict[str, set[int]] = field(default_factory=dict)

    def conflicts(self, other: Access) -> bool:
        for a, b in ((self.writes, other.reads), (self.reads, other.writes), (self.writes, other.writes)):
            if any(elements & b.get(name, set()) for name, elements in a.items()):
                return True
        return False


@st.composite
def effect_graphs(draw: st.DrawFn) -> tuple[Graph, list[Access], list[set[int]]]:
    """A graph of reads, writes and moves on random boxes of two states, with what each touches and needs."""
    g = Graph(CAPACITY)
    widths = {"a": (6,), "b": (5,)}
    states = {n: buffer(g, n, *w) for n, w in widths.items()}
    numbers = {n: np.arange(4 * w[0]).reshape(4, *w) for n, w in widths.items()}
    zero = g.input("zero")
    made: list[Value] = [zero]
    maker: dict[str, int] = {}
    accesses, needs = [], []

    def box(name: str) -> tuple[State, set[int]]:
        s, n = states[name], numbers[name]
        for _ in range(draw(st.integers(0, 2))):
            axis = draw(st.integers(0, 1))
            start = draw(st.integers(0, n.shape[axis] - 1))
            stop = draw(st.integers(start + 1, n.shape[axis]))
            s, n = s.view(axis, start, stop), n[(slice(None),) * axis + (slice(start, stop),)]
        return s, set(n.ravel().tolist())

    for _ in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["read", "write", "write", "move", "add"]))
        access, need = Access(), set()
        name = draw(st.sampled_from("ab"))
        if kind == "add":
            x, y = draw(st.sampled_from(made)), draw(st.sampled_from(made))
            before = len(g.nodes)
            out = add(x, y)
            if len(g.nodes) == before:
                continue
            need = {maker[v.name] for v in (x, y) if v.name in maker}
        elif kind == "read":
            s, access.reads[name] = box(name)
            out = read(s)
        elif kind == "write":
            s, access.writes[name] = box(name)
            x = draw(st.sampled_from(made))
            need = {maker[x.name]} if x.name in maker else set()
            write(x, s)
            out = None
        else:
            other = "b" if name == "a" else "a"
            r, access.reads[name] = box(name)
            w, access.writes[other] = box(other)
            out = move(r, w)
        if out is not None:
            maker[out.name] = len(accesses)
            made.append(out)
        accesses.append(access)
        needs.append(need)
    return g, accesses, needs


def closure(before: list[set[int]]) -> list[set[int]]:
    """For a list in a legal order: everything that comes before each, however indirectly."""
    out: list[set[int]] = []
    for direct in before:
        out.append(direct.union(*(out[b] for b in direct)))
    return out


@pytest.mark.fault("B38")
@given(effect_graphs())
def test_order_is_that_of_elements(drawn: tuple[Graph, list[Access], list[set[int]]]) -> None:
    """Reachability over `edges()` is the closure of brute force: data, and every pair that shares an element."""
    g, accesses, needs = drawn
    assert len(g.nodes) == len(accesses)
    found = [{m.id for m in before} for before in g.edges().values()]
    direct = [needs[i] | {j for j in range(i) if accesses[i].conflicts(accesses[j])} for i in range(len(accesses))]
    assert closure(found) == closure(direct)
    for f, d in zip(found, direct, strict=True):
        assert f <= d, "an edge that nothing asks for"


def test_covered_accesses_are_pruned() -> None:
    """A state that is written whole again and again keeps edges few: each write waits for one write, not for all."""
    g = Graph(CAPACITY)
    s, x = buffer(g), g.input("x")
    for _ in range(50):
        write(x, s)
        read(s)
    assert sum(map(len, g.edges().values())) < 200


def test_one_node_may_touch_regions_apart() -> None:
    g = Graph(CAPACITY)
    s = buffer(g)
    move(s.view(1, 0, 4), s.view(1, 4, 8))
    verify(g)
    move(s.view(1, 0, 4), s.view(1, 3, 8))
    with pytest.raises(
        GraphError, match=r"#1 move: buf\[1:0:4\] and buf\[1:3:8\] overlap, and the node writes one of them"
    ):
        verify(g)


def test_a_node_may_read_a_state_twice() -> None:
    g = Graph(CAPACITY)
    s = buffer(g)
    two_reads(s, s)
    verify(g)
    assert [w for _, w in g.nodes[0].effects] == [False, False]


@local("p[a, b], q[a, b] -> out[]")
def two_reads(p: Any, q: Any) -> Any:
    return np.float32(0)


# -- equal calls -------------------------------------------------------------------------------------------------------


def test_equal_pure_calls_are_one_node() -> None:
    g = Graph(CAPACITY)
    x, y = g.input("x", 2, 3), g.input("y", 2, 3)
    assert add(x, y) is add(x, y)
    assert scaled(x) is scaled(x, by=1) is scaled(x, by=1.0, times=1)
    assert part(x, start=1, size=2) is part(x, start=1, size=2)
    assert len(g.nodes) == 3
    different = [
        add(y, x), add(x, x), scaled(y), scaled(x, by=2), scaled(x, times=2), scaled(x, by=0.0), scaled(x, by=-0.0),
        part(x, start=0, size=2), part(x, start=1, size=1),
    ]  # fmt: skip
    assert len(set(different)) == len(different) == len(g.nodes) - 3


def test_calls_with_effects_are_never_merged() -> None:
    g = Graph(CAPACITY)
    s, x = buffer(g), g.input("x")
    assert read(s) is not read(s)
    write(x, s)
    write(x, s)
    move(s.view(1, 0, 4), s.view(1, 4, 8))
    move(s.view(1, 0, 4), s.view(1, 4, 8))
    assert len(g.nodes) == 6
    p = Graph(pattern=True)
    a, b = (Value(p, n, None, leaf="input") for n in "ab")  # type: ignore[arg-type]
    write(a, b)
    write(a, b)
    assert len(p.nodes) == 2, "nor in a pattern, where no value is a state yet"


def test_the_prologue_has_its_own_nodes() -> None:
    g = Graph(CAPACITY)
    x = g.input("x", 3)
    device = scaled(x)
    with g.prologue():
        host = scaled(x)
        assert host is scaled(x)
    assert host is not device and scaled(x) is device
    assert [n.host for n in g.nodes] == [False, True]


# -- leaves ------------------------------------------------------------------------------------------------------------


def test_leaves_are_declared_once() -> None:
    g = Graph(CAPACITY)
    g.input("x", 3)
    with pytest.raises(GraphError, match=r"input 'x' is declared twice, as f32\[3\] and f32\[4\]"):
        g.input("x", 4)
    w = Weight.of("w", np.zeros((2, 3), np.float32))
    assert g.weight(w) is g.weight(w)
    with pytest.raises(GraphError, match=r"weight 'w' is declared twice"):
        g.weight(Weight.of("w", np.zeros((2, 3), np.float32)))
    c = g.constant("c", np.array([1, 2], np.int32))
    assert g.constant("c", np.array([1, 2], np.int32)) is c
    for other in (np.array([1, 3], np.int32), np.array([1, 2], np.int64), np.array([[1, 2]], np.int32)):
        with pytest.raises(GraphError, match=r"constant 'c' is declared twice"):
            g.constant("c", other)
    with pytest.raises(GraphError, match=r"constant 'w' is declared twice"):
        g.constant("w", np.zeros((2, 3), np.float32) + 1)
    assert g.constant("scalar", np.array(3, np.int32)).type.shape == ()
    for wide in (np.float64, np.float16):
        with pytest.raises(GraphError, match=r"constant f: f\d\d\[1\] must be f32 or of integers"):
            g.constant("f", np.zeros(1, wide))
    s = g.state("s", PerSequence((3,)))
    assert g.state("s", PerSequence((3,))) is s
    for kind in (PerSequence((4,)), PerSequence((3,), fill=1), PerSequence((3,), "i32"), PerToken((3,))):
        with pytest.raises(GraphError, match=r"state 's' is declared twice"):
            g.state("s", kind)
    with pytest.raises(GraphError, match="state s: the graph has no capacity to size it by"):
        Graph().state("s", PerSequence((3,)))


def test_outputs_are_computed_or_inputs() -> None:
    g = Graph(CAPACITY)
    x = g.input("x", 3)
    g.output("y", scaled(x))
    g.output("x", x)
    with pytest.raises(GraphError, match="output 'y' is declared twice"):
        g.output("y", x)
    with pytest.raises(GraphError, match="output z: 3 is no value of this graph"):
        g.output("z", 3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"output z: %x: f32\[3\] is no value of this graph"):
        g.output("z", Graph().input("x", 3))
    c = g.constant("c", np.zeros((2, 3), np.float32))
    for leaf, kind in ((c, "constant"), (part(c, start=0, size=2), "constant"), (buffer(g), "state")):
        with pytest.raises(GraphError, match=rf"is a {kind}; an output is computed or an input"):
            g.output("z", leaf)


# -- views -------------------------------------------------------------------------------------------------------------


def lies(v: Value, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The elements that a value's base, offset and strides address."""
    assert v.base is not None
    start = array.reshape(-1)[v.offset :]
    return np.lib.stride_tricks.as_strided(start, v.type.shape, [8 * s for s in v.type.strides or v.type.row_major()])


@given(st.data())
def test_views_of_values_lie_where_numpy_says(data: st.DataObject) -> None:
    g = Graph()
    v = x = g.input("x", 4, 6, dtype="i64")
    array = want = np.arange(24).reshape(4, 6)
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["part", "reversed", "transposed"]))
        if kind == "part":
            start = data.draw(st.integers(0, want.shape[1] - 1))
            size = data.draw(st.integers(1, want.shape[1] - start))
            v, want = part(v, start=start, size=size), want[:, start : start + size]
        elif kind == "reversed":
            v, want = reversed_columns(v), want[:, ::-1]
        else:
            v, want = any_transposed(v), want.T
    assert v.base is x
    np.testing.assert_array_equal(lies(v, array), want)
    assert v.type.contiguous == (TensorType.of(want).contiguous)


@local("x[a, b]:any -> out[b, a]", view=True)
def any_transposed(x: Any) -> Any:
    return x.T


def test_a_view_that_strides_forbid_has_no_base() -> None:
    g = Graph()
    x = g.input("x", 4, 6)
    assert flat(x).base is x
    assert flat(transposed(x)).base is None


@pytest.mark.fault("B78")
@pytest.mark.parametrize("shape", [(0, 6), (4, 0), (0, 0)])
def test_views_of_nothing(shape: tuple[int, ...]) -> None:
    g = Graph()
    x = g.input("x", *shape)
    for v in (transposed(x), flat(x), transposed(transposed(x))):
        assert v.base is x and v.offset == 0 and v.type.contiguous
    assert part(g.input("y", 4, 6), start=3, size=0).base is g.inputs["y"], "nothing of something is a view too"


def test_a_view_of_a_state_is_not_an_op() -> None:
    g = Graph(CAPACITY)
    with pytest.raises(GraphError, match=r"a view is made of a value; of a state take state.view\(axis, start, stop\)"):
        part(buffer(g), start=0, size=2)


# -- the verifier ------------------------------------------------------------------------------------------------------


def test_rules_of_the_prologue() -> None:
    g = Graph(CAPACITY)
    x = g.input("x", 3)
    device = scaled(x)
    with g.prologue():
        scaled(device)
    with pytest.raises(GraphError, match=r"#1 scaled belongs to the prologue but needs %scaled.0: f32\[3\], which the"):
        verify(g)

    g = Graph(CAPACITY)
    s = buffer(g)
    with g.prologue():
        read(s.view(1, 0, 2))
    read(s.view(1, 4, 8))
    with pytest.raises(GraphError, match="state buf is used in the prologue and on the device, by #0 read and #1 read"):
        verify(g)

    g = Graph(CAPACITY)
    s, t, x = buffer(g, "s"), buffer(g, "t"), g.input("x", 3)
    read(s)
    with g.prologue():
        y = scaled(x)
        read(t)
    scaled(y)
    verify(g)
    assert g.host_states == {"t"}
    g.order(g.nodes[1], g.nodes[0])
    verify(g)
    g.order(g.nodes[0], g.nodes[1])
    with pytest.raises(GraphError, match="#1 scaled belongs to the prologue but must follow #0 read, which the device"):
        verify(g)


def test_the_prologue_ends_where_its_block_ends() -> None:
    g = Graph()
    x = g.input("x", 3)
    with pytest.raises(ArgumentError), g.prologue():
        scaled(x, by="?")
    scaled(x)
    with g.prologue(), g.prologue():
        pass
    assert not g.nodes[0].host


def test_unused_states_are_refused() -> None:
    g = Graph(CAPACITY)
    read(buffer(g, "a"))
    buffer(g, "b").view(1, 0, 2)
    with pytest.raises(GraphError, match="state b is declared but no node uses it"):
        verify(g)


def test_values_of_another_graph_or_too_early_are_refused() -> None:
    g, other = Graph(CAPACITY), Graph(CAPACITY)
    x, s = g.input("x"), buffer(g)
    y = scaled(x)
    write(y, s)
    foreign = other.input("foreign")
    g.nodes[1] = Node(write, (foreign, s), {}, 1, False, frozenset((1,)))
    with pytest.raises(GraphError, match=r"#1 write: %foreign: f32\[\] is a value of another graph"):
        verify(g)
    g.nodes[1] = Node(write, (y, buffer(other)), {}, 1, False, frozenset((1,)))
    with pytest.raises(GraphError, match=r"#1 write: %buf: f32\[4, 8\] is a value of another graph"):
        verify(g)
    g.nodes = [Node(write, (y, s), {}, 0, False, frozenset((0,))), y.node]  # type: ignore[list-item]
    with pytest.raises(GraphError, match=r"#0 write: %scaled.0: f32\[\] is used before #0 scaled computes it"):
        verify(g)
    g.nodes = [Node(read, (s,), {}, 0, False, frozenset((0,)))]
    g.outputs["y"] = y
    with pytest.raises(GraphError, match=r"output y: no node computes %scaled.0: f32\[\]"):
        verify(g)
    g.outputs["y"] = foreign
    with pytest.raises(GraphError, match=r"output y: %foreign: f32\[\] is a value of another graph"):
        verify(g)


def test_constraints_are_edges_and_may_not_make_a_cycle() -> None:
    g = Graph()
    x = g.input("x", 3)
    for by in range(4):
        scaled(x, by=by)
    a, b, c, d = g.nodes
    g.order(c, a)
    g.order(b, c)
    assert g.edges()[a] == {c} and topological(g.edges()).index(b) < topological(g.edges()).index(a)
    verify(g)
    g.order(a, b)
    with pytest.raises(GraphError) as e:
        verify(g)
    assert str(e.value) == "the graph has a cycle: #0 scaled → #1 scaled → #2 scaled → #0 scaled"
    with pytest.raises(GraphError, match="#0 scaled is a node of another graph"):
        Graph().order(a, b)


@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_a_reported_cycle_is_one(size: int, rng: random.Random) -> None:
    """Whatever else hangs on it: the path is made of edges and ends where it begins."""
    g = Graph()
    x = g.input("x", 3)
    for by in range(size):
        scaled(x, by=by)
    for _ in range(size * 2):
        g.order(*rng.choices(g.nodes, k=2))
    edges = g.edges()
    try:
        order = topological(edges)
    except GraphError as e:
        path = [int(n.split("#")[1].split()[0]) for n in str(e).split(": ")[1].split(" → ")]
        assert path[0] == path[-1] and len(path) > 1
        for first, then in zip(path, path[1:], strict=False):
            assert g.nodes[first] in edges[g.nodes[then]]
    else:
        assert all(order.index(b) < i for i, n in enumerate(order) for b in edges[n])


# -- the fingerprint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Everything that enters a graph; each field is changed once."""

    tokens: int = 5
    dtype: str = "i32"
    input_name: str = "ids"
    weight_name: str = "w"
    weight_type: str = "f32"
    constant_name: str = "c"
    constant: tuple[int, ...] = (1, 2, 3)
    constant_dtype: str = "i4"
    state_name: str = "tail"
    width: int = 6
    fill: float = 0
    state_dtype: str = "f32"
    paged: bool = False
    every: int = 1
    slots: int = 4
    pages: int = 4
    page: int = 4
    by: float = 1.5
    times: int = 1
    view_start: int = 1
    region: tuple[int, int] = (0, 3)
    output_name: str = "y"
    output_second: bool = False
    extra_output: bool = False
    host: bool = False
    operands_swapped: bool = False
    other_op: bool = False
    extra_node: bool = False
    effects_swapped: bool = False
    constraint: bool = False
    list_swapped: bool = False
    optional: bool = False


@local("ids[n]:any, w[m, k]:weight -> out[n, m]:f32")
def look_up(ids: Any, w: Any) -> Any: ...


@local("x[...]:any -> out[...]:f32")
def as_float(x: Any) -> Any: ...


@local("*parts[n, m], bias?[m] -> out[n, m]")
def joined(parts: Any, bias: Any = None) -> Any: ...


@local("x[...], y[...] -> out[...]")
def times_(x: Any, y: Any) -> Any: ...


def build(r: Recipe) -> Graph:
    g = Graph(Capacity(r.slots, r.pages, r.page))
    ids = g.input(r.input_name, r.tokens, dtype=r.dtype)
    raw = np.arange(32 * 6, dtype=np.float32).reshape(6, 32)
    w = g.weight(
        Weight.of(r.weight_name, raw)
        if r.weight_type == "f32"
        else Weight(r.weight_name, TensorType((6, 32), "q8_0"), np.zeros((6, 34), np.uint8))
    )
    g.constant(r.constant_name, np.array(r.constant, r.constant_dtype))
    kind = PerToken((r.width,), r.every, r.state_dtype) if r.paged else PerSequence((r.width,), r.state_dtype, r.fill)
    s = g.state(r.state_name, kind)
    with g.prologue() if r.host else contextlib.nullcontext():
        start = as_float(ids)
    x = look_up(ids, w)
    a = scaled(x, by=r.by, times=r.times)
    b = part(x, start=r.view_start, size=3)
    c = part(a, start=0, size=3)
    y = (times_ if r.other_op else add)(*((c, b) if r.operands_swapped else (b, c)))
    bias = g.constant("bias", np.zeros(3, np.float32)) if r.optional else None
    z = joined((c, b) if r.list_swapped else (b, c), bias)
    if r.effects_swapped:
        write_any(y, s)
        read(s.view(1 if not r.paged else 2, *r.region))
    else:
        read(s.view(1 if not r.paged else 2, *r.region))
        write_any(y, s)
    if r.extra_node:
        scaled(y)
    if r.constraint:
        g.order(g.nodes[0], g.nodes[1])
    g.output(r.output_name, z if r.output_second else y)
    if r.extra_output:
        g.output("start", start)
    return g


@local("v[a, b], &s[...]:any ->")
def write_any(v: Any, s: Any) -> None: ...


CHANGES: dict[str, Any] = {
    "tokens": 6, "dtype": "i64", "input_name": "ids2", "weight_name": "w2", "weight_type": "q8_0",
    "constant_name": "c2", "constant": (1, 2, 4), "constant_dtype": "i8", "state_name": "tail2",
    "width": 7, "fill": -1, "state_dtype": "i32",
    "paged": True, "slots": 5, "pages": 5, "page": 8, "by": 2.0, "times": 2, "view_start": 2, "region": (1, 3),
    "output_name": "z", "output_second": True, "extra_output": True, "host": True, "operands_swapped": True,
    "other_op": True, "extra_node": True, "effects_swapped": True, "constraint": True, "list_swapped": True,
    "optional": True,
}  # fmt: skip


def test_the_fingerprint_sees_every_change() -> None:
    base = build(Recipe()).fingerprint()
    assert build(Recipe()).fingerprint() == base, "and nothing else, as addresses"
    seen = {base: "nothing"}
    for name, value in CHANGES.items():
        print_ = build(replace(Recipe(), **{name: value})).fingerprint()
        assert print_ not in seen, f"changing {name} looks like changing {seen[print_]}"
        seen[print_] = name
    paged = build(Recipe(paged=True)).fingerprint()
    assert build(Recipe(paged=True, every=2)).fingerprint() != paged
    assert set(CHANGES) | {"every"} == set(Recipe.__dataclass_fields__), "every field is changed"


def test_the_fingerprint_needs_no_weights() -> None:
    a, b = Graph(), Graph()
    for g, fill in ((a, 0), (b, 1)):
        w = g.weight(Weight.of("w", np.full((2, 3), fill, np.float32)))
        g.output("y", look_up(g.input("ids", 2, dtype="i32"), w))
    assert a.fingerprint() == b.fingerprint()


def test_descriptions() -> None:
    g = Graph(CAPACITY)
    x = g.input("x", 4, 6)
    scaled(part(x, start=0, size=3), by=2.5)
    assert g.nodes[1].describe() == "#1 scaled(x: f32[4, 3] strides [6, 1]; by=2.5, times=1)"
    joined([x, x])
    assert g.nodes[2].describe() == "#2 joined(parts: f32[4, 6], f32[4, 6])"
