"""The dense projection: exact to its rounding, and blind to the batch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trueup.core.op import Cost
from trueup.core.ops import linear
from trueup.core.types import TensorType
from trueup.core.weight import Weight

pytestmark = pytest.mark.filterwarnings("error")

FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)


def test_hand_computed() -> None:
    x, w = np.float32([[1, 2, 3], [0, -1, 1]]), np.float32([[1, 0, 2], [-1, 1, 0]])
    # 1·1+2·0+3·2 = 7, -1+2+0 = 1; 0+0+2 = 2, 0-1+0 = -1
    assert linear(x, w).tolist() == [[7, 1], [2, -1]]
    assert linear(x[0], w).tolist() == [7, 1]
    assert linear(x[:, None], w).shape == (2, 1, 2)


def test_sums_what_float32_would_lose() -> None:
    # 2^24 + 1 - 2^24: in float32 the 1 is gone after the first sum
    assert linear(np.float32([[2**24, 1, -(2**24)]]), np.ones((1, 3), np.float32)).tolist() == [[1]]


@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_each_entry_is_the_exact_sum_but_for_rounding(data: st.DataObject, rows: int, n: int, m: int) -> None:
    x = data.draw(arrays(np.float32, (rows, n), elements=FLOATS))
    w = data.draw(arrays(np.float32, (m, n), elements=FLOATS))
    y = linear(x, w)
    for r in range(rows):
        for c in range(m):
            terms = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x[r], w[c], strict=True)]
            exact, magnitude = sum(terms), sum(map(abs, terms))
            # n roundings of a double, then one of a float, normal or not
            bound = Fraction(n, 2**52) * magnitude + abs(exact) / 2**24 + Fraction(1, 2**149)
            assert abs(Fraction(float(y[r, c])) - exact) <= bound


@pytest.mark.fault("B42")
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.sampled_from([1, 2, 3, 7, 64, 257]), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_b42_a_row_has_the_same_bits_in_every_batch(seed: int, rows: int, n: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, n)).astype(np.float32), rng.standard_normal((m, n)).astype(np.float32)
    whole = linear(x, w)
    cut = int(rng.integers(0, rows + 1))
    assert np.array_equal(whole, np.concatenate([linear(x[:cut], w), linear(x[cut:], w)]))
    order = rng.permutation(rows)
    assert np.array_equal(whole[order], linear(x[order], w))
    assert np.array_equal(whole, np.concatenate([linear(x[i : i + 1], w) for i in range(rows)]))
    wide = np.concatenate([x, x], axis=1)
    assert np.array_equal(whole, linear(wide[:, n:], w))  # strided rows
    noise = np.full((3, n), np.nan, np.float32)
    assert np.array_equal(whole, linear(np.concatenate([noise, x, noise]), w)[3:-3])


@pytest.mark.fault("B42")
def test_b42_large_products_are_read_in_pieces_and_stay_the_same() -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((70, 2048)).astype(np.float32), rng.standard_normal((1100, 2048)).astype(np.float32)
    whole = linear(x, w)  # the weight takes two pieces, the rows two blocks
    for i in (0, 63, 64, 69):
        assert np.array_equal(whole[i], linear(x[i], w))
    assert np.array_equal(whole[:, 1090:], linear(x, w[1090:]))


def test_equal_rows_of_a_weight_tie_exactly() -> None:
    rng = np.random.default_rng(2)
    x, row = rng.standard_normal((9, 333)).astype(np.float32), rng.standard_normal(333).astype(np.float32)
    w = np.stack([row, rng.standard_normal(333).astype(np.float32), row, row])
    y = linear(x, w)
    assert np.array_equal(y[:, 0], y[:, 2]) and np.array_equal(y[:, 0], y[:, 3])


def test_nan_and_infinities_stay_in_their_row_and_column() -> None:
    x, w = np.ones((4, 3), np.float32), np.ones((3, 3), np.float32)
    x[1, 0], x[2, 2] = np.nan, np.inf
    w[1, 1], w[2, 2] = np.nan, 0
    y = linear(x, w)
    assert y[0].tolist()[::2] == [3, 2] and np.isnan(y[:, 1]).all()
    assert np.isnan(y[1]).all()
    assert y[2, 0] == np.inf and np.isnan(y[2, 2])  # inf · 0


def test_overflow_is_an_infinity_of_the_right_sign() -> None:
    big = np.float32([[3e38, 3e38]])
    assert linear(big, np.float32([[3e38, 3e38], [-1, -1], [1, -1]])).tolist() == [[np.inf, -np.inf, 0]]


@pytest.mark.parametrize(("rows", "n", "m"), [(0, 3, 2), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_zero_sizes(rows: int, n: int, m: int) -> None:
    y = linear(np.ones((rows, n), np.float32), np.ones((m, n), np.float32))
    assert y.shape == (rows, m) and not y.any()


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.F16])
def test_a_stored_weight_means_its_dequantized_values(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(4)
    x, values = rng.standard_normal((3, 64)).astype(np.float32), rng.standard_normal((10, 64)).astype(np.float32)
    raw = quants.quantize(values, kind)
    weight = Weight("w", TensorType((10, 64), kind.name.lower()), np.ascontiguousarray(raw).view(np.uint8))
    assert np.array_equal(linear(x, weight), linear(x, quants.dequantize(raw, kind).astype(np.float32)))


def test_cost_counts_the_weight_as_stored() -> None:
    types = [TensorType((5, 64)), TensorType((10, 64), "q8_0")]
    # 2·5·10·64 operations; 5·64·4 + 10·2·34 (32 values in 34 bytes) + 5·10·4 bytes
    assert linear.cost(types, {}) == Cost(6400, 1280 + 680 + 200)
