"""Experts alone, and behind their router: softmax, top_k, normalize."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.op import Cost
from trueup.core.ops import expert_combine, expert_linear, linear, normalize, softmax, swiglu, top_k
from trueup.core.types import TensorType
from trueup.core.weight import Weight

pytestmark = pytest.mark.filterwarnings("error")

F, I = np.float32, np.int32
INF, NAN = np.inf, np.nan


def route(logits: np.ndarray, k: int, *, norm: bool = True) -> tuple[np.ndarray, np.ndarray]:
    p, ids = top_k(softmax(logits), k=k)
    return (normalize(p) if norm else p), ids


def test_expert_linear_by_hand() -> None:
    w = F([[[1, 0]], [[0, 1]], [[10, 10]]])
    y = expert_linear(F([[1, 2], [3, 4]]), I([[2, 0], [1, -1]]), w)
    assert y.tolist() == [[[30], [1]], [[4], [0]]]


def test_expert_combine_by_hand() -> None:
    w = F([[[1], [2]], [[10], [20]]])
    # .5 · 4 · (1, 2) + 2 · 3 · (10, 20) = (62, 124); the second row has one expert, mixed with 1
    y = expert_combine(F([[[4], [3]], [[5], [NAN]]]), I([[0, 1], [1, -1]]), F([[0.5, 2], [1, NAN]]), w)
    assert y.tolist() == [[62, 124], [50, 100]]


def test_an_expert_may_be_named_twice() -> None:
    assert expert_combine(F([[[1], [2]]]), I([[0, 0]]), F([[1, 1]]), F([[[3]]])).tolist() == [[9]]


@pytest.mark.parametrize("bad", [-2, 3])
def test_experts_that_are_not_there_are_refused(bad: int) -> None:
    ids, w = I([[0, 1], [2, bad]]), np.zeros((3, 2, 2), F)
    with pytest.raises(ValueError, match=rf"expert_linear: experts\[1, 1\] is {bad}, of 3 experts"):
        expert_linear(np.zeros((2, 2), F), ids, w)
    with pytest.raises(ValueError, match=rf"expert_combine: experts\[1, 1\] is {bad}, of 3 experts"):
        expert_combine(np.zeros((2, 2, 2), F), ids, np.zeros((2, 2), F), w)


@pytest.mark.fault("B08")
def test_b08_a_bad_router_row_gives_distinct_experts_in_range() -> None:
    logits = np.zeros((5, 8), F)
    logits[0] = NAN
    logits[1, 3] = -NAN
    logits[2] = -INF
    logits[4] = [0, 1, 2, 3, 4, 5, 6, 7]
    mix, ids = route(logits, 2)
    assert ids.tolist() == [[0, 1]] * 4 + [[7, 6]]
    assert np.isnan(mix[:2]).all()  # a NaN goes on, to be seen where the row is sampled from
    assert mix[2:4].tolist() == [[0, 0], [0.5, 0.5]]
    x = np.ones((5, 4), F)
    w = np.ones((8, 3, 4), F)
    h = expert_linear(x, ids, w)
    y = expert_combine(h, ids, mix, w.swapaxes(1, 2))
    assert np.isnan(y[:2]).all() and not y[2].any() and (y[3:] > 0).all()
    clean = expert_combine(h[3:], ids[3:], mix[3:], w.swapaxes(1, 2))
    assert np.array_equal(y[3:], clean)


@pytest.mark.fault("B10")
def test_b10_weights_are_normalized_where_asked() -> None:
    # e^2 : e : 1 : 1/e over their sum 11.475218: .6439, .2369; over the two chosen: 1 / (1 + 1/e) = .731059
    logits = F([[2, 1, 0, -1]])
    np.testing.assert_allclose(route(logits, 2, norm=False)[0], [[0.643914, 0.236883]], atol=1e-6)
    np.testing.assert_allclose(route(logits, 2)[0], [[0.731059, 0.268941]], atol=1e-6)
    assert route(logits, 1)[0].tolist() == [[1]]
    assert normalize(F([[0, 0]])).tolist() == [[0, 0]]  # sigmoids of -200


@pytest.mark.fault("B09")
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_b09_no_tokens_one_and_all_to_one_expert(tokens: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, 6)).astype(F)
    gate, up, down = (rng.standard_normal((8, *s)).astype(F) for s in ((4, 6), (4, 6), (6, 4)))
    mix, ids = route(linear(x, rng.standard_normal((8, 6)).astype(F)), 2)
    for chosen in (ids, np.full((tokens, 2), [5, -1], I)):
        y = expert_combine(swiglu(expert_linear(x, chosen, gate), expert_linear(x, chosen, up)), chosen, mix, down)
        assert y.shape == (tokens, 6)
        for t in range(tokens):  # a token at a time, an expert at a time
            want = np.zeros(6)
            for j, e in enumerate(chosen[t]):
                if e >= 0:
                    h = swiglu(linear(x[t], gate[e]), linear(x[t], up[e]))
                    want += float(mix[t, j]) * linear(h, down[e]).astype(np.float64)
            np.testing.assert_allclose(y[t], want, rtol=1e-6, atol=1e-6)


@pytest.mark.fault("B42")
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_b42_a_token_has_the_same_bits_in_every_batch(seed: int, tokens: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    x, h = rng.standard_normal((tokens, 9)).astype(F), rng.standard_normal((tokens, k, 5)).astype(F)
    ids, mix = rng.integers(-1, 4, (tokens, k)).astype(I), rng.random((tokens, k)).astype(F)
    up, down = rng.standard_normal((4, 5, 9)).astype(F), rng.standard_normal((4, 9, 5)).astype(F)
    a, b = expert_linear(x, ids, up), expert_combine(h, ids, mix, down)
    order = rng.permutation(tokens)
    assert np.array_equal(a[order], expert_linear(x[order], ids[order], up))
    for t in range(tokens):
        one = slice(t, t + 1)
        assert np.array_equal(a[one], expert_linear(x[one], ids[one], up))
        assert np.array_equal(b[one], expert_combine(h[one], ids[one], mix[one], down))
        for j in range(k):
            want = linear(x[t], up[ids[t, j]]) if ids[t, j] >= 0 else np.zeros(5, F)
            assert np.array_equal(a[t, j], want)


def test_a_nan_token_spoils_no_other() -> None:
    x = np.ones((3, 2), F)
    x[1] = NAN
    y = expert_linear(x, I([[0], [0], [0]]), np.ones((1, 2, 2), F))
    assert np.isfinite(y[[0, 2]]).all() and np.isnan(y[1]).all()


def test_a_stored_weight_means_its_dequantized_values_and_only_chosen_experts_are_read() -> None:
    values = np.random.default_rng(1).standard_normal((4, 6, 32)).astype(F)
    raw = quants.quantize(values, GGMLQuantizationType.Q8_0)
    raw[[0, 2]] = 0xFF  # scales of NaN
    weight = Weight("experts", TensorType((4, 6, 32), "q8_0"), np.ascontiguousarray(raw).view(np.uint8))
    x, ids = np.random.default_rng(2).standard_normal((2, 32)).astype(F), I([[3, 1], [1, -1]])
    want = quants.dequantize(raw[[1, 3]], GGMLQuantizationType.Q8_0)
    y = expert_linear(x, ids, weight)
    assert np.array_equal(y[0, 0], linear(x[0], want[1])) and np.array_equal(y[1, 0], linear(x[1], want[0]))


def test_cost_counts_no_more_experts_than_choices() -> None:
    ids, w = TensorType((3, 2), "i32"), TensorType((64, 10, 32), "q8_0")
    one = 10 * 34  # bytes of an expert
    assert expert_linear.cost([TensorType((3, 32)), ids, w], {}) == Cost(2 * 6 * 320, 384 + 24 + 6 * one + 4 * 60)
    few = TensorType((4, 10, 32), "q8_0")
    types = [TensorType((3, 2, 32)), ids, TensorType((3, 2)), few]
    assert expert_combine.cost(types, {}) == Cost(2 * 6 * 10 * 33, 768 + 24 + 24 + 4 * one + 4 * 30)


def test_softmax_of_the_router_sums_to_one() -> None:
    mix, _ = route(np.random.default_rng(3).standard_normal((20, 16)).astype(F) * 5, 4)
    assert all(math.isclose(s, 1, abs_tol=4 * 2.0**-24) for s in mix.sum(axis=1, dtype=np.float64))
