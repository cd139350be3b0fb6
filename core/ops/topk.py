"""Choosing the largest: one rule for ties, NaN and -inf, held by every backend."""

from __future__ import annotations

import numpy as np

from trueup.core.op import op
from trueup.core.types import TensorType

from ._arrays import F32, Array


@op("scores[rows, candidates] -> values[rows, k], indices[rows, k]:i32")
def top_k(scores: F32, *, k: int) -> tuple[F32, Array]:
    """The k largest entries of each row, and where they stand in it, in this order:

    numbers, falling, ties (and -0 with 0) to the lower index; then NaN of either sign, lowest index first, value NaN;
    then, where fewer than k remain, fillers of value -inf and index -1. -inf is no candidate, so that masked entries
    are never chosen; every consumer skips the index -1. All other indices of a row are distinct and in [0,
    candidates).

    ValueError where k exceeds candidates. k = 0 and rows = 0 give empty results.
    """
    # Sorted rising and stably: numbers negated, then NaN, then -inf, in float64, where there is room between.
    rank = np.negative(scores, dtype=np.float64)
    rank = np.where(np.isnan(scores), 1e300, rank)
    order = np.argsort(rank, axis=-1, kind="stable")[:, :k]
    values = np.take_along_axis(scores, order, axis=-1)
    return values, np.where(values == -np.inf, -1, order).astype(np.int32)


@top_k.requires
def _(scores: TensorType, *, k: int) -> bool | str:
    return k <= scores.shape[1] or f"k is {k}, which exceeds the {scores.shape[1]} candidates"


@op("scores[rows, candidates] -> indices[rows]:i32")
def argmax(scores: F32) -> Array:
    """The lowest index of the largest entry of each row; in a row with NaN, of either sign, the index of the first NaN.

    So whoever reads scores[row, index] sees the NaN, which sampling refuses. A row of -inf alone gives 0. ValueError
    where there are no candidates.
    """
    found: Array = np.argmax(scores, axis=-1).astype(np.int32)
    return found


@argmax.requires
def _(scores: TensorType) -> bool | str:
    return scores.shape[1] > 0 or f"{scores.shape[0]} rows of 0 candidates"
