"""A Hugging Face checkpoint folder as it lies on disk: configuration, tokenizer files, and tensors read on demand.

It checks that the files are what they claim to be. It knows no architecture and changes no value but its width.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from trueup.models.convert_rules import Array, ConvertError

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
INTS: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: its file, element type by safetensors' name, shape, and position in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Checkpoint:
    """The folder `path`. Raises ConvertError where it is no checkpoint, or one that was converted before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file():
            kind = "a GGUF file: it is converted already" if _is_gguf(path) else "a file"
            raise ConvertError(f"{path} is {kind}; expected the folder of a Hugging Face checkpoint")
        if not path.is_dir():
            raise ConvertError(f"{path} does not exist; expected the folder of a Hugging Face checkpoint")
        self.config = self.json("config.json")
        for key in ("quantization_config", "quantization"):
            if self.config.get(key):
                raise ConvertError(f"{path / 'config.json'} has {key}: expected float weights (F32, F16, BF16)")
        self.tensors = self._tensors()

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file of the folder."""
        file = self.path / name
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConvertError(f"{self.path} has no {name}; expected a Hugging Face checkpoint") from None
        except ValueError as e:
            raise ConvertError(f"{file} is not JSON: {e}") from None
        if not isinstance(value, dict):
            raise ConvertError(f"{file} holds a {type(value).__name__}, expected an object")
        return value

    def optional_text(self, name: str) -> str | None:
        """A text file of the folder, or None where there is none."""
        file = self.path / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def floats(self, name: str) -> Array:
        """A tensor as float32, which holds every value of F32, F16 and BF16 exactly."""
        entry = self.tensors[name]
        if entry.dtype not in FLOATS:
            raise ConvertError(f"{name} in {entry.file.name} is {entry.dtype}, expected one of {', '.join(FLOATS)}")
        raw = self._raw(entry, FLOATS[entry.dtype])
        if entry.dtype == "BF16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.astype(np.float32)

    def ints(self, name: str) -> list[int]:
        """A tensor of integers, exactly."""
        entry = self.tensors[name]
        if entry.dtype not in INTS:
            raise ConvertError(f"{name} in {entry.file.name} is {entry.dtype}, expected one of {', '.join(INTS)}")
        return [int(x) for x in self._raw(entry, INTS[entry.dtype]).reshape(-1)]

    def _raw(self, entry: Entry, dtype: np.dtype[Any]) -> NDArray[Any]:
        if not entry.nbytes:
            return np.empty(entry.shape, dtype)
        return np.memmap(entry.file, dtype, "r", entry.start, entry.shape)

    def _tensors(self) -> dict[str, Entry]:
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            if not (self.path / "model.safetensors").is_file():
                raise ConvertError(f"{self.path} has neither model.safetensors nor {index.name}")
            return _read_header(self.path / "model.safetensors")
        where = self.json(index.name).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
            raise ConvertError(f"{index}: weight_map must map tensor names to file names")
        shards = sorted(set(where.values()))
        if outside := [shard for shard in shards if Path(shard).name != shard]:
            raise ConvertError(f"{index} names {outside[0]!r}, expected a file of the same folder")
        headers = {shard: _read_header(self.path / shard) for shard in shards}
        tensors: dict[str, Entry] = {}
        for shard, entries in headers.items():
            for name, entry in entries.items():
                if name in tensors:
                    raise ConvertError(f"tensor {name} is in {tensors[name].file.name} and in {shard}")
                if where.get(name) != shard:
                    raise ConvertError(f"tensor {name} is in {shard}, {index.name} says {where.get(name)}")
                tensors[name] = entry
        if missing := sorted(set(where) - set(tensors)):
            raise ConvertError(f"{index.name} lists tensors that their files lack: {', '.join(missing[:5])}")
        return tensors


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as f:
        return f.read(4) == b"GGUF"


def _read_header(file: Path) -> dict[str, Entry]:
    """The entries of a safetensors file.

    safetensors itself checks that header, offsets and file size fit together, but gives no bf16 to NumPy; so its header
    is read once more for the positions, which are known good by then.
    """
    try:
        with safe_open(file, "np") as checked:
            made_by = (checked.metadata() or {}).get("format")
    except FileNotFoundError:
        raise ConvertError(f"{file} does not exist") from None
    except (SafetensorError, OSError) as e:
        raise ConvertError(f"{file} is not a whole safetensors file: {e}") from None
    if made_by == "mlx":
        raise ConvertError(f"{file} is an MLX conversion, whose norms may be folded already; expected the original")
    with file.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        entries[name] = Entry(file, tensor["dtype"], tuple(tensor["shape"]), 8 + length + start, end - start)
    return entries
