"""Tensors on a device: a buffer, an offset and a type; their bytes as arrays. Knows no memory and no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.types import TensorType


@dataclass(frozen=True, eq=False)
class DeviceTensor:
    """A tensor in a buffer: it begins at element `offset`, and lies by its type's strides. Knows not who owns it."""

    buffer: Any
    offset: int
    type: TensorType

    @property
    def itemsize(self) -> int:
        return self.type.element.block_bytes

    @property
    def start(self) -> int:
        """Bytes from the buffer's start."""
        return self.offset * self.itemsize

    @property
    def extent(self) -> int:
        """Bytes from the first to behind the last of its elements."""
        if not self.type.size:
            return 0
        strides = self.type.strides
        if strides is None:
            return self.type.nbytes
        return (1 + sum((n - 1) * s for n, s in zip(self.type.shape, strides, strict=True))) * self.itemsize

    def at(self, elements: int, type: TensorType) -> DeviceTensor:
        """A tensor in the same buffer, so many elements further on."""
        return DeviceTensor(self.buffer, self.offset + elements, type)


def arranged(raw: NDArray[np.uint8], type: TensorType, *, writeable: bool = False) -> NDArray[Any]:
    """The array of a type in bytes read from its first element on; types that NumPy lacks stay bytes."""
    if type.element.numpy is None:
        return raw
    dtype = np.dtype(type.element.numpy)
    if not type.size:
        return np.empty(type.shape, dtype)
    strides = [s * dtype.itemsize for s in type.strides or type.row_major()]
    return np.lib.stride_tricks.as_strided(raw.view(dtype), type.shape, strides, writeable=writeable or type.contiguous)


def element_bytes(dtype: str, value: float) -> bytes:
    """One element of a plain type as it is stored."""
    if dtype == "bf16":
        return np.float32(value).tobytes()[2:]
    numpy = TensorType((), dtype).element.numpy
    if numpy is None:
        raise ValueError(f"{dtype} has no elements to fill with")
    return np.asarray(value).astype(numpy).tobytes()


def row_of(handle: DeviceTensor) -> tuple[TensorType, int]:
    """The type and the bytes of an entry along the first axis."""
    type = handle.type
    if not type.contiguous:
        raise ValueError(f"rows of {type} do not lie one after the other")
    row = TensorType(type.shape[1:], type.dtype)
    return row, prod(row.shape) * handle.itemsize if row.element.plain else row.nbytes


def row_index(handle: DeviceTensor, row: int) -> int:
    """A row's number from the start; IndexError outside of the first axis."""
    count = handle.type.shape[0]
    if not -count <= row < count:
        raise IndexError(f"row {row} of {handle.type}, which has {count}")
    return row % count
