"""Mixture of experts: each row through the experts that its router chose (Shazeer et al., arXiv 1701.06538).

An expert of -1 is none: it contributes zeros, whatever stands beside it. Other ids below 0, or not below the number of
experts, are a ValueError. An expert that no row chose is not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.op import Cost, op
from trueup.core.types import TensorType

from ._arrays import F32, Array, narrow, wide
from ._matmul import product


@op("x[tokens, n], experts[tokens, k]:i32, weight[e, m, n]:weight -> out[tokens, k, m]")
@np.errstate(all="ignore")
def expert_linear(x: F32, experts: Array, weight: Any) -> F32:
    """Each row through each of its experts: out[t, j] = weight[experts[t, j]] x[t]; zeros where the expert is -1.

    Every entry is one dot product in float64, rounded once, as in linear. No tokens, no rows.
    """
    _check("expert_linear", experts, weight.shape[0])
    out = np.zeros((*experts.shape, weight.shape[1]), np.float32)
    for e in np.unique(experts[experts >= 0]):
        t, j = np.nonzero(experts == e)
        out[t, j] = narrow(product(x[t], weight[e]))
    return out


@op("h[tokens, k, m], experts[tokens, k]:i32, mix[tokens, k], weight[e, n, m]:weight -> out[tokens, n]")
@np.errstate(all="ignore")
def expert_combine(h: F32, experts: Array, mix: F32, weight: Any) -> F32:
    """The experts' hidden rows projected and summed: out[t] = sum_j mix[t, j] · weight[experts[t, j]] h[t, j].

    Summed in the order of j, in float64, rounded once. Where the expert is -1, h and mix are not read.
    """
    _check("expert_combine", experts, weight.shape[0])
    each = np.zeros((*experts.shape, weight.shape[1]))
    for e in np.unique(experts[experts >= 0]):
        t, j = np.nonzero(experts == e)
        each[t, j] = product(h[t, j], weight[e])
    out = np.zeros((len(h), weight.shape[1]))
    for i in range(experts.shape[1]):
        out += np.where(experts[:, i, None] < 0, 0, wide(mix[:, i, None]) * each[:, i])
    return narrow(out)


def _check(op: str, experts: Array, count: int) -> None:
    wrong = (experts < -1) | (experts >= count)
    if np.any(wrong):
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise ValueError(f"{op}: experts{list(at)} is {int(experts[at])}, of {count} experts")


@expert_linear.conditions
def _(x: Array, experts: Array, weight: Array) -> None:
    _check("expert_linear", experts, weight.shape[0])


@expert_combine.conditions
def _(h: Array, experts: Array, mix: Array, weight: Array) -> None:
    _check("expert_combine", experts, weight.shape[0])


@expert_linear.costs
def _(x: TensorType, experts: TensorType, weight: TensorType) -> Cost:
    tokens, k = experts.shape
    _, m, n = weight.shape
    return Cost(2 * tokens * k * m * n, x.nbytes + experts.nbytes + _chosen(experts, weight) + 4 * tokens * k * m)


@expert_combine.costs
def _(h: TensorType, experts: TensorType, mix: TensorType, weight: TensorType) -> Cost:
    tokens, k = experts.shape
    _, n, m = weight.shape
    given = h.nbytes + experts.nbytes + mix.nbytes + _chosen(experts, weight)
    return Cost(2 * tokens * k * n * (m + 1), given + 4 * tokens * n)


def _chosen(experts: TensorType, weight: TensorType) -> int:
    """Bytes of the experts read, at most one for each choice."""
    return min(experts.size, weight.shape[0]) * TensorType(weight.shape[1:], weight.dtype).nbytes
