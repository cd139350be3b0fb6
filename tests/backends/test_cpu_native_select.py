"""The native top-k against a sort with the rule written out, and indexer scores against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native

EPS = float(np.finfo(np.float32).eps)
F32 = NDArray[np.float32]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)


def top_k(scores: F32, k: int) -> tuple[F32, NDArray[np.int32]]:
    values, indices = np.full((len(scores), k), 7, np.float32), np.full((len(scores), k), -7, np.int32)
    native.top_k(values, indices, scores, k)
    return values, indices


def sorted_top(row: list[float], k: int) -> list[tuple[float, int]]:
    """Numbers above -inf, falling, ties by index; then NaN by index; then (-inf, -1)."""
    numbers = sorted((-x, i) for i, x in enumerate(row) if not math.isnan(x) and x > -math.inf)
    nans = [(math.nan, i) for i, x in enumerate(row) if math.isnan(x)]
    return ([(-x, i) for x, i in numbers] + nans + [(-math.inf, -1)] * k)[:k]


def same(found: tuple[F32, NDArray[np.int32]], rows: list[list[float]], k: int) -> None:
    for values, indices, row in zip(*found, rows, strict=True):
        want = sorted_top(row, k)
        assert indices.tolist() == [i for _, i in want]
        np.testing.assert_array_equal(values, np.array([x for x, _ in want], np.float32))


special = st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38])
entries = st.one_of(special, st.integers(-3, 3).map(float), st.floats(width=32))


@pytest.mark.fault("B02", "B05")
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_top_k_is_the_sort_by_the_rule(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 70))
    rows = data.draw(st.lists(st.lists(entries, min_size=n, max_size=n), max_size=3))
    k = data.draw(st.integers(0, n))
    scores = np.array(rows, np.float32).reshape(len(rows), n)
    same(top_k(scores, k), scores.tolist(), k)


@pytest.mark.fault("B03", "B06")
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "few", "random", "nan", "masked"])
@pytest.mark.parametrize("k", [1, 8, 257, 4999, 5000])
def test_long_rows_of_every_order(order: str, k: int) -> None:
    rng = np.random.default_rng(k)
    row = rng.standard_normal(5000).astype(np.float32)
    if order in ("rising", "falling"):
        row = np.sort(row) if order == "rising" else np.sort(row)[::-1].copy()
    elif order in ("equal", "few"):
        row = rng.integers(0, 1 if order == "equal" else 3, 5000).astype(np.float32)
    elif order in ("nan", "masked"):
        row[rng.random(5000) < 0.5] = np.nan if order == "nan" else -np.inf
        row[100:3000:7] = np.float32(-np.nan) if order == "nan" else -np.inf
    rows = np.stack([row, row[::-1]])
    same(top_k(rows, k), rows.tolist(), k)


def test_a_zero_keeps_its_sign_in_the_value_and_ties_with_the_other() -> None:
    values, indices = top_k(np.array([[-0.0, 0.0, -1.0]], np.float32), 2)
    assert indices.tolist() == [[0, 1]]
    assert np.signbit(values).tolist() == [[True, False]]


def test_rows_are_independent_strided_and_split_over_threads() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 50, (41, 700)).astype(np.float32)[::2, 3:]
    for threads in (1, 2, 3):
        native.set_threads(threads)
        values, indices = top_k(scores, 20)
        for r in range(len(scores)):
            one = top_k(scores[r : r + 1], 20)
            np.testing.assert_array_equal(values[r], one[0][0])
            np.testing.assert_array_equal(indices[r], one[1][0])


@pytest.mark.parametrize(("k", "message"), [(6, "k is 6, expected 0 to the 5 candidates"), (-1, "k is -1")])
def test_a_k_that_can_not_be_is_refused(k: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"top_k: {message}"):
        native.top_k(np.zeros((1, 6), np.float32), np.zeros((1, 6), np.int32), np.zeros((1, 5), np.float32), k)


def test_an_output_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k: indices has k = 3, expected 2 as in the argument k"):
        native.top_k(np.zeros((1, 2), np.float32), np.zeros((1, 3), np.int32), np.zeros((1, 5), np.float32), 2)


def scores_of(
    q: F32, keys: F32, cu: list[int], past: list[int], table: list[list[int]], weights: F32 | None, every: int
) -> F32:
    pages = np.array(table, np.int32).reshape(len(past), -1)
    out = np.full((len(q), pages.shape[1] * keys.shape[1]), np.nan, np.float32)
    native.index_scores(
        out, q, keys, np.array(cu, np.int32), np.array(past, np.int32), pages, weights, every=every, scale=0.25
    )
    return out


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("heads", "d", "every"), [(1, 1, 1), (4, 16, 4), (5, 33, 1), (64, 128, 2)])
def test_scores_of_the_entries_that_a_row_sees(heads: int, d: int, every: int, weighted: bool, isa: str) -> None:
    native.set_isa(isa)
    rng = np.random.default_rng(d)
    q = rng.standard_normal((9, heads, d)).astype(np.float32)
    weights = rng.standard_normal((9, heads)).astype(np.float32) if weighted else None
    past, cu = [600, 0, 2], [0, 3, 3, 7]
    table = rng.permutation(100)[:60].reshape(3, 20)
    table[0, -(-603 // every // 32) :] = -1
    table[1], table[2, 1:] = -1, -1
    keys = rng.standard_normal((100, 32, d)).astype(np.float32)
    if every > 1:
        keys[table[2, 0], 6 // every :] = np.nan
    out = scores_of(q, keys, cu, past, table.tolist(), weights, every)
    for s, first, last in ((0, 0, 3), (2, 3, 7)):
        for t in range(first, last):
            n = (past[s] + t - first + 1) // every
            k = keys[table[s]].reshape(-1, d)[:n].astype(np.float64)
            dots, sizes = q[t].astype(np.float64) @ k.T, np.abs(q[t].astype(np.float64)) @ np.abs(k).T
            w = np.ones(heads) if weights is None else weights[t].astype(np.float64)
            want, bound = 0.25 * w @ np.maximum(dots, 0), 0.25 * (d + heads + 4) * EPS * (np.abs(w) @ sizes)
            assert np.all(np.abs(out[t, :n] - want) <= bound)
            assert np.all(out[t, n:] == -np.inf)
    assert np.all(out[7:] == -np.inf), "padding"


def test_equal_keys_score_alike_wherever_they_lie_and_rows_do_not_meet() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((5, 7, 24)).astype(np.float32)
    keys = np.broadcast_to(rng.standard_normal(24).astype(np.float32), (3, 512, 24)).copy()
    native.set_threads(1)
    out = scores_of(q, keys, [0, 5], [1000], [[0, 1, 2]], None, 1)
    for t in range(5):
        assert len(np.unique(out[t, : 1001 + t])) == 1
        native.set_threads(1 + t % 3)
        np.testing.assert_array_equal(
            scores_of(q[t : t + 1], keys, [0, 1], [1000 + t], [[0, 1, 2]], None, 1)[0], out[t]
        )


def test_nan_stays_in_its_score() -> None:
    rng = np.random.default_rng(3)
    q, keys = rng.standard_normal((2, 3, 8)).astype(np.float32), rng.standard_normal((1, 16, 8)).astype(np.float32)
    clean = scores_of(q, keys, [0, 2], [9], [[0]], None, 1)
    keys[0, 4, 5] = np.nan
    out = scores_of(q, keys, [0, 2], [9], [[0]], None, 1)
    assert np.isnan(out[:, 4]).all()
    out[:, 4] = clean[:, 4]
    np.testing.assert_array_equal(out, clean)


def test_wrong_arguments_of_index_scores_are_refused_by_name() -> None:
    q, keys = np.zeros((2, 3, 8), np.float32), np.zeros((1, 16, 8), np.float32)
    with pytest.raises(
        ValueError, match=r"index_scores: block_table\[0, 0\] is 1 where it is read, expected one of 1 pages"
    ):
        scores_of(q, keys, [0, 2], [9], [[1]], None, 1)
    with pytest.raises(ValueError, match="index_scores: weights has heads = 4, expected 3 as in q"):
        scores_of(q, keys, [0, 2], [9], [[0]], np.zeros((2, 4), np.float32), 1)
    with pytest.raises(ValueError, match="index_scores: every is 0"):
        scores_of(q, keys, [0, 2], [9], [[0]], None, 0)
