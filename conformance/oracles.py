"""Oracles of another author than the ops' bodies: the formulas of the papers, written out plainly, in 80-bit floats.

By them the reference itself is judged, which can't be judged by its own bodies, and drifts are measured. Slow and simple on
purpose: rows one by one where that is how the formula reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .build import Call

Array = NDArray[Any]
Oracle = Callable[[Call, "Values"], Any]

ORACLES: dict[str, Oracle] = {}
"""By op: results, or (results, states)."""

L: Any = np.longdouble


class Values:
    """A call's arguments as the formulas want them."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __getattr__(self, name: str) -> Any:
        """An argument in long double (integers as they are), or an attribute."""
        if name in self.call.attrs:
            return self.call.attrs[name]
        a = self.call.args[name]
        if a is None or isinstance(a, tuple):
            return a
        a = np.asarray(a)
        return a if a.dtype.kind in "iu" else a.astype(L)


def oracle(f: Oracle) -> Oracle:
    ORACLES[f.__name__.rstrip("_")] = f
    return f


def expected(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Results and written states by the op's oracle, or by its body where it has none."""
    if call.op.name not in ORACLES:
        return call.reference()
    with np.errstate(all="ignore"):
        given = ORACLES[call.op.name](call, Values(call))
        results, states = given if isinstance(given, tuple) and isinstance(given[1], dict) else (given, {})
        results = results if isinstance(results, list) else [results]
        types = call.types()
        out = tuple(np.asarray(r).astype(t.element.numpy).reshape(t.shape) for r, t in zip(results, types, strict=True))
        return out, {k: np.asarray(v).astype(call.args[k].dtype) for k, v in states.items()}


# -- entry by entry ----------------------------------------------------------------------------------------------------


def _logistic(x: Any) -> Any:
    """By tanh, which neither overflows nor cancels: (1 + tanh(x/2)) / 2, or e^x / (1 + e^x) far below 0."""
    return np.where(x < -30, np.exp(np.minimum(x, 0)) / (1 + np.exp(np.minimum(x, 0))), (1 + np.tanh(x / 2)) / 2)


@oracle
def sigmoid(c: Call, v: Values) -> Any:
    return _logistic(v.x)


@oracle
def silu(c: Call, v: Values) -> Any:
    return v.x * v.scale * _logistic(v.x * v.scale)


@oracle
def softplus(c: Call, v: Values) -> Any:
    return np.where(v.x == np.inf, np.inf, np.maximum(v.x, 0) + np.log1p(np.exp(-np.abs(v.x))))


@oracle
def add(c: Call, v: Values) -> Any:
    return v.a + v.b


@oracle
def mul(c: Call, v: Values) -> Any:
    return v.a * v.b


@oracle
def scale_rows(c: Call, v: Values) -> Any:
    return np.array([[x * s[0] for x in row] for row, s in zip(v.x, v.scale, strict=True)], L).reshape(v.x.shape)


@oracle
def clamp(c: Call, v: Values) -> Any:
    return np.where(np.isnan(v.x), v.x, np.where(v.x < v.low, v.low, np.where(v.x > v.high, v.high, v.x)))


@oracle
def swiglu(c: Call, v: Values) -> Any:
    gate = np.where(v.gate > v.limit, v.limit, v.gate)
    up = np.where(v.up > v.limit, v.limit, np.where(v.up < -v.limit, -v.limit, v.up))
    return gate * _logistic(gate) * up


@oracle
def concat(c: Call, v: Values) -> Any:
    a, b = c.args["a"], c.args["b"]
    out = np.zeros((*a.shape[:-1], a.shape[-1] + b.shape[-1]), np.float32)
    for i in range(out.shape[-1]):
        out[..., i] = a[..., i] if i < a.shape[-1] else b[..., i - a.shape[-1]]
    return out


@oracle
def gdn_decay(c: Call, v: Values) -> Any:
    z = v.a + v.bias
    return v.rate * np.where(z == np.inf, np.inf, np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))


@oracle
def hc_read(c: Call, v: Values) -> Any:
    rows, streams, n = v.normed.shape
    parts = [_logistic(v.gate[:, s * n : (s + 1) * n]) * v.normed[:, s] for s in range(streams)]
    return sum(parts, np.zeros((rows, n), L)) / max(streams, 1)


@oracle
def hc_write(c: Call, v: Values) -> Any:
    out = np.array(v.residual)
    for s in range(out.shape[1]):
        out[:, s] += 2 * _logistic(v.inject[:, s] / out.shape[1])[:, None] * v.y
    return out


@oracle
def ple_gate(c: Call, v: Values) -> Any:
    out = np.zeros(v.key.shape, L)
    for s in range(v.key.shape[1]):
        u = (v.key[:, s] * v.query[:, s]).sum(-1) / np.sqrt(L(max(v.key.shape[2], 1)))
        root = np.sqrt(np.maximum(np.abs(u), L(1e-6)))
        out[:, s] = _logistic(np.where(u > 0, root, np.where(u < 0, -root, u)))[:, None] * v.value
    return out


@oracle
def rope(c: Call, v: Values) -> Any:
    """As a product of complex numbers."""
    out, half = np.array(v.x), len(v.freqs)
    for i in range(half):
        a, b = (v.start + 2 * i, v.start + 2 * i + 1) if v.interleaved else (v.start + i, v.start + half + i)
        angle = v.positions[:, v.component[i]].astype(L) * v.freqs[i]
        turn = np.cos(angle)[:, None], (-1 if v.inverse else 1) * np.sin(angle)[:, None]
        x, y = v.x[..., a], v.x[..., b]
        out[..., a], out[..., b] = x * turn[0] - y * turn[1], x * turn[1] + y * turn[0]
    return out


# -- rows --------------------------------------------------------------------------------------------------------------


@oracle
def softmax(c: Call, v: Values) -> Any:
    """By the logarithm of the sum."""
    if not v.x.shape[-1]:
        return v.x
    m = v.x.max(-1, keepdims=True)
    lse = m + np.log(np.exp(v.x - m).sum(-1, keepdims=True))
    return np.where(m == -np.inf, 0, np.exp(v.x - lse))


@oracle
def normalize(c: Call, v: Values) -> Any:
    total = v.x.astype(np.float64).sum(-1, keepdims=True)  # as the op says, so that a sum of nothing is nothing
    divisor = np.where(total < v.floor, v.floor, total)
    return np.where(divisor == 0, 0, v.x / divisor)


def _normed(x: Any, eps: float, n: int) -> Any:
    return x * (np.sqrt((x * x).sum(-1, keepdims=True) / max(n, 1) + L(eps)) ** -1)


@oracle
def rms_norm(c: Call, v: Values) -> Any:
    return _normed(v.x, v.eps, v.x.shape[-1]) * (1 if v.weight is None else v.weight)


@oracle
def group_rms_norm(c: Call, v: Values) -> Any:
    n = v.x.shape[2]
    parts = [_normed(v.x[:, g], v.eps, n) * v.weight[g * n : (g + 1) * n] for g in range(v.x.shape[1])]
    return np.stack(parts, 1) if parts else v.x


@oracle
def gated_rms_norm(c: Call, v: Values) -> Any:
    opened = _logistic(v.gate) * (v.gate if v.activation == "silu" else 1)
    return _normed(v.x, v.eps, v.x.shape[-1]) * v.weight * opened


@oracle
def l2_norm(c: Call, v: Values) -> Any:
    return _normed(v.x, v.eps, 1)


@oracle
def argmax(c: Call, v: Values) -> Any:
    out = []
    for row in c.args["scores"].tolist():
        nan = [i for i, x in enumerate(row) if x != x]
        out.append(nan[0] if nan else row.index(max(row)))
    return np.array(out)


# -- projections and rows by index -------------------------------------------------------------------------------------


@oracle
def linear(c: Call, v: Values) -> Any:
    rows, (m, n) = v.x.reshape(-1, v.x.shape[-1]) if v.x.size else v.x, v.weight.shape
    if not v.x.size:
        return np.zeros((*v.x.shape[:-1], m))
    return sum((rows[:, i, None] * v.weight[:, i] for i in range(n)), np.zeros((len(rows), m), L))


def _by_expert(c: Call) -> Iterator[tuple[Any, Any, Any]]:
    """Each expert's matrix, and the rows and places that chose it."""
    e = c.args["experts"]
    for i in range(c.args["weight"].shape[0]):
        rows, places = np.nonzero(e == i)
        if len(rows):
            yield c.args["weight"][i].astype(L), rows, places


@oracle
def expert_linear(c: Call, v: Values) -> Any:
    out = np.zeros((*v.experts.shape, c.args["weight"].shape[1]), L)
    for w, rows, places in _by_expert(c):
        for i, column in enumerate(w.T):
            out[rows, places] += v.x[rows, i, None] * column
    return out


@oracle
def expert_combine(c: Call, v: Values) -> Any:
    out = np.zeros((len(v.h), c.args["weight"].shape[1]), L)
    for w, rows, places in _by_expert(c):
        for i, column in enumerate(w.T):
            np.add.at(out, rows, (v.mix[rows, places] * v.h[rows, places, i])[:, None] * column)
    return out


@oracle
def embed(c: Call, v: Values) -> Any:
    out = [np.asarray(c.args["table"])[i] for i in c.args["ids"].reshape(-1).tolist()]
    return np.array(out, np.float32) if out else np.zeros(0, np.float32)


@oracle
def take_rows(c: Call, v: Values) -> Any:
    x = c.args["x"]
    rows = [x[i] if i >= 0 else np.zeros(x.shape[1:], x.dtype) for i in c.args["at"].tolist()]
    return np.array(rows, x.dtype)


@oracle
def repeat_streams(c: Call, v: Values) -> Any:
    return np.array([[row for _ in range(v.streams)] for row in c.args["x"]], np.float32)


# -- sequences ---------------------------------------------------------------------------------------------------------


def _sequences(c: Call) -> Iterator[tuple[int, int, int]]:
    """Number, first row and last of each sequence that has rows."""
    for s, (a, b) in enumerate(c.sequences):
        if a < b:
            yield s, a, b


def _tails(c: Call, x: Array, name: str = "tail") -> tuple[dict[int, list[Array]], Array]:
    """Per sequence its rows with the tail before them, and the state with every tail that the step leaves."""
    state, keep = c.args[name].copy(), c.args["keep"]
    size, found = state.shape[1], {}
    for s, a, b in _sequences(c):
        slot = int(c.args["slots"][s])
        found[s] = [*c.args[name][slot], *x[a:b]]
        for t in range(a, b):
            tail = np.array(found[s][t - a + 1 : t - a + 1 + size], state.dtype).reshape(state.shape[1:])
            if keep is not None and keep[t] >= 0:
                state[keep[t]] = tail
            if t == b - 1:
                state[slot] = tail
    return found, state


@oracle
def causal_conv(c: Call, v: Values) -> Any:
    rows, state = _tails(c, c.args["x"])
    out, taps = np.zeros(v.x.shape, L), v.weight.shape[1]
    for s, a, b in _sequences(c):
        for t in range(a, b):
            out[t] = sum(v.weight[:, j] * rows[s][t - a + j * v.dilation].astype(L) for j in range(taps))
    return [out], {"tail": state}


@oracle
def trailing_mean(c: Call, v: Values) -> Any:
    rows, state = _tails(c, c.args["x"])
    out = np.zeros(v.x.shape, L)
    for s, a, b in _sequences(c):
        for t in range(a, b):
            out[t] = np.mean([r.astype(L) for r in rows[s][t - a : t - a + v.every]], axis=0)
    return [out], {"tail": state}


@oracle
def delay(c: Call, v: Values) -> Any:
    rows, state = _tails(c, c.args["x"])
    out = np.zeros(c.args["x"].shape, c.args["x"].dtype)
    for s, a, b in _sequences(c):
        for t in range(a, b):
            out[t] = rows[s][t - a]
    return [out], {"tail": state}


@oracle
def ngram_rows(c: Call, v: Values) -> Any:
    """In Python's integers, wrapped to 64 bits by hand."""
    ids, state = _tails(c, c.args["ids"], "context")
    n, out = len(v.multipliers), np.zeros((len(v.ids), len(v.sizes)), np.int64)
    per = len(v.sizes) // max(n - 1, 1)
    for s, a, b in _sequences(c):
        for t in range(a, b):
            past = [int(ids[s][t - a + n - 1 - back]) for back in range(n)]
            for back in range(1, n):
                if past[back] == v.eos:
                    past[back:] = [v.eos] * (n - back)
                    break
            mixed = 0
            for m in range(n):
                mixed ^= past[m] * int(v.multipliers[m]) & (1 << 64) - 1
                signed = mixed - (1 << 64) if mixed >> 63 else mixed
                for h in range(per if m else 0):
                    i = (m - 1) * per + h
                    out[t, i] = signed % int(v.sizes[i]) + int(v.offsets[i])
    return [out], {"context": state}


def _entry(c: Call, name: str, s: int, e: int) -> Array:
    cache = c.args[name]
    found: Array = cache[c.args["block_table"][s, e // cache.shape[1]], e % cache.shape[1]]
    return found


@oracle
def paged_append(c: Call, v: Values) -> Any:
    cache = c.args["cache"].copy()
    for s, a, b in _sequences(c):
        for t in range(a, b):
            p = int(v.past[s]) + t - a
            if (p + 1) % v.every == 0:
                e = p // v.every
                cache[v.block_table[s, e // cache.shape[1]], e % cache.shape[1]] = c.args["rows"][t]
    return [], {"cache": cache}


@oracle
def index_scores(c: Call, v: Values) -> Any:
    out = np.full((len(v.q), v.block_table.shape[1] * c.args["keys"].shape[1]), -np.inf, L)
    for s, a, b in _sequences(c):
        for t in range(a, b):
            for e in range((int(v.past[s]) + t - a + 1) // v.every):
                dots = (v.q[t] * _entry(c, "keys", s, e).astype(L)).sum(-1)
                relu = np.where(dots < 0, 0, dots)
                out[t, e] = v.scale * (relu if v.weights is None else relu * v.weights[t]).sum()
    return out


@oracle
def attention(c: Call, v: Values) -> Any:
    """A query at a time, over the entries that it sees."""
    kv = c.args["keys"].shape[2]
    out, lse = np.zeros((*v.q.shape[:2], c.args["values"].shape[3]), L), np.zeros(v.q.shape[:2], L)
    for s, a, b in _sequences(c):
        for t in range(a, b):
            n = (int(v.past[s]) + t - a + 1) // v.every
            seen = list(range(max(0, n - v.window) if v.window else 0, n))
            if v.selected is not None:
                seen = [e for e in seen if e // v.block in v.selected[t] or e >= n // v.block * v.block]
            for h in range(v.q.shape[1]):
                g = h * kv // v.q.shape[1]
                x = np.array([v.scale * (v.q[t, h] * _entry(c, "keys", s, e)[g].astype(L)).sum() for e in seen], L)
                m = x.max() if len(x) else -np.inf
                if m == -np.inf:
                    lse[t, h] = -np.inf
                    continue
                w = np.exp(x - m)
                lse[t, h] = m + np.log(w.sum())
                values = np.array([_entry(c, "values", s, e)[g].astype(L) for e in seen])
                out[t, h] = (w[:, None] * values).sum(0) / w.sum()
    return [out, lse]


@oracle
def merge_attention(c: Call, v: Values) -> Any:
    outs, lses = ([np.asarray(x).astype(L) for x in given] for given in (v.outs, v.lses))
    sinks = None if v.sinks is None else np.broadcast_to(v.sinks, lses[0].shape)
    out, total = np.zeros(outs[0].shape, L), np.zeros(lses[0].shape, L)
    for at in np.ndindex(*lses[0].shape):
        logits = [x[at] for x in lses] + ([] if sinks is None else [sinks[at]])
        m = max(logits, key=lambda x: (x != x, x))
        if m == -np.inf:
            total[at] = -np.inf
            continue
        z = sum(np.exp(x - m) for x in logits)
        total[at] = m + np.log(z)
        for o, x in zip(outs, lses, strict=True):
            if x[at] != -np.inf:
                out[at] += np.exp(x[at] - m) / z * o[at]
    return [out, total]


@oracle
def gated_delta_rule(c: Call, v: Values) -> Any:
    return delta_rule(c, rounded=True)


def delta_rule(call: Call, *, rounded: bool) -> tuple[list[Array], dict[str, Array]]:
    """S_t = S_(t-1) a (I - b k k^T) + b v k^T, S as [dv, dk] (arXiv 2412.06464, eq. 10); out = scale S q.

    `rounded`: S is float32 between rows, as the op defines; else it is never rounded.
    """
    x = Values(call)
    q, k, v, decay, beta = x.q, x.k, x.v, x.decay, x.beta
    state, keep = np.array(x.state), call.args["keep"]
    out = np.zeros(v.shape, L)
    with np.errstate(all="ignore"):
        for s, a, b in _sequences(call):
            slot = int(call.args["slots"][s])
            for h in range(v.shape[1]):
                g = h % q.shape[1] if x.tiled else h * q.shape[1] // v.shape[1]
                S = state[slot, h].T
                for t in range(a, b):
                    key, bt = k[t, g], beta[t, h]
                    S = np.exp(decay[t, h]) * S
                    S = S - bt * np.outer((S * key).sum(-1), key) + bt * np.outer(v[t, h], key)
                    S = S.astype(np.float32).astype(L) if rounded else S
                    out[t, h] = x.scale * (S * q[t, g]).sum(-1)
                    if keep is not None and keep[t] >= 0:
                        state[keep[t], h] = S.T
                state[slot, h] = S.T
        return [out], {"state": state.astype(np.float32)}


def _chunks(c: Call, size: int) -> Iterator[tuple[int, range]]:
    for s, a, b in _sequences(c):
        for first in range(a, b, size):
            yield s, range(first, min(first + size, b))


def _fade(decay: Any, i: int, t: int) -> Any:
    """e^(decay of rows i … t)."""
    return np.exp(decay[i : t + 1].sum()) if i <= t else L(1)


@oracle
def chunk_wy(c: Call, v: Values) -> Any:
    """By solving the triangular system (1 + A) w = …, row by row."""
    heads = v.v.shape[1]
    w, u = np.zeros((len(v.v), heads, v.k.shape[2]), L), np.zeros(v.v.shape, L)
    for _, rows in _chunks(c, v.chunk):
        for h in range(heads):
            g = h % v.k.shape[1] if v.tiled else h * v.k.shape[1] // heads
            for t in rows:
                w[t, h], u[t, h] = _fade(v.decay[:, h], rows[0], t) * v.k[t, g], v.v[t, h]
                for i in range(rows[0], t):
                    near = _fade(v.decay[:, h], i + 1, t) * (v.k[t, g] * v.k[i, g]).sum()
                    w[t, h], u[t, h] = w[t, h] - near * w[i, h], u[t, h] - near * u[i, h]
                w[t, h], u[t, h] = v.beta[t, h] * w[t, h], v.beta[t, h] * u[t, h]
    return [w, u]
