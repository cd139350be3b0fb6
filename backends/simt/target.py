"""An open device: a driver, its memory, and the table of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from trueup.core.backend import Capabilities, Device, Executable, Storage
from trueup.core.backend.recorded import RecordedTarget
from trueup.core.plan import Plan
from trueup.core.types import TensorType

from .driver import Driver
from .executable import SimtExecutable
from .memory import SimtMemory
from .ops import table
from .programs import NATIVE, Programs
from .tuning import SEGMENT, Tuning


class SimtTarget(RecordedTarget):
    """Kernels over the memory of one device.

    Every reduction has one order, fixed by its own row: results are the same in every run, and do not depend on the
    other rows or on their number, but for the delta rule in chunks (`Tuning.prompt`), whose bits depend on where a step
    cuts its sequence.
    """

    memory: SimtMemory

    def __init__(self, name: str, device: Device, driver: Driver, programs: Programs, tuning: Tuning) -> None:
        """`tuning`: how kernels are shaped."""
        self.driver, self.programs, self.tuning = driver, programs, tuning
        super().__init__(name, device, table(tuning), SimtMemory(driver, largest=device.limits.get("largest")), NATIVE)
        prompt = tuning.prompt
        self.capabilities = Capabilities(
            deterministic=True,
            batch_invariant=not prompt,
            thresholds={
                "candidates": (256, SEGMENT),
                "rows": (1, 2, 4, 8),
                "n": (16,),
                **({"gated_delta_rule.tokens": (prompt,)} if prompt else {}),
            },
        )

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        self.programs.prepare(t.dtype if t.dtype in NATIVE else "f32" for t in _weights(plan))
        return SimtExecutable(plan, self, storage)


def _weights(plan: Plan) -> Iterator[TensorType]:
    """The types of what kernels of the plan take as weights."""
    for node in plan.kernels:
        for p, given in zip(node.op.params, node.inputs, strict=True):
            if p.dtype == "weight" and given is not None:
                yield from (v.type for v in (given if isinstance(given, tuple) else (given,)))
