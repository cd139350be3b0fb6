"""Element types: the plain ones, and GGUF's block-quantized ones. Knows sizes and NumPy's names; computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import DTypeLike


@dataclass(frozen=True)
class DType:
    """An element type as it is stored.

    `block` elements along the last axis take `block_bytes` bytes; a plain type has `block == 1`. `numpy` is the type of
    the same bytes in NumPy, or None where NumPy has none (bf16 and the quantized types), whose storage is bytes.
    """

    name: str
    block: int
    block_bytes: int
    numpy: DTypeLike | None

    @property
    def plain(self) -> bool:
        """Whether one element can be addressed."""
        return self.block == 1

    def __str__(self) -> str:
        return self.name


_NUMPY: dict[str, DTypeLike] = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
}

DTYPES: dict[str, DType] = {"u8": DType("u8", 1, 1, np.uint8)} | {
    t.name.lower(): DType(t.name.lower(), *GGML_QUANT_SIZES[t], _NUMPY.get(t.name.lower()))
    for t in GGMLQuantizationType
}
"""Every element type, by name: `f32`, `i32`, …, and GGUF's in lower case (`q8_0`, `q4_k`, `mxfp4`, …)."""

FLOATS = frozenset({"f32", "f16", "bf16"})
"""What `:float` in a signature admits."""


def ggml_type(name: str) -> GGMLQuantizationType:
    """The GGUF type of a DType's name; raises KeyError for a type that GGUF lacks (u8)."""
    return GGMLQuantizationType[name.upper()]
