"""The dense projection."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from trueup.core.op import Cost, op
from trueup.core.types import TensorType

from ._arrays import F32, narrow
from ._matmul import product


@op("x[..., n], weight[m, n]:weight -> out[..., m]")
@np.errstate(all="ignore")
def linear(x: F32, weight: Any) -> F32:
    """x W^T: out[..., c] = sum_i x[..., i] weight[c, i], over the weight's dequantized values.

    Each entry is one dot product in float64, rounded once, so a row's bits depend on no other row and on no batch
    size. NaN and infinities follow IEEE arithmetic and stay in their row (of x) or column (of a weight row). n = 0
    gives zeros.
    """
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return narrow(product(rows, weight)).reshape(*x.shape[:-1], weight.shape[0])


@linear.costs
def _(x: TensorType, weight: TensorType) -> Cost:
    rows, (m, n) = prod(x.shape[:-1]), weight.shape
    return Cost(2 * rows * m * n, x.nbytes + weight.nbytes + 4 * rows * m)
