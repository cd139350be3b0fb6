"""Writing to pages: where rows go, which rows go, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.core.errors import ArgumentError
from trueup.core.ops import paged_append

pytestmark = pytest.mark.filterwarnings("error")

F, I = np.float32, np.int32


def test_rows_go_to_their_entry_through_the_page_table() -> None:
    cache = np.full((4, 2), -1, I)
    # positions 3, 4, 5 of a sequence whose pages are 2, 0, 3: entry 3 in page 0 place 1, 4 and 5 in page 3
    paged_append(I([30, 40, 50]), I([0, 3]), I([3]), I([[2, 0, 3]]), cache)
    assert cache.tolist() == [[-1, 30], [-1, -1], [-1, -1], [40, 50]]


def test_only_a_row_that_ends_an_entry_is_stored() -> None:
    cache = np.zeros((2, 2), I)
    # every 3: positions 1 … 6 end entries at 2 and 5
    paged_append(I([1, 2, 3, 4, 5, 6]), I([0, 6]), I([1]), I([[1, 0]]), cache, every=3)
    assert cache.tolist() == [[0, 0], [2, 5]]
    paged_append(I([7]), I([0, 1]), I([7]), I([[1, -1]]), cache, every=3)  # ends nothing, so it needs no page
    assert cache.tolist() == [[0, 0], [2, 5]]


@pytest.mark.fault("B17")
def test_b17_sequences_from_the_same_positions_do_not_meet() -> None:
    cache = np.zeros((4, 2, 1), F)
    paged_append(F([[1], [2], [9]]), I([0, 2, 3]), I([0, 0]), I([[3, -1], [1, -1]]), cache)
    assert cache[..., 0].tolist() == [[0, 0], [9, 0], [0, 0], [1, 2]]


@pytest.mark.fault("B32")
def test_b32_padding_and_sequences_without_rows_write_nothing() -> None:
    cache = np.zeros((2, 2), F)
    paged_append(F([5, np.nan, np.nan]), I([0, 0, 1]), I([-7, 0]), I([[-1], [1]]), cache)
    assert cache.tolist() == [[0, 0], [5, 0]]
    paged_append(np.zeros(0, F), I([0]), I([]), np.zeros((0, 3), I), cache)
    assert cache.tolist() == [[0, 0], [5, 0]]


@pytest.mark.fault("B21")
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int32, np.uint8])
def test_b21_what_is_written_is_read_bit_for_bit_at_its_place(kind: type) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (48, 3, 5)).astype(kind)
    cache, table = np.zeros((7, 8, 3, 5), kind), I([[6, 2, 0, 5, 1, 3]])
    for a, b in ((0, 11), (11, 12), (12, 48)):
        paged_append(x[a:b], I([0, b - a]), I([a]), table, cache)
    for p in range(48):
        assert np.array_equal(cache[table[0, p // 8], p % 8], x[p])
    assert not cache[4].any()


@pytest.mark.parametrize(
    ("table", "past", "message"),
    [
        ([[0, -1]], 1, "sequence 0: page 1 is -1, of 2 pages"),
        ([[0, 2]], 1, "sequence 0: page 1 is 2, of 2 pages"),
        ([[0, 1]], 3, "sequence 0 needs page 2 of a table of 2"),
        ([[0, 1]], -1, "sequence 0 has a past of -1"),
    ],
)
def test_pages_that_are_not_there_are_refused_and_nothing_is_written(
    table: list[list[int]], past: int, message: str
) -> None:
    cache = np.zeros((2, 2), F)
    with pytest.raises(ValueError, match=message):
        paged_append(F([1, 2]), I([0, 2]), I([past]), I(table), cache)
    assert not cache.any()


def test_a_cache_of_another_type_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cache must be of the rows' type, f32, got f16"):
        paged_append(F([1]), I([0, 1]), I([0]), I([[0]]), np.zeros((1, 1), np.float16))
