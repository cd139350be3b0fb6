"""A writer of GGUF bytes for tests: plain enough to be checked by eye, and it tells where each field stands."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

SCALARS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"),
    "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d"),
}  # fmt: skip
STR, ARRAY = 8, 9
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8


@dataclass
class Writer:
    """Bytes with a map: `fields` lists (kind, byte, width) of every count, length, type, dimension and offset."""

    order: str = "<"
    data: bytearray = field(default_factory=bytearray)
    fields: list[tuple[str, int, int]] = field(default_factory=list)

    def number(self, kind: str, form: str, value: Any) -> None:
        packed = struct.pack(form.replace("<", self.order), value)
        self.fields.append((kind, len(self.data), len(packed)))
        self.data += packed

    def text(self, kind: str, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode()
        self.number(f"{kind} length", "<Q", len(raw))
        self.data += raw

    def value(self, kind: str, value: Any) -> None:
        """`kind` is a scalar's name, `str`, or either in brackets, as `[u64]` or `[[str]]`."""
        self.number("type", "<I", self.code(kind))
        self.body(kind, value)

    def body(self, kind: str, value: Any) -> None:
        if kind == "str":
            self.text("string", value)
        elif kind.startswith("["):
            self.number("type", "<I", self.code(kind[1:-1]))
            self.number("array length", "<Q", len(value))
            for v in value:
                self.body(kind[1:-1], v)
        else:
            self.number("value", SCALARS[kind][1], value)

    @staticmethod
    def code(kind: str) -> int:
        return STR if kind == "str" else ARRAY if kind.startswith("[") else SCALARS[kind][0]


def build(
    keys: list[tuple[str | bytes, str, Any]] = [],  # noqa: B006
    tensors: list[tuple[str | bytes, list[int], int, bytes]] = [],  # noqa: B006
    *,
    version: int = 3,
    alignment: int = 32,
    offsets: dict[str, int] = {},  # noqa: B006
    order: str = "<",
    magic: bytes = b"GGUF",
) -> Writer:
    """A file of keys `(name, kind, value)` and tensors `(name, ne in GGUF's order, type number, data)`.

    `offsets` puts a tensor elsewhere in the data than behind the one before it; `alignment` writes no key.
    """
    w = Writer(order)
    w.data += magic
    w.number("version", "<I", version)
    w.number("count", "<Q", len(tensors))
    w.number("count", "<Q", len(keys))
    for name, kind, value in keys:
        w.text("key", name)
        w.value(kind, value)
    blob = bytearray()
    for name, ne, code, data in tensors:
        w.text("tensor", name)
        w.number("dims", "<I", len(ne))
        for n in ne:
            w.number("dim", "<Q", n)
        w.number("type", "<I", code)
        w.number("offset", "<Q", offsets.get(name if isinstance(name, str) else "", len(blob)))
        blob += data + bytes(-len(data) % alignment)
    if tensors:
        w.data += bytes(-len(w.data) % alignment) + blob
    return w


@pytest.fixture(scope="session")
def gguf_bytes() -> SimpleNamespace:
    """`build` and the type numbers it takes."""
    return SimpleNamespace(build=build, F32=F32, F16=F16, Q4_0=Q4_0, Q8_0=Q8_0)
