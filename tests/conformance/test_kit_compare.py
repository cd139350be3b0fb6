"""Comparators, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueup.conformance.compare import bits, dense, selection

NAN, INF = np.nan, np.inf


def f32(*values: Any) -> Any:
    return np.array(values, np.float32)


def test_an_error_is_measured_by_its_bound() -> None:
    found = dense("out", f32(1.0, 2.5), f32(1.0, 2.0), np.array([0.1, 0.25]))
    assert found.worst == pytest.approx(2) and "out[1] is 2.5, expected 2.0 ± 0.25; 1 of 2" in found.wrong
    assert dense("out", f32(2.5), f32(2.0), np.array([0.5])).worst == 1


@pytest.mark.parametrize(
    ("got", "want", "right"),
    [(NAN, NAN, True), (1, NAN, False), (NAN, 1, False), (INF, INF, True), (INF, -INF, False), (3e38, INF, False)],
)
def test_what_is_not_finite_must_be_what_the_reference_has(got: float, want: float, right: bool) -> None:
    assert bool(dense("out", f32(got), f32(want), np.array([1e30]))) == right


def test_an_infinite_bound_promises_nothing_and_none_promises_bits() -> None:
    assert dense("out", f32(NAN), f32(3), np.array([INF]))
    assert not dense("out", f32(0.0), f32(-0.0), None)
    assert bits("out", f32(NAN), -f32(NAN))
    assert "f" in bits("out", f32(1), np.array([1.0])).wrong


def judged(scores: Any, values: Any, indices: Any) -> tuple[str, str]:
    v, i = f32(*values)[None], np.array([indices], np.int32)
    found, ties = selection(f32(*scores)[None], v, i, len(values))
    return found.wrong, ties.wrong


def test_a_selection_is_judged_by_value_then_by_ties() -> None:
    scores = (5, 7, 5, NAN, -INF)
    assert judged(scores, (7, 5, 5), (1, 0, 2)) == ("", "")
    assert judged(scores, (7, 5, 5), (1, 2, 0))[1].endswith("equal scores go to the lower index")
    assert judged(scores, (7, 5, 5, NAN, -INF), (1, 0, 2, 3, -1)) == ("", "")


@pytest.mark.parametrize(
    ("values", "indices", "said"),
    [
        ((7, 5), (1, 5), "not in 0:5"),
        ((7, 5, 5), (1, 0, 0), "twice"),
        ((7, 6), (1, 0), "expected 5.0"),
        ((7, 5), (1, 3), "scores[3] is nan"),
        ((7, 5, 5, NAN, -INF), (1, 0, 2, 3, 4), "fillers"),
        ((7, 5, 5, -INF, -INF), (1, 0, 2, -1, -1), "expected nan"),
    ],
)
def test_wrong_selections(values: Any, indices: Any, said: str) -> None:
    assert said in judged((5, 7, 5, NAN, -INF), values, indices)[0]


def test_zeros_of_both_signs_tie() -> None:
    assert judged((-0.0, 0.0), (-0.0, 0.0), (0, 1)) == ("", "")
    assert judged((-0.0, 0.0), (0.0, -0.0), (1, 0))[1] != ""
