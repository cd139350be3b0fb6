"""Writing files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends, and is removed where it fails."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):  # what is said is why the file could not be written
            part.unlink()
        raise
