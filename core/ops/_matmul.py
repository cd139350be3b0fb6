"""The matrix product of the reference, in which a row's bits never depend on the other rows. Knows NumPy only.

A BLAS `gemm` picks its kernel and its blocking by the number of rows, so the same row gets other bits in another batch.
Here each entry is one dot product of two contiguous vectors in float64: a function of its row and its weight row alone,
whatever the number of rows, their order and their padding. Equal rows of a weight give equal entries, so ties are ties.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import F64, wide

_ELEMENTS = 1 << 21
"""Weight elements converted at once: 16 MiB of float64."""
_ROWS = 64
"""Rows of x that pass over a weight row while they lie in the cache."""


def dots(x: F64, w: F64) -> F64:
    """`x[rows, n]`, `w[m, n]`, both contiguous -> float64 `[rows, m]`: each entry one dot product, x[r] · w[c]."""
    out = np.empty((len(x), len(w)))
    for a in range(0, len(x), _ROWS):
        out[a : a + _ROWS] = np.vecdot(w[:, None], x[None, a : a + _ROWS]).T
    return out


def product(x: Any, weight: Any) -> F64:
    """`x[rows, n]` through `weight[m, n]` (an array, or a Weight read a few rows at a time) -> float64 `[rows, m]`."""
    rows, (m, n) = wide(x), weight.shape
    out = np.zeros((len(rows), m))
    if 0 in (len(rows), m, n):
        return out
    step = max(1, _ELEMENTS // n)
    for a in range(0, m, step):
        out[:, a : a + step] = dots(rows, wide(weight[a : a + step]))
    return out
