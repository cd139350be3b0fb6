"""Looking on at a step: what is read at a node is what the node has, whatever is stored there later; nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.backend import Executable, Look, Storage, observe
from trueup.core.errors import Unavailable
from trueup.core.graph import Graph, Node, Value
from trueup.core.plan import PlanOptions, build_plan

Array = np.ndarray[Any, Any]


class Checking:
    """Runs each node's body on what was read before it, and expects what is read after it."""

    def __init__(self, only: int = 1) -> None:
        self.only, self.seen, self.stopped, self.ended = only, list[Node](), list[Node](), 0
        self.args: list[Any] = []

    def wants(self, node: Node) -> bool:
        self.seen.append(node)
        return len(self.seen) % self.only == 0

    def before(self, node: Node, look: Look) -> None:
        self.args = [
            None if g is None else tuple(map(look.read, g)) if isinstance(g, tuple) else look.read(g)
            for g in node.inputs
        ]

    def after(self, node: Node, look: Look) -> None:
        self.stopped.append(node)
        given = [look.read(v) for p, v in zip(node.op.params, node.inputs, strict=True) if not p.mutates]
        for a, b in zip(
            [a for p, a in zip(node.op.params, self.args, strict=True) if not p.mutates], given, strict=True
        ):
            np.testing.assert_array_equal(a, b)
        out = node.op.body(*self.args, **node.attrs)
        results = out if isinstance(out, tuple) else () if out is None else (out,)
        for v, want in zip(node.outputs, results, strict=True):
            np.testing.assert_array_equal(look.read(v), want)
        for p, v, want in zip(node.op.params, node.inputs, self.args, strict=True):
            if p.mutates:
                np.testing.assert_array_equal(look.read(v), want)

    def end(self) -> None:
        self.ended += 1


def traced(
    kit: Any, graph: Graph, target: Any, inputs: dict[str, Array], watch: Any, **options: Any
) -> dict[str, bytes]:
    """A step with `watch` looking on, on the states that `kit.run` begins with; its outputs and states as bytes."""
    plan = build_plan(graph, target, PlanOptions(**options))
    storage = kit.storage(plan, target, {n: kit.start(s) for n, s in graph.states.items()})
    out = target.compile(plan, storage).trace(inputs, watch)
    states = {n: target.memory.download(h) for n, h in storage.states.items()} | dict(storage.host_states)
    return {f"outputs:{k}": v.tobytes() for k, v in out.items()} | {
        f"states:{k}": v.tobytes() for k, v in states.items()
    }


@given(data=st.data())
@settings(deadline=None)
def test_every_node_is_seen_with_what_it_takes_and_gives(kit: Any, data: st.DataObject) -> None:
    """In an arena that is used again, on versions of states, on bodies, and where nodes fall back."""
    graph, inputs = data.draw(kit.graphs())
    some = tuple(o for o in (kit.ops.scale, kit.ops.stir) if data.draw(st.booleans()))
    targets = [
        *kit.targets(graph), kit.addressed(graph, without=some), kit.managed(graph, without=some)
    ]  # fmt: skip
    for target in targets:
        watch = Checking()
        got = traced(kit, graph, target, inputs, watch, allow_fallback=True)
        assert got == kit.run(graph, target, inputs, options=PlanOptions(allow_fallback=True)).bits
        assert watch.ended == 1 and watch.stopped == watch.seen
        assert [n.op.name for n in watch.seen if n.op.name != "contiguous"] == [
            n.op.name for n in graph.nodes if not n.host and not n.op.view
        ]


@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_watch_stops_only_where_it_wants(kit: Any, data: st.DataObject) -> None:
    graph, inputs = data.draw(kit.graphs())
    for target in kit.targets(graph):
        watch = Checking(only=3)
        traced(kit, graph, target, inputs, watch)
        assert watch.stopped == watch.seen[2::3]


def small(kit: Any) -> tuple[Graph, dict[str, Array]]:
    g = Graph(kit.capacity)
    g.output("out", kit.ops.scale(kit.ops.scale(g.input("x", 2, 3), by=2.0), by=3.0))
    return g, {"x": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize("kind", ["reference", "addressed", "managed"])
def test_an_error_of_the_watch_ends_the_step_and_the_next_one_runs(kit: Any, kind: str) -> None:
    class Angry(Checking):
        def after(self, node: Node, look: Look) -> None:
            raise RuntimeError("seen enough")

    g, inputs = small(kit)
    target = getattr(kit, kind)(g)
    exe = target.compile(build_plan(g, target), Storage())
    with pytest.raises(RuntimeError, match="seen enough"):
        exe.trace(inputs, Angry())
    assert exe.run(inputs)["out"].tolist() == [[6, 6, 6], [6, 6, 6]]


def test_a_watcher_is_asked_for_every_step_of_every_plan(kit: Any) -> None:
    g, inputs = small(kit)
    target, asked, watches = kit.addressed(g), [], [Checking(), None, Checking()]

    def watcher(t: Any, plan: Any) -> Any:
        asked.append((t, plan))
        return watches[len(asked) - 1]

    observe(target, watcher)
    plan = build_plan(g, target)
    exe = target.compile(plan, Storage())
    outs = [exe.run(inputs)["out"].tobytes() for _ in watches]
    assert len(set(outs)) == 1 and [(t, p) for t, p in asked] == [(target, plan)] * 3
    assert [w and len(w.stopped) for w in watches] == [2, None, 2]
    assert exe.fallback_bytes == 0
    exe.close()


def test_an_executable_that_cannot_be_looked_into_says_so() -> None:
    class Sealed(Executable):
        def run(self, inputs: Any) -> Any:
            return {}

    with pytest.raises(Unavailable, match="Sealed can't be stopped between nodes"):
        Sealed().trace({}, Checking())


def test_weights_and_constants_are_read_as_the_host_holds_them(kit: Any) -> None:
    from trueup.core.ops import linear
    from trueup.core.weight import Weight

    w = Weight.of("w", np.eye(3, dtype=np.float32))
    g = Graph(kit.capacity)
    g.output("out", linear(g.input("x", 2, 3), g.weight(w)))
    read: list[Any] = []

    class Reading(Checking):
        def before(self, node: Node, look: Look) -> None:
            value: Value = node.values[1]
            read.append(look.read(value))

        def after(self, node: Node, look: Look) -> None: ...

    target = kit.addressed(g)
    target.compile(build_plan(g, target), Storage()).trace({"x": np.ones((2, 3), np.float32)}, Reading())
    assert read == [w]
