"""The exceptions of GGUF reading: where (file, key or tensor, byte), what was found, what expected. Knows no format."""

from __future__ import annotations

from os import PathLike, fspath

_CLIP = 80


class GGUFError(ValueError):
    """A file that is not what it says it is, or not what its reader needs.

    The message is complete; `path`, `key`, `tensor` and `offset` (a byte of the file) repeat its parts where they are
    known, and are None elsewhere.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | PathLike[str] | None = None,
        key: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        found: object = None,
        expected: object = None,
    ) -> None:
        where = [] if path is None else [fspath(path)]
        what = f"key {clip(key)}" if key is not None else f"tensor {clip(tensor)}" if tensor is not None else ""
        at = "" if offset is None else f"at byte {offset}"
        if what or at:
            where.append(" ".join(filter(None, (what, at))))
        contrast = [f"{w} {v}" for w, v in (("found", found), ("expected", expected)) if v is not None]
        super().__init__(": ".join([*where, "; ".join(filter(None, (problem, ", ".join(contrast))))]))
        self.path = None if path is None else fspath(path)
        self.key, self.tensor, self.offset = key, tensor, offset


class UnsupportedTypeError(GGUFError):
    """A tensor of a type that has no dequantization, or of a number that names no type."""


class DraftHeadAlone(GGUFError):
    """A model's draft head where a model was wanted: the file is whole, and of use beside another."""


def clip(value: object) -> str:
    """`repr(value)`, cut to a length that suits one line: names in a hostile file may be megabytes."""
    text = repr(value[: _CLIP + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _CLIP else f"{text[:_CLIP]}…"
