"""Memory of a CUDA device: tensors as an address, an offset and a type. Knows a driver; no op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend.recorded import DeviceTensor, arranged, element_bytes, row_index, row_of
from trueup.core.types import TensorType

from .driver import Driver

HEADROOM = 16
"""Bytes behind every allocation, so that an empty tensor has storage too."""
PIECE = 1 << 24
"""Bytes of a pattern that are copied at a time."""


class CudaMemory:
    """Allocations of one device, moved over its stream. `used` counts their bytes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.used = 0
        self._live: dict[int, int] = {}

    # -- bytes -------------------------------------------------------------------------------------------------------

    def room(self, nbytes: int, what: str) -> DeviceTensor:
        """So many bytes of undefined contents; MemoryError says what they were for, and the sizes."""
        try:
            return self.allocate(TensorType((nbytes,), "u8"))
        except MemoryError as e:
            raise MemoryError(f"{what}: {e}") from e

    def fill(self, buffer: int, start: int, nbytes: int, pattern: bytes) -> None:
        """`pattern` over and over. `start` and `nbytes` are multiples of its length."""
        if not nbytes:
            return
        if len(set(pattern)) == 1:
            self.driver.memset(buffer + start, pattern[0], nbytes)
            return
        piece = np.frombuffer(pattern * (min(nbytes, PIECE) // len(pattern)), np.uint8)
        for at in range(0, nbytes, piece.nbytes):
            self.driver.copy_to_device(buffer + start + at, piece[: nbytes - at])

    def write(self, buffer: int, start: int, data: NDArray[Any]) -> None:
        """Bytes from a contiguous array."""
        if data.nbytes:
            self.driver.copy_to_device(buffer + start, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def read(self, buffer: int, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes, waited for."""
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self.driver.copy_to_host(out, buffer + start)
        return out

    # -- the contract --------------------------------------------------------------------------------------------------

    def allocate(self, type: TensorType) -> DeviceTensor:
        size = type.nbytes
        try:
            ptr = self.driver.alloc(size + HEADROOM)
        except MemoryError as e:
            raise MemoryError(f"the device has no {size:,} bytes for {type} ({self.used:,} in use): {e}") from e
        self._live[ptr] = size
        self.used += size
        return DeviceTensor(ptr, 0, type)

    def free(self, handle: DeviceTensor) -> None:
        size = self._live.pop(handle.buffer, None)
        if size is not None:  # freeing twice is nothing
            self.used -= size
            self.driver.free(handle.buffer)

    def upload(self, handle: DeviceTensor, array: NDArray[Any]) -> None:
        """Every element of the tensor, its dtype's values in its shape; one that lies in strides is read first."""
        if not handle.type.contiguous:
            raw = self.read(handle.buffer, handle.start, handle.extent)
            arranged(raw, handle.type, writeable=True)[...] = array
            self.write(handle.buffer, handle.start, raw)
            return
        dtype = handle.type.element.numpy
        if dtype is not None:
            array = np.broadcast_to(np.asarray(array, dtype), handle.type.shape)
        elif array.nbytes != handle.type.nbytes:
            raise ValueError(f"{array.nbytes} bytes for {handle.type}, which takes {handle.type.nbytes}")
        self.write(handle.buffer, handle.start, array)

    def download(self, handle: DeviceTensor) -> NDArray[Any]:
        raw = self.read(handle.buffer, handle.start, handle.extent)
        found = arranged(raw, handle.type)
        return found if handle.type.contiguous else found.copy()

    def read_rows(self, handle: DeviceTensor, rows: Sequence[int]) -> NDArray[Any]:
        row, size = row_of(handle)
        out = np.empty((len(rows), size), np.uint8)
        for i, r in enumerate(rows):
            out[i] = self.read(handle.buffer, handle.start + row_index(handle, r) * size, size)
        return arranged(out.reshape(-1), TensorType((len(rows), *row.shape), row.dtype))

    def write_rows(self, handle: DeviceTensor, rows: Sequence[int], array: NDArray[Any]) -> None:
        row, size = row_of(handle)
        data = (
            np.ascontiguousarray(array) if row.element.numpy is None else np.ascontiguousarray(array, row.element.numpy)
        )
        raw = data.view(np.uint8).reshape(len(rows), size)
        for i, r in enumerate(rows):
            self.write(handle.buffer, handle.start + row_index(handle, r) * size, raw[i])

    def copy_rows(self, handle: DeviceTensor, to: Sequence[int], source: Sequence[int]) -> None:
        _, size = row_of(handle)
        for t, s in zip(to, source, strict=True):
            a, b = (handle.buffer + handle.start + row_index(handle, r) * size for r in (s, t))
            if size and a != b:
                self.driver.copy(b, a, size)

    def fill_rows(self, handle: DeviceTensor, rows: Sequence[int], value: float) -> None:
        row, size = row_of(handle)
        pattern = element_bytes(row.dtype, value)
        for r in rows:
            self.fill(handle.buffer, handle.start + row_index(handle, r) * size, size, pattern)
