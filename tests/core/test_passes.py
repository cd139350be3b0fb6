"""The passes: memory against brute force, legalizing, placing, fusing; each plants the faults that it must notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.backend import AddressedTarget, KernelTable
from trueup.core.errors import GraphError, PlanError, Refused
from trueup.core.graph import Graph, Node, Value
from trueup.core.ops.views import contiguous
from trueup.core.passes import memory
from trueup.core.passes.memory import ALIGN, MemoryPlan, plan_memory, verify_memory
from trueup.core.passes.rewrite import keep, rewrite
from trueup.core.passes.schedule import schedule
from trueup.core.plan import PlanOptions, build_plan
from trueup.core.state import PerSequence

Array = np.ndarray[Any, Any]


def ones(g: Graph) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {n: rng.standard_normal(v.type.shape).astype(np.float32) for n, v in g.inputs.items()}


# -- memory ------------------------------------------------------------------------------------------------------------


def owner(v: Value) -> Value:
    """In whose storage a value lies, found by walking back over view ops."""
    while v.node is not None and v.node.op.view and v.base is not None:
        v = v.node.inputs[0]  # type: ignore[assignment]
    return v


def alive(g: Graph, order: list[Node]) -> list[set[Value]]:
    """Brute force: what must keep its bytes while each node runs, by who reads it then or later."""
    made = {v for n in order for o in n.outputs if (v := owner(o)).node is not None and not v.node.host}
    out = []
    for i, n in enumerate(order):
        before = {owner(o) for m in order[:i] for o in m.outputs}
        later = {owner(v) for m in order[i:] for v in m.values} | {owner(v) for v in g.outputs.values()}
        out.append((before & later | {owner(o) for o in n.outputs}) & made)
    return out


@given(st.data())
def test_no_two_live_values_share_bytes(kit: Any, data: st.DataObject) -> None:
    g, _ = data.draw(kit.graphs(), "graph")
    seed = data.draw(st.none() | st.integers(0, 99), "order")
    order = [n for n in schedule(g, rng=None if seed is None else random.Random(seed)) if not n.host]
    plan = plan_memory(g, order)
    most = 0
    for now in alive(g, order):
        spans = sorted((plan.offsets[v], plan.offsets[v] + v.type.nbytes) for v in now if v.type.size)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), spans
        most = max(most, sum(v.type.nbytes for v in now))
    assert most <= plan.peak <= plan.arena <= plan.total
    assert all(o % ALIGN == 0 for o in plan.offsets.values())
    assert set(plan.offsets) == {o for n in order for o in n.outputs if o.base is None}
    whole = plan_memory(g, order, reuse=False)
    spans = sorted((o, o + v.type.nbytes) for v, o in whole.offsets.items())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert whole.arena == whole.total == plan.total


def test_memory_is_used_again_and_views_keep_it(kit: Any) -> None:
    ops, g = kit.ops, Graph()
    x = g.input("x", 64, 64)
    a = ops.scale(x, by=2.0)
    view = ops.part(ops.turned(a), start=0, size=8)
    b = ops.scale(a, by=3.0)  # the last that takes `a` itself
    c = ops.scale(b, by=4.0)
    d = ops.scale(c, by=5.0)
    e = ops.scale(view, by=6.0)  # but its storage lives until here
    g.output("d", d)
    g.output("e", e)
    plan = plan_memory(g, g.nodes)
    size = 64 * 64 * 4
    assert set(plan.offsets) == {a, b, c, d, e}
    assert plan.offsets[a] not in (plan.offsets[b], plan.offsets[c], plan.offsets[d])
    assert plan.offsets[b] == plan.offsets[d], "the third reuses the first that died"
    assert plan.peak == plan.arena == 3 * size
    assert plan.total == 4 * size + 64 * 8 * 4


def test_nothing_takes_no_room(kit: Any) -> None:
    ops, g = kit.ops, Graph()
    x = g.input("x", 0, 6)
    g.output("y", ops.scale(ops.mix(x, x), by=2.0))
    plan = plan_memory(g, g.nodes)
    assert plan.arena == plan.peak == plan.total == 0
    assert kit.run(g, kit.addressed(g), {"x": np.zeros((0, 6), np.float32)}).outputs["y"].shape == (0, 6)


def diamond(kit: Any) -> Graph:
    ops, g = kit.ops, Graph()
    x = g.input("x", 4, 6)
    a = ops.scale(x, by=2.0)
    b = ops.scale(a, by=3.0)
    c = ops.mix(a, b)
    g.output("y", ops.mix(ops.turned(ops.mix(c, b)), ops.turned(c)))
    return g


def test_a_lifetime_one_too_short_is_caught(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the verifier, and, with the verifier off, by what poisoned memory does to the results."""
    g, full = diamond(kit), memory.lifetimes
    inputs = ones(g)
    want = kit.run(g, kit.reference(), inputs).bits
    assert kit.run(g, kit.addressed(g), inputs).bits == want

    def short(graph: Graph, order: Any) -> dict[Value, tuple[int, int]]:
        return {v: (born, max(born, dies - 1)) for v, (born, dies) in full(graph, order).items()}

    monkeypatch.setattr(memory, "verify_memory", lambda *a: None)
    monkeypatch.setattr(memory, "lifetimes", short)
    plan = plan_memory(g, g.nodes)
    assert kit.run(g, kit.addressed(g), inputs).bits != want
    monkeypatch.undo()
    with pytest.raises(PlanError, match="are alive at the same time and share bytes of the arena"):
        verify_memory(g, g.nodes, plan)


def test_plans_of_memory_that_are_none(kit: Any) -> None:
    g = diamond(kit)
    good = plan_memory(g, g.nodes)
    verify_memory(g, g.nodes, good)
    a = g.nodes[0].outputs[0]
    for wrong, message in [
        (
            MemoryPlan({v: o for v, o in good.offsets.items() if v is not a}, good.arena, 0, 0),
            "has no room in the arena",
        ),
        (MemoryPlan(good.offsets, good.arena - ALIGN, 0, 0), f"no room in the arena of {good.arena - ALIGN} bytes"),
        (MemoryPlan(dict.fromkeys(good.offsets, 0), good.arena, 0, 0), "share bytes of the arena"),
    ]:
        with pytest.raises(PlanError, match=message):
            verify_memory(g, g.nodes, wrong)


def test_a_backend_that_overlaps_kernels_gets_no_reuse(kit: Any) -> None:
    g = diamond(kit)
    target = kit.addressed(g)
    assert build_plan(g, target).memory.arena < build_plan(g, target).memory.total
    target.overlaps = True
    plan = build_plan(g, target)
    assert plan.memory.arena == plan.memory.total


# -- legalize ----------------------------------------------------------------------------------------------------------


def table(kit: Any, *ops: Any, **conditions: Callable[..., Any]) -> AddressedTarget:
    """A target with kernels for these ops only; conditions by op name."""
    t = KernelTable()
    for op in ops:
        t.body(op)
        run = t.kernels[op][-1].run
        if op.name in conditions:
            t.kernels[op] = []
            t.implements(op, when=conditions[op.name])(run)
    return AddressedTarget("small", kit.device, t)


def test_a_refused_op_is_decomposed_as_deep_as_it_takes(kit: Any) -> None:
    ops = kit.ops

    @kit.local("x[a, b], y[a, b] -> out[a, b], total[a, b]")
    def middle(x: Any, y: Any) -> Any:
        return ops.mix.body(x, y), x + np.float32(0.125)

    middle.decompose(lambda x, y: (ops.mix(x, y), ops.two(x)[0]))

    @kit.local("x[a, b], &s[a, b], y?[a, b] -> out[b, a]")
    def big(x: Any, s: Any, y: Any = None, *, by: float) -> Any:
        s[...] = x * np.float32(by) + np.float32(0)
        a, b = middle.body(x, x if y is None else y)
        return np.ascontiguousarray(ops.mix.body(a, b).T)

    @big.decompose
    def _(x: Any, s: Any, y: Any = None, *, by: float) -> Any:
        ops.put(ops.scale(x, by=by), s)
        return ops.turned(ops.mix(*middle(x, x if y is None else y)))

    g = Graph(kit.capacity)
    x, y, s = g.input("x", 4, 6), g.input("y", 4, 6), g.state("s", PerSequence((6,)))
    g.output("a", big(x, s, y, by=2.0))
    g.output("b", big(y, s, by=3.0))
    g.output("c", ops.look(s))
    inputs = ones(g)
    want = kit.run(g, kit.reference(), inputs).bits
    small = table(kit, ops.mix, ops.scale, ops.put, ops.two, ops.look)
    for seed in (None, *range(10)):
        ran = kit.run(g, small, inputs, options=PlanOptions(order_seed=seed))
        assert ran.bits == want
    names = {n.op.name for n in ran.plan.order}
    assert names == {"mix", "scale", "put", "two", "look", "turned"}
    assert [n.origin for n in ran.plan.graph.nodes if n.op is ops.put] == [{0}, {1}]


def test_a_decomposition_is_held_to_the_op(kit: Any) -> None:
    ops = kit.ops

    def graph(decomposition: Callable[..., Any]) -> Graph:
        @kit.local("x[a, b], &s[a, b] -> out[a, b]")
        def whole(x: Any, s: Any) -> Any: ...

        whole.decompose(decomposition)
        g = Graph(kit.capacity)
        g.output("y", whole(g.input("x", 4, 6), g.state("s", PerSequence((6,)))))
        return g

    target = table(kit, ops.mix, ops.put, ops.look, ops.stir)

    def half(x: Any, s: Any) -> Any:
        ops.put(ops.part(x, start=0, size=3), s.view(1, 0, 3))
        return ops.mix(x, x)

    for decomposition, message in [
        (lambda x, s: (ops.put(x, s), None)[1], "#0 whole: its decomposition gives nothing, the op f32[4, 6]"),
        (
            lambda x, s: (ops.stir(x, s), ops.look(s)),
            "#0 whole: its decomposition gives f32[4, 6], f32[4, 6], the op f32[4, 6]",
        ),
        (
            lambda x, s: (ops.put(x, s), ops.turned(x))[1],
            "#0 whole: its decomposition gives f32[6, 4] strides [1, 6], the op f32[4, 6]",
        ),
        (lambda x, s: ops.mix(ops.look(s), x), "a rewrite dropped the write of #0 whole to state s, or a part of it"),
        (half, "a rewrite dropped the write of #0 whole to state s, or a part of it"),
    ]:
        with pytest.raises(PlanError) as e:
            build_plan(graph(decomposition), target)
        assert str(e.value) == message


def test_a_decomposition_into_itself_ends(kit: Any) -> None:
    @kit.local("x[a] -> out[a]")
    def around(x: Any, *, depth: int) -> Any: ...

    around.decompose(lambda x, *, depth: around(x, depth=depth + 1))
    g = Graph()
    g.output("y", around(g.input("x", 3), depth=0))
    with pytest.raises(PlanError, match=r"around\(x: f32\[3\]; depth=\d+\) is still decomposed after \d+ rounds"):
        build_plan(g, table(kit))


def contiguous_only(*types: Any, **attrs: Any) -> Any:
    return all(t.contiguous for t in types) or "it reads no strides"


def test_a_strided_argument_is_copied_only_for_who_asks(kit: Any) -> None:
    ops, g = kit.ops, Graph()
    x = g.input("x", 4, 6)
    turned = ops.turned(x)
    g.output("a", ops.mix(turned, turned))
    g.output("b", ops.scale(turned, by=2.0))
    inputs = ones(g)
    want = kit.run(g, kit.reference(), inputs).bits
    ran = kit.run(g, table(kit, ops.mix, ops.scale, contiguous, mix=contiguous_only), inputs)
    assert ran.bits == want
    (copy,) = [n for n in ran.plan.order if n.op is contiguous]
    users = [n.op.name for n in ran.plan.order if copy.outputs[0] in n.values]
    assert users == ["mix"] and ran.plan.memory.offsets[copy.outputs[0]] >= 0
    assert not any(n.op is contiguous for n in kit.run(g, kit.addressed(g), inputs).plan.order)


def test_a_copy_is_better_than_a_decomposition(kit: Any) -> None:
    ops = kit.ops

    @kit.local("x[a, b] -> out[a, b]")
    def twice(x: Any) -> Any:
        return x * np.float32(2)

    twice.decompose(lambda x: ops.scale(x, by=2.0))
    g = Graph()
    x = g.input("x", 4, 6)
    g.output("a", twice(ops.turned(x)))
    names = [n.op.name for n in build_plan(g, table(kit, twice, ops.scale, contiguous, twice=contiguous_only)).order]
    assert names == ["turned", "contiguous", "twice"]
    names = [n.op.name for n in build_plan(g, table(kit, twice, ops.scale, contiguous, twice=lambda *t: "no")).order]
    assert names == ["turned", "scale"]


def test_a_view_that_strides_forbid_is_a_copy(kit: Any) -> None:
    ops, g = kit.ops, Graph()
    x = g.input("x", 4, 6)
    g.output("y", ops.part(ops.folded(ops.turned(x)), start=1, size=2))
    g.output("z", ops.folded(x))
    inputs = ones(g)
    for target in (kit.reference(g), kit.addressed(g), kit.managed(g)):
        ran = kit.run(g, target, inputs)
        np.testing.assert_array_equal(ran.outputs["y"], inputs["x"].T.reshape(4, 6)[:, 1:3])
        np.testing.assert_array_equal(ran.outputs["z"], inputs["x"].reshape(6, 4))
        assert sum(n.op is contiguous for n in ran.plan.order) == 1
    with pytest.raises(Refused, match=r"small refuses #\d contiguous.*: no kernel for contiguous"):
        build_plan(g, table(kit))


def test_a_view_op_that_copies_is_no_view(kit: Any) -> None:
    @kit.local("x[a, b] -> out[a*b]", view=True)
    def copies(x: Any) -> Any:
        return np.array(x).reshape(-1)

    g = Graph()
    g.output("y", copies(g.input("x", 4, 6)))
    with pytest.raises(PlanError, match=r"#0 copies\(x: f32\[4, 6\]\) is no view: it copies even what lies contiguous"):
        build_plan(g, kit.addressed(g))


def test_a_contiguous_that_reads_no_strides_ends(kit: Any) -> None:
    ops, g = kit.ops, Graph()
    g.output("y", ops.scale(ops.turned(g.input("x", 4, 6)), by=1.0))
    target = table(kit, ops.scale, contiguous, scale=contiguous_only, contiguous=contiguous_only)
    with pytest.raises(
        Refused, match=r"small refuses #1 contiguous\(x: f32\[6, 4\] strides \[1, 6\]\): it reads no str"
    ):
        build_plan(g, target)


def test_the_prologue_is_not_asked(kit: Any) -> None:
    ops, g = kit.ops, Graph()
    x = g.input("x", 4, 6)

    @kit.local("x[a, b] -> out[a, b]")
    def itself(x: Any) -> Any:
        return ops.mix.body(x, x)

    itself.decompose(lambda x: ops.two(x)[1])
    with g.prologue():
        y = itself(x)
    g.output("z", ops.scale(y, by=2.0))
    ran = kit.run(g, table(kit, ops.scale), ones(g))
    assert [n.op.name for n in ran.plan.prologue] == ["itself"] and [n.op.name for n in ran.plan.order] == ["scale"]
    assert ran.plan.counts() == {"prologue": 1, "reference body": 1}
    assert ran.bits == kit.run(g, kit.reference(), ones(g)).bits


# -- place -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B03", "B83")
def test_what_is_refused_is_refused_by_name_or_falls_back_counted(kit: Any) -> None:
    ops, g = kit.ops, Graph(kit.capacity)
    x = g.input("x", 4, 6)
    y = ops.scale(x, by=2.0)
    g.output("y", ops.mix(y, x))
    ops.put(y, g.state("s", PerSequence((6,))))
    target = table(kit, ops.scale, ops.mix, mix=lambda x, y: x.shape[0] <= 2 or f"{x.shape[0]} rows, 2 at most")
    with pytest.raises(Refused) as e:
        build_plan(g, target)
    assert str(e.value) == (
        "backend small refuses #1 mix(x: f32[4, 6], y: f32[4, 6]): 4 rows, 2 at most; "
        "--allow-fallback runs such nodes on the reference"
    )
    plan = build_plan(g, target, PlanOptions(allow_fallback=True))
    assert [(str(n), p.reason, p.bytes) for n, p in plan.fallbacks] == [
        ("#1 mix", "4 rows, 2 at most", 3 * 4 * 6 * 4),
        ("#2 put", "no kernel for put", 4 * 6 * 4),
    ]
    assert plan.counts() == {"reference body": 1, "fallback": 2}
    ran = kit.run(g, target, ones(g), options=PlanOptions(allow_fallback=True))
    assert ran.bits == kit.run(g, kit.reference(), ones(g)).bits
    assert ran.executable.fallback_bytes == (3 + 1) * 4 * 6 * 4 + 2 * 4 * 6 * 4, "and the state there and back"


def test_every_reason_is_given(kit: Any) -> None:
    ops, t = kit.ops, KernelTable()
    for when in (lambda x, *, by, shift: "one", lambda x, *, by, shift: False, lambda x, *, by, shift: "one"):
        t.implements(ops.scale, when=when, name="k")(lambda ctx, x, *, by, shift: None)
    g = Graph()
    ops.scale(g.input("x", 3), by=1.0)
    with pytest.raises(
        Refused, match=r"#0 scale\(x: f32\[3\]; by=1.0, shift=0.0\): one; k: condition not met; --allow"
    ):
        build_plan(g, AddressedTarget("small", kit.device, t))


def test_the_first_kernel_that_holds_is_taken(kit: Any) -> None:
    ops, t = kit.ops, KernelTable()
    t.implements(ops.scale, when=lambda x, *, by, shift: np.bool_(x.shape[0] > 3), name="long")(lambda *a, **k: None)
    t.implements(ops.scale, name="any")(lambda *a, **k: None)
    g = Graph()
    ops.scale(g.input("x", 3), by=1.0)
    ops.scale(g.input("y", 4), by=1.0)
    plan = build_plan(g, AddressedTarget("small", kit.device, t))
    assert [p.kernel for p in plan.placements.values()] == ["any", "long"], "NumPy's True holds too"


@given(st.data())
def test_whatever_is_refused_the_bits_are_the_same(kit: Any, data: st.DataObject) -> None:
    """Random graphs, a random set of ops without a kernel, a random order: as the reference, on both memories."""
    g, inputs = data.draw(kit.graphs(), "graph")
    want = kit.run(g, kit.reference(), inputs).bits
    names = sorted({n.op.name for n in g.nodes if not n.op.view})
    refused = tuple(getattr(kit.ops, n) for n in names if data.draw(st.booleans(), n))
    options = PlanOptions(allow_fallback=True, order_seed=data.draw(st.none() | st.integers(0, 99), "order"))
    for make in (kit.addressed, kit.managed):
        ran = kit.run(g, make(g, without=refused), inputs, options=options)
        assert ran.bits == want
        assert len(ran.plan.fallbacks) == sum(n.op in refused and not n.host for n in g.nodes)


# -- rewriting ---------------------------------------------------------------------------------------------------------


def two_writes(kit: Any) -> Graph:
    g = Graph(kit.capacity)
    x, s = g.input("x", 4, 6), g.state("s", PerSequence((6,)))
    kit.ops.put(x, s)
    kit.ops.put(kit.ops.mix(x, x), s.view(1, 0, 6))
    g.output("y", kit.ops.look(s))
    return g


@pytest.mark.fault("B37")
def test_a_rewrite_that_drops_a_write_is_caught(kit: Any) -> None:
    g = two_writes(kit)

    def dropping(which: int) -> Callable[..., Any]:
        return lambda new, n, get: {} if n.id == which else keep(new, n, get)

    rewrite(g, keep)
    for which in (0, 2):
        with pytest.raises(PlanError, match=f"a rewrite dropped the write of #{which} put to state s, or a part of it"):
            rewrite(g, dropping(which))


def test_a_rewrite_that_writes_less_is_caught(kit: Any) -> None:
    ops, g = kit.ops, two_writes(kit)

    def less(new: Graph, n: Any, get: Any) -> Any:
        if n.id != 0:
            return keep(new, n, get)
        x, s = map(get, n.inputs)
        new.record(ops.put, (ops.part(x, start=0, size=5), s.view(1, 0, 5)), {}, [], origin=n.origin)
        return {}

    with pytest.raises(PlanError, match="a rewrite dropped the write of #0 put to state s, or a part of it"):
        rewrite(g, less)


@pytest.mark.fault("B38")
@pytest.mark.parametrize(("held", "until", "message"), [
    (0, 2, "a rewrite put #2 put before #0 put: #0 put writes state s, #2 put writes s"),
    (2, 3, "a rewrite put #3 look before #2 put: #2 put writes state s, #3 look reads s"),
])  # fmt: skip
def test_a_rewrite_that_swaps_effects_is_caught(kit: Any, held: int, until: int, message: str) -> None:
    g, late = two_writes(kit), []

    def swapping(new: Graph, n: Any, get: Any) -> Any:
        if n.id == held:
            late.append(n)
            return {}
        made = keep(new, n, get)
        if n.id == until:
            made |= keep(new, late.pop(), get)
        return made

    with pytest.raises(PlanError) as e:
        rewrite(g, swapping)
    assert str(e.value) == message


def test_a_rewrite_that_makes_no_graph_is_caught(kit: Any) -> None:
    g = two_writes(kit)

    def foreign(new: Graph, n: Any, get: Any) -> Any:
        return keep(new, n, get if n.id else lambda v: v)

    with pytest.raises(GraphError, match="is a value of another graph"):
        rewrite(g, foreign)


def test_states_in_lists_and_regions_survive(kit: Any) -> None:
    @kit.local("*parts[a, b], x[c, d] -> out[a, b]")
    def joined(parts: Any, x: Any) -> Any:
        return sum(parts, np.zeros_like(parts[0]))

    ops, g = kit.ops, Graph(kit.capacity)
    x, s = g.input("x", 4, 6), g.state("s", PerSequence((6,)))
    strided = ops.folded(ops.turned(x))  # makes legalize rewrite
    ops.put(strided, s)
    g.output("y", joined([s.view(1, 0, 3), s.view(1, 3, 6), ops.part(strided, start=0, size=3)], strided))
    inputs = ones(g)
    want = kit.run(g, kit.reference(), inputs).bits
    for target in (kit.addressed(g), kit.managed(g)):
        assert kit.run(g, target, inputs).bits == want
    for target in (kit.addressed(g, without=(joined,)), kit.managed(g, without=(joined,))):
        assert kit.run(g, target, inputs, options=PlanOptions(allow_fallback=True)).bits == want
