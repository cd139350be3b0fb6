"""An open OpenCL device: a context, one in-order queue, memory, and the table of kernels."""

from __future__ import annotations

from typing import Any

import pyopencl as cl

from trueup.core.backend import Capabilities, Device, Executable, Storage, Support
from trueup.core.backend.recorded import RecordedTarget
from trueup.core.graph import Node, State
from trueup.core.plan import Plan

from .executable import OpenCLExecutable
from .memory import OpenCLMemory
from .ops import table
from .programs import NATIVE, shared
from .tuning import Tuning


class OpenCLTarget(RecordedTarget):
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
        super().__init__("opencl", device, table(self.tuning), memory, NATIVE)
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

    def supports(self, node: Node) -> Support:
        largest = self.device.limits["allocation"]
        for v in (*node.values, *node.outputs):
            size = v.type.nbytes if not isinstance(v, State) else v.root.type.nbytes
            if size > largest and not node.op.view:
                return Support.no(f"{v!r} takes {size:,} bytes; the device allows {largest:,} in one buffer")
        return super().supports(node)

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return OpenCLExecutable(plan, self, storage)
