"""Level graph: blocks of a model, fused and unfused, and each fusion by itself with the shapes that it has in graphs.

A fusion's meaning is its pattern's, so it is judged as an op is: its pattern on the reference, with the bound that the
bounds of its ops carry to its end. Blocks need the core alone; fusions also look at the bundled model's graph, if
there is
one.

    values, states   within the bound, fused and unfused     repeat    run to run the same bits
    fusion           the fused kernel of a pattern, on its own, with what its nodes get in the graph
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.errors import Refused
from trueup.core.graph import Graph, Node, State, Value
from trueup.core.passes.fuse import Match, Pattern
from trueup.core.plan import PlanOptions
from trueup.core.state import Capacity

from . import blocks
from .build import Call
from .compare import Found, dense, merge, same_bits
from .errors import KitError
from .harness import Rig
from .propagate import allowed, interpret
from .properties import MEASURED, Verdict
from .steps import steps_for
from .whole import ELSEWHERE, WholeGraph, fresh_states

Array = NDArray[Any]

TOKENS = (1, 5, 17)
TYPES = ("f32", "q8_0", "f16", "q4_0")
MODEL = "model"
"""The source of fusions that is the bundled model's step."""


def cases(count: int, seed: int) -> dict[str, list[str]]:
    """For each block its cases: every number of tokens, stored types in turn."""
    out = {}
    for name in blocks.BLOCK_FUNCTIONS:
        n = max(count, len(TOKENS))
        out[name] = [
            f"graph/{name}?tokens={TOKENS[i % 3]}&type={TYPES[(i + i // 3) % 4]}&seed={seed * 1000 + i}"
            for i in range(n)
        ]
    return out


def fusion_cases(names: list[str], seed: int) -> dict[str, list[str]]:
    """For each fusion of a backend the graphs in which it is looked for."""
    sources = [*blocks.BLOCK_FUNCTIONS, *([MODEL] if has_model() else [])]
    return {
        f"fusion {n}": [f"graph/fusion?name={n}&from={s}&tokens={t}&seed={seed}" for s in sources for t in TOKENS]
        for n in names
    }


def has_model() -> bool:
    try:
        import trueup.models  # noqa: F401
    except ImportError:
        return False
    return True


def examine(rig: Rig, text: str, a: float) -> Verdict:
    """A case of this level; KitError where the line can't be read."""
    name, _, rest = text.partition("?")
    words = dict(w.partition("=")[::2] for w in filter(None, rest.split("&")))
    start, verdict, held = time.perf_counter(), Verdict(f"graph/{text}"), rig.bytes
    try:
        tokens, seed = int(words.get("tokens", 5)), int(words.get("seed", 0))
        if name == "fusion":
            _fusions(rig, words["name"], words["from"], tokens, seed, a, verdict)
        elif name in blocks.BLOCK_FUNCTIONS:
            _block(rig, blocks.graph_of(name, tokens, words.get("type", "f32")), seed, a, verdict)
        else:
            raise KeyError
    except (KeyError, ValueError) as e:
        if isinstance(e, KeyError) or "invalid literal" in str(e):
            raise KitError(f"case graph/{text}: can't be read") from None
        raise
    left = rig.bytes - held
    verdict.say("memory", f"{left} bytes stay allocated" if left else "")
    verdict.seconds = time.perf_counter() - start
    return verdict


# -- blocks ------------------------------------------------------------------------------------------------------------


def _block(rig: Rig, graph: Graph, seed: int, a: float, verdict: Verdict) -> None:
    steps, states = steps_for(graph, seed, 2), fresh_states(graph)
    expected = []
    for i, inputs in enumerate(steps):
        made = allowed(graph, inputs, states, a=a, seed=seed + i)
        expected.append(made)
        states = made[1]
    for fusion in (False, True):
        if fusion and not rig.target.patterns:
            continue
        options = PlanOptions(allow_fallback=True, fusion=fusion)
        with WholeGraph(rig, graph, options) as whole:
            verdict.where = verdict.where or whole.where
            if not whole.where:
                continue
            _steps(rig, whole, graph, steps, expected, verdict, "fused" if fusion else "")
    if not verdict.where:
        verdict.outcome, verdict.reason = "refused", ELSEWHERE


def _steps(
    rig: Rig, whole: WholeGraph, graph: Graph, steps: list[dict[str, Array]], expected: list[Any], verdict: Verdict, how: str
) -> None:  # fmt: skip
    prefix = f"{how}: " if how else ""
    whole.put(fresh_states(graph))
    before = fresh_states(graph)
    for i, (inputs, (want, after, wide, wide_states)) in enumerate(zip(steps, expected, strict=True)):
        got = whole.run(inputs)
        found = merge([dense(f"{prefix}{k} of step {i}", got[k], w, _some(wide[k], w)) for k, w in want.items()])
        states = whole.states()
        kept = merge(
            [
                dense(f"{prefix}state {k} after step {i}", states[k], w, _some(wide_states[k], w))
                for k, w in after.items()
            ]
        )
        verdict.worst = max([verdict.worst, *(f.worst for f in (found, kept) if np.isfinite(f.worst))])
        verdict.say("values", found)
        verdict.say("states", kept)
        verdict.say("canaries", whole.broken())
        whole.put(before)
        again = whole.run(inputs)
        differs = next((k for k in got if not same_bits(again[k], got[k])), "")
        differs = differs or next((k for k, v in whole.states().items() if not same_bits(v, states[k])), "")
        wrong = differs and f"{prefix}two runs differ in {differs}"
        if rig.target.capabilities.deterministic:
            verdict.say("repeat", wrong)
        else:
            verdict.note("repeat", MEASURED, wrong or "held")
        if verdict.failed:
            return
        # the next step goes on from the reference's states, so that errors of one step do not count twice
        whole.put(after)
        before = after


def _some(bound: Array, want: Array) -> Array | None:
    """A bound for numbers, with their own rounding; None for integers and what nothing moved."""
    if want.dtype.kind != "f" or not np.any(bound):
        return None
    ref = np.abs(np.where(np.isfinite(want), want, 0).astype(np.float64))
    return np.where(bound > 0, bound + 2.0**-24 * ref + 2.0**-126, 0)


# -- fusions -----------------------------------------------------------------------------------------------------------


def _fusions(rig: Rig, name: str, source: str, tokens: int, seed: int, a: float, verdict: Verdict) -> None:
    pattern = next((p for p in rig.target.patterns if p.name == name), None)
    if pattern is None:
        raise KitError(f"the backend has no fusion '{name}'; it has {', '.join(p.name for p in rig.target.patterns)}")
    graph, env, snapshots = _recorded(source, tokens, seed)
    found, difference = pattern.matches(graph)
    if not found:
        verdict.outcome, verdict.reason = "refused", f"no match in {source}: {difference}"
        return
    kinds: dict[str, Match] = {}
    for m in found:
        kinds.setdefault(str([str(t) for t in m.types()]) + str(m.attrs), m)
    for m in kinds.values():
        answer = rig.target.accepts(pattern, m.types(), m.attrs)
        if not answer:
            verdict.outcome, verdict.reason = "refused", answer.reason
            verdict.say("refusal", "" if answer.reason.strip() else "a no without a reason")
            continue
        verdict.outcome = "passed" if verdict.outcome != "failed" else "failed"
        _alone(rig, pattern, m, env, snapshots, seed, a, verdict)


def _alone(
    rig: Rig, pattern: Pattern, m: Match, env: Mapping[Value, Any], snapshots: Mapping[tuple[Node, str], Array], seed: int,
    a: float, verdict: Verdict,
) -> None:  # fmt: skip
    """The pattern as a graph of its own, on the values that it has in the graph where it was found, fused."""
    source = m.nodes[0].outputs[0].graph if m.nodes[0].outputs else next(iter(m.values.values())).graph
    graph = Graph(source.capacity)
    inputs: dict[str, Array] = {}
    states: dict[str, Array] = {}
    given: list[Value] = []
    for p in pattern.places:
        v = m.values[p]
        if isinstance(v, State):
            assert v.kind is not None
            root = graph.state(v.root.name, v.kind)
            given.append(_same_region(root, v))
            first = next(n for n in m.nodes if any(s.root is v.root for s, _ in n.effects))
            states[v.root.name] = snapshots[first, v.root.name]
        elif v.data is not None:
            given.append(graph.weight(v.data) if v.leaf == "weight" else graph.constant(v.name, np.asarray(v.data)))
        else:
            inputs[p.name] = np.ascontiguousarray(env[v])
            given.append(graph.input(p.name, *v.type.shape, dtype=v.type.dtype))
    out = pattern.body(*given, **m.attrs)
    results = () if out is None else out if isinstance(out, tuple) else (out,)
    for i, r in enumerate(results):
        graph.output(f"r{i}", r)
    want, after, wide, wide_states = allowed(graph, inputs, states, a=a, seed=seed)
    try:
        whole = WholeGraph(rig, graph, PlanOptions(allow_fallback=True, fusion=True))
    except Refused as e:
        verdict.say("fusion", f"accepted, but its plan was refused: {e}")
        return
    with whole:
        used = any(n.op is pattern for n in whole.plan.order)
        verdict.where = "device"
        whole.put(states)
        got = whole.run(inputs)
        found = [dense(k, got[k], w, _some(wide[k], w)) for k, w in want.items()]
        found += [dense(f"state {k}", whole.states()[k], w, _some(wide_states[k], w)) for k, w in after.items()]
        worst = merge(found)
        verdict.worst = max([verdict.worst, *(f.worst for f in found if np.isfinite(f.worst))])
        verdict.say(
            "fusion", worst if used else Found(np.inf, "accepted, but the plan of its own pattern does not use it")
        )
        verdict.say("canaries", whole.broken())


def _same_region(root: State, v: State) -> State:
    out = root
    for axis, (low, high) in enumerate(v.region):
        if (low, high) != (0, root.type.shape[axis]):
            out = out.view(axis, low, high)
    return out


@functools.lru_cache(maxsize=32)  # sources by numbers of tokens
def _recorded(source: str, tokens: int, seed: int) -> tuple[Graph, dict[Value, Any], dict[tuple[Node, str], Array]]:
    """A graph, every value of its second step on the reference, and each state as the node that touches it finds it."""
    graph = model_graph(tokens) if source == MODEL else blocks.graph_of(source, tokens, "q8_0")
    states = fresh_states(graph, poison=False)
    snapshots: dict[tuple[Node, str], Array] = {}

    def note(node: Node, call: Call, results: tuple[Any, ...]) -> tuple[Any, ...]:
        for (s, writes), name in zip(node.effects, _state_names(node), strict=True):
            snap = states[s.root.name].copy()
            if writes:
                s.slice(snap)[...] = call.args[name]
            snapshots[node, s.root.name] = snap
        return results

    env: dict[Value, Any] = {}
    for inputs in steps_for(graph, seed, 2):
        env = interpret(graph, inputs, states, note)
    return graph, env, snapshots


def _state_names(node: Node) -> Iterator[str]:
    for p, g in zip(node.op.params, node.inputs, strict=True):
        for v in g if isinstance(g, tuple) else (g,):
            if isinstance(v, State):
                yield p.name


def model_graph(tokens: int) -> Graph:
    """The bundled model's step."""
    from trueup.models import load_model
    from trueup.models.architecture import StepShape

    arch = load_model().architecture
    page = 8 * arch.page_multiple
    return arch.build(StepShape(tokens, 3, 4, 2), Capacity(7, 13, page))
