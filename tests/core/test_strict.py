"""The strict mode: each thing that it refuses is refused with the node's name, and what models do passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.core.backend import Look, Storage, conditions, observe
from trueup.core.errors import StrictError
from trueup.core.graph import Graph, Node
from trueup.core.ops import (
    attention,
    clamp,
    columns,
    contiguous,
    delay,
    expert_linear,
    linear,
    merge_heads,
    mul,
    paged_append,
    rms_norm,
    silu,
    softmax,
    split_heads,
    swiglu,
    top_k,
)
from trueup.core.passes.strict import strict
from trueup.core.plan import PlanOptions, build_plan
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.weight import Weight

Array = np.ndarray[Any, Any]
CAPACITY = Capacity(slots=3, pages=4, page=2)
INF, NAN = float("inf"), float("nan")


def fresh(**options: Any) -> tuple[Graph, Any]:
    g = Graph(CAPACITY, **options)
    return g, g.input("x", 4, 6)


def pages(g: Graph) -> list[Any]:
    return [g.input(n, *s, dtype="i32") for n, s in (("cu", (2,)), ("past", (1,)), ("table", (1, 2)))]


def unused_node(g: Graph, x: Any) -> None:
    silu(x, scale=2.0)


def unused_read(g: Graph, x: Any) -> None:
    k = g.state("k", PerToken((1, 6)))
    paged_append(split_heads(x, heads=1), *(at := pages(g)), k)
    attention(split_heads(x, heads=1), k, k, *at, scale=1.0)


def unused_weight(g: Graph, x: Any) -> None:
    g.weight(Weight.of("w", np.ones((6, 6), np.float32)))


def infinite_attribute(g: Graph, x: Any) -> None:
    g.output("y", rms_norm(x, eps=INF))


def nan_limit(g: Graph, x: Any) -> None:
    g.output("y", clamp(x, high=NAN))


def forbidden_view(g: Graph, x: Any) -> None:
    g.output("y", merge_heads(columns(split_heads(x, heads=2), start=0, size=2)))


def nan_constant(g: Graph, x: Any) -> None:
    g.output("y", mul(x, silu(linear(x, g.constant("c", np.full((6, 6), NAN, np.float32))))))


def read_first(g: Graph, x: Any) -> None:
    q, k, at = split_heads(x, heads=1), g.state("k", PerToken((1, 6))), pages(g)
    g.output("y", attention(q, k, k, *at, scale=1.0)[0])
    paged_append(q, *at, k)


def never_written(g: Graph, x: Any) -> None:
    q, k, at = split_heads(x, heads=1), g.state("k", PerToken((1, 6))), pages(g)
    g.output("y", attention(q, k, k, *at, scale=1.0)[0])


def nothing(g: Graph, x: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (unused_node, "nobody uses what #0 silu(x: f32[4, 6]; scale=2.0) gives"),
        (unused_read, "nobody uses what #2 attention("),
        (unused_weight, "no node uses weight w"),
        (infinite_attribute, "#0 rms_norm(x: f32[4, 6]; eps=inf): the attribute eps is inf"),
        (nan_limit, "the attribute high is nan"),
        (forbidden_view, "is no view: strides forbid it"),
        (nan_constant, "constant c: f32[6, 6] holds NaN or an infinity"),
        (read_first, "reads state k before #2 paged_append writes the step's rows to it"),
        (never_written, "reads state k, which nothing in the graph writes"),
        (nothing, "the graph has no output and writes no state"),
    ],
)
def test_it_is_refused_and_only_strictly(build: Callable[[Graph, Any], None], said: str, kit: Any) -> None:
    g, x = fresh()
    build(g, x)
    if build in (unused_node, unused_weight):
        g.output("x", x)
    with pytest.raises(StrictError) as e:
        strict(g)
    assert said in str(e.value) and len(e.value.faults) in (1, 2)
    target = kit.reference(g)
    build_plan(g, target)
    with pytest.raises(StrictError):
        build_plan(g, target, PlanOptions(strict=True))


@pytest.mark.parametrize(("build", "said"), [(infinite_attribute, "eps is inf"), (forbidden_view, "is no view")])
def test_a_strict_graph_refuses_a_node_where_it_is_recorded(build: Callable[[Graph, Any], None], said: str) -> None:
    g, x = fresh(strict=True)
    with pytest.raises(StrictError, match=said):
        build(g, x)
    assert all(n.op.name not in ("rms_norm", "merge_heads") for n in g.nodes), "what was refused is not in the graph"


def test_all_faults_are_listed() -> None:
    g, x = fresh()
    unused_node(g, x)
    infinite_attribute(g, x)
    with pytest.raises(StrictError) as e:
        strict(g)
    assert [f.split(";")[0][:6] for f in e.value.faults] == ["#1 rms", "nobody"]


def test_what_models_do_passes() -> None:
    """Infinite limits, a result of several that is left, copies where they are asked for, sinks, states read after."""
    g, x = fresh(strict=True)
    q, k, at = split_heads(x, heads=1), g.state("k", PerToken((1, 6))), pages(g)
    paged_append(q, *at, k)
    o, _ = attention(q, k, k, *at, scale=1.0)
    part = columns(split_heads(merge_heads(o), heads=2), start=0, size=2)
    g.output("y", swiglu(merge_heads(contiguous(part)), merge_heads(contiguous(part))))
    g.output("z", clamp(x, low=0.0))
    slots = g.input("slots", 1, dtype="i32")
    g.output("d", delay(x, at[0], slots, g.state("t", PerSequence((1, 6))), by=1))
    strict(g)


# -- while it runs -----------------------------------------------------------------------------------------------------


def routed(table: bool = False) -> tuple[Graph, dict[str, Array]]:
    g, x = fresh()
    e, cu, slots = (g.input(n, *s, dtype="i32") for n, s in (("experts", (4, 2)), ("cu", (3,)), ("slots", (2,))))
    w = g.weight(Weight.of("w", np.ones((3, 5, 6), np.float32)))
    g.output("y", expert_linear(x, e, w))
    g.output("d", delay(x, cu, slots, g.state("t", PerSequence((1, 6))), by=1))
    inputs = {
        "x": np.ones((4, 6), np.float32), "experts": np.array([[0, 1], [2, -1], [1, 0], [0, 2]], np.int32),
        "cu": np.array([0, 2, 3], np.int32), "slots": np.array([2, 0], np.int32),
    }  # fmt: skip
    return g, inputs


@pytest.mark.parametrize("kind", ["reference", "addressed", "managed"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "experts",
            [[0, 1], [2, 3], [1, 0], [0, 2]],
            r"expert_linear\(.*\): expert_linear: experts\[1, 1\] is 3, of 3",
        ),
        ("cu", [0, 3, 2], r"delay\(.*\): cu_seqlens must rise from 0"),
        ("slots", [2, 2], "two sequences of one step have slot 2"),
    ],
)
def test_conditions_are_asked_before_the_node_runs(kit: Any, kind: str, name: str, value: Any, said: str) -> None:
    g, inputs = routed()
    target = getattr(kit, kind)(g)
    observe(target, conditions)
    assert kit.run(g, target, inputs).outputs["y"].shape == (4, 2, 5)
    with pytest.raises(StrictError, match=said):
        kit.run(g, target, inputs | {name: np.array(value, np.int32)})


def test_conditions_of_fused_ops_count_as_far_as_their_integers_come_from_outside(kit: Any) -> None:
    g, inputs = routed()
    fuse = {"hidden": lambda x, e, w: silu(expert_linear(x, e, w), scale=2.0)}
    h, x = Graph(CAPACITY), None
    x, e = h.input("x", 4, 6), h.input("experts", 4, 2, dtype="i32")
    w = h.weight(Weight.of("w", np.ones((3, 5, 6), np.float32)))
    h.output("y", silu(expert_linear(x, e, w), scale=2.0))
    target = kit.addressed(h, fuse=fuse)
    observe(target, conditions)
    given = {k: inputs[k] for k in ("x", "experts")}
    ran = kit.run(h, target, given)
    assert [n.op.name for n in ran.plan.order] == ["hidden"]
    with pytest.raises(StrictError, match="hidden.*experts.*is 7, of 3 experts"):
        kit.run(h, target, given | {"experts": np.full((4, 2), 7, np.int32)})

    inner = Graph(CAPACITY)
    x = inner.input("x", 4, 6)
    w = inner.weight(Weight.of("w", np.ones((6, 5, 6), np.float32)))
    inner.output("y", expert_linear(x, top_k(softmax(x), k=2)[1], w))
    target = kit.addressed(inner, fuse={"routed": lambda x, w, *, k: expert_linear(x, top_k(softmax(x), k=k)[1], w)})
    observe(target, conditions)
    ran = kit.run(inner, target, {"x": inputs["x"]})
    assert [n.op.name for n in ran.plan.order] == ["routed"]


def test_several_look_on_at_one_step(kit: Any) -> None:
    """The strict mode and another watch: both stop where they want."""
    stopped: list[str] = []

    class Only:
        def wants(self, node: Node) -> bool:
            return node.op.name == "delay"

        def before(self, node: Node, look: Look) -> None:
            stopped.append(f"before {node.op.name}")

        def after(self, node: Node, look: Look) -> None:
            stopped.append(f"after {node.op.name}")

        def end(self) -> None:
            stopped.append("end")

    g, inputs = routed()
    target = kit.addressed(g)
    observe(target, conditions)
    observe(target, lambda t, plan: Only())
    kit.run(g, target, inputs)
    assert stopped == ["before delay", "after delay", "end"]
    with pytest.raises(StrictError):
        kit.run(g, target, inputs | {"slots": np.array([0, 0], np.int32)})


def test_the_plan_of_a_strict_graph_is_the_same(kit: Any) -> None:
    g, _ = routed()
    target = kit.addressed(g)
    plans = [build_plan(g, target, PlanOptions(strict=s)) for s in (False, True)]
    assert plans[0].graph.fingerprint() == plans[1].graph.fingerprint()
    target.compile(
        plans[1], Storage(kit.storage(plans[1], target, {"t": np.zeros((3, 1, 6), np.float32)}).states)
    ).close()
