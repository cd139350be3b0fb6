"""A GGUF file written as a stream and put in place whole: keys, tensor list, then one tensor after the other.

The file appears under its name when it is complete, or not at all. It knows no architecture and no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from trueup.models.convert_rules import ConvertError, Key

from .encode import stored_size

KINDS = {
    "u32": GGUFValueType.UINT32,
    "i32": GGUFValueType.INT32,
    "u64": GGUFValueType.UINT64,
    "f32": GGUFValueType.FLOAT32,
    "bool": GGUFValueType.BOOL,
    "str": GGUFValueType.STRING,
}


@dataclass(frozen=True)
class Header:
    """A tensor that will follow: its name, shape (outermost axis first) and type."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        return stored_size(self.shape, self.type)


@dataclass
class Pieces:
    """A tensor's bytes in pieces, with the two members of an array that GGUFWriter uses."""

    name: str
    nbytes: int
    pieces: Iterable[NDArray[Any]]

    def tofile(self, file: IO[bytes]) -> None:
        written = 0
        for piece in self.pieces:
            piece.tofile(file)
            written += piece.nbytes
        if written != self.nbytes:
            raise ConvertError(f"{self.name} came out as {written} bytes, expected {self.nbytes}")


class Output:
    """The file being written: `declare` the tensors, add every `key`, `begin`, then `write` the tensors in order."""

    def __init__(self, path: Path, architecture: str) -> None:
        self._writer = GGUFWriter(path, architecture)

    def key(self, prefix: str, key: Key) -> None:
        """Adds `prefix.key`. Raises ConvertError where the value doesn't fit the key's type."""
        name = f"{prefix}.{key.name}"
        scalar = KINDS[key.kind.removesuffix("[]")]
        values = key.value if key.kind.endswith("[]") else [key.value]
        for value in values:
            if not _fits(value, scalar):
                raise ConvertError(f"{name}: {value!r} is no {scalar.name}")
        if key.kind.endswith("[]"):
            # add_array would guess the element type from the values, and has no guess that leads to u64.
            self._writer.add_key_value(name, values, GGUFValueType.ARRAY, sub_type=scalar)
        else:
            self._writer.add_key_value(name, key.value, scalar)

    def declare(self, headers: Iterable[Header]) -> None:
        """Lists the tensors in the order in which they will be written."""
        for h in headers:
            block, size = GGML_QUANT_SIZES[h.type]
            if block == 1 and h.type != GGMLQuantizationType.BF16:
                self._writer.add_tensor_info(h.name, h.shape, np.dtype(h.type.name.replace("F", "float")), h.nbytes)
            else:
                row = h.shape[-1] // block * size
                self._writer.add_tensor_info(h.name, (*h.shape[:-1], row), np.dtype(np.uint8), h.nbytes, h.type)

    def parameters(self) -> tuple[int, int, int, int]:
        """Of the declared tensors: parameters in all, shared ones, those of one expert, and the number of experts."""
        return self._writer.get_total_parameter_count()

    def begin(self) -> None:
        """Writes all that comes before the tensors' bytes."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()

    def write(self, header: Header, pieces: Iterable[NDArray[Any]]) -> None:
        """Writes the next tensor's bytes."""
        self._writer.write_tensor_data(Pieces(header.name, header.nbytes, pieces))  # type: ignore[arg-type]

    def close(self, sync: bool) -> None:
        for f in self._writer.fout or ():
            f.flush()
            if sync:
                os.fsync(f.fileno())
        self._writer.close()


@contextmanager
def output(path: Path, architecture: str) -> Iterator[Output]:
    """A file that takes the name `path` when the block ends well, replacing what was there; else nothing remains."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConvertError(f"can't write {path}: {'it is a folder' if path.is_dir() else 'its folder does not exist'}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    out = Output(partial, architecture)
    try:
        yield out
        out.close(sync=True)
        os.replace(partial, path)
    except BaseException:
        out.close(sync=False)
        partial.unlink(missing_ok=True)
        raise


def _fits(value: Any, kind: GGUFValueType) -> bool:
    if kind is GGUFValueType.STRING:
        return isinstance(value, str)
    if kind is GGUFValueType.BOOL:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if kind is GGUFValueType.FLOAT32:
        return True
    low, high = {
        GGUFValueType.UINT32: (0, 2**32),
        GGUFValueType.INT32: (-(2**31), 2**31),
        GGUFValueType.UINT64: (0, 2**64),
    }[kind]
    return isinstance(value, int) and low <= value < high
