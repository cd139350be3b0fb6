"""Comparators: dense results by bound, selections by value, moved values by bits. Each says how far off, and where.

Knows arrays and bounds; knows no op's meaning beyond the two selections, and no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Found:
    """A comparison: the largest error as a share of its bound (at most 1 is right), and what is wrong, if anything."""

    worst: float = 0.0
    wrong: str = ""

    def __bool__(self) -> bool:
        return not self.wrong


def merge(found: list[Found]) -> Found:
    """The worst of several; the first that is wrong speaks."""
    return Found(max((f.worst for f in found), default=0.0), next((f.wrong for f in found if f.wrong), ""))


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal bit for bit; NaN equals NaN of any payload and sign."""
    return bool(np.all(_equal(a, b))) if a.shape == b.shape and a.dtype == b.dtype else False


def _equal(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.asarray(a == b)
    bits = np.dtype(f"u{a.itemsize}")
    same = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    return np.asarray(same | (np.isnan(a) & np.isnan(b)))


def differences(a: Array, b: Array) -> str:
    """Where two arrays of one shape differ first, and in how many entries."""
    wrong = ~_equal(a, b)
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} entries, first at {list(at)}: {a[at]!s} and {b[at]!s}"


def bits(name: str, got: Array, want: Array) -> Found:
    """Equal bit for bit."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return Found(np.inf, f"{name} is {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}")
    if np.all(_equal(got, want)):
        return Found()
    return Found(np.inf, f"{name} differs bit for bit in {differences(got, want)} (got, expected)")


def dense(name: str, got: Array, want: Array, bound: Array | None) -> Found:
    """Within an absolute bound, entry by entry; NaN and infinities where the reference has them. None: bit for bit."""
    if bound is None:
        return bits(name, got, want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return bits(name, got, want)
    with np.errstate(all="ignore"):
        finite = np.isfinite(want)
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
        ratio = np.where(error == 0, 0, error / np.where(bound > 0, bound, 2.0**-1074))
        ratio = np.where(np.isnan(error) | np.isnan(ratio), np.inf, ratio)
        same_kind = np.where(np.isnan(want), np.isnan(got), got == want)
        ratio = np.where(finite, ratio, np.where(same_kind, 0, np.inf))
        ratio = np.where(np.isposinf(bound), 0, ratio)
    worst = float(ratio.max(initial=0.0))
    if worst <= 1:
        return Found(worst)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    wrong = int((ratio > 1).sum())
    return Found(
        worst,
        f"{name}{list(at)} is {got[at]!s}, expected {want[at]!s} ± {bound[at]:.3g}; {wrong} of {ratio.size} entries are off",
    )


def selection(scores: Array, values: Array, indices: Array, k: int) -> tuple[Found, Found]:
    """top_k judged by value, then by the rule for ties.

    By value: every index in range and none twice, each value the score at its index, the values as a row equal to the k
    largest; NaN only after all numbers; fillers (-inf, -1) only where too few remain. By order: ties to the lower
    index.
    """
    rank = np.where(np.isnan(scores), 1e300, -scores.astype(np.float64))
    order = np.argsort(rank, axis=-1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, -1)
    want = np.where(best == -np.inf, -1, order)
    if values.shape != best.shape or indices.shape != best.shape:
        return Found(
            np.inf, f"results are {list(values.shape)} and {list(indices.shape)}, expected {list(best.shape)}"
        ), Found()
    suspect = np.flatnonzero(
        np.any((indices != want) | ~_equal(values, best), -1)
    )  # all others are right as they stand
    for r in suspect:
        wrong = _row(scores[r], values[r], indices[r], best[r])
        if wrong:
            return Found(np.inf, f"row {r}: {wrong}"), Found()
    if np.array_equal(indices, want):
        return Found(), Found()
    at = np.argwhere(indices != want)[0]
    row, i = int(at[0]), int(at[1])
    return Found(), Found(
        np.inf,
        f"row {row}, place {i}: index {indices[row, i]}, expected {want[row, i]}: equal scores go to the lower index",
    )


def _row(scores: Array, values: Array, indices: Array, best: Array) -> str:
    chosen = indices[indices != -1]
    if np.any((chosen < 0) | (chosen >= len(scores))):
        return f"the index {chosen[(chosen < 0) | (chosen >= len(scores))][0]} is not in 0:{len(scores)}"
    if len(np.unique(chosen)) < len(chosen):
        return f"an index is chosen twice: {indices.tolist()}"
    with np.errstate(invalid="ignore"):
        equal = (values == best) | (np.isnan(values) & np.isnan(best))
    if not np.all(equal):
        i = int(np.argmin(equal))
        return f"place {i} has the value {values[i]!s}, expected {best[i]!s}"
    filler = values == -np.inf
    if np.any((indices == -1) != filler):
        i = int(np.argmax((indices == -1) != filler))
        return (
            f"place {i} has the value {values[i]!s} and the index {indices[i]}: fillers, and they alone, are (-inf, -1)"
        )
    picked = scores[np.where(filler, 0, indices)] if len(scores) else values
    with np.errstate(invalid="ignore"):
        right = filler | (picked == values) | (np.isnan(picked) & np.isnan(values))
    if not np.all(right):
        i = int(np.argmin(right))
        return f"place {i} has the value {values[i]!s}, but scores[{indices[i]}] is {picked[i]!s}"
    return ""
