"""An open OpenCL device: a context, one in-order queue, memory, and the table of kernels."""

from __future__ import annotations

import weakref
from typing import Any

import pyopencl as cl

from trueup.core.backend import AddressedTarget, Capabilities, Device, Executable, Storage, Support
from trueup.core.graph import Node, State
from trueup.core.plan import Plan
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .executable import OpenCLExecutable
from .memory import OpenCLMemory, OpenCLTensor
from .ops import table
from .programs import shared
from .tuning import Tuning
from .weight import OpenCLWeight


class OpenCLTarget(AddressedTarget):
    """Kernels over buffers of one device.

    Every reduction has one order, fixed by its own row: results are the same in every run, and do not depend on the
    other rows or on their number, but for the delta rule in chunks (`Tuning.prompt`), whose bits depend on where a step
    cuts its sequence.
    """

    memory: OpenCLMemory

    def __init__(self, device: Device, handle: Any, *, tuning: Tuning | None = None) -> None:
        """`tuning`: how kernels are shaped; by default from the device's limits."""
        self.tuning = tuning or Tuning.of(device)
        self.context, self.programs = shared(device, handle, self.tuning)
        self.queue = cl.CommandQueue(self.context)
        memory = OpenCLMemory(self.context, self.queue, largest=device.limits["allocation"])
        super().__init__("opencl", device, table(self.tuning), memory)
        self.capabilities = Capabilities(
            deterministic=True,
            batch_invariant=not self.tuning.prompt,
            thresholds={
                "candidates": (256, self.tuning.segment),
                "rows": (self.tuning.tile,),
                "n": (16,),
                **({"gated_delta_rule.tokens": (self.tuning.prompt,)} if self.tuning.prompt else {}),
            },
        )
        self._weights: weakref.WeakSet[OpenCLWeight] = weakref.WeakSet()

    def supports(self, node: Node) -> Support:
        largest = self.device.limits["allocation"]
        for v in (*node.values, *node.outputs):
            size = v.type.nbytes if not isinstance(v, State) else v.root.type.nbytes
            if size > largest and not node.op.view:
                return Support.no(f"{v!r} takes {size:,} bytes; the device allows {largest:,} in one buffer")
        return super().supports(node)

    # -- storage -------------------------------------------------------------------------------------------------------

    def allocate_arena(self, nbytes: int) -> Any:
        return self.memory.room(nbytes, "the values of a step")

    def bind(self, arena: Any, offset: int, type: TensorType) -> OpenCLTensor:
        size = type.element.block_bytes
        if offset % size:
            raise ValueError(f"byte {offset} of the arena is not aligned for {type}")
        return OpenCLTensor(arena.buffer, offset // size, type)

    def view(self, handle: OpenCLTensor, source: TensorType, offset: int, type: TensorType) -> OpenCLTensor:
        return handle.at(offset, type)

    def state_view(self, handle: OpenCLTensor, state: State) -> OpenCLTensor:
        first = sum(low * s for (low, _), s in zip(state.region, state.root.type.row_major(), strict=True))
        return handle.at(first, state.type)

    def fill(self, handle: OpenCLTensor) -> None:
        self.memory.fill(handle.buffer, handle.start, handle.extent, b"\xff")

    def prepare_weight(self, weight: Weight) -> OpenCLWeight:
        made = OpenCLWeight(weight, self.memory)
        self._weights.add(made)
        return made

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return OpenCLExecutable(plan, self, storage)

    def close(self) -> None:
        self.queue.finish()
        for w in self._weights:
            w.close()
        self._weights.clear()
