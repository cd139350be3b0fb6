"""The indexer of sparse attention: scores by which blocks or entries are chosen."""

from __future__ import annotations

import numpy as np

from trueup.core.op import Cost, op
from trueup.core.types import TensorType

from ._arrays import F32, Array, narrow, wide
from ._matmul import dots
from ._sequences import check_pages, gather, length, spans


@op(
    "q[tokens, heads, d], keys[pages, entries, d], cu_seqlens[seqs+1]:i32, past[seqs]:i32, "
    "block_table[seqs, blocks]:i32, weights?[tokens, heads] -> scores[tokens, blocks*entries]"
)
@np.errstate(all="ignore")
def index_scores(
    q: F32,
    keys: F32,
    cu_seqlens: Array,
    past: Array,
    block_table: Array,
    weights: F32 | None = None,
    *,
    every: int,
    scale: float,
) -> F32:
    """scale · sum_h w_h relu(q_h · key) of each entry of the query's sequence that is complete, and -inf of all others.

    The query at position p (past[s] for the first row of sequence s) sees the (p+1) // every entries of `every`
    tokens that end at or before it, by rank in its sequence, whatever positions they were rotated by. w_h is
    weights[token, h], 1 without weights; it may be negative. Entries of equal keys score exactly alike, so ties are
    left to top_k's rule. Entries not seen are not read and padding rows are all -inf, so that none of them is a
    candidate of top_k.

    NaN in a query or a key that it sees gives NaN at that score. Dot products and sum over heads, in their order, in
    float64, rounded once. ValueError for a page that the table lacks. Source: DeepSeek's lightning indexer
    (DeepSeek-V3.2, V4: with weights) and Qwen4-Exp's QSA in transformers (without).
    """
    out = np.full((len(q), block_table.shape[1] * keys.shape[1]), -np.inf, np.float32)
    for s, rows in spans(cu_seqlens, len(q)):
        last = length(past, s, rows)
        k = wide(gather(keys, block_table, s, last // every))
        total = np.zeros((rows.stop - rows.start, len(k)))
        for h in range(q.shape[1]):
            score = np.maximum(dots(wide(q[rows, h]), k), 0)
            total += score if weights is None else score * wide(weights[rows, h, None])
        scores = narrow(scale * total)
        for t in range(rows.start, rows.stop):
            n = (last - rows.stop + t + 1) // every
            out[t, :n] = scores[t - rows.start, :n]
    return out


@index_scores.requires
def _(
    q: TensorType, keys: TensorType, cu_seqlens: TensorType, past: TensorType, block_table: TensorType,
    weights: TensorType | None, *, every: int, scale: float,
) -> bool | str:  # fmt: skip
    return every >= 1 or f"every must be at least 1, got {every}"


@index_scores.conditions
def _(
    q: Array, keys: Array, cu_seqlens: Array, past: Array, block_table: Array, weights: Array | None, *, every: int,
    scale: float,
) -> None:  # fmt: skip
    check_pages(cu_seqlens, past, block_table, keys, len(q), every=every, writes=False)


@index_scores.costs
def _(
    q: TensorType,
    keys: TensorType,
    cu_seqlens: TensorType,
    past: TensorType,
    block_table: TensorType,
    weights: TensorType | None,
    *,
    every: int,
    scale: float,
) -> Cost:
    """For sequences that fill their page tables."""
    (tokens, heads, d), (seqs, blocks) = q.shape, block_table.shape
    full = blocks * keys.shape[1]
    given = q.nbytes + (weights.nbytes if weights is not None else 0)
    return Cost(tokens * full * heads * (2 * d + 2), given + seqs * full * d * 4 + tokens * full * 4)
