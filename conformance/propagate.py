"""A graph on the reference, and how far errors within each op's bound can carry to its end.

`interpret` runs bodies in program order. `allowed` repeats that with every result moved by its own op's bound, with
random
signs (stochastic arithmetic: Vignes, Math. Comput. Simul. 35, 1993), and takes the largest change. It holds for
chains of
any ops, selections included: where a score within its bound of another would choose differently, the bound is wide
there.
Within a chain, sums are taken to err as they typically do, with the root of their length (see `bounds.typical`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Graph, Node, State, Value
from trueup.core.op import Op
from trueup.core.weight import Weight

from .bounds import Judged, bounds, typical
from .build import Call
from .recipe import Recipe

Array = NDArray[Any]
Bounds = dict[Node, tuple[list[Array | None], dict[str, Array | None]]]
Hook = Callable[[Node, Call, tuple[Any, ...]], tuple[Any, ...]]

SMALL = 1 << 22
"""Elements of a weight that is dequantized once and kept."""
RUNS = 5
SAFETY = 4.0
"""Times the largest change of RUNS runs. With 5 runs of random signs the true largest change is seldom twice what was
seen; the other factor of 2 is for errors that agree in sign where the runs' did not."""


def interpret(
    graph: Graph, inputs: Mapping[str, Array], states: Mapping[str, Array], hook: Hook | None = None
) -> dict[Value, Any]:
    """Every value of the graph by the ops' bodies, in program order. States are mutated in place.

    `hook(node, call, results)` may change the results, and the states that the call wrote.
    """
    env: dict[Value, Any] = {v: inputs[name] for name, v in graph.inputs.items()}
    for v in graph.weights.values():
        small = v.leaf == "constant" or v.type.size < SMALL
        env[v] = _dequantized(v.data) if small and v.data is not None else v.data

    def get(v: Value) -> Any:
        return v.slice(states[v.root.name]) if isinstance(v, State) else env[v]

    for node in graph.nodes:
        args: dict[str, Any] = {
            p.name: None if g is None else tuple(map(get, g)) if isinstance(g, tuple) else get(g)
            for p, g in zip(node.op.params, node.inputs, strict=True)
        }
        if hook is not None:
            before = {p.name: args[p.name].copy() for p in node.op.params if p.mutates}
        out = node.op.body(*args.values(), **node.attrs)
        results = () if out is None else out if isinstance(out, tuple) else (out,)
        if hook is not None and isinstance(node.op, Op):
            written = {name: args[name] for name in before}
            call = Call(Recipe(node.op.name), node.op, {**args, **before}, node.attrs)
            call.written = written
            results = hook(node, call, results)
        env.update(zip(node.outputs, results, strict=True))
    return env


@functools.lru_cache(maxsize=512)
def _dequantized(weight: Weight) -> Array:
    return np.asarray(weight)


def outputs(graph: Graph, env: Mapping[Value, Any]) -> dict[str, Array]:
    return {name: np.asarray(env[v]) for name, v in graph.outputs.items()}


def allowed(
    graph: Graph, inputs: Mapping[str, Array], states: Mapping[str, Array], *, a: float = 0.0, seed: int = 0
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array], dict[str, Array]]:
    """The reference's outputs and states after, and an absolute bound for each."""
    after = {k: v.copy() for k, v in states.items()}
    found: Bounds = {}
    want = outputs(graph, interpret(graph, inputs, after, _recorder(found, a)))
    wide = {k: np.zeros(v.shape) for k, v in want.items()}
    wide_states = {k: np.zeros(v.shape) for k, v in after.items()}
    for i in range(RUNS):
        rng = np.random.default_rng([seed, i])
        moved_states = {k: v.copy() for k, v in states.items()}
        moved = outputs(graph, interpret(graph, inputs, moved_states, _shaker(rng, found, along=i % 2 == 1)))
        for k, v in want.items():
            wide[k] = np.maximum(wide[k], _distance(moved[k], v))
        for k, v in after.items():
            wide_states[k] = np.maximum(wide_states[k], _distance(moved_states[k], v))
    carried = {k: SAFETY * v + _own(graph.outputs[k], found) for k, v in wide.items()}
    return want, after, carried, {k: SAFETY * v for k, v in wide_states.items()}


def _own(v: Value, found: Bounds) -> Array | float:
    """The bound of the op that made a value: runs whose signs cancel in an entry must not make that bound smaller."""
    if v.node is None or v.node not in found or v.base is not None:
        return 0.0
    bound = found[v.node][0][v.node.outputs.index(v)]
    return 0.0 if bound is None else np.where(np.isfinite(bound), bound, 0.0)


def _distance(a: Array, b: Array) -> Array:
    if b.dtype.kind != "f":
        return np.where(a == b, 0, np.inf)
    with np.errstate(all="ignore"):
        d = np.abs(a.astype(np.float64) - b.astype(np.float64))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0, np.where(np.isnan(d), np.inf, d))


def _recorder(found: Bounds, a: float) -> Hook:
    """Notes each node's bounds, for sums of typical rounding."""

    def hook(node: Node, call: Call, results: tuple[Any, ...]) -> tuple[Any, ...]:
        with typical():
            found[node] = bounds(Judged(call, results, call.written or {}, a))
        return results

    return hook


def _shaker(rng: np.random.Generator, found: Bounds, *, along: bool) -> Hook:
    """Moves results by their bounds; `along`: with one sign for each row, as a common factor errs."""

    def move(array: Array, bound: Array | None) -> Array:
        if bound is None or array.dtype.kind != "f" or not array.size:
            return array
        shape = (*array.shape[:-1], 1) if along and array.ndim else array.shape
        signs = rng.integers(0, 2, size=shape) * 2 - 1
        with np.errstate(all="ignore"):
            moved: Array = (array + np.where(np.isfinite(bound), bound, 0) * signs).astype(array.dtype)
            # half a unit in the last place is lost when it is rounded again, but two of them may make a whole one
            lost = (moved == array) & (bound > 0) & np.isfinite(array)
            return np.where(lost, np.nextafter(array, (np.inf * signs).astype(array.dtype)), moved)

    def hook(node: Node, call: Call, results: tuple[Any, ...]) -> tuple[Any, ...]:
        given, given_states = found[node]
        for name, array in (call.written or {}).items():
            array[...] = move(array, given_states[name])
        return tuple(move(r, b) for r, b in zip(results, given, strict=True))

    return hook
