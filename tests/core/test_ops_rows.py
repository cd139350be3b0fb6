"""Rows chosen, repeated and looked up."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from trueup.core.ops import embed, repeat_streams, take_rows
from trueup.core.types import TensorType
from trueup.core.weight import Weight

pytestmark = pytest.mark.filterwarnings("error")


def test_repeat_streams() -> None:
    x = np.float32([[1, 2], [3, 4]])
    assert repeat_streams(x, streams=3).tolist() == [[[1, 2]] * 3, [[3, 4]] * 3]
    assert repeat_streams(x[:0], streams=3).shape == (0, 3, 2)


def test_take_rows_repeats_and_fills_with_zeros() -> None:
    x = np.int32([[1, 2], [3, 4], [5, 6]])
    taken = take_rows(x, np.int32([2, -1, 0, 2]))
    assert taken.tolist() == [[5, 6], [0, 0], [1, 2], [5, 6]]
    assert taken.dtype == np.int32


def test_take_rows_of_nothing() -> None:
    assert take_rows(np.zeros((0, 2, 3), np.float32), np.int32([-1])).tolist() == [[[0] * 3] * 2]
    assert take_rows(np.zeros((4, 2), np.float32), np.int32([])).shape == (0, 2)
    assert take_rows(np.float32([7, 8]), np.int32([1])).tolist() == [8]


@pytest.mark.parametrize("at", [-2, 3, 2**31 - 1])
def test_take_rows_refuses_rows_that_are_not_there(at: int) -> None:
    with pytest.raises(ValueError, match=rf"the index {at} is not in -1:3"):
        take_rows(np.zeros((3, 2), np.float32), np.int32([0, at]))


def test_take_rows_passes_nan_in_other_rows_by() -> None:
    x = np.float32([[np.nan, np.nan], [1, 2]])
    assert take_rows(x, np.int32([1, -1])).tolist() == [[1, 2], [0, 0]]


def test_embed_looks_up_any_shape_of_ids() -> None:
    table = np.float32([[0, 1], [2, 3], [4, 5]])
    assert embed(table, np.int32([2, 0])).tolist() == [[4, 5], [0, 1]]
    assert embed(table, np.int32([[1, 1], [0, 2]])).shape == (2, 2, 2)
    assert embed(table, np.zeros((0,), np.int32)).shape == (0, 2)


@pytest.mark.parametrize("bad", [-1, 3])
def test_embed_refuses_ids_outside_the_table(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"embed: the id {bad} is not in 0:3"):
        embed(np.zeros((3, 2), np.float32), np.int32([0, bad]))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.BF16])
def test_embed_of_a_stored_table_is_the_dequantized_row(kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    raw = quants.quantize(values, kind)
    table = Weight("table", TensorType((5, 64), kind.name.lower()), np.ascontiguousarray(raw).view(np.uint8))
    ids = np.int32([[4, 0], [1, 1]])
    assert np.array_equal(embed(table, ids), quants.dequantize(raw, kind)[ids])


def test_embed_reads_only_the_rows_it_needs() -> None:
    class Once(np.ndarray):
        asked: list[object] = []

        def __getitem__(self, rows: object) -> object:
            self.asked.append(rows)
            return super().__getitem__(rows)  # type: ignore[index]

    data = np.zeros((1000, 8), np.uint8).view(Once)
    embed(Weight("table", TensorType((1000, 2)), data), np.int32([7, 3]))
    assert [np.asarray(a).tolist() for a in Once.asked] == [[7, 3]]
