"""Bounds hold for honest float32 arithmetic, and are no wider than they must be."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import trueup.core.ops  # noqa: F401  # registers the ops
from trueup.conformance.bounds import BITS, RULES, TINY, Judged, U, bounds, gamma, reason, typical
from trueup.conformance.build import Call, build
from trueup.conformance.cases import drawn
from trueup.conformance.compare import dense
from trueup.conformance.propagate import allowed
from trueup.conformance.recipe import Recipe
from trueup.conformance.spaces import find
from trueup.core.graph import Graph
from trueup.core.op import OPS
from trueup.core.ops import add, scale_rows

F32 = NDArray[np.float32]
Kernel = Callable[..., Any]


def call(op: str, attrs: dict[str, Any] | None = None, **args: Any) -> Call:
    full = {p.name: args.get(p.name) for p in find(op).params}
    return Call(Recipe(op), find(op), full, attrs or {})


def bound_of(c: Call, a: float = 0.0) -> Any:
    results, states = c.reference()
    return bounds(Judged(c, results, states, a))[0][0]


def test_every_op_has_a_rule_with_a_reason() -> None:
    assert set(OPS) <= set(RULES) | BITS
    assert not set(RULES) & BITS
    assert all(len(reason(name)) > 20 for name in OPS)


def test_the_bound_of_a_dot_product_is_gamma_of_its_terms() -> None:
    """Three products: gamma_5 of 1·2 + 2·2 + 4·0.25 = 7, TINY where a device flushes, half a unit for the reference."""
    x, w = np.array([[1, -2, 4]], np.float32), np.array([[2, 2, 0.25]], np.float32)
    c = call("linear", x=x, weight=w)
    flush = TINY * (7 + 4.25 + 3 + 1)
    assert bound_of(c)[0, 0] == pytest.approx(7 * 5 * U / (1 - 5 * U) + flush + U * 1.0 + 2.0**-149, rel=1e-12)
    assert bound_of(c, a=2.0**-8)[0, 0] == pytest.approx(7 * 2.0**-8, rel=1e-3)


def test_typical_rounding_grows_with_the_root() -> None:
    assert gamma(100) == pytest.approx(100 * U, rel=1e-4)
    with typical():
        assert gamma(100) == 40 * U
    assert gamma(100) > 99 * U


def test_nothing_is_promised_where_float32_overflows_on_the_way() -> None:
    x, w = np.full((1, 4), 1e30, np.float32), np.array([[1e9, -1e9, 1, 1]], np.float32)
    assert np.isinf(bound_of(call("linear", x=x, weight=w))).all()
    assert np.isfinite(bound_of(call("linear", x=x * 1e-20, weight=w))).all()


def test_a_gate_that_steps_at_zero_may_fall_on_either_side() -> None:
    key, value = np.array([[[1, -1]]], np.float32), np.array([[8, 8]], np.float32)
    near = call("ple_gate", key=key, query=np.array([[[1, 1]]], np.float32), value=value)
    far = call("ple_gate", key=key, query=np.array([[[1, 0.5]]], np.float32), value=value)
    assert bound_of(near)[0, 0, 0] > 8 * 2e-4 > bound_of(far)[0, 0, 0]


def _sequential(x: F32, w: F32) -> F32:
    """Sums of float32, term by term: the worst order."""
    total = np.zeros((len(x), len(w)), np.float32)
    for i in range(x.shape[1]):
        total = total + x[:, i, None] * w[:, i]
    return total


def linear(x: F32, weight: Any) -> F32:
    rows, w = x.reshape(prod(x.shape[:-1]), x.shape[-1]), np.asarray(weight, np.float32)
    return _sequential(rows, w).reshape(*x.shape[:-1], len(w))


def rms_norm(x: F32, weight: Any = None, *, eps: float) -> F32:
    mean = linear(x * x, np.ones((1, x.shape[-1]), np.float32)) / np.float32(max(x.shape[-1], 1))
    y = x / np.sqrt(mean + np.float32(eps))
    return y if weight is None else y * np.asarray(weight, np.float32)


def softmax(x: F32) -> F32:
    e = np.exp(x - np.max(x, -1, keepdims=True, initial=-np.inf))
    return np.where(np.isneginf(np.max(x, -1, keepdims=True, initial=-np.inf)), 0, e / e.sum(-1, keepdims=True)).astype(
        np.float32
    )


def silu(x: F32, *, scale: float) -> F32:
    y = x * np.float32(scale)
    return y / (1 + np.exp(-y))


def gdn_decay(a: F32, bias: Any, rate: Any) -> F32:
    z = a + np.asarray(bias, np.float32)
    soft = np.where(z == np.inf, np.inf, np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
    return (np.asarray(rate, np.float32) * soft).astype(np.float32)


def index_scores(q: F32, keys: F32, cu: Any, past: Any, table: Any, weights: Any = None, **attrs: Any) -> F32:
    every, scale = attrs["every"], attrs["scale"]
    out = np.full((len(q), table.shape[1] * keys.shape[1]), -np.inf, np.float32)
    for s in range(len(cu) - 1):
        for t in range(cu[s], cu[s + 1]):
            for e in range((past[s] + t - cu[s] + 1) // every):
                k = keys[table[s, e // keys.shape[1]], e % keys.shape[1]]
                each = np.maximum(_sequential(q[t], k[None])[:, 0], 0) * (1 if weights is None else weights[t])
                out[t, e] = np.float32(scale) * np.cumsum(each, dtype=np.float32)[-1]
    return out


def gated_delta_rule(
    q: F32, k: F32, v: F32, decay: F32, beta: F32, cu: Any, slots: Any, state: F32, keep: Any = None, **attrs: Any
) -> F32:
    scale, tiled = attrs["scale"], attrs["tiled"]
    out, heads = np.zeros(v.shape, np.float32), np.arange(v.shape[1])
    pick = heads % k.shape[1] if tiled else heads // (len(heads) // k.shape[1])
    for i in range(len(cu) - 1):
        for t in range(cu[i], cu[i + 1]):
            s = np.exp(decay[t])[:, None, None] * state[slots[i]]
            said = (s * k[t, pick][:, :, None]).sum(1, dtype=np.float32)
            s = s + k[t, pick][:, :, None] * (beta[t][:, None] * (v[t] - said))[:, None]
            state[slots[i]] = s
            out[t] = np.float32(scale) * (s * q[t, pick][:, :, None]).sum(1, dtype=np.float32)
            if keep is not None and keep[t] >= 0:
                state[keep[t]] = s
    return out


@pytest.mark.parametrize("kernel", [linear, rms_norm, softmax, silu, gdn_decay, index_scores, gated_delta_rule])
def test_float32_stays_within_the_bound_and_twice_that_does_not(kernel: Kernel) -> None:
    """Straightforward kernels in float32, the worst order of adding included; then the bound itself as an error."""
    worst = 0.0
    for r in drawn(find(kernel.__name__), 60, 5):
        c = build(r)
        results, states = c.reference()
        given, given_states = bounds(Judged(c, results, states))
        mine = c.copy()
        with np.errstate(all="ignore"):
            out = kernel(*mine.args.values(), **mine.attrs)
        found = dense("out", out, results[0], given[0])
        assert found, f"{r}: {found.wrong}"
        for name, bound in given_states.items():
            assert dense(name, mine.args[name], states[name], bound)
        worst = max(worst, found.worst)
        sure = np.isfinite(results[0]) & np.isfinite(given[0]) & (np.abs(results[0]) < 1e30) & (given[0] > 1e-30)
        if sure.any():
            with np.errstate(all="ignore"):
                moved = np.where(sure, results[0] + 2.5 * given[0], results[0]).astype(np.float32)
            assert not dense("out", moved, results[0], given[0])
    assert worst > 0.01, "a bound a hundred times wider than any error would catch little"


def test_a_chain_is_never_bound_to_the_last_bit_where_its_ops_round() -> None:
    """A device that contracts a product and a sum may differ by a unit in the last place in any entry, also where the
    shaken runs happen to cancel (seen on a GPU: 3.2023852 for 3.202385, with a bound of 0)."""
    g = Graph()
    a, x, s = g.input("a", 50, 64), g.input("x", 50, 64), g.input("s", 50, 1)
    g.output("r", add(a, scale_rows(x, s)))
    rng = np.random.default_rng(0)
    inputs = {
        n: rng.standard_normal(shape).astype(np.float32)
        for n, shape in (("a", (50, 64)), ("x", (50, 64)), ("s", (50, 1)))
    }
    want, _, wide, _ = allowed(g, inputs, {})
    contracted = (inputs["a"] + inputs["x"].astype(np.float64) * inputs["s"]).astype(np.float32)
    room = wide["r"] + 2.0**-24 * np.abs(want["r"])
    assert np.any(contracted != want["r"]) and np.all(np.abs(contracted.astype(np.float64) - want["r"]) <= room)
    assert np.all(room <= 64 * 2.0**-24 * np.maximum(np.abs(inputs["x"] * inputs["s"]), np.abs(inputs["a"])))
