"""A target whose memory is a RecordedMemory: tensors in buffers, weights put there once."""

from __future__ import annotations

import weakref
from typing import Any

from trueup.core.backend.addressed import AddressedTarget
from trueup.core.backend.contract import Device
from trueup.core.backend.kernels import KernelTable
from trueup.core.graph import State
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .memory import RecordedMemory
from .tensor import DeviceTensor
from .weight import RecordedWeight


class RecordedTarget(AddressedTarget):
    """Kernels over buffers of one device. A backend adds its tables and `compile`."""

    memory: RecordedMemory

    def __init__(
        self, name: str, device: Device, kernels: KernelTable, memory: RecordedMemory, native: tuple[str, ...]
    ) -> None:
        """`native`: types of weights that kernels read as they are stored."""
        super().__init__(name, device, kernels, memory)
        self.native = native
        self._weights: weakref.WeakSet[RecordedWeight] = weakref.WeakSet()

    def allocate_arena(self, nbytes: int) -> Any:
        return self.memory.room(nbytes, "the values of a step")

    def bind(self, arena: Any, offset: int, type: TensorType) -> DeviceTensor:
        size = type.element.block_bytes
        if offset % size:
            raise ValueError(f"byte {offset} of the arena is not aligned for {type}")
        return DeviceTensor(arena.buffer, offset // size, type)

    def view(self, handle: DeviceTensor, source: TensorType, offset: int, type: TensorType) -> DeviceTensor:
        return handle.at(offset, type)

    def state_view(self, handle: DeviceTensor, state: State) -> DeviceTensor:
        first = sum(low * s for (low, _), s in zip(state.region, state.root.type.row_major(), strict=True))
        return handle.at(first, state.type)

    def fill(self, handle: DeviceTensor) -> None:
        self.memory.fill(handle.buffer, handle.start, handle.extent, b"\xff")

    def prepare_weight(self, weight: Weight) -> RecordedWeight:
        made = RecordedWeight(weight, self.memory, self.native)
        self._weights.add(made)
        return made

    def close(self) -> None:
        self.memory.wait()
        for w in self._weights:
            w.close()
        self._weights.clear()
