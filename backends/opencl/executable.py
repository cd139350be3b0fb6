"""A compiled plan: kernels whose arguments are set once, enqueued in order for every step. Inputs go up in one copy,
and nothing comes back before the outputs do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from trueup.core.backend.addressed import AddressedExecutable, Context
from trueup.core.backend.contract import Storage
from trueup.core.backend.host import resolve
from trueup.core.backend.trace import Watch
from trueup.core.graph import Node, Value
from trueup.core.passes.fuse import Pattern
from trueup.core.plan import Plan
from trueup.core.signature import Param
from trueup.core.types import TensorType

from .memory import OpenCLTensor, arranged
from .weight import DeviceWeight, OpenCLWeight

ALIGN = 64
NO_FAULT = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its arguments, and how many work-items in groups of how many."""

    kernel: Any
    items: tuple[int]
    group: tuple[int]


@dataclass(frozen=True)
class Rows:
    """A tensor as a kernel's ROWS: rows of its last axis, row r at (r // inner) * outer + (r % inner) * step.

    Sizes count elements, as the tensor's offset does, or words of `words` bytes where a kernel asks for those.
    """

    tensor: OpenCLTensor
    inner: int = 1
    outer: int = 0
    step: int = 0


@dataclass(frozen=True)
class Recorder(Context):
    """What a kernel function is given: where its results go, and how to put launches into the plan."""

    executable: OpenCLExecutable
    node: Node
    launches: list[Launch]

    @property
    def fault(self) -> tuple[Any, np.int64]:
        """The arguments by which a kernel reports an index that its op forbids."""
        return self.executable.fault, np.int64(self.node.id)

    def flat(self, kernel: str, rows: int, n: int, *args: Any, format: str = "") -> None:
        """An elementwise kernel over rows of n; its first two arguments are these."""
        self.over(kernel, rows, n, rows, n, *args, format=format)

    def over(self, kernel: str, rows: int, n: int, *args: Any, format: str = "") -> None:
        """An elementwise kernel over rows of n."""
        tuning = self.executable.target.tuning
        self._add(kernel, rows * -(-n // tuning.run), tuning.group, args, format)

    def items(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A kernel of `count` independent work-items."""
        self._add(kernel, count, self.executable.target.tuning.group, args, format)

    def groups(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A kernel of `count` work-groups, each as many lanes as share a reduction."""
        lanes = self.executable.target.tuning.lanes
        self._add(kernel, count * lanes, lanes, args, format)

    def sides(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A kernel of `count` work-groups that share local memory."""
        side = self.executable.target.tuning.side
        self._add(kernel, count * side, side, args, format)

    def scratch(self, nbytes: int) -> OpenCLTensor:
        """Room for this node's launches alone, as bytes."""
        return self.executable.scratch.take(nbytes)

    def _add(self, name: str, items: int, group: int, args: tuple[Any, ...], format: str) -> None:
        if items <= 0:
            return
        kernel = self.executable.target.programs.kernel(name, format)
        kernel.set_args(*packed(args))
        self.launches.append(Launch(kernel, (-(-items // group) * group,), (group,)))


def packed(args: tuple[Any, ...]) -> list[Any]:
    """Arguments as kernels take them: int as long, float as float, a tensor as its buffer and offset, None as none."""
    out: list[Any] = []
    for a in args:
        if a is None:
            out += [None, np.uint64(0)]
        elif isinstance(a, OpenCLTensor):
            out += [a.buffer, np.uint64(a.offset)]
        elif isinstance(a, Rows):
            out += [a.tensor.buffer, np.uint64(a.tensor.offset), *map(np.int64, (a.inner, a.outer, a.step))]
        elif isinstance(a, tuple):
            out += packed(a)
        elif isinstance(a, bool | int):
            out.append(np.int64(a))
        elif isinstance(a, float):
            out.append(np.float32(a))
        else:
            out.append(a)
    return out


class Scratch:
    """Room that the launches of one node at a time use; kernels run in order, so the next node may use it again."""

    def __init__(self, executable: OpenCLExecutable) -> None:
        self._memory = executable.target.memory
        self._blocks: list[OpenCLTensor] = []
        self._used = 0

    def reset(self) -> None:
        """The next node begins."""
        self._used = 0

    def take(self, nbytes: int) -> OpenCLTensor:
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        have = self._blocks[-1].extent if self._blocks else 0
        if self._used + size > have:
            self._blocks.append(self._memory.room(max(size, 2 * have), "intermediate results of a kernel"))
            self._used = 0
        start, self._used = self._used, self._used + size
        return self._blocks[-1].at(start, TensorType((nbytes,), "u8"))

    def close(self) -> None:
        for block in self._blocks:
            self._memory.free(block)
        self._blocks.clear()


class OpenCLExecutable(AddressedExecutable):
    """A list of launches, made when the plan is compiled."""

    target: Any  # an OpenCLTarget

    def __init__(self, plan: Plan, target: Any, storage: Storage) -> None:
        self.closed = False
        self._kept: list[OpenCLTensor] = []
        self._weights: list[OpenCLWeight] = []
        self.fault: Any = None
        self.arena: Any = None
        self.target = target
        self.scratch = Scratch(self)
        self._nodes = {n.id: n for n in plan.order}
        self.launches = 0
        """Kernels that a step starts."""
        try:
            given = [v.type.nbytes for v in (*plan.graph.inputs.values(), *_results(plan))]
            self.staging = np.zeros(sum(-(-n // ALIGN) * ALIGN for n in given), np.uint8)
            self._staged = self._keep(self.staging.nbytes, "the inputs of a step").buffer
            self._next = 0
            self._parts: list[tuple[OpenCLTensor, NDArray[Any]]] = []
            self.fault = self._keep(4, "a word for faults").buffer
            self._clear_fault()
            super().__init__(plan, target, storage)
        except BaseException:
            self.close()
            raise

    def _keep(self, nbytes: int, what: str) -> OpenCLTensor:
        self._kept.append(self.target.memory.room(nbytes, what))
        return self._kept[-1]

    # -- recording -----------------------------------------------------------------------------------------------------

    def _allocate(self, v: Value) -> OpenCLTensor:
        """An input of the plan: a part of the staged buffer, and of the array that is copied there."""
        start = self._next
        self._next += -(-v.type.nbytes // ALIGN) * ALIGN
        tensor = OpenCLTensor(self._staged, start // v.type.element.block_bytes, v.type)
        self._parts.append((tensor, arranged(self.staging[start : start + v.type.nbytes], v.type, writeable=True)))
        self.handles[v] = tensor
        return tensor

    def _bind(self, v: Value) -> Any:
        made = OpenCLWeight(v.data, self.target.memory) if v.leaf == "constant" else super()._bind(v)
        if isinstance(made, OpenCLWeight):
            made.use()
            self._weights.append(made)
        return made

    def _step(self, node: Node) -> Callable[[], None]:
        if node not in self.plan.kernels:
            return super()._step(node)
        self.scratch.reset()
        outs = tuple(self.handle(o) for o in node.outputs)
        launches: list[Launch] = []
        context = Recorder(outs, tuple(o.type for o in node.outputs), self.target, self, node, launches)
        args = [
            resolve(g, lambda v, p=p: self._argument(node, p, v))
            for p, g in zip(node.op.params, node.inputs, strict=True)
        ]
        self.plan.kernels[node].run(context, *args, **node.attrs)
        queue, target, enqueue = self.target.queue, self.target, cl.enqueue_nd_range_kernel
        calls = [(launch.kernel, launch.items, launch.group) for launch in launches]
        self.launches += len(calls)

        def step() -> None:
            if target.poison:
                for o in outs:
                    target.fill(o)
            for kernel, items, group in calls:
                enqueue(queue, kernel, items, group)

        return step

    def _argument(self, node: Node, param: Param, v: Value) -> Any:
        """A weight for a parameter that takes weights, else a tensor; a fusion, whose parameters don't say, gets weights
        as weights."""
        handle = self.handle(v)
        if param.dtype == "weight":
            return DeviceWeight(handle) if isinstance(handle, OpenCLTensor) else handle
        if isinstance(node.op, Pattern) and v.leaf == "weight":
            return handle
        return handle.plain if isinstance(handle, OpenCLWeight) else handle

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        queue = self.target.queue
        handed = self.prologue.run(inputs)
        arrays = [*(inputs[name] for name in self.inputs), *(handed[v] for v in self.handed)]
        for (_, part), array in zip(self._parts, arrays, strict=True):
            part[...] = array
        try:
            if self.staging.size:
                cl.enqueue_copy(queue, self._staged, self.staging, is_blocking=False)
            for step in self.steps:
                step()
            word = np.empty(1, np.int32)
            cl.enqueue_copy(queue, word, self.fault, is_blocking=False)
            raws = {}
            for name, handle in self.outputs.items():
                raws[name] = np.empty(handle.extent, np.uint8)
                if handle.extent:
                    cl.enqueue_copy(queue, raws[name], handle.buffer, src_offset=handle.start, is_blocking=False)
        finally:
            queue.finish()
        self._answer(word[0])
        return {name: _owned(raws[name], handle) for name, handle in self.outputs.items()}

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        try:
            out = super().trace(inputs, watch)
        finally:
            self.target.queue.finish()
        self._answer(self.target.memory.read(self.fault, 0, 4).view(np.int32)[0])
        return out

    def _answer(self, word: int) -> None:
        """The error that kernels of the step have noted, if any has."""
        if word == NO_FAULT:
            return
        self._clear_fault()
        node = self._nodes[int(word)]
        raise ValueError(
            f"{node.describe()}: an index that it was given points outside of what it indexes, or cu_seqlens does "
            "not rise from 0 to at most the rows of the step"
        )

    def _clear_fault(self) -> None:
        self.target.memory.fill(self.fault, 0, 4, np.int32(NO_FAULT).tobytes())

    def close(self) -> None:
        """Give the buffers back; closing twice is nothing."""
        if self.closed:
            return
        self.closed = True
        self.target.queue.finish()
        self.scratch.close()
        for weight in self._weights:
            weight.leave()
        for room in (*self._kept, *([] if self.arena is None else [self.arena])):
            self.target.memory.free(room)


def _results(plan: Plan) -> list[Value]:
    return [o for n in plan.prologue for o in n.outputs if o.base is None]


def _owned(raw: NDArray[np.uint8], handle: OpenCLTensor) -> NDArray[Any]:
    found = arranged(raw, handle.type)
    return found if handle.type.contiguous else found.copy()
