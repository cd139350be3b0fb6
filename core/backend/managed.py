"""Backends whose arrays are immutable values of a library (NumPy, torch, MLX): kernels return results.

A kernel gets arrays and returns its results, then the next version of each state that it writes, in the order of its
parameters. This class threads the versions in effect order. Poison and canaries do not apply: nothing is written in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Node, State, Value
from trueup.core.plan import Plan
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .contract import Device, Executable, Storage, row_array
from .host import FallbackStep, Prologue, resolve
from .kernels import KernelTable, say_where
from .table import TableTarget
from .trace import Look, Watch, follow


class Cell:
    """A handle: it holds the current version of an array."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class ManagedMemory:
    """Memory over immutable arrays. A library other than NumPy overrides the conversions and the row operations."""

    def array(self, array: NDArray[Any]) -> Any:
        """A library array of this NumPy array; a copy."""
        out = np.array(array)
        out.setflags(write=False)
        return out

    def numpy(self, value: Any) -> NDArray[Any]:
        return np.array(value)

    def set_rows(self, value: Any, rows: NDArray[np.intp], part: Any) -> Any:
        """A new array with these rows replaced."""
        out = np.array(value)
        out[rows] = part
        out.setflags(write=False)
        return out

    def take_rows(self, value: Any, rows: NDArray[np.intp]) -> Any:
        return value[rows]

    def allocate(self, type: TensorType) -> Cell:
        return Cell(self.array(np.zeros(type.shape, type.element.numpy)))

    def free(self, handle: Cell) -> None:
        handle.value = None

    def upload(self, handle: Cell, array: NDArray[Any]) -> None:
        handle.value = self.array(array)

    def download(self, handle: Cell) -> NDArray[Any]:
        return self.numpy(handle.value)

    def read_rows(self, handle: Cell, rows: Sequence[int]) -> NDArray[Any]:
        return self.numpy(self.take_rows(handle.value, row_array(rows)))

    def write_rows(self, handle: Cell, rows: Sequence[int], array: NDArray[Any]) -> None:
        handle.value = self.set_rows(handle.value, row_array(rows), self.array(array))

    def copy_rows(self, handle: Cell, to: Sequence[int], source: Sequence[int]) -> None:
        handle.value = self.set_rows(handle.value, row_array(to), self.take_rows(handle.value, row_array(source)))

    def fill_rows(self, handle: Cell, rows: Sequence[int], value: float) -> None:
        handle.value = self.set_rows(handle.value, row_array(rows), value)


class ManagedTarget(TableTarget):
    """A target made of a table of kernels over immutable arrays."""

    memory: ManagedMemory

    def __init__(self, name: str, device: Device, kernels: KernelTable, memory: ManagedMemory | None = None) -> None:
        super().__init__(name, device, kernels)
        self.memory = memory or ManagedMemory()

    def prepare_weight(self, weight: Weight) -> Any:
        return self.memory.array(np.asarray(weight))

    def prepare_constant(self, array: NDArray[Any]) -> Any:
        return self.memory.array(array)

    def run_view(self, node: Node, value: Any) -> Any:
        """A view op on a library array; its body uses nothing but reshape and slices."""
        return node.op.body(value, **node.attrs)

    def set_region(self, root: Any, state: State, part: Any) -> Any:
        """A new version of a state with one region replaced."""
        out = np.array(root)
        state.slice(out)[...] = part
        out.setflags(write=False)
        return out

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return ManagedExecutable(plan, self, storage)


class ManagedExecutable(Executable):
    """Evaluates the plan's order on library arrays."""

    def __init__(self, plan: Plan, target: ManagedTarget, storage: Storage) -> None:
        self.plan, self.target, self.storage = plan, target, storage
        self.prologue = Prologue(plan, storage.host_states)
        self.weights = {v: storage.leaf(v, target) for v in _device_weights(plan)}
        self.env: dict[Value, Any] = {}
        self.fallback_bytes = 0

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._begin(inputs)
        for _, step in self._steps():
            step()
        return self._collect()

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        self._begin(inputs)
        follow(watch, Look(self.target.memory, self._cell), self._steps())
        return self._collect()

    def _begin(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        memory, handed = self.target.memory, self.prologue.run(inputs)
        self.env = dict(self.weights)
        self.env.update((v, memory.array(inputs[name])) for name, v in self.plan.graph.inputs.items())
        self.env.update((v, memory.array(a)) for v, a in handed.items())

    def _steps(self) -> Iterator[tuple[Node, Callable[[], None]]]:
        """The calls in order; views are made as their turn comes."""
        for n in self.plan.order:
            if n.op.view:
                self.env[n.outputs[0]] = self.target.run_view(n, resolve(n.inputs[0], self._get))
            else:
                yield n, partial(self._call if n in self.plan.kernels else self._fall_back, n)

    def _collect(self) -> dict[str, NDArray[Any]]:
        out = {name: self.target.memory.numpy(self.env[v]) for name, v in self.plan.graph.outputs.items()}
        self.env = {}
        return out

    def _cell(self, v: Value) -> Cell:
        """A handle for the memory, of a value or a whole state."""
        if isinstance(v, State):
            cell: Cell = self.storage.states[v.root.name]
            return cell
        return Cell(self.env[v])

    def _get(self, v: Value) -> Any:
        if isinstance(v, State):
            return v.slice(self.storage.states[v.root.name].value)
        return self.env[v]

    def _call(self, n: Node) -> None:
        kernel, args = self.plan.kernels[n], [resolve(g, self._get) for g in n.inputs]
        try:
            returned = kernel.run(*args, **n.attrs)
        except Exception as e:
            say_where(e, n, kernel, self.target.name)
            raise
        results = tuple(returned) if isinstance(returned, tuple | list) else () if returned is None else (returned,)
        written = [s for s, writes in n.effects if writes]
        if len(results) != len(n.outputs) + len(written):
            raise TypeError(
                f"{self.target.name}: the kernel of {n} returned {len(results)} arrays, "
                f"expected {len(n.outputs)} results and {len(written)} states"
            )
        for v, r in zip((*n.outputs, *written), results, strict=True):
            if tuple(getattr(r, "shape", ())) != v.type.shape:
                found = list(r.shape) if hasattr(r, "shape") else type(r).__name__
                raise TypeError(f"{self.target.name}: the kernel of {n} returned {found} for {v!r}")
        self.env.update(zip(n.outputs, results, strict=False))
        for s, version in zip(written, results[len(n.outputs) :], strict=True):
            cell = self.storage.states[s.root.name]
            cell.value = version if s.root is s else self.target.set_region(cell.value, s, version)

    def _fall_back(self, n: Node) -> None:
        cells = {v: Cell(self.env[v]) for v in n.values if not isinstance(v, State) and v.data is None}
        cells.update((o, Cell(None)) for o in n.outputs)

        def handle(v: Value) -> Cell:
            cell: Cell = self.storage.states[v.root.name] if isinstance(v, State) else cells[v]
            return cell

        step = FallbackStep(n, self.target.memory, handle)
        step.run()
        self.fallback_bytes += step.bytes
        self.env.update((o, cells[o].value) for o in n.outputs)


def _device_weights(plan: Plan) -> list[Value]:
    used = {v for n in plan.order for v in n.values}
    return [v for v in plan.graph.weights.values() if v in used]
