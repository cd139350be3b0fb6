"""Weights on a device: as they are stored, or as float32 values, each put there when it is first asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .memory import RecordedMemory
from .tensor import DeviceTensor


class RecordedWeight:
    """A weight on the device: its GGUF bytes for kernels that unpack them, float32 values for those that don't. Each form is
    made when it is first asked for, once; MemoryError where it has no room. It lies there as long as one of the plans that
    `use` it is open; the next plan puts it there again."""

    def __init__(self, weight: Weight, memory: RecordedMemory, native: tuple[str, ...]) -> None:
        """`native`: the types that kernels read as they are stored; all others are expanded to float32."""
        self.weight, self.memory, self.native = weight, memory, native
        self._stored: DeviceTensor | None = None
        self._values: DeviceTensor | None = None
        self._held: list[DeviceTensor] = []
        self._users = 0

    @property
    def type(self) -> TensorType:
        return self.weight.type

    @property
    def format(self) -> str:
        """The type that kernels read: the stored one, or f32."""
        return self.type.dtype if self.type.dtype in self.native else "f32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `format`."""
        return TensorType(self.type.shape[-1:], self.format).nbytes

    @property
    def stored(self) -> DeviceTensor:
        """The bytes of all rows, of type `format`, as u8."""
        if self.format == "f32":
            return DeviceTensor(self.values.buffer, 0, TensorType((self.values.type.nbytes,), "u8"))
        return self._bytes()

    @property
    def values(self) -> DeviceTensor:
        """The dequantized values, float32."""
        if self._values is None:
            array = np.ascontiguousarray(np.asarray(self.weight), np.float32)
            self._values = self._put(array, TensorType(self.type.shape))
        return self._values

    @property
    def plain(self) -> DeviceTensor:
        """The weight as a tensor of its own type, for parameters that take no weights."""
        if self.type.dtype == "f32":
            return self.values
        return DeviceTensor(self._bytes().buffer, 0, self.type)

    def _bytes(self) -> DeviceTensor:
        if self._stored is None:
            raw = np.ascontiguousarray(self.weight.data).reshape(-1)
            self._stored = self._put(raw, TensorType(raw.shape, "u8"))
        return self._stored

    def _put(self, array: NDArray[Any], type: TensorType) -> DeviceTensor:
        room = self.memory.room(array.nbytes, f"weight {self.weight.name} ({self.type})")
        self._held.append(room)
        self.memory.write(room.buffer, 0, array)
        return DeviceTensor(room.buffer, 0, type)

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


class ComputedWeight:
    """A tensor that a step computed, where a weight may stand."""

    def __init__(self, tensor: DeviceTensor) -> None:
        if tensor.type.dtype not in ("f32", "f16", "bf16"):
            raise TypeError(f"a computed {tensor.type} can't be a weight: only floats are read as they lie")
        self.tensor, self.type, self.format = tensor, tensor.type, tensor.type.dtype
        self.row_bytes = TensorType(tensor.type.shape[-1:], self.format).nbytes

    @property
    def stored(self) -> DeviceTensor:
        return DeviceTensor(self.tensor.buffer, self.tensor.start, TensorType((self.type.nbytes,), "u8"))

    @property
    def values(self) -> DeviceTensor:
        if self.format != "f32":
            raise TypeError(f"a computed {self.type} can't be read as float32 values")
        return self.tensor


def as_weight(handle: Any) -> Any:
    """What stands where a weight may: a weight, or a tensor that the step computed."""
    return ComputedWeight(handle) if isinstance(handle, DeviceTensor) else handle


def values(weight: Any) -> DeviceTensor | None:
    """Float32 values of an optional weight."""
    return None if weight is None else weight.values
