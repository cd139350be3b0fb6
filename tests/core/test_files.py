"""Files appear whole or not at all, with the mode that any new file gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trueup.core.files import whole_file


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "state"
    target.write_text("before")
    with whole_file(target) as part:
        part.write_text("after")
        assert target.read_text() == "before"
    assert target.read_text() == "after" and os.listdir(tmp_path) == ["state"]
    (tmp_path / "other").touch()
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_nothing_is_left_of_one_that_failed(tmp_path: Path) -> None:
    target = tmp_path / "state"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), whole_file(target) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["state"]
