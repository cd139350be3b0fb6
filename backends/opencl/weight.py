"""A weight on the device: its GGUF bytes for kernels that unpack them, float32 values for those that don't. Each form
is made when it is first asked for, once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .memory import OpenCLMemory, OpenCLTensor

NATIVE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
"""Types that kernels read as they are stored; all others are expanded to float32."""


class OpenCLWeight:
    """`stored` and `values` put the weight on the device; MemoryError where it has no room. It lies there as long as
    one of the plans that `use` it is open; the next plan puts it there again."""

    def __init__(self, weight: Weight, memory: OpenCLMemory) -> None:
        self.weight, self.memory = weight, memory
        self._stored: OpenCLTensor | None = None
        self._values: OpenCLTensor | None = None
        self._held: list[OpenCLTensor] = []
        self._users = 0

    @property
    def type(self) -> TensorType:
        return self.weight.type

    @property
    def format(self) -> str:
        """The type that kernels read: the stored one, or f32."""
        return self.type.dtype if self.type.dtype in NATIVE else "f32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `format`."""
        return TensorType(self.type.shape[-1:], self.format).nbytes

    @property
    def stored(self) -> OpenCLTensor:
        """The bytes of all rows, of type `format`, as u8."""
        if self.format == "f32":
            return OpenCLTensor(self.values.buffer, 0, TensorType((self.values.type.nbytes,), "u8"))
        return self._bytes()

    @property
    def values(self) -> OpenCLTensor:
        """The dequantized values, float32."""
        if self._values is None:
            array = np.ascontiguousarray(np.asarray(self.weight), np.float32)
            self._values = self._put(array, TensorType(self.type.shape))
        return self._values

    @property
    def plain(self) -> OpenCLTensor:
        """The weight as a tensor of its own type, for parameters that take no weights."""
        if self.type.dtype == "f32":
            return self.values
        return OpenCLTensor(self._bytes().buffer, 0, self.type)

    def _bytes(self) -> OpenCLTensor:
        if self._stored is None:
            raw = np.ascontiguousarray(self.weight.data).reshape(-1)
            self._stored = self._put(raw, TensorType(raw.shape, "u8"))
        return self._stored

    def _put(self, array: NDArray[Any], type: TensorType) -> OpenCLTensor:
        room = self.memory.room(array.nbytes, f"weight {self.weight.name} ({self.type})")
        self._held.append(room)
        self.memory.write(room.buffer, 0, array)
        return OpenCLTensor(room.buffer, 0, type)

    def use(self) -> None:
        """One more plan needs what is on the device."""
        self._users += 1

    def leave(self) -> None:
        """A plan that used it is closed."""
        self._users -= 1
        if self._users <= 0:
            self.close()

    def close(self) -> None:
        """Give the storage back."""
        for room in self._held:
            self.memory.free(room)
        self._held.clear()
        self._stored = self._values = None


class DeviceWeight:
    """A tensor that a step computed, where a weight may stand."""

    def __init__(self, tensor: OpenCLTensor) -> None:
        if tensor.type.dtype not in ("f32", "f16", "bf16"):
            raise TypeError(f"a computed {tensor.type} can't be a weight: only floats are read as they lie")
        self.tensor, self.type, self.format = tensor, tensor.type, tensor.type.dtype
        self.row_bytes = TensorType(tensor.type.shape[-1:], self.format).nbytes

    @property
    def stored(self) -> OpenCLTensor:
        return OpenCLTensor(self.tensor.buffer, self.tensor.start, TensorType((self.type.nbytes,), "u8"))

    @property
    def values(self) -> OpenCLTensor:
        if self.format != "f32":
            raise TypeError(f"a computed {self.type} can't be read as float32 values")
        return self.tensor
