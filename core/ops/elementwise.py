"""Ops in which no entry looks further than its row: activations, sums, products, softmax.

Evaluated in float64 and rounded once, in IEEE arithmetic: NaN stays NaN, and only in its own entry (softmax and
normalize: in its own row).
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from trueup.core.op import op

from ._arrays import F32, F64, narrow, wide


@op("x[...] -> out[...]")
@np.errstate(all="ignore")
def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x): 0 at -inf, 1 at inf."""
    return narrow(_sigmoid(wide(x)))


@op("x[...] -> out[...]")
@np.errstate(all="ignore")
def silu(x: F32, *, scale: float = 1.0) -> F32:
    """y / (1 + e^-y) for y = scale x (Elfwing et al., arXiv 1702.03118): inf at inf, NaN at -inf."""
    y = wide(x) * scale
    return narrow(y * _sigmoid(y))


@op("x[...] -> out[...]")
@np.errstate(all="ignore")
def softplus(x: F32) -> F32:
    """ln(1 + e^x), without overflow: 0 at -inf, x for large x."""
    return narrow(np.logaddexp(0, wide(x)))


@op("a[...], b[...] -> out[...]")
@np.errstate(all="ignore")
def add(a: F32, b: F32) -> F32:
    """a + b."""
    return np.add(a, b, order="C")


@op("a[...], b[...] -> out[...]")
@np.errstate(all="ignore")
def mul(a: F32, b: F32) -> F32:
    """a b."""
    return np.multiply(a, b, order="C")


@op("x[...] -> out[...]")
@np.errstate(all="ignore")
def clamp(x: F32, *, low: float = -inf, high: float = inf) -> F32:
    """min(max(x, low), high); NaN stays NaN."""
    return narrow(np.minimum(np.maximum(wide(x), low), high))


@op("gate[...], up[...] -> out[...]")
@np.errstate(all="ignore")
def swiglu(gate: F32, up: F32, *, limit: float = inf) -> F32:
    """silu(min(gate, limit)) · min(max(up, -limit), limit): the gate is clamped from above only, before silu.

    Without a limit it is silu(gate) · up (Shazeer, arXiv 2002.05202); the limit is DeepSeek-V4's.
    """
    g = np.minimum(wide(gate), limit)
    return narrow(g * _sigmoid(g) * np.minimum(np.maximum(wide(up), -limit), limit))


@swiglu.decompose
def _(gate: Any, up: Any, *, limit: float) -> Any:
    if limit == inf:
        return mul(silu(gate), up)
    return mul(silu(clamp(gate, high=limit)), clamp(up, low=-limit, high=limit))


@op("a[..., n], b[..., m] -> out[..., n+m]")
def concat(a: F32, b: F32) -> F32:
    """Side by side on the last axis: a's entries, then b's."""
    return np.concatenate([a, b], axis=-1)


@op("x[rows, n], scale[rows, 1] -> out[rows, n]")
@np.errstate(all="ignore")
def scale_rows(x: F32, scale: F32) -> F32:
    """Each row times its own number: out[r, i] = x[r, i] scale[r, 0]."""
    return np.multiply(x, scale, order="C")


@op("x[..., n] -> out[..., n]")
@np.errstate(all="ignore")
def softmax(x: F32) -> F32:
    """e^(x - m) / sum e^(x - m) over the last axis, m the largest entry.

    A row that is all -inf, having nothing to choose from, gives zeros. A NaN or +inf anywhere makes the whole row
    NaN. An axis of no entries stays empty.
    """
    y = wide(x)
    m = np.max(y, axis=-1, keepdims=True, initial=-inf)
    e = np.exp(y - m)
    return narrow(np.where(m == -inf, 0, e / np.sum(e, axis=-1, keepdims=True)))


@op("x[..., n] -> out[..., n]")
@np.errstate(all="ignore")
def normalize(x: F32, *, floor: float = 0.0) -> F32:
    """x / max(sum x, floor) over the last axis; a row whose divisor is 0 gives zeros. NaN makes its row NaN.

    Weights of chosen experts: `floor` is what keeps a sum of almost nothing from blowing up.
    """
    y = wide(x)
    divisor = np.maximum(np.sum(y, axis=-1, keepdims=True), floor)
    return narrow(np.where(divisor == 0, 0, y / divisor))


def _sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))
