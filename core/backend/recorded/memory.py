"""Memory of a device with a queue of its own: what is the same wherever bytes can be moved. Knows no op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.types import TensorType

from .tensor import DeviceTensor, arranged, element_bytes, row_index, row_of

HEADROOM = 16
"""Bytes behind every buffer, so that an empty tensor has storage too."""


class RecordedMemory(ABC):
    """Buffers of one device, moved over its queue. `used` counts their bytes. A backend makes and moves bytes; tensors and
    rows follow."""

    def __init__(self, *, largest: int | None = None) -> None:
        """`largest`: bytes that the device allows in one buffer, None where there is no such limit."""
        self.largest, self.used = largest, 0
        self._live: dict[int, tuple[Any, int]] = {}

    # -- a backend's own -----------------------------------------------------------------------------------------------

    @abstractmethod
    def make(self, nbytes: int) -> Any:
        """A buffer, which may be an address; MemoryError where there is no room."""

    @abstractmethod
    def release(self, buffer: Any) -> None: ...

    @abstractmethod
    def put(self, buffer: Any, start: int, data: NDArray[np.uint8]) -> None:
        """Bytes to the device; `data` must stay until `wait`."""

    @abstractmethod
    def fetch(self, out: NDArray[np.uint8], buffer: Any, start: int) -> None:
        """Bytes from the device; they are there after `wait`."""

    @abstractmethod
    def move(self, buffer: Any, to: int, source: int, nbytes: int) -> None:
        """Bytes within a buffer, without waiting."""

    @abstractmethod
    def fill(self, buffer: Any, start: int, nbytes: int, pattern: bytes) -> None:
        """`pattern` over and over; `start` and `nbytes` are multiples of its length."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all that is in the queue."""

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def room(self, nbytes: int, what: str) -> DeviceTensor:
        """So many bytes of undefined contents; MemoryError says what they were for, and the sizes."""
        try:
            return self.allocate(TensorType((nbytes,), "u8"))
        except MemoryError as e:
            raise MemoryError(f"{what}: {e}") from e

    def write(self, buffer: Any, start: int, data: NDArray[Any]) -> None:
        """Bytes from a contiguous array; it waits until they are there."""
        if data.nbytes:
            self.put(buffer, start, np.ascontiguousarray(data).reshape(-1).view(np.uint8))
            self.wait()

    def read(self, buffer: Any, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes, waited for."""
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self.fetch(out, buffer, start)
            self.wait()
        return out

    # -- the contract --------------------------------------------------------------------------------------------------

    def allocate(self, type: TensorType) -> DeviceTensor:
        size = type.nbytes
        if self.largest is not None and size > self.largest:
            raise MemoryError(
                f"{type} takes {size:,} bytes; the device allows {self.largest:,} in one buffer ({self.used:,} in use)"
            )
        try:
            buffer = self.make(size + HEADROOM)
        except MemoryError as e:
            raise MemoryError(f"the device has no {size:,} bytes for {type} ({self.used:,} in use): {e}") from e
        self._live[self._key(buffer)] = buffer, size
        self.used += size
        return DeviceTensor(buffer, 0, type)

    def free(self, handle: DeviceTensor) -> None:
        buffer, size = self._live.pop(self._key(handle.buffer), (None, 0))
        if buffer is not None:  # freeing twice is nothing
            self.used -= size
            self.release(buffer)

    @staticmethod
    def _key(buffer: Any) -> int:
        return buffer if isinstance(buffer, int) else id(buffer)

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
        return owned(self.read(handle.buffer, handle.start, handle.extent), handle)

    def read_rows(self, handle: DeviceTensor, rows: Sequence[int]) -> NDArray[Any]:
        row, size = row_of(handle)
        out = np.empty((len(rows), size), np.uint8)
        for i, r in enumerate(rows):
            if size:
                self.fetch(out[i], handle.buffer, handle.start + row_index(handle, r) * size)
        self.wait()
        return arranged(out.reshape(-1), TensorType((len(rows), *row.shape), row.dtype))

    def write_rows(self, handle: DeviceTensor, rows: Sequence[int], array: NDArray[Any]) -> None:
        row, size = row_of(handle)
        data = (
            np.ascontiguousarray(array) if row.element.numpy is None else np.ascontiguousarray(array, row.element.numpy)
        )
        raw = data.view(np.uint8).reshape(len(rows), size)
        for i, r in enumerate(rows):
            if size:
                self.put(handle.buffer, handle.start + row_index(handle, r) * size, raw[i])
        self.wait()

    def copy_rows(self, handle: DeviceTensor, to: Sequence[int], source: Sequence[int]) -> None:
        _, size = row_of(handle)
        for t, s in zip(to, source, strict=True):
            a, b = (handle.start + row_index(handle, r) * size for r in (s, t))
            if size and a != b:
                self.move(handle.buffer, b, a, size)

    def fill_rows(self, handle: DeviceTensor, rows: Sequence[int], value: float) -> None:
        row, size = row_of(handle)
        pattern = element_bytes(row.dtype, value)
        for r in rows:
            self.fill(handle.buffer, handle.start + row_index(handle, r) * size, size, pattern)


def owned(raw: NDArray[np.uint8], handle: DeviceTensor) -> NDArray[Any]:
    """The array of a tensor in the bytes read for it; the caller's own."""
    found = arranged(raw, handle.type)
    return found if handle.type.contiguous else found.copy()
