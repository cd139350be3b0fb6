"""The one rule for ties, NaN and -inf, on tables and on adversarial rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trueup.core.errors import ArgumentError
from trueup.core.ops import argmax, top_k

pytestmark = pytest.mark.filterwarnings("error")

INF, NAN = np.inf, np.nan
F = np.float32
MINUS_NAN = np.uint32(0xFFC00000).view(F)
NASTY = st.sampled_from([F(v) for v in (NAN, INF, -INF, 0.0, -0.0, 1, 1, 2, -3, 3.4e38, -3.4e38, 1e-45)] + [MINUS_NAN])


def expected(row: np.ndarray, k: int) -> list[tuple[float, int]]:
    """The rule, word for word, with Python's sort: numbers, then NaN, then fillers."""
    numbers = sorted((-float(v), i) for i, v in enumerate(row) if not math.isnan(v) and v != -INF)
    nans = [(math.nan, i) for i, v in enumerate(row) if math.isnan(v)]
    return ([(-v, i) for v, i in numbers] + nans + [(-INF, -1)] * len(row))[:k]


def same(values: np.ndarray, indices: np.ndarray, want: list[tuple[float, int]]) -> bool:
    return indices.tolist() == [i for _, i in want] and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, (b, _) in zip(values.tolist(), want, strict=True)
    )


@pytest.mark.fault("B01")
def test_b01_top_1_of_three_rows() -> None:
    logits = F([[0, 1, 9, 8, 2], [7, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    values, indices = top_k(logits, k=1)
    assert indices.tolist() == [[2], [0], [4]] and values.tolist() == [[9], [7], [4]]
    assert argmax(logits).tolist() == [2, 0, 4]
    assert top_k(logits[:1], k=3)[1].tolist() == [[2, 3, 4]]  # what a call with rows and k swapped would give


@pytest.mark.fault("B01")
def test_b01_rows_and_k_cannot_be_swapped() -> None:
    logits = np.zeros((3, 5), F)
    with pytest.raises(ArgumentError, match="k by keyword only"):
        top_k(logits, 3)
    with pytest.raises(ArgumentError):
        top_k(logits, rows=3, k=1)


@pytest.mark.fault("B02")
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("k", [1, 2, 40, 70])
def test_b02_equal_values_go_to_the_lower_index(rows: int, k: int) -> None:
    values, indices = top_k(np.ones((rows, 70), F), k=k)
    assert indices.tolist() == [list(range(k))] * rows and (values == 1).all()


@pytest.mark.fault("B02")
def test_b02_ties_at_the_border() -> None:
    assert top_k(F([[5, 5, 5, 1]]), k=2)[1].tolist() == [[0, 1]]
    row = np.zeros(70, F)
    row[10:50] = 3
    row[60] = 4
    assert top_k(row[None], k=12)[1].tolist() == [[60, *range(10, 21)]]
    assert top_k(F([[-0.0, 0.0, -1]]), k=2)[1].tolist() == [[0, 1]]


@pytest.mark.fault("B03")
@pytest.mark.parametrize("k", [1023, 1024, 1025, 2048, 2051, 3000])
def test_b03_k_above_any_workgroup(k: int) -> None:
    x = np.random.default_rng(k).permutation(6000).reshape(2, 3000).astype(F)
    values, indices = top_k(x, k=k)
    for r in range(2):
        assert values[r].tolist() == sorted(x[r].tolist(), reverse=True)[:k]
        assert np.array_equal(x[r][indices[r]], values[r])


@pytest.mark.fault("B05")
@pytest.mark.parametrize(
    ("row", "first"),
    [
        ([3, NAN, 1, 5], 1),
        ([NAN] * 61, 0),
        ([*range(1, 10), MINUS_NAN, *range(11, 65)], 9),
        ([INF, NAN, -INF], 1),
        ([-INF, -INF], 0),
    ],
)
def test_b05_argmax_gives_the_first_nan(row: list[float], first: int) -> None:
    assert argmax(F([row])).tolist() == [first]


@pytest.mark.fault("B05")
def test_b05_nan_of_either_sign_is_taken_when_no_number_is_left() -> None:
    values, indices = top_k(F([[3, NAN, 1, 5, -INF, MINUS_NAN]]), k=6)
    assert indices.tolist() == [[3, 0, 2, 1, 5, -1]]
    assert values[0, :3].tolist() == [5, 3, 1] and np.isnan(values[0, 3:5]).all() and values[0, 5] == -INF
    assert top_k(np.full((1, 61), NAN, F), k=16)[1].tolist() == [list(range(16))]


@pytest.mark.fault("B06")
@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 63, 64, 127, 1023, 1025, 2700, 4097])
def test_b06_infinities_in_odd_sizes(n: int) -> None:
    rng = np.random.default_rng(n)
    half = rng.standard_normal(n).astype(F)
    half[::2] = -INF
    one = np.zeros(n, F)
    one[n // 2] = INF
    x = np.stack([half, np.full(n, -INF, F), one, rng.standard_normal(n).astype(F)])
    values, indices = top_k(x, k=n)
    for r in range(4):
        assert same(values[r], indices[r], expected(x[r], n))


def test_minus_infinity_is_no_candidate() -> None:
    values, indices = top_k(F([[-INF, 2, -INF, -3.4e38]]), k=3)
    assert indices.tolist() == [[1, 3, -1]] and values[0, 2] == -INF


def test_k_above_the_candidates_names_both() -> None:
    with pytest.raises(ValueError, match="k is 6, which exceeds the 5 candidates"):
        top_k(np.zeros((3, 5), F), k=6)
    with pytest.raises(ArgumentError):
        top_k(np.zeros((3, 5), F), k=-1)


def test_nothing_to_choose() -> None:
    values, indices = top_k(np.zeros((0, 5), F), k=2)
    assert values.shape == indices.shape == (0, 2) and indices.dtype == np.int32
    assert top_k(np.zeros((3, 5), F), k=0)[0].shape == (3, 0)
    assert top_k(np.zeros((3, 0), F), k=0)[1].shape == (3, 0)
    assert argmax(np.zeros((0, 5), F)).shape == (0,)
    with pytest.raises(ValueError, match="3 rows of 0 candidates"):
        argmax(np.zeros((3, 0), F))


@given(arrays(F, st.tuples(st.integers(0, 4), st.integers(1, 20)), elements=NASTY), st.data())
@settings(max_examples=150, deadline=None)
def test_any_row_follows_the_rule(x: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, x.shape[1]))
    values, indices = top_k(x, k=k)
    for r in range(len(x)):
        assert same(values[r], indices[r], expected(x[r], k))
        chosen = indices[r][indices[r] >= 0]
        assert len(set(chosen.tolist())) == len(chosen)
    best = argmax(x)
    for r, row in enumerate(x):
        nans = np.flatnonzero(np.isnan(row))
        assert best[r] == (nans[0] if len(nans) else row.tolist().index(max(row.tolist())))
