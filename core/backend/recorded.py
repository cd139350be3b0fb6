"""Plans as launches recorded once: what backends share whose kernels take addresses on a device with a queue of its own.

Tensors as a buffer, an offset and a type; rows as kernels take them; weights on the device; staging, scratch and the fault
word of an executable. A backend adds its memory, how arguments are packed, and how launches are started. No API here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Node, Value
from trueup.core.op import Op
from trueup.core.plan import Plan
from trueup.core.signature import Param
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .addressed import AddressedExecutable, AddressedTarget, Context
from .contract import Memory, Storage
from .host import resolve
from .trace import Watch

ALIGN = 256
"""Bytes; where parts of the staged buffer and of scratch begin."""
NO_FAULT = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, eq=False)
class DeviceTensor:
    """A tensor in a buffer: it begins at element `offset`, and lies by its type's strides. Knows not who owns it."""

    buffer: Any
    offset: int
    type: TensorType

    @property
    def itemsize(self) -> int:
        return self.type.element.block_bytes

    @property
    def start(self) -> int:
        """Bytes from the buffer's start."""
        return self.offset * self.itemsize

    @property
    def extent(self) -> int:
        """Bytes from the first to behind the last of its elements."""
        if not self.type.size:
            return 0
        strides = self.type.strides
        if strides is None:
            return self.type.nbytes
        return (1 + sum((n - 1) * s for n, s in zip(self.type.shape, strides, strict=True))) * self.itemsize

    def at(self, elements: int, type: TensorType) -> DeviceTensor:
        """A tensor in the same buffer, so many elements further on."""
        return DeviceTensor(self.buffer, self.offset + elements, type)


class RecordedMemory(Memory, Protocol):
    """Memory whose handles are DeviceTensors, with bytes as kernels' host sides need them."""

    def room(self, nbytes: int, what: str) -> DeviceTensor:
        """So many bytes of undefined contents; MemoryError says what they were for, and the sizes."""

    def write(self, buffer: Any, start: int, data: NDArray[Any]) -> None:
        """Bytes from a contiguous array; it waits until they are there."""

    def read(self, buffer: Any, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes, waited for."""

    def fill(self, buffer: Any, start: int, nbytes: int, pattern: bytes) -> None:
        """`pattern` over and over; `start` and `nbytes` are multiples of its length."""


def arranged(raw: NDArray[np.uint8], type: TensorType, *, writeable: bool = False) -> NDArray[Any]:
    """The array of a type in bytes read from its first element on; types that NumPy lacks stay bytes."""
    if type.element.numpy is None:
        return raw
    dtype = np.dtype(type.element.numpy)
    if not type.size:
        return np.empty(type.shape, dtype)
    strides = [s * dtype.itemsize for s in type.strides or type.row_major()]
    return np.lib.stride_tricks.as_strided(raw.view(dtype), type.shape, strides, writeable=writeable or type.contiguous)


def element_bytes(dtype: str, value: float) -> bytes:
    """One element of a plain type as it is stored."""
    if dtype == "bf16":
        return np.float32(value).tobytes()[2:]
    numpy = TensorType((), dtype).element.numpy
    if numpy is None:
        raise ValueError(f"{dtype} has no elements to fill with")
    return np.asarray(value).astype(numpy).tobytes()


def row_of(handle: DeviceTensor) -> tuple[TensorType, int]:
    """The type and the bytes of an entry along the first axis."""
    type = handle.type
    if not type.contiguous:
        raise ValueError(f"rows of {type} do not lie one after the other")
    row = TensorType(type.shape[1:], type.dtype)
    return row, prod(row.shape) * handle.itemsize if row.element.plain else row.nbytes


def row_index(handle: DeviceTensor, row: int) -> int:
    """A row's number from the start; IndexError outside of the first axis."""
    count = handle.type.shape[0]
    if not -count <= row < count:
        raise IndexError(f"row {row} of {handle.type}, which has {count}")
    return row % count


# -- how tensors may lie -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """A tensor as kernels take rows of its last axes: row r at (r // inner) * outer + (r % inner) * step, in elements."""

    tensor: DeviceTensor
    inner: int = 1
    outer: int = 0
    step: int = 0


Axes = list[tuple[int, int]]
"""Sizes and strides of axes of more than one entry, neighbours that lie as one joined."""

STATES = frozenset({"keys", "values"})
"""Arguments that are states which an op only reads: any strides of the leading axes will do."""


def strides(type: TensorType) -> tuple[int, ...]:
    """Elements from one entry of each axis to the next."""
    return type.strides or type.row_major()


def joined(type: TensorType, first: int, last: int) -> Axes:
    """The axes `first … last-1` as few as they can be."""
    out: Axes = []
    for n, s in list(zip(type.shape, strides(type), strict=True))[first:last]:
        if n == 1:
            continue
        if out and out[-1][1] == n * s:
            out[-1] = (out[-1][0] * n, s)
        else:
            out.append((n, s))
    return out


def side_by_side(type: TensorType, lead: int) -> bool:
    """Whether what stands behind the first `lead` axes lies in one piece."""
    inner = joined(type, lead, len(type.shape))
    return type.size == 0 or not inner or (len(inner) == 1 and inner[0][1] == 1)


def readable_rows(type: TensorType, lead: int) -> bool:
    """Whether it is rows as a kernel reads them: the rest in one piece, the first `lead` axes two at most."""
    return side_by_side(type, lead) and len(joined(type, 0, lead)) <= 2


def rows(tensor: DeviceTensor, lead: int | None = None) -> Rows:
    """Rows over the first `lead` axes, by default all but the last."""
    type = tensor.type
    lead = len(type.shape) - 1 if lead is None else lead
    axes = joined(type, 0, lead) if type.size else []
    (outer, inner) = ((1, 0), (1, 0)) if not axes else ((1, 0), axes[0]) if len(axes) == 1 else axes
    count = max(inner[0], 1) if len(axes) > 1 or not axes else prod(type.shape[:lead])
    return Rows(tensor, count, outer[1], inner[1])


def typed(raw: DeviceTensor, type: TensorType) -> DeviceTensor:
    """Bytes of scratch as a tensor."""
    return DeviceTensor(raw.buffer, raw.offset // type.element.block_bytes, type)


def lies(op: Op, **layouts: int) -> Callable[..., bool | str]:
    """A condition: the named arguments are rows over so many leading axes (negative: of all but so many), states have
    their last axes in one piece from that axis on, everything else is contiguous."""

    def when(*types: Any, **attrs: Any) -> bool | str:
        for p, given in zip(op.params, types, strict=True):
            for t in given if isinstance(given, tuple) else (given,):
                if t is None or t.contiguous:
                    continue
                lead = layouts.get(p.name)
                if lead is None:
                    return f"{p.name} is {t}, which is not contiguous"
                lead = lead if lead >= 0 else len(t.shape) + lead
                state = p.mutates or p.name in STATES
                if not (side_by_side(t, lead) if state else readable_rows(t, lead)):
                    return f"{p.name} is {t}, which does not lie in rows"
        return True

    return when


def first_no(*answers: bool | str) -> bool | str:
    """True, or the first of the answers that is not."""
    return next((a for a in answers if a is not True), True)


# -- weights -----------------------------------------------------------------------------------------------------------


class RecordedWeight:
    """A weight on the device: its GGUF bytes for kernels that unpack them, float32 values for those that don't. Each form is
    made when it is first asked for, once; MemoryError where it has no room. It lies there as long as one of the plans that
    `use` it is open; the next plan puts it there again."""

    def __init__(self, weight: Weight, memory: RecordedMemory, native: tuple[str, ...]) -> None:
        """`native`: the types that kernels read as they are stored; all others are expanded to float32."""
        self.weight, self.memory, self.native = weight, memory, native
        self._stored: DeviceTensor | None = None
        self._values: DeviceTensor | None = None
        self._held: list[DeviceTensor] = []
        self._users = 0

    @property
    def type(self) -> TensorType:
        return self.weight.type

    @property
    def format(self) -> str:
        """The type that kernels read: the stored one, or f32."""
        return self.type.dtype if self.type.dtype in self.native else "f32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `format`."""
        return TensorType(self.type.shape[-1:], self.format).nbytes

    @property
    def stored(self) -> DeviceTensor:
        """The bytes of all rows, of type `format`, as u8."""
        if self.format == "f32":
            return DeviceTensor(self.values.buffer, 0, TensorType((self.values.type.nbytes,), "u8"))
        return self._bytes()

    @property
    def values(self) -> DeviceTensor:
        """The dequantized values, float32."""
        if self._values is None:
            array = np.ascontiguousarray(np.asarray(self.weight), np.float32)
            self._values = self._put(array, TensorType(self.type.shape))
        return self._values

    @property
    def plain(self) -> DeviceTensor:
        """The weight as a tensor of its own type, for parameters that take no weights."""
        if self.type.dtype == "f32":
            return self.values
        return DeviceTensor(self._bytes().buffer, 0, self.type)

    def _bytes(self) -> DeviceTensor:
        if self._stored is None:
            raw = np.ascontiguousarray(self.weight.data).reshape(-1)
            self._stored = self._put(raw, TensorType(raw.shape, "u8"))
        return self._stored

    def _put(self, array: NDArray[Any], type: TensorType) -> DeviceTensor:
        room = self.memory.room(array.nbytes, f"weight {self.weight.name} ({self.type})")
        self._held.append(room)
        self.memory.write(room.buffer, 0, array)
        return DeviceTensor(room.buffer, 0, type)

    def use(self) -> None:
        """One more plan needs what is on the device."""
        self._users += 1

    def leave(self) -> None:
        """A plan that used it is closed."""
        self._users -= 1
        if self._users <= 0:
            self.close()

    def close(self) -> None:
        """Give the storage back."""
        for room in self._held:
            self.memory.free(room)
        self._held.clear()
        self._stored = self._values = None


class ComputedWeight:
    """A tensor that a step computed, where a weight may stand."""

    def __init__(self, tensor: DeviceTensor) -> None:
        if tensor.type.dtype not in ("f32", "f16", "bf16"):
            raise TypeError(f"a computed {tensor.type} can't be a weight: only floats are read as they lie")
        self.tensor, self.type, self.format = tensor, tensor.type, tensor.type.dtype
        self.row_bytes = TensorType(tensor.type.shape[-1:], self.format).nbytes

    @property
    def stored(self) -> DeviceTensor:
        return DeviceTensor(self.tensor.buffer, self.tensor.start, TensorType((self.type.nbytes,), "u8"))

    @property
    def values(self) -> DeviceTensor:
        if self.format != "f32":
            raise TypeError(f"a computed {self.type} can't be read as float32 values")
        return self.tensor


def values(weight: Any) -> DeviceTensor | None:
    """Float32 values of an optional weight."""
    return None if weight is None else weight.values


# -- the executable ----------------------------------------------------------------------------------------------------


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
            resolve(g, lambda v, p=p: _as_parameter(p, self.handle(v)))  # type: ignore[misc]
            for p, g in zip(node.op.params, node.inputs, strict=True)
        ]
        self.plan.kernels[node].run(context, *args, **node.attrs)
        target = self.target
        self.launches += len(launches)

        def step() -> None:
            if target.poison:
                for o in outs:
                    target.fill(o)
            for launch in launches:
                self.start(launch)

        return step

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        handed = self.prologue.run(inputs)
        arrays = [*(inputs[name] for name in self.inputs), *(handed[v] for v in self.handed)]
        for part, array in zip(self._parts, arrays, strict=True):
            part[...] = array
        word, raws = self.play()
        self._answer(word)
        return {name: _owned(raws[name], handle) for name, handle in self.outputs.items()}

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


def _as_parameter(param: Param, handle: Any) -> Any:
    """A weight for a parameter that takes weights, else a tensor."""
    if param.dtype == "weight":
        return ComputedWeight(handle) if isinstance(handle, DeviceTensor) else handle
    return handle.plain if isinstance(handle, RecordedWeight) else handle


def _results(plan: Plan) -> list[Value]:
    return [o for n in plan.prologue for o in n.outputs if o.base is None]


def _owned(raw: NDArray[np.uint8], handle: DeviceTensor) -> NDArray[Any]:
    found = arranged(raw, handle.type)
    return found if handle.type.contiguous else found.copy()
