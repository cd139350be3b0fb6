"""The bytes of one GGUF file to a Header. Believes nothing: every count, length, dimension and offset is a Python
integer, bounded by the bytes that remain before anything is read or allocated for it. Maps nothing, reads no weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from functools import cache
from math import prod
from mmap import mmap
from os import PathLike
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from trueup.core.dtypes import DTYPES
from trueup.core.types import TensorType

from .errors import GGUFError, UnsupportedTypeError, clip
from .strings import StringArray, blank_lengths

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_DEPTH = 4
MIN_ALIGNMENT = 8

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: _U32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<B"),
    GGUFValueType.UINT64: _U64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_MIN_KEY = 8 + 1 + 4 + 1
"""Bytes of the shortest key: length, one character, type, one byte of value."""
_MIN_TENSOR = 8 + 1 + 4 + 4 + 8
"""Bytes of the shortest tensor record: length, one character, number of dimensions (none), type, offset."""
_MIN_ELEMENT = {GGUFValueType.STRING: 8, GGUFValueType.ARRAY: 12}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `start` and `nbytes` in bytes of the file; `record` is where the header speaks of it."""

    name: str
    type: TensorType
    start: int
    nbytes: int
    record: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says of itself, checked. `offsets` gives the byte at which each key stands."""

    path: str | PathLike[str]
    size: int
    version: int
    alignment: int
    metadata: dict[str, Any]
    value_types: dict[str, tuple[GGUFValueType, ...]]
    offsets: dict[str, int]
    tensors: dict[str, TensorInfo]


def parse(path: str | PathLike[str], buf: bytes | mmap) -> Header:
    """Header of the file whose bytes are `buf`; `path` is for messages. GGUFError on the first thing that is wrong."""
    c = _Cursor(path, buf)
    version = _version(c)
    n_tensors, n_keys = c.u64("tensor count"), c.u64("key count")
    for what, n, least, at in (("key count", n_keys, _MIN_KEY, 16), ("tensor count", n_tensors, _MIN_TENSOR, 8)):
        if n * least > c.left:
            raise c.error(f"{what} exceeds the file", at=at, found=n, expected=f"at most {c.left // least}")

    metadata: dict[str, Any] = {}
    types: dict[str, tuple[GGUFValueType, ...]] = {}
    offsets: dict[str, int] = {}
    for _ in range(n_keys):
        at = c.pos
        key = c.name("key")
        if key in offsets:
            raise c.error("key stands twice", key=key, at=at, found=f"it first at byte {offsets[key]}")
        c.key = key
        offsets[key] = at
        types[key], metadata[key] = _value(c)
    c.key = None

    alignment = _alignment(c, metadata, types, offsets)
    records = [_record(c) for _ in range(n_tensors)]
    return Header(path, c.end, version, alignment, metadata, types, offsets, _place(c, records, alignment))


class _Cursor:
    """A position in the bytes that can't pass their end, and the words for what is wrong there."""

    __slots__ = ("buf", "end", "key", "path", "pos", "tensor")

    def __init__(self, path: str | PathLike[str], buf: bytes | mmap) -> None:
        self.path, self.buf, self.end, self.pos = path, buf, len(buf), 0
        self.key: str | None = None
        self.tensor: str | None = None

    @property
    def left(self) -> int:
        return self.end - self.pos

    def error(
        self, problem: str, *, at: int, kind: type[GGUFError] = GGUFError, key: str | None = None, **contrast: object
    ) -> GGUFError:
        return kind(problem, path=self.path, key=key or self.key, tensor=self.tensor, offset=at, **contrast)

    def take(self, n: int, what: str) -> int:
        """Where the next n bytes start."""
        start = self.pos
        if n > self.end - start:
            raise self.error(
                f"{what} runs past the end", at=start, found=f"{self.end - start} bytes left", expected=f"{n} bytes"
            )
        self.pos = start + n
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buf, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buf, self.take(8, what))[0])

    def text(self, what: str) -> str:
        at = self.pos
        n = self.u64(f"length of {what}")
        start = self.take(n, what)
        try:
            return self.buf[start : start + n].decode()
        except UnicodeDecodeError as e:
            raise self.error(f"{what} is not UTF-8 ({e.reason} at its byte {e.start})", at=at) from None

    def name(self, what: str) -> str:
        at = self.pos
        name = self.text(f"{what} name")
        if not name:
            raise self.error(f"{what} name is empty", at=at)
        return name


def _version(c: _Cursor) -> int:
    magic = c.buf[c.take(4, "magic") : 4]
    if magic == b"FUGG":
        raise c.error(_BIG_ENDIAN, at=0, found=f"magic {magic!r}", expected="b'GGUF'")
    if magic != b"GGUF":
        raise c.error("not a GGUF file", at=0, found=f"magic {magic!r}", expected="b'GGUF'")
    version = c.u32("version")
    if version in VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 0 < swapped < 0x10000 and version >= 0x10000:
        raise c.error(_BIG_ENDIAN, at=4, found=f"version {swapped} in swapped byte order", expected="2 or 3")
    raise c.error("version of GGUF is not read", at=4, found=version, expected="2 or 3")


_BIG_ENDIAN = "file is big-endian, which is not read: gguf-convert-endian, of the package gguf, makes it little-endian"


def _type(c: _Cursor, what: str) -> GGUFValueType:
    at = c.pos
    raw = c.u32(f"{what} type")
    try:
        return GGUFValueType(raw)
    except ValueError:
        raise c.error(f"{what} type is unknown", at=at, found=raw, expected=f"0 to {max(GGUFValueType)}") from None


def _value(c: _Cursor) -> tuple[tuple[GGUFValueType, ...], Any]:
    t = _type(c, "value")
    if t == GGUFValueType.ARRAY:
        types, value = _array(c, depth=1)
        return (t, *types), value
    if t == GGUFValueType.STRING:
        return (t,), c.text("string")
    form = _SCALARS[t]
    at = c.take(form.size, f"{t.name.lower()} value")
    (value,) = form.unpack_from(c.buf, at)
    if t == GGUFValueType.BOOL:
        if value > 1:
            raise c.error("bool is neither true nor false", at=at, found=value, expected="0 or 1")
        value = bool(value)
    return (t,), value


def _array(c: _Cursor, depth: int) -> tuple[tuple[GGUFValueType, ...], Any]:
    """An array behind its type: numbers as a read-only NumPy array, strings as StringArray, arrays as a list."""
    t, at = _type(c, "element"), c.pos
    n = c.u64("array length")
    least = _MIN_ELEMENT.get(t) or _SCALARS[t].size
    if n * least > c.left:
        raise c.error(
            f"array of {t.name.lower()} runs past the end", at=at, found=n, expected=f"at most {c.left // least}"
        )
    if t == GGUFValueType.STRING:
        return (t,), _strings(c, n)
    if t == GGUFValueType.ARRAY:
        if depth == MAX_DEPTH:
            raise c.error("arrays nest too deep", at=at - 4, expected=f"a depth of at most {MAX_DEPTH}")
        parts = [_array(c, depth + 1) for _ in range(n)]
        return (t, *(parts[0][0] if parts else ())), [p[1] for p in parts]
    form = _SCALARS[t]
    start = c.take(n * form.size, "array")
    a = np.frombuffer(c.buf, np.dtype(form.format), n, start) if n else np.empty(0, form.format)
    if t == GGUFValueType.BOOL:
        if n and a.max() > 1:
            i = int(np.argmax(a > 1))
            raise c.error(f"bool {i} is neither true nor false", at=start + i, found=a[i], expected="0 or 1")
        a = a.view(np.bool_)
    a = a.copy()
    a.flags.writeable = False
    return (t,), a


def _strings(c: _Cursor, n: int) -> StringArray:
    buf, begin, end = c.buf, c.pos, c.end
    ends = array("Q", bytes(8 * n))
    length_at, pos = _U64.unpack_from, begin
    for i in range(n):
        if pos + 8 > end:
            raise c.error(f"length of string {i} of {n} runs past the end", at=pos, found=f"{end - pos} bytes left")
        (length,) = length_at(buf, pos)
        start, pos = pos, pos + 8 + length
        if pos > end:
            left = end - start - 8
            raise c.error(
                f"string {i} of {n} runs past the end", at=start, found=f"{left} bytes left", expected=f"{length} bytes"
            )
        ends[i] = pos - begin
    c.pos = pos
    raw = np.frombuffer(buf, np.uint8, pos - begin, begin).copy() if n else np.empty(0, np.uint8)
    blank_lengths(raw, ends)
    try:
        return StringArray(raw.tobytes(), ends)
    except UnicodeDecodeError as e:
        i = int(np.searchsorted(np.frombuffer(ends, np.int64), e.start, side="right"))
        raise c.error(f"string {i} of {n} is not UTF-8 ({e.reason})", at=begin + e.start) from None


def _alignment(
    c: _Cursor, metadata: dict[str, Any], types: dict[str, tuple[GGUFValueType, ...]], offsets: dict[str, int]
) -> int:
    key = "general.alignment"
    if key not in metadata:
        return GGUF_DEFAULT_ALIGNMENT
    if types[key] != (GGUFValueType.UINT32,):
        found = " of ".join(t.name.lower() for t in types[key])
        raise c.error("alignment is of the wrong type", key=key, at=offsets[key], found=found, expected="uint32")
    n = int(metadata[key])
    if n < MIN_ALIGNMENT or n & (n - 1):
        raise c.error(
            "alignment is out of range",
            key=key,
            at=offsets[key],
            found=n,
            expected=f"a power of two, {MIN_ALIGNMENT} or more",
        )
    return n


def _record(c: _Cursor) -> TensorInfo:
    """A tensor's record; its `start` is still relative to the data."""
    record = c.pos
    name = c.tensor = c.name("tensor")
    at = c.pos
    n_dims = c.u32("number of dimensions")
    if n_dims > MAX_DIMS:
        raise c.error("too many dimensions", at=at, found=n_dims, expected=f"at most {MAX_DIMS}")
    at = c.take(8 * n_dims, "dimensions")
    ne = struct.unpack_from(f"<{n_dims}Q", c.buf, at)
    if 0 in ne:
        raise c.error("a dimension is zero", at=at, found=list(ne), expected="1 or more")
    dtype = _dtype(c)
    start = c.u64("offset")
    element = DTYPES[dtype]
    row = ne[0] if ne else 1
    if row % element.block:
        raise c.error(
            f"rows of {dtype} don't fill their blocks",
            at=record,
            found=row,
            expected=f"a multiple of {element.block}",
        )
    nbytes = prod(ne) // element.block * element.block_bytes
    c.tensor = None
    return TensorInfo(name, TensorType(tuple(reversed(ne)), dtype), start, nbytes, record)


def _dtype(c: _Cursor) -> str:
    at = c.pos
    raw = c.u32("type")
    try:
        t = GGMLQuantizationType(raw)
    except ValueError:
        raise c.error("tensor type is unknown", at=at, kind=UnsupportedTypeError, found=raw) from None
    if not _readable(t):
        raise c.error("tensor type has no dequantization", at=at, kind=UnsupportedTypeError, found=t.name)
    return t.name.lower()


@cache
def _readable(t: GGMLQuantizationType) -> bool:
    """Whether this type has values: plain in NumPy, or dequantized by `gguf`, which is asked with a block of zeros."""
    if DTYPES[t.name.lower()].numpy is not None:
        return True
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[t][1]), np.uint8), t)
    except NotImplementedError:
        return False
    return True


def _place(c: _Cursor, records: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Tensors by name, in the file's order, at their places in the file: aligned, inside it, apart from each other."""
    base = -(-c.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for r in records:
        c.tensor = r.name
        if r.name in tensors:
            raise c.error("tensor stands twice", at=r.record, found=f"it first at byte {tensors[r.name].record}")
        if r.start % alignment:
            raise c.error("offset is not aligned", at=r.record, found=r.start, expected=f"a multiple of {alignment}")
        if base + r.start + r.nbytes > c.end:
            raise c.error(
                f"data of {r.type} runs past the end",
                at=r.record,
                found=f"{r.nbytes} bytes from byte {base + r.start}",
                expected=f"an end within the file's {c.end} bytes",
            )
        tensors[r.name] = TensorInfo(r.name, r.type, base + r.start, r.nbytes, r.record)
    last: TensorInfo | None = None
    for t in sorted(tensors.values(), key=lambda t: t.start):
        if last is not None and t.start < last.start + last.nbytes:
            c.tensor = t.name
            raise c.error(
                f"data overlaps that of tensor {clip(last.name)}",
                at=t.record,
                found=f"a start at byte {t.start}",
                expected=f"{last.start + last.nbytes} or later",
            )
        last = t
    c.tensor = None
    return tensors
