"""Fusion: what matches and what does not, in readable words, and the same bits with it as without, in every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.backend import AddressedTarget, KernelTable
from trueup.core.graph import Graph
from trueup.core.passes.fuse import FusionReport, Pattern, fuse
from trueup.core.plan import PlanOptions, build_plan
from trueup.core.state import PerSequence

Array = np.ndarray[Any, Any]
Meaning = Callable[..., Any]
OPTIONS = [PlanOptions(), *(PlanOptions(order_seed=s) for s in range(10))]


class Yes:
    reason = ""


def yes(*args: Any) -> Any:
    return Yes()


def values(g: Graph) -> dict[str, Array]:
    rng = np.random.default_rng(2)
    return {n: rng.standard_normal(v.type.shape).astype(np.float32) for n, v in g.inputs.items()}


def reports(kit: Any, g: Graph, **meanings: Meaning) -> dict[str, FusionReport]:
    """What became of patterns, and proof that what was fused changes no bit, in 11 orders on two kinds of memory."""
    inputs = values(g)
    want = kit.run(g, kit.reference(), inputs).bits
    for make in (kit.addressed, kit.managed):
        target = make(g, fuse=meanings)
        for options in OPTIONS:
            ran = kit.run(g, target, inputs, options=options)
            assert ran.bits == want, f"{target.name}, {options}"
        plain = kit.run(g, target, inputs, options=PlanOptions(fusion=False))
        assert plain.bits == want and not plain.plan.fusions
        found = {r.name: r for r in ran.plan.fusions}
        assert sum(r.fused for r in found.values()) == sum(n.op.name in meanings for n in ran.plan.graph.nodes)
    return found


def one(kit: Any, g: Graph, meaning: Meaning) -> FusionReport:
    return reports(kit, g, p=meaning)["p"]


def fresh(kit: Any) -> tuple[Any, Graph, Any, Any, Any]:
    g = Graph(kit.capacity)
    return kit.ops, g, g.input("x", 4, 6), g.input("y", 4, 6), lambda n: g.state(n, PerSequence((6,)))


# -- what matches ------------------------------------------------------------------------------------------------------


def test_a_chain(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    for i, v in enumerate((x, y, ops.turned(ops.turned(x)))):
        g.output(f"o{i}", ops.mix(ops.scale(v, by=2.0), y))
    r = one(kit, g, lambda v, w: ops.mix(ops.scale(v, by=2.0), w))
    assert r == FusionReport("p", 3)


def test_several_results_some_used_inside(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    a, b = ops.two(ops.mix(x, y))
    g.output("a", ops.scale(a, by=3.0))
    g.output("c", ops.mix(a, b))
    r = one(kit, g, lambda v, w: (lambda a, b: (ops.mix(a, b), a))(*ops.two(ops.mix(v, w))))
    assert r.fused == 1


def test_no_result_it_ends_in_a_write(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s = state("s")
    ops.put(ops.mix(x, y), s)
    g.output("a", ops.look(s))
    ops.put(ops.mix(y, x), s)
    assert one(kit, g, lambda v, w, s: ops.put(ops.mix(v, w), s)).fused == 2


def test_a_write_in_the_middle(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s, t = state("s"), state("t")

    def append_and_look(v: Any, s: Any) -> Any:
        ops.put(ops.scale(v, by=2.0), s)
        return ops.look(s)

    ops.put(ops.scale(x, by=2.0), s)
    g.output("a", ops.look(s))
    ops.put(ops.scale(y, by=2.0), t)
    g.output("b", ops.mix(ops.look(t), ops.look(s)))
    assert one(kit, g, append_and_look).fused == 2


def test_a_write_that_gives_a_result(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    g.output("a", ops.mix(ops.stir(ops.scale(x, by=2.0), state("s")), y))
    assert one(kit, g, lambda x, y, s: ops.mix(ops.stir(ops.scale(x, by=2.0), s), y)).fused == 1


def test_regions_of_states(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s = state("s")
    left, right = ops.part(x, start=0, size=3), ops.part(y, start=3, size=3)
    ops.put(ops.scale(left, by=2.0), s.view(1, 0, 3))
    ops.put(ops.scale(right, by=3.0), s.view(1, 3, 6))
    g.output("a", ops.look(s))
    ops.put(ops.scale(right, by=4.0), s.view(1, 2, 5))
    assert one(kit, g, lambda x, s, *, by: ops.put(ops.scale(x, by=by), s)).fused == 3


def test_a_view_inside_and_strided_arguments(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    m = ops.turned(ops.mix(x, y))
    g.output("a", ops.scale(ops.part(m, start=1, size=2), by=2.0))
    g.output("b", ops.turned(ops.part(m, start=1, size=2)))

    def meaning(m: Any) -> Any:
        return ops.scale(ops.part(m, start=1, size=2), by=2.0)

    r = one(kit, g, meaning)
    assert r.fused == 0 and "is used outside the pattern" in r.difference, "the view is used by another too"

    ops, g, x, y, _ = fresh(kit)
    m = ops.turned(ops.mix(x, y))
    g.output("a", ops.scale(ops.part(m, start=1, size=2), by=2.0))
    assert one(kit, g, meaning).fused == 1


def test_attributes_are_given_or_held_equal(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    for i, (by, shift) in enumerate([(2.0, 0.0), (3.0, 0.0), (2.0, 1.0)]):
        g.output(f"o{i}", ops.mix(ops.scale(x, by=by, shift=shift), y))
    r = reports(
        kit,
        g,
        any_by=lambda v, w, *, by: ops.mix(ops.scale(v, by=by), w),
        four=lambda v, w: ops.mix(ops.scale(v, by=4.0), w),
    )
    assert r["any_by"].fused == 2 and r["four"].fused == 0
    assert r["four"].difference == "#4 scale has by=2.0 where the pattern has by=4.0"


def test_one_hole_is_one_number(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    for i, (a, b) in enumerate([(2.0, 2.0), (3.0, 4.0)]):
        g.output(f"o{i}", ops.mix(ops.scale(x, by=a), ops.scale(y, by=b)))
    assert one(kit, g, lambda v, w, *, by: ops.mix(ops.scale(v, by=by), ops.scale(w, by=by))).fused == 1

    ops, g, x, y, _ = fresh(kit)
    g.output("o", ops.mix(ops.scale(x, by=2.0), ops.scale(y, by=3.0)))
    r = one(kit, g, lambda v, w, *, by: ops.mix(ops.scale(v, by=by), ops.scale(w, by=by)))
    assert r.difference == "#1 scale has by=3.0 where by is 2.0 already"


def test_one_place_is_one_value(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    g.output("a", ops.mix(ops.scale(x, by=2.0), x))
    g.output("b", ops.mix(ops.scale(x, by=2.0), y))
    r = one(kit, g, lambda v: ops.mix(ops.scale(v, by=2.0), v))
    assert r.fused == 0 and "used outside" in r.difference, "equal calls are one node, which both need"

    ops, g, x, y, _ = fresh(kit)
    g.output("a", ops.mix(ops.scale(x, by=2.0), x))
    g.output("b", ops.mix(ops.scale(y, by=2.0), x))
    assert one(kit, g, lambda v: ops.mix(ops.scale(v, by=2.0), v)).fused == 1


def test_equal_calls_in_a_pattern_are_one_node(kit: Any) -> None:
    """As DESIGN's own pattern: what is written twice is computed once, in patterns as in graphs."""
    ops, g, x, y, _ = fresh(kit)

    def meaning(v: Any, a: Any, b: Any, *, by: float) -> Any:
        return ops.mix(ops.mix(ops.scale(v, by=by), a), ops.mix(ops.scale(v, by=by), b))

    p = Pattern(meaning, name="p")
    assert len(p.graph.nodes) == 4
    g.output("o", meaning(x, y, x, by=2.0))
    assert one(kit, g, meaning).fused == 1


def test_a_place_is_a_value_from_outside(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    a = ops.scale(x, by=2.0)
    g.output("o", ops.mix(a, a))
    r = one(kit, g, lambda v, w: ops.mix(ops.scale(v, by=2.0), w))
    assert r.difference == "%scale.0: f32[4, 6] is computed inside the pattern, which takes it as w"


def test_two_nodes_of_a_pattern_are_two_nodes(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    g.output("o", ops.mix(ops.scale(x, by=2.0), ops.scale(x, by=2.0)))
    r = one(kit, g, lambda v, w: ops.mix(ops.scale(v, by=2.0), ops.scale(w, by=2.0)))
    assert r == FusionReport("p", 0, (), "#0 scale where the pattern has another scale")
    s, t = state("s"), state("t")
    ops.put(x, s)
    ops.put(x, t)
    assert one(kit, g, lambda v, w, s, t: (ops.put(v, s), ops.put(w, t), None)[2]).fused == 1


def test_lists_and_absent_arguments(kit: Any) -> None:
    @kit.local("*xs[a, b], y?[a, b] -> out[a, b]")
    def joined(xs: Any, y: Any = None) -> Any:
        out = np.zeros_like(np.ascontiguousarray(xs[0]))
        for x in (*xs, *([] if y is None else [y])):
            out = out * np.float32(0.5) + x
        return out

    ops, g, x, y, _ = fresh(kit)
    g.output("a", ops.scale(joined([x, y]), by=2.0))
    g.output("b", ops.scale(joined([x, y, x]), by=2.0))
    g.output("c", ops.scale(joined([y, x], y), by=2.0))
    r = reports(
        kit,
        g,
        two=lambda v, w: ops.scale(joined([v, w]), by=2.0),
        more=lambda v, w, z: ops.scale(joined([v, w], z), by=2.0),
        four=lambda v, w: ops.scale(joined([v, w, v, w]), by=2.0),
    )
    assert (r["two"].fused, r["more"].fused, r["four"].fused) == (1, 1, 0)


def test_prologue_and_device_are_not_mixed(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s = state("s")
    with g.prologue():
        a = ops.scale(x, by=2.0)
        b = ops.mix(ops.scale(y, by=3.0), y)
        ops.put(ops.mix(ops.scale(y, by=4.0), b), s)
    g.output("o", ops.mix(a, b))
    r = one(kit, g, lambda v, w, *, by: ops.mix(ops.scale(v, by=by), w))
    assert r.fused == 2, "those wholly in the prologue are fused there"

    ops, g, x, y, _ = fresh(kit)
    with g.prologue():
        a = ops.scale(x, by=2.0)
    g.output("o", ops.mix(a, y))
    r = one(kit, g, lambda v, w, *, by: ops.mix(ops.scale(v, by=by), w))
    assert r.difference == "#0 scale and #1 mix are not on one side of the prologue"


# -- what does not -----------------------------------------------------------------------------------------------------


def test_a_value_used_outside_or_given_out_rules_a_match_out(kit: Any) -> None:
    def meaning(v: Any, w: Any) -> Any:
        return ops.mix(ops.scale(v, by=2.0), w)

    ops, g, x, y, _ = fresh(kit)
    a = ops.scale(x, by=2.0)
    g.output("o", ops.mix(a, y))
    g.output("a", a)
    assert one(kit, g, meaning) == FusionReport("p", 0, (), "%scale.0: f32[4, 6] is used outside the pattern")

    ops, g, x, y, state = fresh(kit)
    a = ops.scale(x, by=2.0)
    g.output("o", ops.mix(a, y))
    ops.put(a, state("s"))
    assert one(kit, g, meaning).difference == "%scale.0: f32[4, 6] is used outside the pattern"


def test_the_first_difference_is_readable(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    g.output("o", ops.mix(ops.scale(ops.turned(ops.turned(x)), by=2.0), y))
    g.output("p", ops.mix(ops.cross(ops.turned(x), ops.turned(x)), y))
    s = state("s")
    ops.put(x, s)
    r = reports(
        kit,
        g,
        attribute=lambda v, w: ops.mix(ops.scale(v, by=3.0), w),
        attribute_at_the_root=lambda v, w: ops.put(ops.scale(v, by=2.0, shift=9.0), w),
        operands=lambda v, w: ops.mix(w, ops.scale(v, by=2.0)),
        a_view_between=lambda v, w: ops.mix(ops.scale(ops.turned(v), by=2.0), ops.stir(v, w)),
        no_such_op=lambda v, w: ops.carry(v, w),
        no_such_second_root=lambda v, w: (ops.put(v, w), ops.carry(v, w))[1],
        another_result=lambda v, w: ops.mix(ops.two(v)[1], w),
        root_attribute=lambda v: ops.scale(v, by=7.0),
    )
    assert {n: x.difference for n, x in r.items()} == {
        "attribute": "#2 scale has by=2.0 where the pattern has by=3.0",
        "attribute_at_the_root": "%x: f32[4, 6] where the pattern has scale",
        "operands": "%y: f32[4, 6] where the pattern has scale",
        "a_view_between": "%y: f32[4, 6] where the pattern has stir",
        "no_such_op": "the graph has no carry",
        "no_such_second_root": "the graph has no carry",
        "another_result": "%scale.2: f32[4, 6] where the pattern has two",
        "root_attribute": "#2 scale has by=2.0 where the pattern has by=7.0",
    }


def test_a_kernel_may_decline(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    small = g.input("small", 2, 6)
    g.output("a", ops.scale(ops.mix(x, y), by=2.0))
    g.output("b", ops.scale(ops.mix(small, small), by=3.0))
    t, seen = KernelTable(), []
    for op in (ops.scale, ops.mix):
        t.body(op)

    def when(v: Any, w: Any, *, by: float) -> Any:
        seen.append((str(v), str(w), by))
        return v.shape[0] <= 2 or f"{v.shape[0]} rows"

    @t.fuses(lambda v, w, *, by: ops.scale(ops.mix(v, w), by=by), when=when)
    def both(ctx: Any, v: Any, w: Any, *, by: float) -> None:
        ctx.out[...] = ops.scale.body(ops.mix.body(v, w), by=by)

    target = AddressedTarget("t", kit.device, t)
    ran = kit.run(g, target, values(g))
    assert ran.bits == kit.run(g, kit.reference(), values(g)).bits
    assert ran.plan.fusions == [FusionReport("both", 1, ("4 rows",), "")]
    assert seen[:2] == [("f32[4, 6]", "f32[4, 6]", 2.0), ("f32[2, 6]", "f32[2, 6]", 3.0)]
    assert {p.kernel for p in ran.plan.placements.values()} == {"both", "scale (NumPy body)", "mix (NumPy body)"}
    assert ran.plan.counts() == {"reference body": 2, "device": 1}


def test_a_group_that_would_wait_for_itself_is_not_fused(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    a = ops.scale(x, by=2.0)
    g.output("a", a)
    g.output("o", ops.mix(a, ops.cross(ops.turned(a), ops.turned(a))))
    g.output("p", ops.mix(ops.scale(y, by=2.0), x))  # and this one is none the worse for it

    def meaning(v: Any, w: Any) -> Any:
        a = ops.scale(v, by=2.0)
        return a, ops.mix(a, w)

    assert one(kit, g, meaning) == FusionReport("p", 1, ("it would have to wait for itself",), "")


def test_a_group_that_would_wait_for_itself_through_states(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s, t = state("s"), state("t")
    ops.put(x, s)
    ops.put(ops.look(s), t)
    g.output("o", ops.mix(ops.look(t), y))

    def meaning(v: Any, w: Any, s: Any, t: Any) -> Any:
        ops.put(v, s)
        return ops.mix(ops.look(t), w)

    assert one(kit, g, meaning) == FusionReport("p", 0, ("it would have to wait for itself",), "")


def test_two_groups_that_wait_for_each_other(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    a, b = ops.scale(x, by=2.0), ops.scale(y, by=2.0)
    g.output("o", ops.mix(a, b))
    g.output("p", ops.mix(b, a))
    g.output("a", a)
    g.output("b", b)

    def meaning(v: Any, w: Any) -> Any:
        a = ops.scale(v, by=2.0)
        return a, ops.mix(a, w)

    assert one(kit, g, meaning) == FusionReport("p", 1, ("it would have to wait for itself",), "")


def test_effects_in_the_other_order_are_not_what_the_pattern_means(kit: Any) -> None:
    """put then look, where the graph looks first: nothing but the state joins the two."""
    ops, g, x, y, state = fresh(kit)
    s = state("s")

    def put_then_look(v: Any, w: Any, s: Any) -> Any:
        ops.put(v, s)
        return ops.mix(ops.look(s), w)

    g.output("o", ops.mix(ops.look(s), y))
    ops.put(x, s)
    r = one(kit, g, put_then_look)
    assert r == FusionReport("p", 0, (), "#0 look comes before #2 put, and they meet in state s")


def test_two_places_are_two_states(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s = state("s")

    def meaning(v: Any, a: Any, b: Any) -> Any:
        ops.put(v, a)
        return ops.look(b)

    ops.put(x, s)
    g.output("o", ops.look(s))
    assert one(kit, g, meaning) == FusionReport("p", 0, (), "s and s overlap where the pattern has two states")

    ops, g, x, y, state = fresh(kit)
    s, t = state("s"), state("t")
    ops.put(x, s)
    ops.put(y, t)
    g.output("o", ops.look(t))
    assert one(kit, g, meaning).fused == 1


def test_one_state_read_at_two_places(kit: Any) -> None:
    ops, g, x, y, state = fresh(kit)
    s = state("s")
    g.output("p", ops.mix(ops.look(s.view(1, 0, 3)), ops.look(s.view(1, 0, 3))))
    assert one(kit, g, lambda a, b: ops.mix(ops.look(a), ops.look(b))).fused == 1


# -- which of several --------------------------------------------------------------------------------------------------


def test_the_largest_first_then_the_first_registered(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    g.output("o", ops.scale(ops.mix(ops.scale(x, by=2.0), y), by=3.0))
    inner = lambda v, w, *, by: ops.mix(ops.scale(v, by=by), w)
    outer = lambda v, w, *, by: ops.scale(ops.mix(v, w), by=by)
    whole = lambda v, w, *, a, b: ops.scale(ops.mix(ops.scale(v, by=a), w), by=b)
    for meanings, fused in [
        ({"inner": inner, "outer": outer, "whole": whole}, "whole"),
        ({"inner": inner, "outer": outer}, "inner"),
        ({"outer": outer, "inner": inner}, "outer"),
    ]:
        found = reports(kit, g, **meanings)
        assert [n for n, r in found.items() if r.fused] == [fused]
        assert all(r.difference for n, r in found.items() if n != fused)


def test_matches_do_not_share_nodes(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    v = x
    for _ in range(7):
        v = ops.scale(v, by=1.5)
    g.output("o", v)
    r = one(kit, g, lambda v: ops.scale(ops.scale(v, by=1.5), by=1.5))
    assert r.fused == 3


# -- patterns that are none --------------------------------------------------------------------------------------------


def test_patterns_that_are_none(kit: Any) -> None:
    ops = kit.ops
    for meaning, message in [
        (lambda x: x, "pattern p: it returns %x: None, not what its ops compute"),
        (lambda x: (ops.scale(x, by=1.0), x), "not what its ops compute"),
        (lambda x: None, "pattern p: it calls no op"),
        (lambda x: 3, "pattern p: it returns 3, not what its ops compute"),
        (lambda x, y: ops.scale(x, by=1.0), "pattern p: the parameter y is used by no op"),
        (lambda x, *, by: ops.scale(x, by=1.0), "pattern p: the parameter by is used by no op"),
        (lambda *xs: ops.scale(xs[0], by=1.0), "pattern p: values are plain positional parameters"),
        (lambda x, **a: ops.scale(x, by=1.0), "pattern p: values are plain positional parameters"),
    ]:
        with pytest.raises(ValueError) as e:
            Pattern(meaning, name="p")
        assert message in str(e.value)


def test_a_pattern_is_an_op_on_arrays(kit: Any) -> None:
    ops = kit.ops
    p = Pattern(lambda v, w, s: ops.put(ops.mix(v, w), s), name="p")
    v, w, s = (np.full((2, 3), n, np.float32) for n in (1, 2, 3))
    assert p.body(v, w, s) is None
    np.testing.assert_array_equal(s, ops.mix(v, w))
    assert [x.mutates for x in p.params] == [False, False, True]


# -- everything at once ------------------------------------------------------------------------------------------------


@given(st.data())
def test_random_graphs_fuse_to_the_same_bits(kit: Any, data: st.DataObject) -> None:
    ops = kit.ops

    def put_look(v: Any, s: Any) -> Any:
        ops.put(v, s)
        return ops.look(s)

    def stir_both(v: Any, s: Any, t: Any) -> Any:
        a = ops.stir(v, s)
        return a, ops.stir(a, t)

    def pair(v: Any) -> Any:
        a, b = ops.two(v)
        return ops.mix(a, b), b

    meanings = {
        "mix_scale": lambda v, w, *, by, shift: ops.mix(ops.scale(v, by=by, shift=shift), w),
        "scale_scale": lambda v, *, by: ops.scale(ops.scale(v, by=by), by=by),
        "put_mix": lambda v, w, s: ops.put(ops.mix(v, w), s),
        "turned_part": lambda v, *, start, size: ops.scale(ops.part(ops.turned(v), start=start, size=size), by=2.0),
        "put_look": put_look,
        "stir_both": stir_both,
        "two_puts": lambda v, w, s, t: (ops.put(v, s), ops.put(w, t), None)[2],
        "pair": pair,
        "look_look": lambda s, t: (ops.look(s), ops.look(t)),
        "carry_look": lambda s, t: ops.scale(ops.carry(s, t), by=0.5),
        "scale": lambda v: ops.scale(v, by=0.5),
    }  # fmt: skip
    g, inputs = data.draw(kit.graphs(most=20), "graph")
    names = data.draw(st.permutations(sorted(meanings)).map(lambda p: p[:6]), "patterns")
    chosen = {n: meanings[n] for n in names}
    want = kit.run(g, kit.reference(), inputs).bits
    for make in (kit.addressed, kit.managed):
        seed = data.draw(st.none() | st.integers(0, 99), "order")
        ran = kit.run(g, make(g, fuse=chosen), inputs, options=PlanOptions(order_seed=seed))
        assert ran.bits == want, [str(r) for r in ran.plan.fusions]


def test_fusing_leaves_the_recorded_graph_alone(kit: Any) -> None:
    ops, g, x, y, _ = fresh(kit)
    g.output("o", ops.mix(ops.scale(x, by=2.0), y))
    before = g.fingerprint()
    new, (report,) = fuse(g, [Pattern(lambda v, w: ops.mix(ops.scale(v, by=2.0), w), name="p")], yes)
    assert report.fused == 1 and g.fingerprint() == before != new.fingerprint()
    assert [n.origin for n in new.nodes] == [{0, 1}]
    build_plan(g, kit.addressed(g))
