"""A plan as launches that are made once: staging, scratch, and the word by which kernels report a fault."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend.addressed import AddressedExecutable, AddressedTarget, Context
from trueup.core.backend.contract import Storage
from trueup.core.backend.host import resolve
from trueup.core.backend.kernels import say_where
from trueup.core.backend.trace import Watch
from trueup.core.graph import Node, Value
from trueup.core.passes.fuse import Pattern
from trueup.core.plan import Plan
from trueup.core.signature import Param
from trueup.core.types import TensorType

from .memory import RecordedMemory, owned
from .tensor import DeviceTensor, arranged
from .weight import RecordedWeight, as_weight

ALIGN = 256
"""Bytes; where parts of the staged buffer and of scratch begin."""
NO_FAULT = int(np.iinfo(np.int32).max)


class Scratch:
    """Room that the launches of one node at a time use; kernels run in order, so the next node may use it again."""

    def __init__(self, memory: RecordedMemory) -> None:
        self._memory = memory
        self._blocks: list[DeviceTensor] = []
        self._used = 0

    def reset(self) -> None:
        """The next node begins."""
        self._used = 0

    def take(self, nbytes: int) -> DeviceTensor:
        """So many bytes, as u8."""
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


@dataclass(frozen=True)
class Recording(Context):
    """What a kernel function is given: where its results go, and the node's launches so far. A backend adds the ways to put
    launches there."""

    executable: RecordedExecutable
    node: Node
    launches: list[Any]

    @property
    def fault(self) -> tuple[Any, int]:
        """The arguments by which a kernel reports an index that its op forbids."""
        return self.executable.fault, self.node.id

    def scratch(self, nbytes: int) -> DeviceTensor:
        """Room for this node's launches alone, as bytes."""
        return self.executable.scratch.take(nbytes)


class RecordedExecutable(AddressedExecutable):
    """A list of launches, made when the plan is compiled. Inputs lie in one buffer, which one copy fills."""

    recording: type[Recording] = Recording

    def __init__(self, plan: Plan, target: AddressedTarget, storage: Storage) -> None:
        self.closed = False
        memory: Any = target.memory
        self.memory: RecordedMemory = memory
        self._kept: list[DeviceTensor] = []
        self._weights: list[RecordedWeight] = []
        self.fault: Any = None
        self.arena: Any = None
        self.target = target
        self.scratch = Scratch(self.memory)
        self._nodes = {n.id: n for n in plan.order}
        self.launches = 0
        """Kernels that a step starts."""
        try:
            given = [v.type.nbytes for v in (*plan.graph.inputs.values(), *_results(plan))]
            self.staging = self.host_room(sum(-(-n // ALIGN) * ALIGN for n in given))
            self.staged = self._keep(self.staging.nbytes, "the inputs of a step")
            self._next = 0
            self._parts: list[NDArray[Any]] = []
            self.fault = self._keep(4, "a word for faults")
            self._clear_fault()
            super().__init__(plan, target, storage)
        except BaseException:
            self.close()
            raise

    # -- a backend's own -----------------------------------------------------------------------------------------------

    def host_room(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of the host that copies to and from the device like best."""
        return np.zeros(nbytes, np.uint8)

    @abstractmethod
    def start(self, launch: Any) -> None:
        """Put a launch into the queue."""

    @abstractmethod
    def play(self) -> tuple[int, dict[str, NDArray[np.uint8]]]:
        """Bring the staged inputs up, run the steps, and wait: the fault word, and each output's bytes, the caller's own."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all that is in the queue."""

    # -- recording -----------------------------------------------------------------------------------------------------

    def _keep(self, nbytes: int, what: str) -> DeviceTensor:
        self._kept.append(self.memory.room(nbytes, what))
        return self._kept[-1]

    def _allocate(self, v: Value) -> DeviceTensor:
        """An input of the plan: a part of the staged buffer, and of the array that is copied there."""
        start = self._next
        self._next += -(-v.type.nbytes // ALIGN) * ALIGN
        tensor = DeviceTensor(self.staged.buffer, start // v.type.element.block_bytes, v.type)
        self._parts.append(arranged(self.staging[start : start + v.type.nbytes], v.type, writeable=True))
        self.handles[v] = tensor
        return tensor

    def constant(self, v: Value) -> RecordedWeight:
        """A constant of the plan, which belongs to it."""
        made = self.target.prepare_weight(v.data)  # type: ignore[arg-type]
        assert isinstance(made, RecordedWeight)
        return made

    def _bind(self, v: Value) -> Any:
        made = self.constant(v) if v.leaf == "constant" else super()._bind(v)
        if isinstance(made, RecordedWeight):
            made.use()
            self._weights.append(made)
        return made

    def _step(self, node: Node) -> Callable[[], None]:
        if node not in self.plan.kernels:
            return super()._step(node)
        self.scratch.reset()
        outs = tuple(self.handle(o) for o in node.outputs)
        launches: list[Any] = []
        context = self.recording(outs, tuple(o.type for o in node.outputs), self.target, self, node, launches)
        args = [
            resolve(g, lambda v, p=p: self._argument(node, p, v))  # type: ignore[misc]
            for p, g in zip(node.op.params, node.inputs, strict=True)
        ]
        kernel, target = self.plan.kernels[node], self.target
        try:
            kernel.run(context, *args, **node.attrs)
        except Exception as e:
            say_where(e, node, kernel, target.name)
            raise
        self.launches += len(launches)

        def step() -> None:
            if target.poison:
                for o in outs:
                    target.fill(o)
            for launch in launches:
                self.start(launch)

        return step

    def _argument(self, node: Node, param: Param, v: Value) -> Any:
        """A weight for a parameter that takes weights, else a tensor; a fusion, whose parameters don't say, gets weights
        as weights."""
        handle = self.handle(v)
        if param.dtype == "weight":
            return as_weight(handle)
        if isinstance(node.op, Pattern) and v.leaf == "weight":
            return handle
        return handle.plain if isinstance(handle, RecordedWeight) else handle

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        handed = self.prologue.run(inputs)
        arrays = [*(inputs[name] for name in self.inputs), *(handed[v] for v in self.handed)]
        for part, array in zip(self._parts, arrays, strict=True):
            part[...] = array
        word, raws = self.play()
        self._answer(word)
        return {name: owned(raws[name], handle) for name, handle in self.outputs.items()}

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        try:
            out = super().trace(inputs, watch)
        finally:
            self.wait()
        self._answer(int(self.memory.read(self.fault.buffer, self.fault.start, 4).view(np.int32)[0]))
        return out

    def _answer(self, word: int) -> None:
        """The error that kernels of the step have noted, if any has."""
        if word == NO_FAULT:
            return
        self._clear_fault()
        node = self._nodes[word]
        raise ValueError(
            f"{node.describe()}: an index that it was given points outside of what it indexes, or cu_seqlens does "
            "not rise from 0 to at most the rows of the step"
        )

    def _clear_fault(self) -> None:
        self.memory.write(self.fault.buffer, self.fault.start, np.array([NO_FAULT], np.int32))

    def close(self) -> None:
        """Give the buffers back; closing twice is nothing."""
        if self.closed:
            return
        self.closed = True
        self.wait()
        self.scratch.close()
        for weight in self._weights:
            weight.leave()
        for room in (*self._kept, *([] if self.arena is None else [self.arena])):
            self.memory.free(room)


def _results(plan: Plan) -> list[Value]:
    return [o for n in plan.prologue for o in n.outputs if o.base is None]
