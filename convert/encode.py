"""How float32 values are stored in a file of a given type. A further file type is a further line in `FILE_TYPES`.

It knows shapes and GGUF's types; which tensors are sensitive, the architecture's table says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from trueup.models.convert_rules import Array, ConvertError

F32, F16, BF16, Q8_0 = (GGMLQuantizationType[n] for n in ("F32", "F16", "BF16", "Q8_0"))


@dataclass(frozen=True)
class FileType:
    """`--type`: the type of the large tensors, of those whose rows are no whole number of its blocks, and GGUF's id."""

    main: GGMLQuantizationType
    fallback: GGMLQuantizationType
    id: LlamaFileType

    def of(self, name: str, shape: Sequence[int], f32: Sequence[str]) -> GGMLQuantizationType:
        """The type of the tensor `name`; `f32` are the patterns of names that stay float32."""
        if len(shape) == 1 or any(re.search(p, name) for p in f32):
            return F32
        return self.fallback if shape[-1] % GGML_QUANT_SIZES[self.main][0] else self.main


FILE_TYPES = {
    "f32": FileType(F32, F32, LlamaFileType.ALL_F32),
    "f16": FileType(F16, F16, LlamaFileType.MOSTLY_F16),
    "bf16": FileType(BF16, BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": FileType(Q8_0, F16, LlamaFileType.MOSTLY_Q8_0),
}


def stored_size(shape: Sequence[int], type: GGMLQuantizationType) -> int:
    """Bytes of a tensor whose rows are whole blocks."""
    block, size = GGML_QUANT_SIZES[type]
    return prod(shape) // block * size


def encode(name: str, x: Array, type: GGMLQuantizationType) -> NDArray[Any]:
    """`x` in the bytes of `type`, for a row-wise type, whole or in groups of rows alike.

    Raises ConvertError for values that `type` can't hold: NaN, infinity, and what would round to infinity.
    """
    if not np.isfinite(x).all():
        raise ConvertError(f"{name} has NaN or infinity at {_first(~np.isfinite(x))}")
    out = _ENCODERS[type](x)
    if out is None:
        raise ConvertError(f"{name} has values up to {np.abs(x).max():g}, which {type.name} can't hold")
    return out


def _f32(x: Array) -> NDArray[Any] | None:
    return np.ascontiguousarray(x)


def _f16(x: Array) -> NDArray[Any] | None:
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(x.astype(np.float16))
    return out if np.isfinite(out).all() else None


def _bf16(x: Array) -> NDArray[Any] | None:
    out: NDArray[Any] = quantize(np.ascontiguousarray(x), BF16)
    return out if np.isfinite(_upcast(out)).all() else None


def _q8_0(x: Array) -> NDArray[Any] | None:
    """A block whose scale rounds to zero in float16 is all zero; without that its integers would come from 0 * inf."""
    blocks = np.ascontiguousarray(x).reshape(-1, 32)
    with np.errstate(over="ignore", under="ignore"):
        scale = (np.abs(blocks).max(axis=1) / np.float32(127)).astype(np.float16)
    if not np.isfinite(scale).all():
        return None
    if not scale.all():
        blocks = np.where(scale[:, None] == 0, np.float32(0), blocks)
    out: NDArray[Any] = quantize(blocks.reshape(x.shape), Q8_0)
    return out


def _upcast(bf16: NDArray[Any]) -> Array:
    return (bf16.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


_ENCODERS: dict[GGMLQuantizationType, Callable[[Array], NDArray[Any] | None]] = {
    F32: _f32,
    F16: _f16,
    BF16: _bf16,
    Q8_0: _q8_0,
}


def _first(mask: NDArray[np.bool_]) -> list[int]:
    return [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]
