"""Convolution, trailing mean and delay: constants, tails, padding, snapshots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.errors import ArgumentError
from trueup.core.ops import causal_conv, delay, trailing_mean

pytestmark = pytest.mark.filterwarnings("error")

F, I = np.float32, np.int32


def test_causal_conv_by_hand() -> None:
    tail = F([[[10], [20]]])
    # taps (1, 2, 3): t0 = 10 + 2·20 + 3·1 = 53, t1 = 20 + 2·1 + 3·2 = 28, t2 = 1 + 4 + 9 = 14
    y = causal_conv(F([[1], [2], [3]]), F([[1, 2, 3]]), I([0, 3]), I([0]), tail)
    assert y.tolist() == [[53], [28], [14]]
    assert tail.tolist() == [[[2], [3]]]


def test_causal_conv_with_dilation() -> None:
    tail = np.zeros((1, 2, 1), F)
    # taps (10, 1) at distance 2: 1, 2, 3 + 10·1, 4 + 10·2
    y = causal_conv(F([[1], [2], [3], [4]]), F([[10, 1]]), I([0, 4]), I([0]), tail, dilation=2)
    assert y.tolist() == [[1], [2], [13], [24]] and tail.tolist() == [[[3], [4]]]


def test_a_step_shorter_than_the_tail_shifts_it() -> None:
    tail = F([[[1], [2], [3]]])
    causal_conv(F([[4]]), F([[0, 0, 0, 1]]), I([0, 1]), I([0]), tail)
    assert tail.tolist() == [[[2], [3], [4]]]


def test_one_tap_needs_no_tail() -> None:
    tail = np.zeros((1, 0, 2), F)
    assert causal_conv(F([[1, 2]]), F([[3], [4]]), I([0, 1]), I([0]), tail).tolist() == [[3, 8]]


def test_keep_takes_the_tail_after_its_row() -> None:
    tail = np.zeros((4, 2, 1), F)
    tail[0] = [[8], [9]]
    causal_conv(F([[1], [2], [3]]), F([[0, 0, 1]]), I([0, 3]), I([0]), tail, I([3, -1, 2]))
    assert tail[..., 0].tolist() == [[2, 3], [0, 0], [2, 3], [9, 1]]


def test_trailing_mean_by_hand() -> None:
    tail = np.zeros((1, 3, 1), F)
    y = trailing_mean(F([[4], [8], [12], [16], [20]]), I([0, 5]), I([0]), tail, every=4)
    # 4/4, 12/4, 24/4, 40/4, (8+12+16+20)/4
    assert y.tolist() == [[1], [3], [6], [10], [14]]
    assert tail.tolist() == [[[12], [16], [20]]]
    one = trailing_mean(F([[4], [8]]), I([0, 2]), I([0]), np.zeros((1, 0, 1), F), every=1)
    assert one.tolist() == [[4], [8]]


def test_delay_by_hand_in_any_type() -> None:
    tail = I([[7, 8]])
    assert delay(I([1, 2, 3]), I([0, 3]), I([0]), tail, by=2).tolist() == [7, 8, 1]
    assert tail.tolist() == [[2, 3]]
    wide = np.zeros((1, 1, 2, 2), F)
    x = np.arange(8, dtype=F).reshape(2, 2, 2)
    assert np.array_equal(delay(x, I([0, 2]), I([0]), wide, by=1), [np.zeros((2, 2)), x[0]])
    assert np.array_equal(wide[0, 0], x[1])
    assert np.array_equal(delay(x, I([0, 2]), I([0]), np.zeros((1, 0, 2, 2), F), by=0), x)


def test_delay_refuses_a_tail_of_another_type() -> None:
    with pytest.raises(ArgumentError, match="tail must be of x's type, i32, got f32"):
        delay(I([1]), I([0, 1]), I([0]), np.zeros((1, 1), F), by=1)


@pytest.mark.fault("B18")
def test_b18_the_first_position_of_a_block_is_its_own_when_positions_repeat() -> None:
    positions = I([[p] for p in (0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4)])
    firsts = delay(positions, I([0, 12]), I([0]), np.zeros((1, 3, 1), I), by=3)
    assert firsts[[3, 7, 11], 0].tolist() == [0, 2, 2]  # blocks 0-3, 4-7, 8-11, by rank


def run(name: str, x: np.ndarray, cu: list[int], slots: list[int], state: np.ndarray) -> np.ndarray:
    w = F([[1, -2, 0.5, 3]] * x.shape[1])
    if name == "conv":
        return causal_conv(x, w, I(cu), I(slots), state)
    if name == "mean":
        return trailing_mean(x, I(cu), I(slots), state, every=4)
    return delay(x, I(cu), I(slots), state, by=3)


@pytest.mark.fault("B32")
@pytest.mark.parametrize("name", ["conv", "mean", "delay"])
def test_b32_padding_rows_are_not_read_and_empty_sequences_not_touched(name: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 2)).astype(F), rng.standard_normal((7, 2)).astype(F)
    alone = []
    for x in (a, b):
        state = np.zeros((1, 3, 2), F)
        alone.append((run(name, x, [0, len(x)], [0], state), state[0]))
    state = np.zeros((4, 3, 2), F)
    state[0] = 5
    packed = np.concatenate([a, b, np.full((4, 2), np.nan, F)])
    y = run(name, packed, [0, 3, 3, 10, 10], [2, -1, 1, 99], state)
    assert np.array_equal(y[:3], alone[0][0]) and np.array_equal(y[3:10], alone[1][0])
    assert not y[10:].any()
    assert np.array_equal(state[2], alone[0][1]) and np.array_equal(state[1], alone[1][1])
    assert (state[0] == 5).all() and not state[3].any()


@pytest.mark.parametrize("name", ["conv", "mean", "delay"])
def test_nan_reaches_only_what_follows_it_within_reach(name: str) -> None:
    x, state = np.ones((9, 2), F), np.zeros((1, 3, 2), F)
    x[2, 0] = np.nan
    y = run(name, x, [0, 9], [0], state)
    hit = [t for t in range(9) if np.isnan(y[t, 0])]
    assert hit == ([5] if name == "delay" else [2, 3, 4, 5]) and np.isfinite(y[:, 1]).all()
    assert np.isfinite(state).all()


@pytest.mark.parametrize(
    ("cu", "slots", "message"),
    [
        ([0, 2, 1], [0, 0], "must rise from 0 to at most 3"),
        ([0, 2, 4], [0, 1], "must rise from 0 to at most 3"),
        ([1, 2, 3], [0, 1], "must rise from 0 to at most 3"),
        ([0, 2, 3], [0, -1], "sequence 1 has rows 2:3 and slot -1, of 2 slots"),
        ([0, 2, 3], [2, 0], "sequence 0 has rows 0:2 and slot 2, of 2 slots"),
    ],
)
def test_bad_rows_and_slots_are_refused(cu: list[int], slots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("conv", np.zeros((3, 2), F), cu, slots, np.zeros((2, 3, 2), F))


@pytest.mark.parametrize("slot", [-2, 4])
def test_a_bad_keep_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=rf"keep\[1\] is {slot}, of 4 slots"):
        delay(I([1, 2]), I([0, 2]), I([0]), np.zeros((4, 1), I), I([-1, slot]), by=1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_causal_conv_is_numpys_convolution(seed: int, tokens: int, taps: int, dilation: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((tokens, 3)).astype(F), rng.standard_normal((3, taps)).astype(F)
    tail = rng.standard_normal((1, (taps - 1) * dilation, 3)).astype(F)
    history = np.concatenate([tail[0], x]).astype(np.float64)
    y = causal_conv(x, w, I([0, tokens]), I([0]), tail, dilation=dilation)
    for c in range(3):
        kernel = np.zeros((taps - 1) * dilation + 1)
        kernel[::dilation] = w[c]
        want = np.convolve(history[:, c], kernel[::-1], mode="valid")
        np.testing.assert_allclose(y[:, c], want, rtol=1e-6, atol=1e-6)
    assert np.array_equal(tail[0], history[tokens:].astype(F))
