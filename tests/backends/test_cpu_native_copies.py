"""Native copies: rows chosen, repeated and looked up, caches and tails; values by hand, any type, any strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float16, np.uint8, np.int64])
def test_rows_of_any_type_pass_bit_for_bit(dtype: Any) -> None:
    x = np.arange(24).astype(dtype).reshape(4, 6)
    out = np.full((3, 6), 9, dtype)
    native.take_rows(out, x, i32(2, -1, 2))
    np.testing.assert_array_equal(out, [[12, 13, 14, 15, 16, 17], [0] * 6, [12, 13, 14, 15, 16, 17]])
    two = np.full((4, 3, 6), 9, dtype)
    native.repeat_streams(two, x, streams=3)
    np.testing.assert_array_equal(two, np.stack([x] * 3, 1))
    joined = np.full((4, 9), 9, dtype)
    native.concat(joined, x, x[:, ::2])
    np.testing.assert_array_equal(joined[:, 6:], x[:, [0, 2, 4]])
    np.testing.assert_array_equal(joined[:, :6], x)
    copy = np.full((6, 4), 9, dtype)
    native.contiguous(copy, x.T)
    np.testing.assert_array_equal(copy, x.T)


def test_many_rows_are_copied_by_several_threads() -> None:
    x = np.random.default_rng(0).standard_normal((70_001, 3)).astype(np.float32)
    at = np.random.default_rng(1).integers(-1, 70_001, 70_003).astype(np.int32)
    out = np.full((70_003, 3), 7, np.float32)
    native.take_rows(out, x, at)
    np.testing.assert_array_equal(out, np.where(at[:, None] < 0, 0, x[at]))


def test_rows_of_a_strided_array_of_three_axes() -> None:
    x = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)[:, :, ::2]
    out = np.full((2, 3, 4), 9, np.float32)
    native.take_rows(out, x, i32(-1, 1))
    np.testing.assert_array_equal(out, np.stack([np.zeros((3, 4)), x[1]]))


def test_embedded_rows_are_the_dequantized_ones() -> None:
    table = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    stored = quantize(table, GGMLQuantizationType.Q8_0)
    out = np.full((2, 64), 9, np.float32)
    native.embed(out, stored, "q8_0", i32(4, 0))
    np.testing.assert_array_equal(out, native.dequantize(stored, "q8_0")[[4, 0]])
    with pytest.raises(ValueError, match="the id 5 is not in 0:5"):
        native.embed(out, stored, "q8_0", i32(0, 5))


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([1, 3, 3], 1),
        ([-np.inf, -np.inf], 0),
        ([5, np.nan, np.inf], 1),
        ([-np.nan, np.nan], 0),
        ([-0.0, 0.0], 0),
        ([1, np.inf, np.inf], 1),
    ],
)
def test_argmax_by_its_rule(row: list[float], want: int) -> None:
    out = i32(7)
    native.argmax(out, np.array([row], np.float32))
    assert out[0] == want


def test_entries_of_two_tokens_go_to_the_pages_of_their_sequence() -> None:
    """Sequence 0 has 3 tokens before the step: its rows are those of positions 3 and 4; entry 1 ends with position 3."""
    rows = np.arange(1, 6, dtype=np.float32)[:, None]
    cache = np.zeros((3, 2, 1), np.float32)
    native.paged_append(rows, i32(0, 2, 5), i32(3, 0), np.array([[2, 1], [0, -1]], np.int32), cache, every=2)
    np.testing.assert_array_equal(cache[:, :, 0], [[4, 0], [0, 0], [0, 1]])
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is -1"):
        native.paged_append(rows, i32(0, 0, 2), i32(0, 0), np.array([[0], [-1]], np.int32), cache)
    with pytest.raises(ValueError, match="2 pages, expected the 3 that entry 4 needs"):
        native.paged_append(rows, i32(0, 5), i32(0), np.array([[0, 1]], np.int32), cache)


def test_a_cut_out_part_of_a_cache_is_written_alone() -> None:
    cache = np.zeros((1, 2, 2, 4), np.int64)
    native.paged_append(np.ones((2, 2, 2), np.int64), i32(0, 2), i32(0), i32(0)[:, None], cache[..., 1:3])
    np.testing.assert_array_equal(cache[0, 1, 1], [0, 1, 1, 0])
    assert cache.sum() == 8


def test_delayed_rows_come_from_the_tail_then_from_the_step() -> None:
    tail = np.array([[[10], [11]], [[20], [21]], [[0], [0]]], np.int32)
    out = np.full((5, 1), 9, np.int32)
    x = np.arange(1, 6, dtype=np.int32)[:, None]
    native.delay(out, x, i32(0, 3, 4), i32(1, 0), tail, i32(2, -1, -1, -1, -1), by=2)
    np.testing.assert_array_equal(out[:, 0], [20, 21, 1, 10, 0])
    np.testing.assert_array_equal(tail[:, :, 0], [[11, 4], [2, 3], [21, 1]])
    with pytest.raises(ValueError, match=r"slots\[0\] is 3"):
        native.delay(out, x, i32(0, 5), i32(3), tail, by=2)


def test_ngram_rows_by_hand() -> None:
    """mix = 7·3 xor 4·5 = 21 xor 20 = 1; with the eos, 9, one token back the next mix is 2·3 xor 9·5 = 6 xor 45 = 43."""
    context = i32(4)[:, None]
    out = np.full((3, 2), -7, np.int32)
    sizes, offsets = np.array([10, 4], np.int64), np.array([100, 200], np.int64)
    native.ngram_rows(out, i32(7, 9, 2), i32(0, 3), i32(0), np.array([3, 5], np.int64), offsets, sizes, context, eos=9)
    np.testing.assert_array_equal(out, [[101, 201], [(27 ^ 35) % 10 + 100, (27 ^ 35) % 4 + 200], [103, 203]])
    assert context[0, 0] == 2
    # A negative mix: -3 mod 10 is 7.
    native.ngram_rows(
        out[:1], i32(1), i32(0, 1), i32(0), np.array([-1, 1], np.int64), offsets, sizes, i32(2)[:, None], eos=9
    )
    np.testing.assert_array_equal(out[0], [(-1 ^ 2) % 10 + 100, (-1 ^ 2) % 4 + 200])
    with pytest.raises(ValueError, match="size of 0"):
        native.ngram_rows(
            out, i32(7, 9, 2), i32(0, 3), i32(0), np.array([3, 5], np.int64), offsets, 0 * sizes, context, eos=9
        )


def test_clamp_keeps_nan() -> None:
    out = np.empty(4, np.float32)
    native.clamp(out, np.array([-5, np.nan, np.inf, 0.5], np.float32), low=-1, high=2)
    np.testing.assert_array_equal(out, np.array([-1, np.nan, 2, 0.5], np.float32))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: native.take_rows(np.empty((1, 3)), np.empty((1, 2)), i32(0)), "out has entries on axis 1 = 3"),
        (lambda: native.take_rows(np.empty((1, 2), np.float32), np.empty((1, 2)), i32(0)), "out has bytes an element = 4"),
        (lambda: native.concat(np.empty((1, 3)), np.empty((1, 2)), np.empty((1, 2))), "last axis = 3, expected 4"),
        (lambda: native.repeat_streams(np.empty((1, 3, 2)), np.empty((1, 2)), streams=2), "streams = 3, expected 2"),
        (lambda: native.paged_append(np.empty((1, 3)), i32(0, 1), i32(0), i32(0)[:, None], np.empty((1, 1, 2))), "axis 2 = 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_was_found(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
