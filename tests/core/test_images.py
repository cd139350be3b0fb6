"""Compiled kernels on disk: one for all that they are made of, made again where a file is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup.core.backend.recorded.images import Images


def test_made_once_for_all_that_it_is_made_of(tmp_path: Path) -> None:
    made: list[str] = []

    def get(*parts: str) -> bytes:
        def make() -> bytes:
            made.append(parts[-1])
            return f"image of {parts[-1]}\n".encode()

        return Images(tmp_path / "sub").get(parts, make)

    asked = [
        ("13.0", "sm_90", "a"),
        ("13.5", "sm_90", "a"),
        ("13.5", "sm_90", "b"),
        ("13.5", "sm_80", "a"),
        ("13.5", "sm_80a"),
    ]
    for given in asked * 2:
        assert get(*given) == f"image of {given[-1]}\n".encode()
    assert len(made) == len(asked) == len(list((tmp_path / "sub").iterdir()))


@pytest.mark.parametrize("damage", [b"", b"x", b"cut", b"\0" * 200, b"another's"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: bytes) -> None:
    images, parts = Images(tmp_path), ("13.5", "a")
    images.write(("13.5", "b"), b"of b")
    (other,) = tmp_path.iterdir()
    images.get(parts, lambda: b"good")
    (path,) = set(tmp_path.iterdir()) - {other}
    path.write_bytes({b"cut": path.read_bytes()[:-1], b"another's": other.read_bytes()}.get(damage, damage))
    assert images.read(parts) is None
    assert images.get(parts, lambda: b"again") == b"again"
    assert images.get(parts, lambda: b"never") == b"again"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_can_t_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    images = Images(tmp_path / "file")
    assert images.get(("a",), lambda: b"made") == b"made" and images.read(("a",)) is None
