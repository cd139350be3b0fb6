"""The indexer's scores, by which blocks or entries are chosen."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from trueup.backends.metal.steps import entries, length, spans
from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()

ELEMENTS = 1 << 22
"""Products that exist at once."""


@kernels.implements(ops.index_scores)
def index_scores(
    q: mx.array,
    keys: mx.array,
    cu_seqlens: mx.array,
    past: mx.array,
    block_table: mx.array,
    weights: mx.array | None,
    *,
    every: int,
    scale: float,
) -> mx.array:
    """Sums of products, not a matrix product: that may round entries of equal keys differently."""
    tokens, heads, d = q.shape
    total, parts, done = block_table.shape[1] * keys.shape[1], [], 0
    for s, a, b in spans(cu_seqlens, tokens):
        end = length(past, s, b - a)
        n = end // every
        k = entries(keys, block_table, s, 0, n)
        step = max(1, ELEMENTS // max(1, n * d))
        for first in range(a, b, step):
            last = min(first + step, b)
            score = mx.zeros((last - first, n))
            for h in range(heads):
                dots = mx.maximum((q[first:last, h, None] * k).sum(axis=-1), 0.0)
                score = score + (dots if weights is None else dots * weights[first:last, h, None])
            counts = np.arange(end - b + first + 1, end - b + last + 1) // every
            seen = mx.array(np.arange(n) < counts[:, None])
            score = mx.where(seen, scale * score, -mx.inf)
            parts.append(mx.concatenate([score, mx.full((last - first, total - n), -mx.inf)], axis=1))
        done = b
    parts.append(mx.full((tokens - done, total), -mx.inf))
    return mx.concatenate(parts)
