"""A target under test: one op compiled at a time, with guarded memory, poisoned results and allocations counted.

Knows the backend contract and graphs. What needs the host's memory is left out for targets that have their own;
`applies`
says what is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import AddressedTarget, Device, HostMemory, ManagedTarget, Storage, Target
from trueup.core.errors import Refused, Unavailable
from trueup.core.graph import Graph, State, Value
from trueup.core.ops import columns, contiguous, split_heads
from trueup.core.passes.memory import MemoryPlan
from trueup.core.plan import Plan, PlanOptions, build_plan
from trueup.core.plugins import PluginHost
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .build import Call, is_state

Array = NDArray[Any]

GUARD = 256
"""Bytes before and after every buffer."""
CANARY = np.frombuffer(np.full(GUARD // 4, 0x7FC0BEEF, np.uint32).tobytes(), np.uint8)
"""What stands there: NaN for whoever reads it as numbers, an index out of range for whoever reads it as indices."""


class GuardedMemory(HostMemory):
    """Host memory with a canary before and after every tensor."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Array, int, Array]] = {}

    def allocate(self, type: TensorType) -> Array:
        raw = np.empty(type.nbytes + 2 * GUARD + 64, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % 64
        raw[start - GUARD : start], raw[start + type.nbytes : start + type.nbytes + GUARD] = CANARY, CANARY
        handle = raw[start : start + type.nbytes]
        if type.element.numpy is not None:
            handle = handle.view(type.element.numpy).reshape(type.shape)
        self.blocks[id(handle)] = raw, start, handle
        return handle

    def free(self, handle: Array) -> None:
        self.blocks.pop(id(handle), None)

    def broken(self) -> str:
        """Which tensor's canary was overwritten, or ""."""
        for raw, start, handle in self.blocks.values():
            stop = start + handle.nbytes
            for where, part in (("before", raw[start - GUARD : start]), ("after", raw[stop : stop + GUARD])):
                if not np.array_equal(part, CANARY):
                    return f"bytes {where} a tensor {handle.dtype}{list(handle.shape)} were overwritten"
        return ""


class Blamed(Exception):
    """An exception that came out of the backend; `error` is it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(f"{type(error).__name__}: {error}".split()))
        self.error = error


@contextlib.contextmanager
def blame() -> Iterator[None]:
    """Calls of the backend: what they raise is a finding, except a refusal and want of room, which are answers."""
    try:
        yield
    except (Refused, MemoryError):
        raise
    except Exception as e:
        raise Blamed(e) from e


@dataclass
class Spec:
    """Which backend, as the command line names it: NAME or NAME:DEVICE; `plugins` are modules loaded besides those
    installed."""

    name: str
    plugins: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def open_target(spec: Spec) -> Target:
    """Open the backend's device; Unavailable says why not."""
    name, _, wanted = spec.name.partition(":")
    extra = [EntryPoint(m.replace(".", "_"), m, "trueup") for m in spec.plugins]
    backend = PluginHost([*entry_points(group="trueup"), *extra]).backend(name)
    devices = backend.devices()
    picked = [d for i, d in enumerate(devices) if not wanted or str(i) == wanted or wanted.lower() in d.name.lower()]
    if not picked:
        raise Unavailable(
            f"backend {name} has no device {wanted!r}; it has {', '.join(d.name for d in devices) or 'none'}"
        )
    return backend.open(picked[0], **spec.options)


class Rig:
    """A target with what is needed to look over its shoulder."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.guards: GuardedMemory | None = None
        if isinstance(target, AddressedTarget) and type(target.memory) is HostMemory:
            target.memory = self.guards = GuardedMemory()
        self.live: dict[int, int] = {}
        self.fail_at = 0
        """Let the n-th allocation from now on fail, as a device without room does; 0: none."""
        self._count()

    @property
    def managed(self) -> bool:
        return isinstance(self.target, ManagedTarget)

    @property
    def device(self) -> Device:
        return self.target.device

    @property
    def bytes(self) -> int:
        """Bytes allocated and not freed."""
        return sum(self.live.values())

    def _count(self) -> None:
        """Count what is allocated and freed; prepared weights outlive plans and are not counted."""
        memory, target = self.target.memory, self.target
        allocate, free, prepare_weight = memory.allocate, memory.free, target.prepare_weight
        held: dict[int, Any] = {}
        preparing: list[Any] = []

        def prepared(weight: Weight) -> Any:
            preparing.append(weight)
            try:
                return prepare_weight(weight)
            finally:
                preparing.pop()

        def counted(type: TensorType) -> Any:
            if self.fail_at:
                self.fail_at -= 1
                if not self.fail_at:
                    raise MemoryError("no room, as the conformance kit arranged")
            handle = allocate(type)
            if preparing:
                return handle
            self.live[id(handle)], held[id(handle)] = type.nbytes, handle
            return handle

        def freed(handle: Any) -> None:
            self.live.pop(id(handle), None)
            held.pop(id(handle), None)
            free(handle)

        memory.allocate, memory.free = counted, freed  # type: ignore[method-assign]
        target.prepare_weight = prepared  # type: ignore[method-assign]


@dataclass
class Recorded:
    """A graph of one op, and how its inputs and states are made of a call's arrays."""

    graph: Graph
    op: str
    feeds: dict[str, Callable[[Call], Array]]
    states: dict[str, tuple[State, Callable[[Call], Array]]]
    """By argument: the state as the op sees it, and the whole of it."""

    def inputs(self, call: Call) -> dict[str, Array]:
        return {name: make(call) for name, make in self.feeds.items()}


OUTSIDE = -77.0
"""What stands in a state outside the region that an op is given."""


def record(call: Call) -> Recorded:
    """A graph that holds this call, its arguments lying as the recipe says."""
    pages = next((a.shape[:2] for p, a in call.states() if p.axes[0].text == "pages"), (1, 1))
    slots = next((len(a) for p, a in call.states() if p.axes[0].text == "slot"), 1)
    graph = Graph(Capacity(max(slots, 1), max(pages[0], 1), max(pages[1], 1)))
    made = Recorded(graph, call.op.name, {}, {})
    values: dict[str, Any] = {}
    for p in call.op.params:
        given, lay = call.args[p.name], call.recipe.lays.get(p.name, "row")
        if given is None:
            values[p.name] = None
        elif isinstance(given, Weight):
            values[p.name] = graph.weight(given)
        elif is_state(p):
            values[p.name] = _state(made, p.name, given, lay, paged=p.axes[0].text == "pages")
        elif isinstance(given, tuple):
            values[p.name] = [
                _input(made, f"{p.name}.{i}", a, "row", lambda c, n=p.name, i=i: c.args[n][i])  # type: ignore[misc]
                for i, a in enumerate(given)
            ]
        elif lay.startswith("same:"):
            values[p.name] = values[lay.removeprefix("same:")]
        else:
            values[p.name] = _input(made, p.name, given, lay, lambda c, n=p.name: c.args[n])  # type: ignore[misc]
    out = call.op(*values.values(), **call.attrs)
    results = () if out is None else out if isinstance(out, tuple) else (out,)
    for r, v in zip(call.op.results, results, strict=True):
        graph.output(r.name, contiguous(v) if call.op.view else v)
    return made


def _input(made: Recorded, name: str, array: Array, lay: str, get: Callable[[Call], Array]) -> Value:
    """A graph input of this array: row by row, as a window of columns of a wider one, or as heads of such a window."""
    dtype = TensorType.of(array).dtype
    if lay == "row" or array.ndim < 2:
        made.feeds[name] = get
        return made.graph.input(name, *array.shape, dtype=dtype)
    left, right = 3, 2
    if lay == "heads" and array.ndim > 2 and array.shape[-2]:
        h, d = array.shape[-2:]
        made.feeds[name] = lambda c: _widen(get(c).reshape(*array.shape[:-2], h * d), left, right)
        wide = made.graph.input(name, *array.shape[:-2], h * d + left + right, dtype=dtype)
        heads: Value = split_heads(columns(wide, start=left, size=h * d), heads=h)
        return heads
    made.feeds[name] = lambda c: _widen(get(c), left, right)
    wide = made.graph.input(name, *array.shape[:-1], array.shape[-1] + left + right, dtype=dtype)
    part: Value = columns(wide, start=left, size=array.shape[-1])
    return part


def _widen(array: Array, left: int, right: int) -> Array:
    """The array among columns of NaN (or of the largest integer)."""
    odd: Any = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max
    out = np.full((*array.shape[:-1], array.shape[-1] + left + right), odd, array.dtype)
    out[..., left : left + array.shape[-1]] = array
    return out


def _state(made: Recorded, name: str, array: Array, lay: str, *, paged: bool) -> State:
    dtype = TensorType.of(array).dtype
    region = lay == "region" and array.ndim > 2 and array.shape[-1] > 0
    width = list(array.shape[2:] if paged else array.shape[1:])
    if region:
        width[-1] += 4
    kind = PerToken(tuple(width), 1, dtype) if paged else PerSequence(tuple(width), dtype)
    root = made.graph.state(name, kind)
    if not region:
        made.states[name] = root, lambda c: c.args[name]
        return root
    n = array.shape[-1]
    view = root.view(array.ndim - 1, 1, 1 + n)

    def whole(c: Call) -> Array:
        out = np.full((*array.shape[:-1], n + 4), OUTSIDE, array.dtype)
        out[..., 1 : 1 + n] = c.args[name]
        return out

    made.states[name] = view, whole
    return view


@dataclass
class Outcome:
    """What a run gave: results in order, states by argument, and what the run did besides."""

    results: list[Array]
    states: dict[str, Array]
    broken: str = ""
    """A canary that was overwritten, or bytes of a state outside its region."""
    changed: str = ""
    """An input that was changed."""


class Step:
    """One call, compiled; run as often as wanted, with the values of any call of the same shapes."""

    def __init__(self, rig: Rig, call: Call, options: PlanOptions = PlanOptions(fusion=False)) -> None:  # noqa: B008
        self.rig, self.call = rig, call
        self.recorded = record(call)
        with blame():
            self.plan: Plan = build_plan(self.recorded.graph, rig.target, options)
        if rig.guards is not None:
            _spread(self.plan)
        memory = rig.target.memory
        self.handles: dict[str, Any] = {}
        self.exe: Any = None
        try:
            with blame():
                for name, (state, _) in self.recorded.states.items():
                    self.handles[name] = memory.allocate(state.root.type)
                roots = {s.root.name: self.handles[n] for n, (s, _) in self.recorded.states.items()}
                self.exe = rig.target.compile(self.plan, Storage(states=roots))
        except BaseException:
            self.close()
            raise
        self.arena = self._host_arena()

    def _host_arena(self) -> Array | None:
        arena = getattr(self.exe, "arena", None)
        ours = isinstance(arena, np.ndarray) and arena.dtype == np.uint8 and arena.size == self.plan.memory.arena
        return arena if self.rig.guards is not None and ours else None

    @property
    def where(self) -> str:
        """Where the op's own node runs; "lowered" where the plan has put other nodes in its place."""
        own = [p for n, p in self.plan.placements.items() if n.op.name == self.recorded.op]
        copies = any(n.op is contiguous for n in self.plan.order) and self.recorded.op != "contiguous"
        if not own or (copies and not self.call.op.view):
            return "lowered"
        return own[0].where

    @property
    def applies(self) -> dict[str, bool]:
        """Which of the properties that look into memory can be seen here."""
        poison = self.arena is not None or isinstance(self.rig.target, AddressedTarget)
        return {"written": poison, "canaries": self.rig.guards is not None}

    def run(self, call: Call, poison: int = 0xFF, *, upload: bool = True) -> Outcome:
        """Run on a call's values: states are uploaded first, unless they go on; results poisoned with this byte."""
        memory, target = self.rig.target.memory, self.rig.target
        if upload:
            self._upload(call)
        if self.arena is not None:
            _poison(self.arena, self.plan, poison)
        elif isinstance(target, AddressedTarget):
            target.poison = poison == 0xFF
        inputs = self.recorded.inputs(call)
        copies = {k: v.copy() for k, v in inputs.items()}
        weights = {n: w.data.data.copy() for n, w in self.recorded.graph.weights.items() if w.data is not None}
        with blame():
            out = self.exe.run(inputs)
        changed = next((k for k, v in inputs.items() if v.tobytes() != copies[k].tobytes()), "")
        changed = changed or next(
            (
                n
                for n, w in self.recorded.graph.weights.items()
                if w.data and not np.array_equal(w.data.data, weights[n])
            ),
            "",
        )
        changed = changed or self._device_input_changed(copies)
        broken = (self.rig.guards.broken() if self.rig.guards else "") or self._arena_broken()
        states = {}
        for name, (state, whole) in self.recorded.states.items():
            after = memory.download(self.handles[name])
            states[name] = np.array(state.slice(after), order="C")
            if state.root is not state and not broken:
                state.slice(after)[...] = state.slice(whole(call))
                if after.tobytes() != whole(call).tobytes():
                    broken = f"state {name} was written outside the region that the op was given"
        return Outcome([np.asarray(out[r.name]) for r in call.op.results], states, broken, changed)

    def _upload(self, call: Call) -> None:
        with blame():
            for name, (_, whole) in self.recorded.states.items():
                self.rig.target.memory.upload(self.handles[name], whole(call))

    def _device_input_changed(self, fed: dict[str, Array]) -> str:
        handles = getattr(self.exe, "inputs", None)
        if self.rig.guards is None or not isinstance(handles, dict):
            return ""
        now = {k: self.rig.target.memory.download(h) for k, h in handles.items() if k in fed}
        return next((f"{k} on the device" for k, v in now.items() if v.tobytes() != fed[k].tobytes()), "")

    def _arena_broken(self) -> str:
        if self.arena is None:
            return ""
        for a, b in _gaps(self.plan):
            if not np.array_equal(self.arena[a:b], np.resize(CANARY, b - a)):
                return "bytes beside a result were overwritten"
        return ""

    def close(self) -> None:
        if self.exe is not None:
            self.exe.close()
        for handle in self.handles.values():
            self.rig.target.memory.free(handle)
        self.exe, self.handles = None, {}


def _spread(plan: Plan) -> None:
    """Room for a canary before and after every value of the arena."""
    values = sorted(plan.memory.offsets, key=lambda v: plan.memory.offsets[v])
    at, offsets = GUARD, {}
    for v in values:
        offsets[v] = at
        at += -(-v.type.nbytes // 64) * 64 + GUARD
    plan.memory = MemoryPlan(offsets, at, plan.memory.total, at)


def _gaps(plan: Plan) -> list[tuple[int, int]]:
    taken = sorted((o, o + v.type.nbytes) for v, o in plan.memory.offsets.items())
    edges = [0, *[e for pair in taken for e in pair], plan.memory.arena]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _poison(arena: Array, plan: Plan, byte: int) -> None:
    arena[...] = byte
    for a, b in _gaps(plan):
        arena[a:b] = np.resize(CANARY, b - a)
