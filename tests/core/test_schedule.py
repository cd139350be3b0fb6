"""Every legal order gives the same bits, on three kinds of targets; forget one kind of edge and some order does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.errors import GraphError, PlanError
from trueup.core.graph import Edges, Graph, Node
from trueup.core.passes.schedule import schedule
from trueup.core.passes.verify import verify, verify_edges, verify_order
from trueup.core.plan import PlanOptions
from trueup.core.state import PerSequence

KINDS = ["reference", "addressed", "managed"]
ORDERS = 120


def every_effect(kit: Any) -> tuple[Graph, dict[str, np.ndarray[Any, Any]]]:
    """Reads and writes of whole states and of regions, in all orders; twice two overlapping writes, no read between."""
    ops, g = kit.ops, Graph(kit.capacity)
    x, y = g.input("x", 4, 6), g.input("y", 4, 3)
    s, t = (g.state(n, PerSequence((6,))) for n in "st")
    low, high, mid = s.view(1, 0, 3), s.view(1, 3, 6), s.view(1, 1, 4)
    g.output("before", ops.look(s))  # read → write
    ops.put(x, s)
    a = ops.look(low)  # write → read
    ops.put(y, mid)  # write → write, a part
    ops.put(ops.mix(y, a), high)  # write → write, another part; no read between
    g.output("stirred", ops.stir(y, low))
    g.output("carried", ops.carry(mid, t))
    ops.put(ops.mix(x, x), t.view(0, 0, 4))  # write → write, all of it
    b = ops.look(t)
    ops.put(b, s)
    ops.put(y, s.view(1, 2, 5))
    g.output("after", ops.look(s.view(0, 1, 3)))
    g.output("last", ops.carry(s.view(0, 0, 2), t.view(1, 2, 4)))
    rng = np.random.default_rng(0)
    return g, {n: rng.standard_normal(v.type.shape).astype(np.float32) for n, v in g.inputs.items()}


def orders(kit: Any, g: Graph, inputs: Any, kind: str, seeds: range) -> Iterator[tuple[list[int], dict[str, bytes]]]:
    target = getattr(kit, kind)(g)
    for seed in seeds:
        ran = kit.run(g, target, inputs, options=PlanOptions(order_seed=seed))
        yield [n.id for n in ran.plan.order], ran.bits


@pytest.mark.fault("B37")
@pytest.mark.parametrize("kind", KINDS)
def test_every_order_gives_the_same_bits(kit: Any, kind: str) -> None:
    g, inputs = every_effect(kit)
    verify(g)
    want = kit.run(g, kit.reference(), inputs).bits
    seen = set()
    for seed, (order, bits) in enumerate(orders(kit, g, inputs, kind, range(ORDERS))):
        assert bits == want, f"order_seed={seed} gives other bits"
        seen.add(tuple(order))
    assert len(seen) > 10, "the orders differ"


def without(kind: str) -> Callable[[Graph], Edges]:
    """Edges as `Graph.edges` has them, from every pair of accesses, but of one kind."""

    def edges(self: Graph) -> Edges:
        before: Edges = {n: {v.node for v in n.values if v.node is not None} for n in self.nodes}
        for i, n in enumerate(self.nodes):
            for m in self.nodes[:i]:
                for s, writes in n.effects:
                    for t, wrote in m.effects:
                        this = f"{'write' if wrote else 'read'}→{'write' if writes else 'read'}"
                        if (writes or wrote) and this != kind and s.overlaps(t):
                            before[n].add(m)
        return before

    return edges


@pytest.mark.fault("B37")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forgotten", ["write→read", "read→write", "write→write", "nothing"])
def test_a_forgotten_kind_of_edge_is_seen(kit: Any, kind: str, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves the test above: it would fail, and only where an edge is missing."""
    g, inputs = every_effect(kit)
    want = kit.run(g, kit.reference(), inputs).bits
    monkeypatch.setattr(Graph, "edges", without(forgotten))
    wrong = sum(bits != want for _, bits in orders(kit, g, inputs, kind, range(40)))
    assert (wrong > 0) == (forgotten != "nothing"), f"{wrong} of 40 orders differ without {forgotten}"


@pytest.mark.fault("B37", "B38")
@given(st.data())
def test_random_graphs_give_the_same_bits_in_every_order(kit: Any, data: st.DataObject) -> None:
    g, inputs = data.draw(kit.graphs(), "graph")
    want = kit.run(g, kit.reference(), inputs).bits
    for target in kit.targets(g):
        assert kit.run(g, target, inputs).bits == want, f"{target.name}, program order"
        seed = data.draw(st.integers(0, 999), "order_seed")
        assert kit.run(g, target, inputs, options=PlanOptions(order_seed=seed)).bits == want, f"{target.name}, {seed}"


@given(st.data())
def test_a_replayed_plan_gives_the_bits_of_new_ones(kit: Any, data: st.DataObject) -> None:
    """Three steps of one executable, states and all, against three plans that each run one step."""
    g, inputs = data.draw(kit.graphs(), "graph")
    for target in kit.targets(g):
        states: dict[str, Any] = {n: kit.start(s) for n, s in g.states.items()}
        for _ in range(3):
            once = kit.run(g, target, inputs, states)
            states = once.states
        assert kit.run(g, target, inputs, steps=3).bits == once.bits, target.name


# -- orders that are none ----------------------------------------------------------------------------------------------


def chain(kit: Any) -> tuple[Graph, list[Node]]:
    g = Graph(kit.capacity)
    x, s = g.input("x", 4, 6), g.state("s", PerSequence((6,)))
    kit.ops.put(x, s)
    g.output("y", kit.ops.look(s))
    kit.ops.put(g.outputs["y"], s.view(1, 0, 6))
    kit.ops.put(x, s)
    return g, g.nodes


def test_orders_that_are_none_are_refused(kit: Any) -> None:
    g, (w, r, w2, w3) = chain(kit)
    verify_order(g, [w, r, w2, w3])
    for order, message in [
        ([r, w, w2, w3], "#1 look runs before #0 put, which it must follow: #0 put writes state s, #1 look reads s"),
        ([w, r, w3, w2], "#3 put runs before #2 put, which it must follow: #2 put writes state s, #3 put writes s"),
        ([w, w2, r, w3], "#2 put runs before #1 look, which it must follow: it needs %look.1: f32[4, 6]"),
        ([w, r, w2], "#3 put is dropped from the schedule, a sink"),
        ([w, r, w2, w2, w3], "#2 put runs twice"),
        ([w, r, w2, w3, w], "#0 put runs twice"),
        ([], "#0 put is dropped from the schedule, a sink"),
    ]:
        with pytest.raises(PlanError) as e:
            verify_order(g, order)
        assert str(e.value) == message
    other, nodes = chain(kit)
    with pytest.raises(PlanError, match="#0 put is a node of another graph"):
        verify_order(g, [nodes[0], r, w2, w3])


def test_a_pure_node_that_is_dropped_is_no_sink(kit: Any) -> None:
    g = Graph()
    kit.ops.mix(g.input("x", 3), g.inputs["x"])
    with pytest.raises(PlanError, match="^#0 mix is dropped from the schedule$"):
        verify_order(g, [])


def test_edges_of_ones_own_are_verified(kit: Any) -> None:
    """What a backend does that overlaps kernels: it makes edges, and they must order all that conflicts."""
    g, (w, r, w2, w3) = chain(kit)
    edges = g.edges()
    verify_edges(g, edges)
    verify_edges(g, {w: set(), r: {w}, w2: {r}, w3: {w2}})
    for lacking, message in [
        ({**edges, r: set()}, "#0 put and #1 look have no order: #0 put writes state s, #1 look reads s, and no path"),
        ({**edges, w3: set()}, "#2 put and #3 put have no order: #2 put writes state s, #3 put writes s, and no path"),
        ({**edges, w: {w3}}, "the graph has a cycle: "),
        ({w: set(), r: {w}, w2: {r}}, "the edges lack #3 put"),
    ]:
        with pytest.raises(GraphError) as e:
            verify_edges(g, lacking)
        assert str(e.value).startswith(message)


@given(st.data())
def test_edges_that_lack_one_are_refused(kit: Any, data: st.DataObject) -> None:
    """Any edge that no path replaces is missed."""
    g, _ = data.draw(kit.graphs(), "graph")
    edges = g.edges()
    verify_edges(g, edges)
    pairs = [(n, b) for n, before in edges.items() for b in before]
    if not pairs:
        return
    n, b = pairs[data.draw(st.integers(0, len(pairs) - 1), "edge")]
    fewer = {**edges, n: edges[n] - {b}}

    def reaches(node: Node) -> bool:
        return b in fewer[node] or any(map(reaches, fewer[node]))

    if reaches(n):
        verify_edges(g, fewer)
    else:
        with pytest.raises(GraphError, match=f"{b} and {n} have no order"):
            verify_edges(g, fewer)


def test_a_schedule_is_verified(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With edges that change between scheduling and verifying, as a faulty scheduler would see them."""
    g, _ = every_effect(kit)
    full, calls = Graph.edges, []

    def forgetful(self: Graph) -> Edges:
        calls.append(self)
        return {n: set() for n in self.nodes} if len(calls) == 1 else full(self)

    monkeypatch.setattr(Graph, "edges", forgetful)
    monkeypatch.setattr(
        "trueup.core.passes.schedule.verify_order", lambda graph, order, edges: verify_order(graph, order)
    )
    with pytest.raises(PlanError, match="which it must follow"):
        schedule(g, rng=random.Random(0))


# -- constraints -------------------------------------------------------------------------------------------------------


def test_added_constraints_hold_in_every_order(kit: Any) -> None:
    g = Graph()
    x = g.input("x", 4, 6)
    values = [kit.ops.part(x, start=i, size=1) for i in range(6)]
    for v in values:
        kit.ops.mix(v, v)
    mixes = g.nodes[6:]
    for first, then in zip(mixes[::-1], mixes[-2::-1], strict=False):
        g.order(first, then)
    for seed in (None, *range(20)):
        order = schedule(g, rng=None if seed is None else random.Random(seed))
        assert [n for n in order if n in mixes] == mixes[::-1]
    assert schedule(g)[:6] == g.nodes[:6], "program order as far as edges allow"


def test_constraints_that_make_a_cycle_name_it(kit: Any) -> None:
    g, (w, r, w2, w3) = chain(kit)
    g.order(w3, w)
    for check in (
        lambda: verify(g),
        lambda: schedule(g),
        lambda: schedule(g, rng=random.Random(0)),
        lambda: kit.run(g, kit.reference(), {}),
    ):
        with pytest.raises(GraphError) as e:
            check()
        assert str(e.value) == "the graph has a cycle: #0 put → #2 put → #3 put → #0 put"


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_survive_the_passes(kit: Any, kind: str) -> None:
    """A graph that legalize rewrites (a strided view that needs a copy) still has its constraints."""
    ops, g = kit.ops, Graph()
    x = g.input("x", 4, 6)
    late = ops.folded(ops.turned(x))
    g.output("a", ops.mix(late, late))
    g.output("b", ops.mix(x, x))
    a, b = (v.node for v in g.outputs.values())
    g.order(a, b)
    for seed in range(20):
        ran = kit.run(
            g, getattr(kit, kind)(g), {"x": np.ones((4, 6), np.float32)}, options=PlanOptions(order_seed=seed)
        )
        outs = ran.plan.graph.outputs
        assert ran.plan.order.index(outs["a"].node) < ran.plan.order.index(outs["b"].node)
    assert any(n.op.name == "contiguous" for n in ran.plan.order)
