"""The CUDA backend on an emulated device, for machines without a GPU: its kernels' text, compiled as C++ and run on fibers.

A plugin: `trueup check --plugin emulated_cuda.backend --backend cuda_emulated`. `cuda_emulated` runs what `cuda` runs;
`cuda_checked` looks at each access of memory, as compute-sanitizer does, with every value of a step in a place of its own;
`cuda_shuffled` runs each launch in several orders of its threads and blocks, which must leave the same bits.
"""

from __future__ import annotations

from typing import Any, ClassVar

from trueup.backends.cuda.target import CudaTarget
from trueup.backends.simt.memory import SimtMemory
from trueup.backends.simt.tuning import Tuning
from trueup.core.backend import Backend, Device, Executable, Storage, Target
from trueup.core.backend.recorded import HEADROOM, DeviceTensor
from trueup.core.passes.memory import MemoryPlan
from trueup.core.plan import Plan
from trueup.core.plugins import hookimpl
from trueup.core.types import TensorType

from .driver import ATTRIBUTES, EmulatedDriver

GUARD = 256
"""Bytes between the values of a step, where each has a place of its own."""


class GuardedMemory(SimtMemory):
    """Memory whose headroom nobody may touch."""

    driver: EmulatedDriver

    def allocate(self, type: TensorType) -> DeviceTensor:
        tensor = super().allocate(type)
        self.driver.zone(tensor.buffer + type.nbytes, HEADROOM)
        return tensor


class EmulatedTarget(CudaTarget):
    """The backend's target; `spread`: values of a step never share room, and what lies between them is watched."""

    driver: EmulatedDriver

    def __init__(self, name: str, device: Device, driver: EmulatedDriver, tuning: Tuning, *, spread: bool) -> None:
        super().__init__(device, driver, name=name, tuning=tuning)
        self.memory = GuardedMemory(driver)
        self.spread = spread
        self._gaps: list[tuple[int, int]] = []

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        if self.spread:
            self._gaps = _spread(plan)
        return super().compile(plan, storage)

    def allocate_arena(self, nbytes: int) -> Any:
        arena = super().allocate_arena(nbytes)
        gaps, self._gaps = self._gaps, []
        for start, stop in gaps:
            self.driver.zone(arena.buffer + start, stop - start)
        return arena


def _spread(plan: Plan) -> list[tuple[int, int]]:
    """Give every value of the plan's arena a place of its own; where the gaps are."""
    at, offsets, gaps = GUARD, {}, [(0, GUARD)]
    for v in sorted(plan.memory.offsets, key=lambda v: plan.memory.offsets[v]):
        offsets[v] = at
        end = at + v.type.nbytes
        at = -(-end // 256) * 256 + GUARD
        gaps.append((end, at))
    plan.memory = MemoryPlan(offsets, at, plan.memory.total, at)
    return gaps


class Emulated(Backend):
    """What the CUDA backend runs, on the emulated device."""

    name = "cuda_emulated"
    driver = False
    API = (1, 0)
    kind: ClassVar[dict[str, Any]] = {}
    spread: ClassVar[bool] = False

    def devices(self) -> list[Device]:
        limits = {k: v for k, v in ATTRIBUTES.items() if not k.startswith("pci_")}
        return [Device("emulated CUDA device", "cpu", memory=1 << 32, limits=limits)]

    def open(self, device: Device, *, invariant: bool = False) -> Target:
        made = EmulatedDriver(**self.kind)
        tuning = Tuning.of(made.attributes, invariant=invariant)
        return EmulatedTarget(self.name, device, made, tuning, spread=self.spread)


class Checked(Emulated):
    """Every access is looked at."""

    name = "cuda_checked"
    kind = {"checked": True}
    spread = True


class Shuffled(Emulated):
    """Every launch runs in three orders."""

    name = "cuda_shuffled"
    kind = {"orders": (0, 1, 2)}


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [Emulated, Checked, Shuffled]
