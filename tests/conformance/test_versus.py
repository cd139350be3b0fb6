"""Two backends on one model: a single wrong op deep in it is named exactly, and replays by itself; honest ones are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.conformance import replay
from trueup.conformance.errors import KitError
from trueup.conformance.given import given, shown
from trueup.conformance.harness import Rig, Spec, open_target
from trueup.conformance.nodes import expect, judge
from trueup.conformance.versus import Compared, compare, saved
from trueup.conformance.versus import replay as run_again
from trueup.core.alone import Alone, alone
from trueup.core.graph import Graph
from trueup.core.ops import columns, gated_delta_rule, merge_attention, paged_append, split_heads, top_k
from trueup.core.plan import PlanOptions
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.models import load_model

TOKENS = [101, 2002, 33, 404, 55]
Named = Callable[[str], Spec]


def compared(a: Spec, b: Spec, more: int = 1) -> Compared:
    return compare(load_model(), a, b, TOKENS, more)


def weights(node: Any) -> set[str]:
    return {v.name for v in node.values if v.leaf == "weight"}


# -- the node ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["numpy_fused", "numpy_managed"])
def test_honest_backends_are_equal(spec: Named, backend: str) -> None:
    done = compared(spec(backend), Spec("reference"))
    assert done.wrong is None and [len(s) for s in done.steps] == [5, 1]
    assert done.sides[0].how == "in its plan" and done.sides[0].tally.nodes > 700 and done.sides[1].tally.nodes == 0
    assert all(same for _, same in done.distance)


def test_native_kernels_are_within_their_bounds() -> None:
    done = compared(Spec("cpu"), Spec("reference"), more=2)
    assert done.wrong is None and done.steps[0] == TOKENS and [len(s) for s in done.steps] == [5, 1, 1]
    assert 0 < max(w for w, _ in done.sides[0].tally.worst.values()) <= 1


@pytest.mark.parametrize(
    ("backend", "op", "weight", "step", "output"),
    [
        ("deep_linear", "linear", "blk.5.ssm_out.weight", 0, "out"),
        ("deep_fusion", "heads_out", "blk.6.ssm_out.weight", 0, "r0"),
        ("deep_state", "paged_append", "", 1, "state blk.7.v"),
        ("deep_managed", "gated_delta_rule", "", 0, "state blk.6.delta"),
        ("sealed_wrong", "linear", "blk.5.ssm_out.weight", 0, "out"),
    ],
)
def test_one_wrong_op_deep_in_the_model_is_named_and_replays(
    spec: Named, tmp_path: Path, backend: str, op: str, weight: str, step: int, output: str
) -> None:
    """In an arena, fused, in a cache, on versions of states, and where the executable can't be looked into."""
    done = compared(spec(backend), Spec("reference"))
    finding = done.sides[0].finding
    assert finding is not None and done.wrong is done.sides[0]
    assert (finding.op, finding.step) == (op, step) and (not weight or weight in weights(finding.node))
    assert finding.part is not None and finding.part.name == output and finding.part.found.worst > 1
    assert done.sides[0].how == ("one by one" if backend == "sealed_wrong" else "in its plan")
    file = saved(finding, backend)
    assert file is not None
    replay.write(tmp_path / "node.safetensors", file)
    again = replay.read(tmp_path / "node.safetensors")
    assert again.about["op"] == op and again.about["backend"] == backend
    right, none = run_again(spec("numpy_addressed"), again)
    assert none is None and right.finding is None
    if backend in ("deep_linear", "deep_fusion", "sealed_wrong"):  # the others are wrong in a plan of that model alone
        _, wrong = run_again(spec(backend), again)
        assert wrong is not None and wrong.part is not None
        assert (wrong.part.at, wrong.part.got) == (finding.part.at, finding.part.got)


def test_either_side_may_be_wrong_and_the_other_is_asked_about_the_same(spec: Named) -> None:
    done = compared(Spec("cpu"), spec("deep_linear"))
    assert done.wrong is done.sides[1] and done.wrong.finding is not None
    part = done.wrong.finding.part
    assert part is not None and part.name == "out" and part.bound is not None
    assert done.peer is not None and not done.peer.refused
    assert abs(float(done.peer.results["out"][tuple(part.at)]) - float(part.expected or 0)) <= part.bound


def test_the_first_of_several_is_named(spec: Named) -> None:
    """`bf16_activations` is wrong in every projection."""
    done = compared(spec("bf16_activations"), Spec("reference"))
    assert done.wrong is not None and done.wrong.finding is not None
    plan = done.wrong.plan
    assert plan is not None
    assert done.wrong.finding.node is next(n for n in plan.order if n.op.name == "linear")


def test_what_goes_wrong_only_where_nobody_stops_it_is_found_by_bisection(spec: Named) -> None:
    """Results of `silu` come too late for the kernel after it; stopped at every node, the plan is right."""
    done = compared(spec("unwaiting"), Spec("reference"))
    finding = done.sides[0].finding
    assert finding is not None and finding.part is None and "when nothing stops the plan" in finding.wrong
    plan = done.sides[0].plan
    assert plan is not None
    first = next(n for n in plan.order if n.op.name == "silu")
    assert first.outputs[0] in finding.node.values, "the first that takes what is late"


@pytest.mark.fault("B40")
def test_a_step_that_is_wrong_only_as_a_whole_is_told(spec: Named) -> None:
    """B40: a recorded step that replays its first inputs is right at every node where it is stopped."""
    done = compared(spec("stale_graph"), Spec("reference"), more=2)
    assert done.sides[0].finding is not None and done.sides[0].finding.whole and done.sides[0].finding.step == 2


def test_a_kernel_that_raises_is_named(spec: Named) -> None:
    finding = compared(spec("lying_supports"), Spec("reference")).sides[0].finding
    assert (
        finding is not None and finding.op == "linear" and "it raised NotImplementedError: weights of" in finding.wrong
    )


def test_a_changed_argument_is_told(spec: Named, tmp_path: Path) -> None:
    finding = compared(spec("in_place"), Spec("reference")).sides[0].finding
    assert finding is not None and finding.wrong == "its argument x, which it only reads, was changed"
    file = saved(finding, "in_place")
    assert file is not None and run_again(spec("in_place"), file)[1] is not None


def test_a_dropped_sink_is_told(spec: Named) -> None:
    finding = compared(spec("dropped_sink"), Spec("reference")).sides[0].finding
    assert finding is not None and "which it must follow" in finding.wrong and saved(finding, "dropped_sink") is None


def test_requests_that_cannot_be_met(spec: Named) -> None:
    with pytest.raises(KitError, match="there are no tokens"):
        compare(load_model(), Spec("cpu"), Spec("reference"), [], 0)
    with pytest.raises(KitError, match="exceed the model's context"):
        compare(load_model(), Spec("cpu"), Spec("reference"), [1], 1 << 20)


# -- a node alone ------------------------------------------------------------------------------------------------------


def every_kind() -> tuple[Graph, dict[str, Any], dict[str, Any]]:
    """Nodes with views, lists, regions of states, absent arguments, integers and infinite attributes; inputs; states."""
    g = Graph(Capacity(3, 4, 2))
    rng = np.random.default_rng(0)
    wide, cu = g.input("wide", 4, 12), g.input("cu", 2, dtype="i32")
    slots, past, table = (g.input(n, *s, dtype="i32") for n, s in (("slots", (1,)), ("past", (1,)), ("table", (1, 3))))
    x = split_heads(columns(wide, start=2, size=8), heads=2)
    state = g.state("s", PerSequence((2, 4, 6)))
    small = columns(wide, start=0, size=2)
    g.output("rule", gated_delta_rule(x, x, x, small, small, cu, slots, state.view(3, 1, 5), scale=0.5, tiled=True))
    paged_append(x, cu, past, table, g.state("k", PerToken((2, 4))))
    lse = columns(wide, start=3, size=2)
    g.output("merged", merge_attention([x, x], [lse, lse])[0])
    g.output("chosen", top_k(wide, k=3)[1])
    inputs = {
        "wide": rng.standard_normal((4, 12)).astype(np.float32), "cu": np.array([0, 4], np.int32),
        "slots": np.array([1], np.int32), "past": np.array([1], np.int32), "table": np.array([[2, 0, 3]], np.int32),
    }  # fmt: skip
    states = {n: rng.standard_normal(s.type.shape).astype(np.float32) for n, s in g.states.items()}
    return g, inputs, states


def taken(made: Alone, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    fed = {n: inputs[v.name] for n, v in made.inputs.items()}
    return fed, {n: states[n].copy() for n in made.states}


def test_a_node_alone_keeps_views_and_regions_and_survives_a_file(tmp_path: Path, spec: Named) -> None:
    g, inputs, states = every_kind()
    for i, node in enumerate(n for n in g.nodes if not n.op.view):
        made = alone(node)
        (only,) = made.ops
        assert [str(t) for t in only.types] == [str(t) for t in node.types], "strides, too"
        fed, before = taken(made, inputs, states)
        replay.write(tmp_path / f"{i}", replay.Saved(made, fed, before, {"op": node.op.name}))
        again = replay.read(tmp_path / f"{i}")
        assert again.made.graph.fingerprint() == made.graph.fingerprint()
        expected = expect(made, fed, before)
        rig = Rig(open_target(spec("numpy_addressed")))
        got = replay.run(rig, again.made, again.inputs, again.states, PlanOptions())
        assert not any(p.found.wrong for p in judge(expected, got.results, got.states)), node
        assert before.keys() == got.states.keys()


def test_what_is_beside_the_region_of_a_state_must_not_change() -> None:
    g, inputs, states = every_kind()
    made = alone(next(n for n in g.nodes if n.op.name == "gated_delta_rule"))
    fed, before = taken(made, inputs, states)
    expected = expect(made, fed, before)
    after = {n: a.copy() for n, a in expected.states.items()}
    assert not any(p.found.wrong for p in judge(expected, expected.results, after))
    after["s"][1, 0, 0, 0] += np.float32(1e-6)  # outside 1:5 of the last axis
    (wrong,) = [p for p in judge(expected, expected.results, after) if p.found.wrong]
    assert wrong.name == "state s" and wrong.at == [1, 0, 0, 0] and wrong.bound == 0


def test_selections_are_judged_by_value_then_by_order() -> None:
    g = Graph()
    node = top_k(g.input("scores", 1, 4), k=2)[0].node
    made = alone(node)
    scores = np.array([[1, 5, 5, 0]], np.float32)
    expected = expect(made, {"scores": scores}, {})

    def wrong(indices: list[int]) -> str:
        found = {"values": np.array([[5, 5]], np.float32), "indices": np.array([indices], np.int32)}
        return judge(expected, found, {})[0].found.wrong

    assert wrong([1, 2]) == ""
    assert "equal scores go to the lower index" in wrong([2, 1])
    assert "chosen twice" in wrong([1, 1])


def test_statistics_count_what_is_not_finite() -> None:
    a = np.array([[np.nan, 1, -3], [np.inf, -np.inf, np.nan]], np.float32)
    (s,) = shown({"a": a})
    assert (s["min"], s["max"], s["mean"], s["nan"], s["inf"]) == (-3, 1, -1, 2, 2)
    (s,) = shown({"a": np.zeros((0, 3), np.int32)})
    assert (s["min"], s["shape"], s["dtype"]) == (None, [0, 3], "i32")


def test_statistics_are_of_what_the_op_sees() -> None:
    g, inputs, states = every_kind()
    made = alone(next(n for n in g.nodes if n.op.name == "gated_delta_rule"))
    seen = given(made, *taken(made, inputs, states))
    assert seen["q"].shape == (4, 2, 4) and seen["state (state s[3:1:5])"].shape == (3, 2, 4, 4)
    np.testing.assert_array_equal(seen["decay"], inputs["wide"][:, :2])


@pytest.mark.parametrize("damage", ["text", "kind", "version", "op", "shape", "missing", "reference"])
def test_a_damaged_replay_file_is_an_error(tmp_path: Path, damage: str) -> None:
    from safetensors.numpy import load_file, save_file

    g, inputs, states = every_kind()
    made = alone(next(n for n in g.nodes if n.op.name == "paged_append"))
    path = tmp_path / "node"
    replay.write(path, replay.Saved(made, *taken(made, inputs, states)))
    if damage == "text":
        path.write_text("{}")
    else:
        graph = replay._described(made.graph)
        tensors, meta = load_file(path), {"trueup": "1", "kind": "replay"}
        if damage in ("kind", "version"):
            meta |= {"kind": "session"} if damage == "kind" else {"trueup": "2"}
        elif damage == "op":
            graph["nodes"][-1]["op"] = "paged_prepend"
        elif damage == "shape":
            tensors["input/past"] = np.zeros(2, np.int32)
        elif damage == "missing":
            del tensors["state/k"]
        else:
            graph["nodes"][-1]["inputs"][0] = {"node": [9, 0]}
        save_file(tensors, path, meta | {"graph": json.dumps(graph)})
    with pytest.raises(KitError, match="node: "):
        replay.read(path)
