"""A node of a plan judged: what the reference gives for what the node was given, and how far the node may be from it.

For an op by its bound, for a fusion by the bound that those of its ops carry to its end. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.alone import Alone
from trueup.core.graph import Graph, Node, State

from .bounds import Judged, bounds, reason
from .build import Call
from .compare import Found, dense, same_bits, selection
from .propagate import allowed, interpret, outputs

Array = NDArray[Any]


@dataclass
class Expected:
    """What the reference gives: results and states by name, with absolute bounds (None: bit for bit)."""

    results: dict[str, Array]
    states: dict[str, Array]
    bounds: dict[str, Array | None]
    state_bounds: dict[str, Array | None]
    reason: str
    scores: Array | None = None
    """Of a top_k: what it chooses among; its results are judged by value, then by order."""


@dataclass
class Part:
    """A result or a state compared: where it is farthest from its bound."""

    name: str
    found: Found
    at: list[int] = field(default_factory=list)
    got: float | int | None = None
    expected: float | int | None = None
    bound: float | None = None


def expect(made: Alone, inputs: Mapping[str, Array], states: Mapping[str, Array], a: float = 0.0) -> Expected:
    """`a`: unit roundoff of activations, as in `bounds`."""
    if len(made.ops) > 1:
        want, after, wide, wide_states = allowed(made.graph, inputs, states, a=a)
        return Expected(
            want, after, {k: _own(wide[k], w) for k, w in want.items()},
            {k: _own(wide_states[k], w) for k, w in after.items()},
            f"the bounds of {', '.join(dict.fromkeys(n.op.name for n in made.ops))}, carried to the end",
        )  # fmt: skip
    (only,) = made.ops
    after = {k: v.copy() for k, v in states.items()}
    calls: list[tuple[Call, tuple[Any, ...]]] = []

    def note(node: Node, call: Call, results: tuple[Any, ...]) -> tuple[Any, ...]:
        if node is only:
            calls.append((call, results))
        return results

    want = outputs(made.graph, interpret(made.graph, inputs, after, note))
    ((call, results),) = calls
    found, found_states = bounds(Judged(call, results, call.written or {}, a))
    scores = np.asarray(call.args["scores"]) if only.op.name == "top_k" else None
    return Expected(
        want, after, dict(zip(want, found, strict=True)), _whole(only, made.graph, found_states, after),
        reason(only.op.name), scores,
    )  # fmt: skip


def judge(expected: Expected, got: Mapping[str, Array], states: Mapping[str, Array]) -> list[Part]:
    """Every result and every state that the node has, against what is expected."""
    parts = []
    if expected.scores is not None:
        values, indices = got["values"], got["indices"]
        value, order = selection(expected.scores, values, indices, values.shape[-1])
        parts.append(Part("values, indices", value if value.wrong else order))
    else:
        parts = [_part(k, got[k], w, expected.bounds[k]) for k, w in expected.results.items()]
    return parts + [_part(f"state {k}", states[k], w, expected.state_bounds.get(k)) for k, w in expected.states.items()]


def _part(name: str, got: Array, want: Array, bound: Array | None) -> Part:
    if bound is None and same_bits(got, want):
        return Part(name, Found())
    found = dense(name, got, want, bound)
    if got.shape != want.shape or not want.size:
        return Part(name, found)
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
        same = (got == want) | ((got != got) & (want != want))
        allowed_ = np.zeros(want.shape) if bound is None else np.broadcast_to(bound, want.shape)
        ratio = np.where(same, 0, np.where(np.isposinf(allowed_), 0, error / np.maximum(allowed_, 2.0**-1074)))
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio))), want.shape)
    return Part(name, found, [int(i) for i in at], got[at].item(), want[at].item(), float(allowed_[at]))


def _own(bound: Array, want: Array) -> Array | None:
    """A carried bound with the rounding of the reference itself; integers may differ only where bounds let them."""
    if not np.any(bound):
        return None
    with np.errstate(all="ignore"):
        size = np.abs(np.where(np.isfinite(want), want, 0).astype(np.float64))
        return np.where(bound > 0, bound + 2.0**-24 * size + 2.0**-126, 0)


def _whole(
    node: Node, graph: Graph, found: Mapping[str, Array | None], after: Mapping[str, Array]
) -> dict[str, Array | None]:
    """Bounds by argument as bounds of whole states: beside the region that the node writes nothing may change."""
    out: dict[str, Array | None] = dict.fromkeys(after)
    for p, given in zip(node.op.params, node.inputs, strict=True):
        bound = found.get(p.name)
        if isinstance(given, State) and bound is not None:
            name = given.root.name
            whole = out[name] if out[name] is not None else np.zeros(after[name].shape)
            assert whole is not None
            given.slice(whole)[...] = bound
            out[name] = whole
    return out
