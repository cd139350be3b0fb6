"""How far a result may lie from the reference: one rule for each op, derived from what the op does, with its reason.

A rule gives an absolute bound for every entry of every result and state. It follows from the number of terms added,
their
magnitudes, and the rounding of float32; nothing in it comes from a backend, and no backend can change it. Terms:

    U        unit roundoff of float32, 2^-24
    gamma    n U / (1 - n U): n roundings in any order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1)
    TINY     2^-126: what a device that flushes denormals loses at a time
    a        unit roundoff of activations, where a backend declares that it rounds them (bf16 2^-8, f16 2^-11)

The reference rounds once from float64; that half unit in the last place is added to every bound but those of ops that
move values bit for bit. A bound of infinity says that float32 can't promise anything there: an intermediate overflows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.weight import Weight

from .build import Call
from .weights import magnitude

F64 = NDArray[np.float64]

U = 2.0**-24
TINY = 2.0**-126
LIMIT = float(np.finfo(np.float32).max)


class Blocks(float):
    """The roundoff of activations that are rounded in blocks with one scale, which are off by a share of the block's largest:
    0 as a unit roundoff of single entries, and `share` of products with weights."""

    size, share = 32, 0.5 / 127


ACTIVATIONS = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8": Blocks()}
"""Unit roundoff by the type that activations are rounded to before a matrix unit; 0 where they are not."""


@dataclass
class Judged:
    """A call, what the reference gives for it, and how activations are rounded."""

    call: Call
    results: tuple[Any, ...]
    states: dict[str, Any]
    a: float = 0.0

    def __getitem__(self, name: str) -> Any:
        """An argument in float64; a Weight as its dequantized values."""
        return np.asarray(self.call.args[name], np.float64)

    def dequantizing(self, name: str) -> Any:
        """What rounding while a weight is dequantized may change: 3 roundings of its terms; 0 for plain types."""
        w = self.call.args[name]
        if not isinstance(w, Weight) or w.type.element.plain:
            return 0.0
        return 3 * U * magnitude(w)

    def attr(self, name: str) -> Any:
        return self.call.attrs[name]


@dataclass(frozen=True)
class Rule:
    """`bound(judged)` gives the bounds of the results, or (results, states by name)."""

    bound: Callable[[Judged], Any]
    reason: str


RULES: dict[str, Rule] = {}
BITS = frozenset({
    "paged_append", "delay", "take_rows", "repeat_streams", "contiguous", "split_heads", "merge_heads", "columns", "concat",
    "ngram_rows", "top_k", "argmax",
})  # fmt: skip
"""Ops that compute nothing: what they move or choose arrives bit for bit. (top_k is judged by value, then by order.)"""


def rule(*ops: str, why: str) -> Callable[[Callable[[Judged], Any]], Callable[[Judged], Any]]:
    def add(f: Callable[[Judged], Any]) -> Callable[[Judged], Any]:
        for name in ops:
            RULES[name] = Rule(f, why)
        return f

    return add


def bounds(j: Judged) -> tuple[list[F64 | None], dict[str, F64 | None]]:
    """Absolute bounds for each result and each written state; None where bits must be equal."""
    name = j.call.op.name
    if name in BITS:
        return [None] * len(j.results), dict.fromkeys(j.states)
    found = RULES.get(name, UNKNOWN)
    with np.errstate(all="ignore"):
        given = found.bound(j)
        results, states = given if isinstance(given, tuple) and isinstance(given[1], dict) else (given, {})
        results = results if isinstance(results, list) else [results]
        out: list[F64 | None] = [_with_rounding(b, r) for b, r in zip(results, j.results, strict=True)]
        return out, {k: _with_rounding(states[k], v) if k in states else None for k, v in j.states.items()}


def _with_rounding(bound: Any, reference: Any) -> F64:
    """Plus the rounding of the reference itself, where anything was computed."""
    b = np.broadcast_to(np.asarray(bound, np.float64), reference.shape)
    b = np.where(np.isnan(b), np.inf, b)
    ref = np.abs(np.where(np.isfinite(reference), reference, 0).astype(np.float64))
    return np.where(b > 0, b + U * ref + 2.0**-149, 0)


def reason(name: str) -> str:
    """Why the bound of an op is what it is."""
    return "moves or chooses values: bit for bit" if name in BITS else RULES.get(name, UNKNOWN).reason


def gamma(n: float) -> float:
    if _typical.get():
        return 4 * float(np.sqrt(n)) * U
    return n * U / (1 - n * U)


_typical: ContextVar[bool] = ContextVar("typical", default=False)


@contextlib.contextmanager
def typical() -> Iterator[None]:
    """Let gamma be 4 sqrt(n) U, which n independent roundings exceed once in 1,500 times (Higham & Mary, SIAM J. Sci.
    Comput. 41, 2019): for chains of ops, where the worst of every op at once would say nothing."""
    token = _typical.set(True)
    try:
        yield
    finally:
        _typical.reset(token)


def _dot(x: F64, w: F64, extra: int, a: float, dequantizing: Any = 0.0) -> Any:
    """Bound of `x[r, n] · w[m, n]` in float32, in any order, plus `extra` roundings: [r, m]."""
    n, x, w = x.shape[-1], np.abs(x), np.abs(w)
    x, w = np.where(np.isfinite(x), x, 0), np.where(np.isfinite(w), w, 0)
    out = x @ ((gamma(n + extra) + a * (1 + gamma(n))) * w + dequantizing).T
    if isinstance(a, Blocks) and n % a.size == 0:
        most = x.reshape(*x.shape[:-1], n // a.size, a.size).max(-1, initial=0).repeat(a.size, -1)
        out += (a.share * most * (1 + 4 * U)) @ (w * (1 + gamma(n + extra)) + dequantizing).T
        terms = dequantizing / (3 * U) * np.ones_like(w)  # a scale's and a minimum's sums are added apart
        out += gamma(n // a.size + 8) * most @ terms.T
    out += TINY * (x.sum(-1)[:, None] + w.sum(-1)[None] + n + 1)
    if x.max(initial=0) * w.max(initial=0) * n * 2 > LIMIT:
        out = np.where((x @ w.T) * 2 > LIMIT, np.inf, out)
    return out


# -- projections -------------------------------------------------------------------------------------------------------

DOT = "gamma_(n+2) Σ|x||w|: n products added in any order; 3 U |block| where a block is dequantized; a Σ|x||w| for rounded activations, or Σ_blocks max|x| Σ|w| / 254"


@rule("linear", why=DOT)
def _(j: Judged) -> Any:
    x, w = j["x"], j["weight"]
    rows = x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
    return _dot(rows, w, 2, j.a, j.dequantizing("weight")).reshape(*x.shape[:-1], w.shape[0])


@rule("expert_linear", why=DOT)
def _(j: Judged) -> Any:
    x, w, e, q = j["x"], j["weight"], j.call.args["experts"], j.dequantizing("weight")
    out = np.zeros(j.results[0].shape)
    for i in np.unique(e[e >= 0]):
        t, k = np.nonzero(e == i)
        out[t, k] = _dot(x[t], w[i], 2, j.a, q[i] if np.ndim(q) else 0.0)
    return out


@rule(
    "expert_combine",
    why="Σ_j |mix_j| (the bound of each projection) + gamma_(k+2) Σ_j |mix_j| Σ|h||w|: projections, then k sums",
)
def _(j: Judged) -> Any:
    h, w, e, mix, q = j["h"], j["weight"], j.call.args["experts"], np.abs(j["mix"]), j.dequantizing("weight")
    out = np.zeros(j.results[0].shape)
    for i in np.unique(e[e >= 0]):
        t, k = np.nonzero(e == i)
        total = np.abs(h[t, k]) @ np.abs(w[i]).T
        part = _dot(h[t, k], w[i], 2, j.a, q[i] if np.ndim(q) else 0.0) + gamma(e.shape[1] + 2) * total
        part = np.where(mix[t, k][:, None] * total * 2 > LIMIT, np.inf, part)
        np.add.at(out, t, mix[t, k][:, None] * part + TINY)
    return out


@rule("embed", why="plain types bit for bit; 3 U |block| where a block is dequantized")
def _(j: Judged) -> Any:
    q = j.dequantizing("table")
    return q[j.call.args["ids"]] if np.ndim(q) else np.zeros(j.results[0].shape)


# -- entry by entry ----------------------------------------------------------------------------------------------------


def _sigmoid(x: F64) -> tuple[F64, F64]:
    """The value, and the bound of e^-x (argument rounded: |x| U; 4 U for itself), of the sum and the quotient."""
    s = 1 / (1 + np.exp(-x))
    near = np.where(np.isfinite(x), np.abs(x), 0)
    return s, U * ((near + 4) * s * (1 - s) + 3 * s) + TINY


@rule("add", "mul", "scale_rows", why="one rounding; U |result|, and TINY where the device flushes")
def _(j: Judged) -> Any:
    args = [np.abs(np.nan_to_num(np.asarray(a, np.float64), posinf=0, neginf=0)) for a in j.call.args.values()]
    flush = TINY * (1 + args[0] + args[1]) if j.call.op.name != "add" else 3 * TINY
    return U * np.abs(np.nan_to_num(j.results[0].astype(np.float64), posinf=0, neginf=0)) + flush


@rule(
    "sigmoid",
    why="e^-x by its rounded argument, (|x| + 4) U, times the derivative s (1 - s); 3 U s for sum and quotient",
)
def _(j: Judged) -> Any:
    return _sigmoid(j["x"])[1]


@rule("silu", why="|y| times the bound of sigmoid, and 2 U |y s| for the scale and the product")
def _(j: Judged) -> Any:
    y = j["x"] * j.attr("scale")
    s, b = _sigmoid(y)
    return np.abs(y) * (b + U * (np.abs(y) * s * (1 - s) + 3 * s)) + TINY * (1 + np.abs(y))


@rule("softplus", why="(|x| U s(x): the argument rounded) + 6 U softplus(x): exp, log1p and a sum")
def _(j: Judged) -> Any:
    return _softplus(j["x"])


def _softplus(x: F64) -> Any:
    s = 1 / (1 + np.exp(-x))
    return U * ((np.abs(x) + 4) * s + 6 * np.logaddexp(0, x)) + TINY


@rule("clamp", why="chooses one of three numbers: exact, but for a flushed denormal and the rounding of the limits")
def _(j: Judged) -> Any:
    return U * np.abs(np.nan_to_num(j.results[0], posinf=0, neginf=0).astype(np.float64)) + TINY


@rule("swiglu", why="|up| times the bound of silu, and 2 U |result|")
def _(j: Judged) -> Any:
    limit = j.attr("limit")
    g, up = np.minimum(j["gate"], limit), np.clip(j["up"], -limit, limit)
    s, b = _sigmoid(g)
    return np.abs(up * g) * (b + 3 * U * s) + TINY * (1 + np.abs(g)) * (1 + np.abs(up))


@rule("hc_read", why="mean over streams of |normed| times the bound of sigmoid, and gamma_(streams+3) of the terms")
def _(j: Judged) -> Any:
    x = np.abs(j["normed"])
    s, b = _sigmoid(j["gate"].reshape(x.shape))
    n = max(x.shape[1], 1)
    return np.sum(x * (b + gamma(n + 3) * s) + TINY * (1 + x), axis=1) / n + TINY


@rule("hc_write", why="2 |y| times the bound of sigmoid at inject / streams; 2 U of residual and of the term added")
def _(j: Judged) -> Any:
    y, inject = np.abs(j["y"])[:, None], j["inject"]
    s, b = (v[..., None] for v in _sigmoid(inject / max(inject.shape[1], 1)))
    return (
        2 * y * (b + U * (np.abs(inject)[..., None] * s * (1 - s) + 4 * s))
        + 2 * U * np.abs(j["residual"])
        + TINY * (2 + y)
    )


@rule(
    "ple_gate",
    why="the gate at u ± gamma_(n+3) Σ|key query|/sqrt(n), as the gate is monotonic but steep (not continuous) near 0; 6 U",
)
def _(j: Judged) -> Any:
    key, query, value = j["key"], j["query"], j["value"]
    n = max(key.shape[-1], 1)
    u = np.sum(key * query, -1) / np.sqrt(n)
    total = np.sum(np.abs(key * query), -1)
    slack = gamma(n + 3) * total / np.sqrt(n) + TINY * n * (total > 0)

    def gate(x: F64) -> Any:
        return 1 / (1 + np.exp(-np.sign(x) * np.sqrt(np.maximum(np.abs(x), 1e-6))))

    g = gate(u)
    wide = np.maximum(np.abs(gate(u + slack) - g), np.abs(gate(u - slack) - g))
    wide = np.where(total * 2 > LIMIT, np.inf, wide)
    root = np.sqrt(np.maximum(np.abs(u), 1e-6))
    return (wide + U * (6 + root) * g)[..., None] * np.abs(value)[:, None] + TINY * (1 + np.abs(value)[:, None])


@rule("gdn_decay", why="|rate| times the bound of softplus at the rounded sum a + bias, and 2 U |result|")
def _(j: Judged) -> Any:
    z, rate = j["a"] + j["bias"], np.abs(j["rate"])
    s = 1 / (1 + np.exp(-z))
    return rate * (_softplus(z) + U * (np.abs(z) * s + 2 * np.logaddexp(0, z))) + TINY * (1 + rate)


@rule(
    "rope",
    why="4 U (|a| + |b|): cosine, sine, two products and a sum; the angle is float64. Dims that pass: bit for bit",
)
def _(j: Judged) -> Any:
    x, half, start = np.abs(j["x"]), len(j["freqs"]), j.attr("start")
    out = np.zeros(x.shape)
    if j.attr("interleaved"):
        first, second = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
    else:
        first, second = slice(start, start + half), slice(start + half, start + 2 * half)
    pair = 4 * U * (x[..., first] + x[..., second]) + TINY
    out[..., first] = out[..., second] = np.where(x[..., first] + x[..., second] > LIMIT, np.inf, pair)
    return out


# -- rows --------------------------------------------------------------------------------------------------------------


@rule(
    "softmax",
    why="p ((|x - m| + 4) U for its own exponent, the same weighted by p for the sum, gamma_n for adding, 2 U)",
)
def _(j: Judged) -> Any:
    x = j["x"]
    p = j.results[0].astype(np.float64)
    m = np.max(x, -1, keepdims=True, initial=-np.inf)
    far = np.where(np.isfinite(x) & np.isfinite(m), np.abs(x - m), 0)
    own = 2 * U * (far + 4)
    return p * (own + np.sum(np.where(np.isfinite(p), p, 0) * own, -1, keepdims=True) + gamma(x.shape[-1] + 2)) + TINY


@rule("normalize", why="|x| (1/(D - gamma_n Σ|x|) - 1/D) + 2 U |result|: a sum that cancels leaves nothing to promise")
def _(j: Judged) -> Any:
    x = j["x"]
    divisor = np.maximum(np.sum(x, -1, keepdims=True), j.attr("floor"))
    slack = gamma(x.shape[-1]) * np.sum(np.abs(x), -1, keepdims=True) + TINY * x.shape[-1] + U * np.abs(divisor)
    slack = np.where(np.sum(np.abs(x), -1, keepdims=True) == 0, 0, slack)
    size = np.abs(divisor)
    wide = np.where(size <= 2 * slack, np.where(slack == 0, 0, np.inf), 1 / (size - slack) - 1 / size)
    return np.abs(x) * wide + 2 * U * np.abs(x / np.where(divisor == 0, 1, divisor)) + TINY


ROOT = "|result| ((n/2 + 6) U: n squares added, root, quotient, products), more where squares leave float32"


def _root(x: F64, n: int, eps: float, mean: bool) -> F64:
    """Relative bound of x / sqrt(sum(x²)/n + eps), or without the mean."""
    squares = np.sum(x * x, -1, keepdims=True)
    inside = (squares / max(n, 1) if mean else squares) + eps
    rel = (n / 2 + 6) * U + np.where(inside > 0, TINY * (1 if mean else n) / np.where(inside > 0, inside, 1), 0)
    return np.where((rel > 0.25) | (squares > LIMIT) | (inside > LIMIT), np.inf, rel)


def _norm(j: Judged, x: F64, n: int, weight: F64 | float, mean: bool = True) -> F64:
    eps = j.attr("eps")
    r = np.sqrt(np.sum(x * x, -1, keepdims=True) / (max(n, 1) if mean else 1) + eps)
    y = np.abs(x / np.where(r == 0, 1, r) * weight)
    flush = TINY * (1 + np.abs(weight) / np.where(r == 0, 1, r) + np.abs(weight))
    out: F64 = _times(y, _root(x, n, eps, mean)) + flush
    return out


def _times(y: F64, rel: F64) -> F64:
    """y·rel, with infinity where the relative bound is, also at y = 0: nothing is promised there."""
    return np.where(np.isinf(rel), np.inf, y * rel)


@rule("rms_norm", why=ROOT)
def _(j: Judged) -> Any:
    x = j["x"]
    return _norm(j, x, x.shape[-1], 1.0 if j.call.args["weight"] is None else j["weight"])


@rule("group_rms_norm", why=ROOT)
def _(j: Judged) -> Any:
    x = j["x"]
    return _norm(j, x, x.shape[-1], j["weight"].reshape(x.shape[1:]))


@rule("l2_norm", why=ROOT)
def _(j: Judged) -> Any:
    x = j["x"]
    return _norm(j, x, x.shape[-1], 1.0, mean=False)


@rule("gated_rms_norm", why=ROOT + "; and the bound of the activation of the gate")
def _(j: Judged) -> Any:
    x, g, w = j["x"], j["gate"], j["weight"]
    s, b = _sigmoid(g)
    opened, slack = (s, b) if j.attr("activation") == "sigmoid" else (g * s, np.abs(g) * (b + 2 * U * s) + TINY)
    r = np.sqrt(np.sum(x * x, -1, keepdims=True) / max(x.shape[-1], 1) + j.attr("eps"))
    y = np.abs(x / np.where(r == 0, 1, r) * w)
    return np.abs(opened) * _norm(j, x, x.shape[-1], w) + y * slack + 2 * U * y * np.abs(opened) + TINY * (1 + y)


# -- sequences ---------------------------------------------------------------------------------------------------------


def _history(j: Judged, tail: str, rows: tuple[int, int], s: int) -> F64:
    a, b = rows
    before = np.asarray(j.call.args[tail][j.call.args["slots"][s]], np.float64)
    return np.concatenate([before, j["x"][a:b]])


@rule("causal_conv", why="gamma_(taps+1) Σ|w||x| over the taps. The tail moves bit for bit")
def _(j: Judged) -> Any:
    w, dilation = np.abs(j["weight"]), j.attr("dilation")
    out = np.zeros(j.results[0].shape)
    for s, (a, b) in enumerate(j.call.sequences):
        if a < b:
            past = np.abs(_history(j, "tail", (a, b), s))
            for i in range(w.shape[1]):
                out[a:b] += w[:, i] * past[i * dilation : i * dilation + b - a]
            out[a:b] = np.where(
                out[a:b] * 2 > LIMIT, np.inf, gamma(w.shape[1] + 1) * out[a:b] + TINY * (w.shape[1] + 1 + out[a:b])
            )
    return out


@rule("trailing_mean", why="gamma_(every+1) times the mean of |x|. The tail moves bit for bit")
def _(j: Judged) -> Any:
    every = j.attr("every")
    out = np.zeros(j.results[0].shape)
    for s, (a, b) in enumerate(j.call.sequences):
        if a < b:
            past = np.abs(_history(j, "tail", (a, b), s))
            for i in range(every):
                out[a:b] += past[i : i + b - a]
            out[a:b] = np.where(out[a:b] * 2 > LIMIT, np.inf, gamma(every + 1) * out[a:b] / every + TINY * (every + 1))
    return out


def _paged(j: Judged, name: str, s: int, entries: int) -> F64:
    cache, table = j.call.args[name], j.call.args["block_table"]
    at = np.arange(entries)
    return np.asarray(cache[table[s, at // cache.shape[1]], at % cache.shape[1]], np.float64)


@rule(
    "index_scores",
    why="|scale| gamma_(d+heads+4) Σ_h |w_h| Σ|q||k|: dot products, relu (which shrinks errors), a sum over heads",
)
def _(j: Judged) -> Any:
    q, every = np.abs(j["q"]), j.attr("every")
    weights = np.ones(q.shape[:2]) if j.call.args["weights"] is None else np.abs(j["weights"])
    out = np.zeros(j.results[0].shape)
    for s, (a, b) in enumerate(j.call.sequences):
        last = (int(j.call.args["past"][s]) + b - a) // every if a < b else 0
        if last:
            k = np.abs(_paged(j, "keys", s, last))
            total = np.einsum("th,thd,nd->tn", weights[a:b], q[a:b], k)
            bound = abs(j.attr("scale")) * (gamma(q.shape[2] + q.shape[1] + 4) + j.a) * total
            out[a:b, :last] = np.where(total * 2 > LIMIT, np.inf, bound + TINY * (q.shape[2] + 2) * q.shape[1])
    return out


@rule(
    "attention",
    why="Σ p|v| (e^ε - 1) twice, for numerator and denominator, with ε = gamma_(d+2) |scale| Σ|q||k| + 2 U |x - max| + 4 U; gamma_(2n+8) Σ p|v| for the sums and rescalings; never more than the spread of the values",
)
def _(j: Judged) -> Any:
    q, scale, every, block, window = j["q"], j.attr("scale"), j.attr("every"), j.attr("block"), j.attr("window")
    keys, picks = j.call.args["keys"], j.call.args["selected"]
    out, lse = np.zeros(j.results[0].shape), np.zeros(j.results[1].shape)
    kv, d = keys.shape[2], q.shape[2]
    for s, (a, b) in enumerate(j.call.sequences):
        past = int(j.call.args["past"][s])
        last = (past + b - a) // every if a < b else 0
        if not last:
            continue
        k, v = _paged(j, "keys", s, last), _paged(j, "values", s, last)
        for t in range(a, b):
            n = (past + t - a + 1) // every
            seen = np.arange(n) >= (n - window if window else 0)
            if picks is not None:
                seen &= np.isin(np.arange(n) // block, picks[t]) | (np.arange(n) >= n // block * block)
            at = np.flatnonzero(seen)
            if not len(at):
                continue
            qt = q[t].reshape(kv, -1, d)
            x = scale * np.einsum("hgd,nhd->hgn", qt, k[at])
            slack = (gamma(d + 2) + 2 * j.a) * abs(scale) * np.einsum(
                "hgd,nhd->hgn", np.abs(qt), np.abs(k[at])
            ) + TINY * d
            m = np.max(x, -1, keepdims=True)
            e = np.exp(x - m)
            z = np.sum(e, -1, keepdims=True)
            p, eps = e / z, slack + 2 * U * np.abs(x - m) + 4 * U
            size = np.abs(v[at])
            grow = np.minimum(np.expm1(eps), 1e30)
            mean = np.einsum("hgn,nhv->hgv", p, size)
            err = np.einsum("hgn,nhv->hgv", p * grow, size) + np.sum(p * grow, -1, keepdims=True) * mean
            err += gamma(2 * len(at) + 8) * mean + TINY * len(at) * (1 + size.max(0)[:, None])
            spread = 2 * size.max(0)[:, None] * (1 + 8 * U)
            huge = np.any(np.abs(x) * 2 > LIMIT, -1, keepdims=True)
            out[t] = np.where(huge, np.inf, np.minimum(err, spread)).reshape(out[t].shape)
            loose = np.sum(p * grow, -1) + gamma(len(at) + 6) + 4 * U * (np.abs(m[..., 0]) + np.abs(np.log(z[..., 0])))
            loose = np.minimum(
                loose, np.max(eps, -1) + gamma(len(at) + 6) + 4 * U * (np.abs(m[..., 0]) + np.log(len(at)))
            )
            lse[t] = np.where(huge[..., 0], np.inf, loose).reshape(lse[t].shape)
    return [out, lse]


@rule(
    "merge_attention",
    why="each weight e^(lse_i - lse) has 2 U |lse_i - m| + 6 U; numerator and denominator; gamma of the number of parts",
)
def _(j: Judged) -> Any:
    lses = [np.asarray(x, np.float64) for x in j.call.args["lses"]]
    sinks = j.call.args["sinks"]
    parts = lses + ([] if sinks is None else [np.broadcast_to(np.asarray(sinks, np.float64), lses[0].shape)])
    m = np.max(parts, axis=0)
    weights = [np.where(m == -np.inf, 0, np.exp(x - m)) for x in parts]
    z = np.sum(weights, axis=0)
    z = np.where(z == 0, 1, z)
    rel = [2 * U * np.where(np.isfinite(x - m), np.abs(x - m), 0) + 6 * U + gamma(len(parts) + 3) for x in parts]
    common = sum(w * r for w, r in zip(weights, rel, strict=True)) / z
    out = np.zeros(j.results[0].shape)
    for o, w, r, x in zip(j.call.args["outs"], weights, rel, lses, strict=False):
        size = np.where((x == -np.inf)[..., None], 0, np.abs(np.asarray(o, np.float64)))
        out += (w / z * (r + common))[..., None] * size + TINY * (1 + size)
    return [out, common + 4 * U * (np.abs(np.where(np.isfinite(m), m, 0)) + np.log(np.maximum(z, 1)) + 1)]


@rule(
    "gated_delta_rule",
    why="by columns of S in the 2-norm: the error of the state grows by e^decay max(1, |1 - beta |k|²|), plus 4 times what a row adds: rounding of the decay, of S^T k (gamma_(dk+1)), of d and of the sum",
)
def _(j: Judged) -> Any:
    q, k, v, decay, beta = (j[n] for n in ("q", "k", "v", "decay", "beta"))
    heads = np.arange(v.shape[1])
    pick = heads % k.shape[1] if j.attr("tiled") else heads // max(len(heads) // max(k.shape[1], 1), 1)
    dk, scale, keep = k.shape[2], abs(j.attr("scale")), j.call.args["keep"]
    out, states = np.zeros(v.shape), np.zeros(j.call.args["state"].shape)
    for i, (a, b) in enumerate(j.call.sequences):
        if a == b:
            continue
        slot = int(j.call.args["slots"][i])
        s = np.asarray(j.call.args["state"][slot], np.float64)
        e = np.zeros((len(heads), v.shape[2]))
        for t in range(a, b):
            key, query, f, g = k[t, pick], q[t, pick], np.exp(decay[t])[:, None], np.abs(beta[t])[:, None]
            kn, qn = (np.sqrt(np.sum(x * x, -1))[:, None] for x in (key, query))
            s = f[..., None] * s
            size = np.sqrt(np.sum(s * s, 1))
            d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, key))
            s = s + key[:, :, None] * d[:, None]
            rel = (5 + np.where(np.isfinite(decay[t]), np.abs(decay[t]), 0))[:, None] * U
            local = rel * size * (1 + g * kn**2)
            local += kn * g * (gamma(dk + 1) * size * kn + 3 * U * (np.abs(v[t]) + size * kn))
            local += 2 * U * (size + kn * np.abs(d)) + TINY * (dk + 2) * (1 + g * kn)
            grown = f * np.maximum(1, np.abs(1 - beta[t][:, None] * kn**2)) * e
            e = np.hypot(grown, local) if _typical.get() else grown + 4 * local
            after = np.sqrt(np.sum(s * s, 1))
            out[t] = scale * (e * qn + gamma(dk + 2) * (after + e) * qn) + TINY * (dk + 1)
            if keep is not None and keep[t] >= 0:
                states[keep[t]] = e[:, None]
            e = e + U * after
        states[slot] = e[:, None]
    return [out], {"state": states}


@rule(
    "chunk_wy",
    why="forward substitution with magnitudes: the error of earlier rows times E|k·k|, plus gamma_(dk+chunk+6) of every term",
)
def _(j: Judged) -> Any:
    k, v, decay, beta = (j[n] for n in ("k", "v", "decay", "beta"))
    pick = _pick(j, k, v)
    rw, ru = (np.asarray(r, np.float64) for r in j.results)
    bw, bu = np.zeros(rw.shape), np.zeros(ru.shape)
    size = j.attr("chunk")
    for a, b in j.call.sequences:
        for first in range(a, b, size):
            last = min(first + size, b)
            g = gamma(k.shape[2] + size + 6) * (1 + _farthest(decay[first:last]))
            for t in range(first, last):
                for h in range(v.shape[1]):
                    key = np.abs(k[t, pick[h]])
                    ew = np.exp(np.sum(decay[first : t + 1, h])) * key * g
                    eu = g * np.abs(v[t, h])
                    for i in range(first, t):
                        c = np.exp(np.sum(decay[i + 1 : t + 1, h])) * (key @ np.abs(k[i, pick[h]]))
                        ew = ew + c * (g * np.abs(rw[i, h]) + (1 + g) * bw[i, h])
                        eu = eu + c * (g * np.abs(ru[i, h]) + (1 + g) * bu[i, h])
                    bw[t, h], bu[t, h] = (
                        np.abs(beta[t, h]) * e + U * np.abs(r) + TINY for e, r in ((ew, rw[t, h]), (eu, ru[t, h]))
                    )
    return [bw, bu]


def _farthest(decay: F64) -> float:
    """The longest argument of an exponential in a chunk, whose rounding goes into the result."""
    finite = np.where(np.isfinite(decay), np.abs(decay), 0)
    return float(np.max(np.sum(finite, 0), initial=0))


def _pick(j: Judged, k: F64, v: F64) -> Any:
    heads = np.arange(v.shape[1])
    return heads % k.shape[1] if j.attr("tiled") else heads // max(len(heads) // max(k.shape[1], 1), 1)


@rule(
    "chunk_delta_scan",
    why="by columns in the 2-norm: d has the error of S times |w| and gamma_(dk+2) of its terms; S that of d times |k|, and gamma_(chunk+6) of the sum",
)
def _(j: Judged) -> Any:
    q, k, w, u, decay = (j[n] for n in ("q", "k", "w", "u", "decay"))
    pick, size, scale = _pick(j, k, u), j.attr("chunk"), abs(j.attr("scale"))
    keep, dk = j.call.args["keep"], k.shape[2]
    out, states = np.zeros(u.shape), np.zeros(j.call.args["state"].shape)

    def norm(x: F64) -> Any:
        return np.sqrt(np.sum(x * x, -1))

    for i, (a, b) in enumerate(j.call.sequences):
        if a == b:
            continue
        slot = int(j.call.args["slots"][i])
        s = np.asarray(j.call.args["state"][slot], np.float64)
        e = np.zeros((u.shape[1], u.shape[2]))
        for first in range(a, b, size):
            rows = range(first, min(first + size, b))
            g = gamma(dk + size + 6) * (1 + _farthest(decay[first : rows.stop]))
            sn = np.sqrt(np.sum(s * s, 1))
            key, d, ed = k[first : rows.stop][:, pick], [], []
            for t in rows:
                d.append(u[t] - np.einsum("hkv,hk->hv", s, w[t]))
                wn = norm(w[t])[:, None]
                ed.append(wn * e + g * (np.abs(u[t]) + wn * (sn + e)))
            for n, t in enumerate(rows):
                f = np.exp(np.cumsum(decay[first : t + 1][::-1], 0))[::-1]  # f[i]: from row i on
                now, err = f[0][:, None, None] * s, f[0][:, None] * (e + g * (sn + e))
                for m in range(n + 1):
                    fade = (f[m + 1] if m < n else np.ones(u.shape[1]))[:, None]
                    now = now + fade[..., None] * key[m][:, :, None] * d[m][:, None]
                    err = err + fade * norm(key[m])[:, None] * (ed[m] + g * np.abs(d[m]))
                err = err + TINY * (dk + 2)
                qn = norm(q[t, pick])[:, None]
                out[t] = scale * qn * (err + g * (np.sqrt(np.sum(now * now, 1)) + err)) + TINY * (dk + 1)
                if keep is not None and keep[t] >= 0:
                    states[keep[t]] = err[:, None]
            s, e = now, err + U * np.sqrt(np.sum(now * now, 1))
        states[slot] = e[:, None]
    return [out], {"state": states}


UNKNOWN = Rule(
    lambda j: [2.0**-14 * np.max(np.abs(np.nan_to_num(r, posinf=0, neginf=0)), initial=0) + TINY if r.dtype.kind == "f" else 0.0 for r in j.results],
    "an op that the kit has no rule for: 2^-14 of the largest result",
)  # fmt: skip
