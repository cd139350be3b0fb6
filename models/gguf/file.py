"""A GGUF model as others see it: metadata by key, weights by name over memory maps. Reads no tensor's data itself."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from trueup.core.weight import Weight

from .errors import GGUFError
from .parse import Header, parse
from .split import load_set, pick


class GGUFFile:
    """A whole model: one file or all shards of a set.

    `path` is the (first) file, `files` all of them; `size` their bytes. `metadata` holds int, float, bool and str,
    read-only NumPy arrays for arrays of numbers and bools (of the file's own type: u64 stays exact), StringArray for
    arrays of strings, lists of these for nested arrays; `value_types` gives each key's GGUF types, outermost first, as
    `(ARRAY, UINT64)`, and `key_offsets` the byte at which it stands. `tensors` holds Weights in the files' order,
    shapes in NumPy's order (`[out, in]`).

    Weights keep their memory map alive, and the map its file: they may outlive this object.
    """

    def __init__(self, headers: list[Header], maps: list[mmap]) -> None:
        first = headers[0]
        self.path = Path(first.path)
        self.files = tuple(Path(h.path) for h in headers)
        self.size = sum(h.size for h in headers)
        self.version, self.alignment = first.version, first.alignment
        self.metadata: Mapping[str, Any] = MappingProxyType(first.metadata)
        self.value_types: Mapping[str, tuple[GGUFValueType, ...]] = MappingProxyType(first.value_types)
        self.key_offsets: Mapping[str, int] = MappingProxyType(first.offsets)
        self.tensors: Mapping[str, Weight] = MappingProxyType(
            {name: w for h, m in zip(headers, maps, strict=True) for name, w in _weights(h, m)}
        )

    def close(self) -> None:
        """Forget the weights, so that maps that nobody else holds are unmapped."""
        self.tensors = MappingProxyType({})

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shards = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"GGUFFile({self.path}{shards}: {len(self.metadata)} keys, {len(self.tensors)} tensors)"


def open_gguf(path: str | PathLike[str]) -> GGUFFile:
    """The model at `path`: a file, any shard of a split set, or a folder that holds one model.

    Every header is checked in full before a weight exists; tensor data is mapped, not read. Raises GGUFError on a file
    that is wrong or a set that is incomplete, OSError where the system can't open it.
    """
    p = Path(path)
    if p.is_dir():
        p = pick(p)
    maps: dict[str, mmap] = {}

    def load(p: Path) -> Header:
        maps[str(p)] = m = _map(p)
        return parse(p, m)

    headers = load_set(p, load)
    return GGUFFile(headers, [maps[str(h.path)] for h in headers])


def _map(path: Path) -> mmap:
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise GGUFError("not a regular file", path=path)
    if not found.st_size:
        raise GGUFError("file is empty", path=path)
    with path.open("rb") as f:
        return mmap(f.fileno(), 0, access=ACCESS_READ)


def _weights(h: Header, m: mmap) -> list[tuple[str, Weight]]:
    data = np.frombuffer(m, np.uint8)
    out = []
    for name, t in h.tensors.items():
        raw = data[t.start : t.start + t.nbytes]
        shape = t.type.shape
        out.append((name, Weight(name, t.type, raw.reshape(*shape[:-1], -1) if shape else raw)))
    return out
