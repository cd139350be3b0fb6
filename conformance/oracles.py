"""Oracles of another author than the ops' bodies: the formulas of the papers, plainly, in float64.

By them the reference itself is judged, and drifts are measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .build import Call

Array = NDArray[Any]


def expected(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call.reference()


def delta_rule(call: Call, *, rounded: bool) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """S_t = S_(t-1) a (I - b k k^T) + b v k^T, S as [dv, dk] (arXiv 2412.06464, eq. 10); out = scale S q.

    `rounded`: S is float32 between rows, as the op defines; else float64 throughout.
    """
    q, k, v, decay, beta = (np.asarray(call.args[n], np.float64) for n in ("q", "k", "v", "decay", "beta"))
    state, keep = np.array(call.args["state"], np.float64), call.args["keep"]
    out = np.zeros(v.shape)
    kheads, heads = q.shape[1], v.shape[1]
    with np.errstate(all="ignore"):
        for s, (a, b) in enumerate(call.sequences):
            slot = int(call.args["slots"][s])
            for h in range(heads if a < b else 0):
                g = h % kheads if call.attrs["tiled"] else h * kheads // heads
                S = state[slot, h].T
                for t in range(a, b):
                    key, bt = k[t, g], beta[t, h]
                    S = np.exp(decay[t, h]) * S
                    S = S - bt * np.outer(S @ key, key) + bt * np.outer(v[t, h], key)
                    S = S.astype(np.float32).astype(np.float64) if rounded else S
                    out[t, h] = call.attrs["scale"] * (S @ q[t, g])
                    if keep is not None and keep[t] >= 0:
                        state[keep[t], h] = S.T
                state[slot, h] = S.T
        return (out.astype(np.float32),), {"state": state.astype(np.float32)}
