"""Rotary embedding: constants, pairs, components, and the property it exists for."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import mrope_components, rope, rope_frequencies

pytestmark = pytest.mark.filterwarnings("error")

F = np.float32


def zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.int32)


def test_frequencies_by_hand() -> None:
    # 10000^(-2i/4) for i = 0, 1
    assert rope_frequencies(dims=4, base=10000.0).tolist() == [1, F(0.01)]
    assert rope_frequencies(dims=0, base=10000.0).shape == (0,)
    for dims, base in ((3, 10000.0), (-2, 10000.0), (4, 0.0), (4, np.nan)):
        with pytest.raises(ValueError, match=f"got {dims} and {base}"):
            rope_frequencies(dims=dims, base=base)


def test_interleaved_components_of_the_reference_model() -> None:
    # sections 6, 5, 5 over 16 frequencies: i mod 3 names the component while i < 3·5
    assert mrope_components([6, 5, 5, 0], 16).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert mrope_components([2, 1, 1], 4).tolist() == [0, 1, 2, 0]
    assert mrope_components([4, 0, 0], 4).tolist() == [0, 0, 0, 0]
    assert mrope_components([11, 11, 10, 0], 32).tolist() == [i % 3 if i < 30 else [0, 1][i - 30] for i in range(32)]


def test_a_quarter_turn_in_both_pairings() -> None:
    x, quarter = F([[[1, 2, 3, 4, 5]]]), F([math.pi / 2, math.pi])
    at = np.int32([[1]])
    # NeoX pairs (1,3) by 90°: (-3, 1), and (2,4) by 180°: (-2, -4)
    np.testing.assert_allclose(rope(x, at, quarter, zeros(2))[0, 0], [-3, -2, 1, -4, 5], atol=1e-6)
    # interleaved pairs (1,2) by 90°: (-2, 1), and (3,4) by 180°: (-3, -4)
    np.testing.assert_allclose(rope(x, at, quarter, zeros(2), interleaved=True)[0, 0], [-2, 1, -3, -4, 5], atol=1e-6)
    # from dim 1, backwards: NeoX pairs (2,4) by -90°: (4, -2), and (3,5) by -180°
    np.testing.assert_allclose(
        rope(x, at, quarter, zeros(2), start=1, inverse=True)[0, 0], [1, 4, -3, -2, -5], atol=1e-6
    )


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_against_complex_numbers(
    seed: int, tokens: int, half: int, start: int, rest: int, interleaved: bool, inverse: bool
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 2, start + 2 * half + rest)).astype(F)
    positions = rng.integers(0, 100_000, (tokens, 3)).astype(np.int32)
    component, freqs = rng.integers(0, 3, half).astype(np.int32), rng.random(half).astype(F)
    y = rope(x, positions, freqs, component, start=start, interleaved=interleaved, inverse=inverse)
    want = x.astype(np.float64)
    for t in range(tokens):
        for h in range(2):
            for i in range(half):
                a, b = (start + 2 * i, start + 2 * i + 1) if interleaved else (start + i, start + half + i)
                angle = int(positions[t, component[i]]) * float(freqs[i])
                z = complex(x[t, h, a], x[t, h, b]) * cmath.exp(-1j * angle if inverse else 1j * angle)
                want[t, h, a], want[t, h, b] = z.real, z.imag
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    assert np.array_equal(y[..., :start], x[..., :start])
    assert np.array_equal(y[..., start + 2 * half :], x[..., start + 2 * half :])


def test_dot_products_depend_on_the_distance_alone_and_inverse_undoes() -> None:
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 1, 1, 8)).astype(F)
    freqs = rope_frequencies(dims=8, base=100.0)

    def at(x: np.ndarray, p: int, **how: bool) -> np.ndarray:
        return rope(x, np.int32([[p]]), freqs, zeros(4), **how)

    near, far = float((at(q, 7) * at(k, 3)).sum()), float((at(q, 1007) * at(k, 1003)).sum())
    assert near == pytest.approx(far, abs=1e-5)
    np.testing.assert_allclose(at(at(q, 99), 99, inverse=True), q, atol=1e-6)


def test_position_zero_changes_nothing_and_no_tokens_are_fine() -> None:
    x = np.random.default_rng(6).standard_normal((3, 2, 8)).astype(F)
    freqs = rope_frequencies(dims=8, base=100.0)
    assert np.array_equal(rope(x, np.zeros((3, 1), np.int32), freqs, zeros(4)), x)
    assert rope(x[:0], np.zeros((0, 1), np.int32), freqs, zeros(4)).shape == (0, 2, 8)


def test_nan_stays_in_its_pair_and_padding_in_its_row() -> None:
    x = np.ones((2, 1, 6), F)
    x[0, 0, 0] = np.nan
    y = rope(x, np.int32([[1], [1]]), F([1, 1]), zeros(2))
    assert np.isnan(y).tolist() == [[[True, False, True, False, False, False]], [[False] * 6]]


def test_what_does_not_fit_is_refused() -> None:
    x = np.zeros((1, 1, 6), F)
    for start in (-1, 3):
        with pytest.raises(ValueError, match=f"2 pairs from dim {start} on leave a head of 6"):
            rope(x, np.int32([[0]]), F([1, 1]), zeros(2), start=start)
    with pytest.raises(ValueError, match=r"component \[0, 3\] of 3 components"):
        rope(x, np.int32([[0, 0, 0]]), F([1, 1]), np.int32([0, 3]))


@pytest.mark.fault("B42")
def test_b42_a_row_has_the_same_bits_in_every_batch() -> None:
    rng = np.random.default_rng(7)
    x, p = rng.standard_normal((37, 3, 8)).astype(F), rng.integers(0, 5000, (37, 1)).astype(np.int32)
    freqs = rope_frequencies(dims=6, base=10000.0)
    whole = rope(x, p, freqs, zeros(3))
    for i in range(37):
        assert np.array_equal(whole[i], rope(x[i : i + 1], p[i : i + 1], freqs, zeros(3))[0])
