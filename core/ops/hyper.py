"""Hyper-connections as in Qwen4-Exp: several residual streams, read into one row and written back.

After Zhu et al., arXiv 2409.19606. Evaluated in float64, rounded once; no entry looks beyond its own row.
"""

from __future__ import annotations

import numpy as np

from trueup.core.op import op

from ._arrays import F32, narrow, wide


@op("normed[rows, streams, n], gate[rows, streams*n] -> out[rows, n]")
@np.errstate(all="ignore")
def hc_read(normed: F32, gate: F32) -> F32:
    """The mean over streams of sigmoid(gate) · normed: gate[r, s*n + i] belongs to normed[r, s, i]."""
    rows, streams, n = normed.shape
    opened = wide(normed) / (1 + np.exp(-wide(gate).reshape(rows, streams, n)))
    total = np.zeros((rows, n))
    for s in range(streams):
        total += opened[:, s]
    return narrow(total / max(streams, 1))


@op("residual[rows, streams, n], y[rows, n], inject[rows, streams] -> out[rows, streams, n]")
@np.errstate(all="ignore")
def hc_write(residual: F32, y: F32, inject: F32) -> F32:
    """residual[r, s] + 2 sigmoid(inject[r, s] / streams) · y[r]; an inject of 0 adds y as it is."""
    gain = 2 / (1 + np.exp(-wide(inject) / max(inject.shape[1], 1)))
    return narrow(wide(residual) + gain[:, :, None] * wide(y)[:, None])
