"""Norms: constants, special rows, and no look beyond the row."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import gated_rms_norm, group_rms_norm, l2_norm, rms_norm

pytestmark = pytest.mark.filterwarnings("error")


def test_rms_norm_by_hand() -> None:
    # mean(9 + 16) = 12.5, + 0.5 = 13, sqrt = 3.605551
    y = rms_norm(np.float32([[3, 4]]), eps=0.5)
    assert y[0] == pytest.approx([3 / math.sqrt(13), 4 / math.sqrt(13)], rel=1e-7)
    weighted = rms_norm(np.float32([[3, 4]]), np.float32([2, -1]), eps=0.5)
    assert weighted[0] == pytest.approx([6 / math.sqrt(13), -4 / math.sqrt(13)], rel=1e-7)


def test_group_rms_norm_weighs_each_group_with_its_part() -> None:
    x = np.float32([[[3, 4], [0, 2]]])
    # groups' mean squares: 12.5 and 2
    y = group_rms_norm(x, np.float32([1, 2, 3, 4]), eps=0.0)
    expected = [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)], [0, 8 / math.sqrt(2)]]
    np.testing.assert_allclose(y[0], expected, rtol=1e-7)


def test_l2_norm_by_hand() -> None:
    # sqrt(9 + 16 + 11) = 6: eps stands inside the root
    assert l2_norm(np.float32([[3, 4]]), eps=11.0).tolist() == [[0.5, float(np.float32(4 / 6))]]


@pytest.mark.fault("B35")
def test_b35_the_gate_opens_after_the_norm_and_the_weight_is_no_one_plus_w() -> None:
    # rms of (3, 4) = 3.535534; w = (2, .5); gate (0, ln 3): sigmoid (.5, .75), silu (0, .75 ln 3)
    x, gate, w = np.float32([[3, 4]]), np.float32([[0, math.log(3)]]), np.float32([2, 0.5])
    r = math.sqrt(12.5)
    opened = gated_rms_norm(x, gate, w, eps=0.0, activation="sigmoid")
    np.testing.assert_allclose(opened, [[3 / r * 2 * 0.5, 4 / r * 0.5 * 0.75]], rtol=2e-7)
    silu = gated_rms_norm(x, gate, w, eps=0.0, activation="silu")
    np.testing.assert_allclose(silu, [[0, 4 / r * 0.5 * 0.75 * math.log(3)]], rtol=2e-7)


def test_an_unknown_activation_is_refused() -> None:
    x = np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match="'silu' or 'sigmoid', got 'relu'"):
        gated_rms_norm(x, x, x[0], eps=0.0, activation="relu")


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gated_rms_norm_is_its_parts_but_for_their_rounding(activation: str) -> None:
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    w = rng.standard_normal(8).astype(np.float32)
    parts = gated_rms_norm.decomposition
    assert parts is not None
    # three roundings of 2^-24 in place of one
    np.testing.assert_allclose(
        parts(x, gate, w, eps=1e-6, activation=activation),
        gated_rms_norm(x, gate, w, eps=1e-6, activation=activation),
        rtol=4 * 2.0**-24,
    )


def test_rows_of_zeros_nan_and_infinity() -> None:
    x = np.float32([[0, 0], [np.nan, 1], [np.inf, 1], [1, 1]])
    for y in (rms_norm(x, eps=1e-6), l2_norm(x, eps=1e-6)):
        assert y[0].tolist() == [0, 0]
        assert np.isnan(y[1]).all()
        assert np.isnan(y[2, 0]) and y[2, 1] == 0
        assert np.isfinite(y[3]).all()
    assert np.isnan(rms_norm(x[:1], eps=0.0)).all() and np.isnan(l2_norm(x[:1], eps=0.0)).all()


def test_squares_that_float32_could_not_hold() -> None:
    x = np.float32([[3e38, 3e38], [1e-30, 1e-30]])
    np.testing.assert_allclose(rms_norm(x, eps=0.0), [[1, 1], [1, 1]], rtol=1e-7)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_norm(shape: tuple[int, int]) -> None:
    x = np.zeros(shape, np.float32)
    assert rms_norm(x, eps=1e-6).shape == shape and l2_norm(x, eps=1e-6).shape == shape


@pytest.mark.fault("B42")
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_against_correctly_rounded_sums_and_b42_bits(seed: int, rows: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, n)) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(np.float32)
    y = rms_norm(x, eps=1e-6)
    for r in range(rows):
        mean = math.fsum(float(a) ** 2 for a in x[r]) / n
        np.testing.assert_allclose(y[r], [float(a) / math.sqrt(mean + 1e-6) for a in x[r]], rtol=2.0**-23)
        assert np.array_equal(y[r], rms_norm(x[r], eps=1e-6))
        assert np.array_equal(y[r], rms_norm(np.asfortranarray(x), eps=1e-6)[r])
