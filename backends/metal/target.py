"""Tensors as MLX arrays, and a step as one lazy expression that is evaluated with its results. Holds no op."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import Capabilities, Device, Executable, ManagedTarget, Storage
from trueup.core.backend.managed import ManagedExecutable, ManagedMemory
from trueup.core.backend.trace import Watch
from trueup.core.graph import State
from trueup.core.plan import Plan
from trueup.core.weight import Weight

from . import checks
from .ops import table
from .ops.delta import ROW_BY_ROW
from .weights import Prepared, prepare


class MetalMemory(ManagedMemory):
    """MLX arrays. A new version of one shares nothing that is seen, and MLX writes in place where nobody holds the old one."""

    def array(self, array: NDArray[Any]) -> mx.array:
        """A copy on the device. MLX would make float32 of float64, so that is refused with TypeError."""
        if array.dtype == np.float64:
            raise TypeError("metal: Apple GPUs have no float64")
        return mx.array(array)

    def numpy(self, value: mx.array) -> NDArray[Any]:
        return np.array(value, order="C")

    def set_rows(self, value: mx.array, rows: NDArray[np.intp], part: Any) -> mx.array:
        out = copy(value)
        out[mx.array(rows)] = part
        return out

    def take_rows(self, value: mx.array, rows: NDArray[np.intp]) -> mx.array:
        return value[mx.array(rows)]


class MetalTarget(ManagedTarget):
    """The table of kernels on one device.

    Equal bits run to run are claimed; equal bits for every number of rows are not, as MLX chooses its matrix kernels by
    it.
    """

    memory: MetalMemory

    def __init__(self, device: Device) -> None:
        """MLX's default device becomes the GPU, or the CPU where `device` is of that kind."""
        mx.set_default_device(mx.cpu if device.kind == "cpu" else mx.gpu)
        super().__init__("metal", device, table(), MetalMemory())
        self.capabilities = Capabilities(deterministic=True, thresholds={"gated_delta_rule.tokens": (ROW_BY_ROW,)})

    def prepare_weight(self, weight: Weight) -> Prepared:
        """In MLX's format where one holds the blocks' values exactly, else as float32. MemoryError where the device's
        recommended working set would be exceeded."""
        prepared = prepare(weight)
        self._within(weight.name)
        return prepared

    def set_region(self, root: mx.array, state: State, part: mx.array) -> mx.array:
        out = copy(root)
        out[tuple(slice(a, b) for a, b in state.region)] = part
        return out

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return MetalExecutable(plan, self, storage)

    def close(self) -> None:
        mx.clear_cache()

    def _within(self, name: str) -> None:
        used, most = mx.get_active_memory(), self.device.memory
        if most is not None and used > most:
            raise MemoryError(
                f"metal: with weight {name} {used:,} bytes are in use; {self.device.name} recommends at most {most:,}"
            )


class MetalExecutable(ManagedExecutable):
    """Queues the plan's order as MLX's lazy operations, and evaluates results, states and checks together."""

    def __init__(self, plan: Plan, target: MetalTarget, storage: Storage) -> None:
        super().__init__(plan, target, storage)
        self.written = {s.root.name for n in plan.order for s, writes in n.effects if writes}
        self.checks: list[checks.Check] = []

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        with checks.collected() as self.checks:
            return super().run(inputs)

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        with checks.collected() as self.checks:
            return super().trace(inputs, watch)

    def _collect(self) -> dict[str, NDArray[Any]]:
        """States are evaluated, too: else each would be an expression that grows with every step."""
        results = [self.env[v] for v in self.plan.graph.outputs.values()]
        states = [self.storage.states[name].value for name in self.written]
        mx.eval(results, states, [holds for holds, _ in self.checks])
        checks.settle(self.checks)
        return super()._collect()
