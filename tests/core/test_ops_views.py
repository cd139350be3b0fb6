"""Views and copies: values, where they lie, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.core.errors import ArgumentError
from trueup.core.graph import Graph
from trueup.core.ops import columns, contiguous, merge_heads, split_heads

pytestmark = pytest.mark.filterwarnings("error")


def test_split_heads_cuts_the_last_axis_in_order() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert split_heads(x, heads=3).tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]


def test_merge_heads_is_the_inverse_of_split_heads() -> None:
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    assert np.array_equal(merge_heads(x), x.reshape(2, 12))
    assert np.array_equal(split_heads(merge_heads(x), heads=3), x)


def test_heads_must_divide_the_axis() -> None:
    with pytest.raises(ArgumentError, match="heads"):
        split_heads(np.zeros((2, 7), np.float32), heads=3)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)])
def test_views_of_nothing_keep_their_axes(shape: tuple[int, int]) -> None:
    x = np.zeros(shape, np.float32)
    cut = split_heads(x, heads=3)
    assert cut.shape == (shape[0], 3, shape[1] // 3)
    assert merge_heads(cut).shape == shape
    assert columns(x, start=0, size=shape[1]).shape == shape
    assert contiguous(x).shape == shape


def test_columns_takes_a_range_of_any_type() -> None:
    x = np.arange(10, dtype=np.int32).reshape(2, 5)
    assert columns(x, start=1, size=3).tolist() == [[1, 2, 3], [6, 7, 8]]
    assert columns(x, start=5, size=0).shape == (2, 0)


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (3, 3), (6, 0)])
def test_columns_refuses_to_leave_the_axis(start: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{start}:{start + size} leaves the axis of 5"):
        columns(np.zeros((2, 5), np.float32), start=start, size=size)


def test_contiguous_copies_what_is_strided() -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3).T
    y = contiguous(x)
    assert y.flags.c_contiguous and np.array_equal(x, y) and not np.may_share_memory(x, y)
    assert not np.may_share_memory(y, contiguous(y))


@pytest.mark.fault("B38")
def test_b38_views_of_one_value_name_its_storage_and_where_they_lie() -> None:
    g = Graph()
    x = g.input("x", 4, 12)
    left, right = columns(x, start=0, size=8), columns(x, start=6, size=6)
    assert (left.base, left.offset, left.type.strides) == (x, 0, (12, 1))
    assert (right.base, right.offset, right.type.strides) == (x, 6, (12, 1))
    heads = columns(split_heads(right, heads=3), start=1, size=1)  # a view of a view of a view
    assert (heads.base, heads.offset, heads.type.strides) == (x, 7, (12, 2, 1))
    assert merge_heads(split_heads(x, heads=3)).base is x
    assert (
        merge_heads(columns(split_heads(x, heads=3), start=1, size=2)).base is None
    )  # no strides say it: the view needs a copy
    assert contiguous(x).base is None
