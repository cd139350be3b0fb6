"""Memory of an OpenCL device: tensors as a buffer, an offset and a type. Knows buffers and one queue; no op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from trueup.core.types import TensorType

HEADROOM = 16
"""Bytes behind every buffer, so that an empty tensor has storage too."""


@dataclass(frozen=True, eq=False)
class OpenCLTensor:
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

    def at(self, elements: int, type: TensorType) -> OpenCLTensor:
        """A tensor in the same buffer, so many elements further on."""
        return OpenCLTensor(self.buffer, self.offset + elements, type)


class OpenCLMemory:
    """Buffers of one context, moved over one in-order queue. `used` counts their bytes."""

    def __init__(self, context: Any, queue: Any, *, largest: int) -> None:
        self.context, self.queue, self.largest = context, queue, largest
        self.used = 0
        self._live: dict[int, tuple[Any, int]] = {}

    # -- bytes -------------------------------------------------------------------------------------------------------

    def room(self, nbytes: int, what: str) -> OpenCLTensor:
        """So many bytes of undefined contents; MemoryError says what they were for, and the sizes."""
        try:
            return self.allocate(TensorType((nbytes,), "u8"))
        except MemoryError as e:
            raise MemoryError(f"{what}: {e}") from e

    def fill(self, buffer: Any, start: int, nbytes: int, pattern: bytes) -> None:
        """`pattern` over and over, without waiting. `start` and `nbytes` are multiples of its length."""
        if nbytes:
            cl.enqueue_fill_buffer(self.queue, buffer, np.frombuffer(pattern, np.uint8), start, nbytes)

    def write(self, buffer: Any, start: int, data: NDArray[Any]) -> None:
        """Bytes from a contiguous array; it waits until they are there."""
        if data.nbytes:
            cl.enqueue_copy(self.queue, buffer, data, dst_offset=start, is_blocking=True)

    def read(self, buffer: Any, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes, waited for."""
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            cl.enqueue_copy(self.queue, out, buffer, src_offset=start, is_blocking=True)
        return out

    # -- the contract --------------------------------------------------------------------------------------------------

    def allocate(self, type: TensorType) -> OpenCLTensor:
        size = type.nbytes
        if size > self.largest:
            raise MemoryError(
                f"{type} takes {size:,} bytes; the device allows {self.largest:,} in one buffer ({self.used:,} in use)"
            )
        try:
            buffer = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size + HEADROOM)
        except cl.Error as e:  # which class it is differs between implementations
            raise MemoryError(f"the device has no {size:,} bytes for {type} ({self.used:,} in use): {e}") from e
        self._live[id(buffer)] = buffer, size
        self.used += size
        return OpenCLTensor(buffer, 0, type)

    def free(self, handle: OpenCLTensor) -> None:
        buffer, size = self._live.pop(id(handle.buffer), (None, 0))
        if buffer is not None:  # freeing twice is nothing
            self.used -= size
            buffer.release()

    def upload(self, handle: OpenCLTensor, array: NDArray[Any]) -> None:
        """Every element of the tensor, its dtype's values in its shape; one that lies in strides is read first."""
        if not handle.type.contiguous:
            raw = self.read(handle.buffer, handle.start, handle.extent)
            arranged(raw, handle.type, writeable=True)[...] = array
            self.write(handle.buffer, handle.start, raw)
            return
        dtype = handle.type.element.numpy
        if dtype is not None:
            array = np.ascontiguousarray(np.broadcast_to(np.asarray(array, dtype), handle.type.shape))
        elif array.nbytes != handle.type.nbytes:
            raise ValueError(f"{array.nbytes} bytes for {handle.type}, which takes {handle.type.nbytes}")
        self.write(handle.buffer, handle.start, np.ascontiguousarray(array))

    def download(self, handle: OpenCLTensor) -> NDArray[Any]:
        raw = self.read(handle.buffer, handle.start, handle.extent)
        found = arranged(raw, handle.type)
        return found if handle.type.contiguous else found.copy()

    def read_rows(self, handle: OpenCLTensor, rows: Sequence[int]) -> NDArray[Any]:
        row, size = _row(handle)
        out = np.empty((len(rows), size), np.uint8)
        for i, r in enumerate(rows):
            if size:
                self._copy(out[i], handle.buffer, src_offset=handle.start + self._index(handle, r) * size)
        self.queue.finish()
        return arranged(out.reshape(-1), TensorType((len(rows), *row.shape), row.dtype))

    def write_rows(self, handle: OpenCLTensor, rows: Sequence[int], array: NDArray[Any]) -> None:
        row, size = _row(handle)
        data = (
            np.ascontiguousarray(array) if row.element.numpy is None else np.ascontiguousarray(array, row.element.numpy)
        )
        raw = data.view(np.uint8).reshape(len(rows), size)
        for i, r in enumerate(rows):
            if size:
                self._copy(handle.buffer, raw[i], dst_offset=handle.start + self._index(handle, r) * size)
        self.queue.finish()

    def copy_rows(self, handle: OpenCLTensor, to: Sequence[int], source: Sequence[int]) -> None:
        _, size = _row(handle)
        for t, s in zip(to, source, strict=True):
            a, b = (handle.start + self._index(handle, r) * size for r in (s, t))
            if size and a != b:
                cl.enqueue_copy(self.queue, handle.buffer, handle.buffer, src_offset=a, dst_offset=b, byte_count=size)

    def fill_rows(self, handle: OpenCLTensor, rows: Sequence[int], value: float) -> None:
        row, size = _row(handle)
        pattern = element_bytes(row.dtype, value)
        for r in rows:
            self.fill(handle.buffer, handle.start + self._index(handle, r) * size, size, pattern)

    def _copy(self, to: Any, source: Any, **offset: int) -> None:
        cl.enqueue_copy(self.queue, to, source, is_blocking=False, **offset)

    @staticmethod
    def _index(handle: OpenCLTensor, row: int) -> int:
        count = handle.type.shape[0]
        if not -count <= row < count:
            raise IndexError(f"row {row} of {handle.type}, which has {count}")
        return row % count


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


def _row(handle: OpenCLTensor) -> tuple[TensorType, int]:
    """The type and the bytes of an entry along the first axis."""
    type = handle.type
    if not type.contiguous:
        raise ValueError(f"rows of {type} do not lie one after the other")
    row = TensorType(type.shape[1:], type.dtype)
    return row, prod(row.shape) * handle.itemsize if row.element.plain else row.nbytes
