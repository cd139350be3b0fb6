"""Compiled kernels on disk, under what they are made of. A file that is not whole is made again, and a folder that can't be
written to costs time alone. Knows no compiler."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from trueup.core.files import whole_file


class Images:
    """Images in a folder. `parts` are all that an image depends on: device, compiler, options, text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, parts: Sequence[str], make: Callable[[], bytes]) -> bytes:
        """The image, made where none is kept whole."""
        image = self.read(parts)
        if image is None:
            image = make()
            self.write(parts, image)
        return image

    def read(self, parts: Sequence[str]) -> bytes | None:
        """The image, or None where none is kept whole."""
        key = self._key(parts)
        try:
            raw = (self.folder / key).read_bytes()
        except OSError:
            return None
        return raw[32:] if hashlib.sha256(key.encode() + raw[32:]).digest() == raw[:32] else None

    def write(self, parts: Sequence[str], image: bytes) -> None:
        """Keep an image, whole or not at all."""
        key = self._key(parts)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / key) as part:
                part.write_bytes(hashlib.sha256(key.encode() + image).digest() + image)

    @staticmethod
    def _key(parts: Sequence[str]) -> str:
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()
