"""Tables read by rows: the same values, and advice about just the pages of the rows that are read."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from trueup.core.types import TensorType
from trueup.core.weight import Weight
from trueup.models.gguf import RowTable

PAGE = mmap.PAGESIZE


@pytest.fixture
def table(tmp_path: Path) -> tuple[RowTable, np.ndarray]:
    """A table of 4,000 rows of 24 bytes (6 float32) that begins in the middle of a page."""
    values = np.arange(4000 * 6, dtype=np.float32).reshape(4000, 6)
    (tmp_path / "table").write_bytes(b"\1" * 100 + values.tobytes() + b"\2" * 50)
    with open(tmp_path / "table", "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    raw = np.frombuffer(mapped, np.uint8)[100 : 100 + values.nbytes].reshape(4000, 24)
    return RowTable(Weight("table", TensorType((4000, 6)), raw), small=0), values


def test_rows_are_those_of_the_weight(table: tuple[RowTable, np.ndarray]) -> None:
    made, values = table
    assert made.advised
    for rows in (
        np.array([0, 3999, 7, 7]),
        np.array([[5, 6], [1, 2]]),
        np.array([], np.int64),
        np.array([-1]),
        3,
        slice(2, 5),
    ):
        assert np.array_equal(made[rows], values[rows])
    assert np.array_equal(np.asarray(made), values)
    with pytest.raises(IndexError):
        made[np.array([4000])]


def test_just_the_pages_of_the_rows_are_asked_for(
    table: tuple[RowTable, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = table
    asked: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        RowTable,
        "_advise",
        lambda self, advice, a, b: asked.extend((advice, int(x), int(y)) for x, y in zip(a, b, strict=True)),
    )
    assert made.prefetch(np.array([0])) == PAGE
    assert asked == [("MADV_WILLNEED", -100, PAGE - 100)]  # byte 0 of the file is 100 before the table
    asked.clear()
    # row 166 ends at byte 100 + 167 * 24 = 4108 of the file: it lies on two pages, which neighbours share
    assert made.prefetch(np.array([166, 165, 166])) == 2 * PAGE and len(asked) == 1
    asked.clear()
    assert made.prefetch(np.array([0, 3999])) == 2 * PAGE and len(asked) == 2  # two runs, not all that lies between


def test_a_small_table_and_one_in_memory_are_left_alone(table: tuple[RowTable, np.ndarray]) -> None:
    made, values = table
    assert not RowTable(Weight("table", made.type, made.data)).advised
    assert not RowTable(Weight.of("table", values), small=0).advised
