"""Backends whose kernels write into storage that the plan assigned: an arena, and states in place.

`AddressedTarget` needs a table of kernels and a memory. A step is a list of bound calls, made once and replayed; a
device with a queue of its own overrides `compile` or the binding of handles, not the meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Node, State, Value
from trueup.core.plan import Plan
from trueup.core.types import TensorType

from .contract import Device, Executable, Memory, Storage
from .host import FallbackStep, Prologue, resolve
from .kernels import KernelTable, say_where
from .memory import HostMemory
from .table import TableTarget
from .trace import Look, Watch, follow


@dataclass(frozen=True)
class Context:
    """What a kernel is given besides its arguments: where its results go, and their types."""

    outs: tuple[Any, ...]
    types: tuple[TensorType, ...]
    target: AddressedTarget

    @property
    def out(self) -> Any:
        """The only result."""
        (only,) = self.outs
        return only


class AddressedTarget(TableTarget):
    """A target made of a table of kernels over addressed memory; by default the host's."""

    def __init__(self, name: str, device: Device, kernels: KernelTable, memory: Memory | None = None) -> None:
        super().__init__(name, device, kernels)
        self.memory = memory or HostMemory()
        self.poison = False
        """Fill results with 0xFF bytes before each kernel; for tests."""

    # -- storage: a device other than the host overrides these ---------------------------------------------------------

    def allocate_arena(self, nbytes: int) -> Any:
        """Storage for a step's values."""
        return np.zeros(nbytes, np.uint8)

    def bind(self, arena: Any, offset: int, type: TensorType) -> Any:
        """A handle for a value that lies in the arena from byte `offset` on, by the type's shape and strides."""
        dtype = np.dtype(type.element.numpy)
        strides = [s * dtype.itemsize for s in type.strides or type.row_major()]
        return np.ndarray(
            type.shape, dtype, arena if type.size else None, offset if type.size else 0, strides if type.size else None
        )

    def view(self, handle: Any, source: TensorType, offset: int, type: TensorType) -> Any:
        """A handle for a view of an array outside the arena, `offset` elements from its start."""
        strides = [s * handle.itemsize for s in type.strides or type.row_major()]
        return np.lib.stride_tricks.as_strided(handle.reshape(-1)[offset:], type.shape, strides, writeable=False)

    def state_view(self, handle: Any, state: State) -> Any:
        """A handle for a region of a state."""
        return state.slice(handle)

    def fill(self, handle: Any) -> None:
        """Overwrite a result with 0xFF bytes (NaN, -1)."""
        handle[...] = np.frombuffer(b"\xff" * handle.itemsize, handle.dtype)[0]

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return AddressedExecutable(plan, self, storage)


class AddressedExecutable(Executable):
    """A list of kernel calls, each bound to its storage."""

    def __init__(self, plan: Plan, target: AddressedTarget, storage: Storage) -> None:
        self.plan, self.target, self.storage = plan, target, storage
        self.arena = target.allocate_arena(plan.memory.arena)
        self.prologue = Prologue(plan, storage.host_states)
        self.handles: dict[Value, Any] = {}
        self.owned: list[Any] = []
        """Handles to give back: of inputs, of what the prologue hands over, and of constants."""
        self.fallbacks: list[FallbackStep] = []
        try:
            self.inputs = {name: self._allocate(v) for name, v in plan.graph.inputs.items()}
            self.handed = {v: self._allocate(v) for v in self.prologue.results if v.base is None}
            self.steps: list[Callable[[], None]] = [self._step(n) for n in plan.order if not n.op.view]
            self.outputs = {name: self.handle(v) for name, v in plan.graph.outputs.items()}
        except BaseException:
            self.close()
            raise

    def _allocate(self, v: Value) -> Any:
        handle = self.handles[v] = self.target.memory.allocate(v.type)
        self.owned.append(handle)
        return handle

    def handle(self, v: Value) -> Any:
        """Where a value, a state or a prepared weight lies."""
        if v not in self.handles:
            self.handles[v] = self._bind(v)
        return self.handles[v]

    def _bind(self, v: Value) -> Any:
        if isinstance(v, State):
            root = self.storage.states[v.root.name]
            return root if v.root is v else self.target.state_view(root, v)
        if v.data is not None:
            prepared = self.storage.leaf(v, self.target)
            if v.leaf == "constant":
                self.owned.append(prepared)
            return prepared
        offset = self.plan.memory.offsets.get(v.storage)
        if offset is None:
            return self.target.view(self.handle(v.storage), v.storage.type, v.offset, v.type)
        return self.target.bind(self.arena, offset + v.offset * v.type.element.block_bytes, v.type)

    def _step(self, node: Node) -> Callable[[], None]:
        if node not in self.plan.kernels:
            fallback = FallbackStep(node, self.target.memory, self.handle)
            self.fallbacks.append(fallback)
            return fallback.run
        kernel, attrs, target = self.plan.kernels[node], node.attrs, self.target
        args = [resolve(g, self.handle) for g in node.inputs]
        outs = tuple(self.handle(o) for o in node.outputs)
        context = Context(outs, tuple(o.type for o in node.outputs), target)

        def step() -> None:
            if target.poison:
                for o in outs:
                    target.fill(o)
            try:
                kernel.run(context, *args, **attrs)
            except Exception as e:
                say_where(e, node, kernel, target.name)
                raise

        return step

    @property
    def fallback_bytes(self) -> int:
        """Bytes moved so far for nodes that fell back to the reference."""
        return sum(f.bytes for f in self.fallbacks)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._feed(inputs)
        for step in self.steps:
            step()
        return self._collect()

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        self._feed(inputs)
        nodes = [n for n in self.plan.order if not n.op.view]
        follow(watch, Look(self.target.memory, self.handle), zip(nodes, self.steps, strict=True))
        return self._collect()

    def _feed(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Run the prologue, and bring its results and the step's inputs to the device."""
        memory = self.target.memory
        results = self.prologue.run(inputs)
        for name, handle in self.inputs.items():
            memory.upload(handle, inputs[name])
        for v, handle in self.handed.items():
            memory.upload(handle, results[v])

    def _collect(self) -> dict[str, NDArray[Any]]:
        return {name: self.target.memory.download(handle) for name, handle in self.outputs.items()}

    def close(self) -> None:
        while self.owned:
            self.target.memory.free(self.owned.pop())
