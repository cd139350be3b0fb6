"""Activations, sums, softmax: constants, special values, decompositions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trueup.core.ops import (
    add,
    clamp,
    concat,
    mul,
    normalize,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    softplus,
    swiglu,
)

pytestmark = pytest.mark.filterwarnings("error")

INF, NAN = np.inf, np.nan
F = np.float32
TINY = 2.0**-149
"""The least float32: what rounding costs below 2^-126."""


def test_sigmoid() -> None:
    # 1/(1+e^-ln 3) = 3/4
    assert sigmoid(F([0, math.log(3), -math.log(3), INF, -INF, -800, 800])).tolist() == [0.5, 0.75, 0.25, 1, 0, 0, 1]
    assert np.isnan(sigmoid(F([NAN]))).all()
    # far below float32's e^x it is e^x
    np.testing.assert_allclose(sigmoid(F([-87])), math.exp(-87), rtol=1e-7)


def test_silu() -> None:
    np.testing.assert_allclose(silu(F([0, math.log(3)])), [0, 0.75 * math.log(3)], rtol=1e-7)
    np.testing.assert_allclose(silu(F([4 * math.log(3)]), scale=0.25), [0.75 * math.log(3)], rtol=1e-7)
    special = silu(F([INF, -INF, NAN, -1000]))
    assert special[0] == INF and np.isnan(special[1:3]).all() and special[3] == 0


def test_softplus() -> None:
    # ln(1 + e^0) = ln 2; ln(1 + e^100) = 100 to float32
    np.testing.assert_allclose(softplus(F([0, 100, -100])), [math.log(2), 100, math.exp(-100)], rtol=1e-7, atol=TINY)
    assert softplus(F([INF, -INF])).tolist() == [INF, 0] and np.isnan(softplus(F([NAN]))).all()


def test_add_and_mul_are_ieee() -> None:
    a, b = F([1, INF, NAN, 3e38, 0]), F([2, -INF, 1, 3e38, INF])
    assert str(add(a, b).tolist()) == "[3.0, nan, nan, inf, inf]"
    assert str(mul(a, b).tolist()) == "[2.0, -inf, nan, inf, nan]"
    assert add(a[:0], b[:0]).shape == (0,)


def test_clamp() -> None:
    assert str(clamp(F([-5, 0, 5, INF, -INF, NAN]), low=-1.0, high=2.0).tolist()) == "[-1.0, 0.0, 2.0, 2.0, -1.0, nan]"
    assert clamp(F([-5, INF])).tolist() == [-5, INF]


def test_swiglu_by_hand() -> None:
    g, u = F([math.log(3), math.log(3)]), F([2, -4])
    np.testing.assert_allclose(swiglu(g, u), [1.5 * math.log(3), -3 * math.log(3)], rtol=1e-7)


def test_swiglu_limits_the_gate_from_above_and_up_on_both_sides() -> None:
    limit = math.log(3)
    s = 0.75 * limit  # silu of the limit
    low = -3 * limit / (1 + 27)  # silu(-ln 27): 1/(1+27); not clamped
    y = swiglu(F([9, 9, 9, -3 * limit]), F([0.5, 9, -9, 1]), limit=limit)
    np.testing.assert_allclose(y, [s * 0.5, s * limit, -s * limit, low], rtol=3e-7)
    assert np.isnan(swiglu(F([NAN, 1]), F([1, NAN]), limit=1.0)).all()


@pytest.mark.parametrize("limit", [INF, 1.5])
def test_swiglu_is_its_parts_but_for_their_rounding(limit: float) -> None:
    g, u = np.random.default_rng(0).standard_normal((2, 50)).astype(F) * 3
    parts = swiglu.decomposition
    assert parts is not None
    np.testing.assert_allclose(parts(g, u, limit=limit), swiglu(g, u, limit=limit), rtol=4 * 2.0**-24, atol=1e-40)


def test_concat_and_scale_rows() -> None:
    assert concat(F([[1], [2]]), F([[3, 4], [5, 6]])).tolist() == [[1, 3, 4], [2, 5, 6]]
    assert concat(np.zeros((2, 0), F), F([[3], [5]])).tolist() == [[3], [5]]
    assert scale_rows(F([[1, 2], [3, 4]]), F([[2], [-1]])).tolist() == [[2, 4], [-3, -4]]
    assert np.isnan(scale_rows(F([[1, 2], [3, 4]]), F([[NAN], [1]]))).tolist() == [[True, True], [False, False]]


def test_softmax_by_hand() -> None:
    # e^0 : e^ln2 : e^ln5 = 1 : 2 : 5
    np.testing.assert_allclose(softmax(F([[0, math.log(2), math.log(5)]])), [[1 / 8, 2 / 8, 5 / 8]], rtol=1e-7)
    assert softmax(F([[1000, 1000], [-1000, -1000]])).tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.fault("B07")
def test_b07_a_softmax_over_nothing_gives_zeros_and_over_one_gives_one() -> None:
    assert softmax(F([[-INF, -INF], [-INF, -1e6]])).tolist() == [[0, 0], [0, 1]]
    assert softmax(np.zeros((2, 0), F)).shape == (2, 0)


def test_softmax_with_nan_or_plus_infinity_is_a_row_of_nan_and_no_other() -> None:
    y = softmax(F([[NAN, 1, 2], [-NAN, -INF, -INF], [INF, 1, -INF], [0, 0, 0]]))
    assert np.isnan(y[:3]).all() and np.isfinite(y[3]).all()


@pytest.mark.fault("B42")
@given(arrays(F, st.tuples(st.integers(0, 5), st.integers(1, 40)), elements=st.floats(-60, 60, width=32)))
@settings(max_examples=60, deadline=None)
def test_softmax_against_correctly_rounded_sums_and_b42_bits(x: np.ndarray) -> None:
    y = softmax(x)
    for r, row in enumerate(x):
        total = math.fsum(math.exp(float(a)) for a in row)
        np.testing.assert_allclose(y[r], [math.exp(float(a)) / total for a in row], rtol=2.0**-23, atol=TINY)
        assert np.array_equal(y[r], softmax(row))


def test_normalize() -> None:
    assert normalize(F([[1, 3], [2, 2]])).tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert normalize(F([[1, 1]]), floor=8.0).tolist() == [[0.125, 0.125]]
    assert normalize(F([[0, 0], [1, -1]])).tolist() == [[0, 0], [0, 0]]  # divided by 0
    assert np.isnan(normalize(F([[NAN, 1], [1, 1]]))).tolist() == [[True, True], [False, False]]
    assert normalize(np.zeros((2, 0), F)).shape == (2, 0)


@pytest.mark.parametrize("op", [sigmoid, silu, softplus])
def test_scalars_and_strides(op) -> None:  # type: ignore[no-untyped-def]
    x = np.random.default_rng(0).standard_normal((6, 7)).astype(F)
    assert np.array_equal(op(x.T), op(x).T) and np.array_equal(op(x[:, ::2]), op(x)[:, ::2])
    assert np.array_equal(op(x[0, 0]), op(x)[0, 0])
