"""What the tests of the core share: small ops with every kind of effect, targets made of their bodies, random graphs.

Nothing here enters the registry of ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from trueup.backends.reference import ReferenceTarget
from trueup.core.backend import AddressedTarget, Device, KernelTable, ManagedTarget, Storage, Target, body_kernel
from trueup.core.backend.kernels import Kernel
from trueup.core.graph import Graph, State, Value
from trueup.core.op import Op, Operation
from trueup.core.ops.views import contiguous
from trueup.core.plan import Plan, PlanOptions, build_plan
from trueup.core.state import Capacity, PerSequence

Array = np.ndarray[Any, Any]
DEVICE = Device("test", "cpu")
SLOTS, WIDTH = 4, 6


def local(signature: str, **kwargs: Any) -> Callable[[Callable[..., Any]], Op]:
    """An op outside the registry."""
    return lambda body: Op(signature, body, **kwargs)


def in_order(x: Array) -> np.float32:
    """The sum of the elements in row-major order: NumPy's own order depends on strides."""
    return np.float32(np.ascontiguousarray(x).sum(dtype=np.float32))


@local("x[...], y[...] -> out[...]")
def mix(x: Array, y: Array) -> Array:
    return x * np.float32(0.75) - y * np.float32(0.5)


@local("x[...] -> total[...], spread[...]")
def two(x: Array) -> tuple[Array, Array]:
    return x + np.float32(0.125), x - in_order(x) * np.float32(0.25)


@local("x[a, b], y[a, b] -> out[b, a]")
def cross(x: Array, y: Array) -> Array:
    return np.ascontiguousarray((x - y[::-1] * np.float32(0.5)).T)


@local("x[...] -> out[...]")
def scale(x: Array, *, by: float, shift: float = 0.0) -> Array:
    return x * np.float32(by) + np.float32(shift)


@local("x[..., n]:any -> out[..., size]", view=True)
def part(x: Array, *, start: int, size: int) -> Array:
    return x[..., start : start + size]


@local("x[a, b]:any -> out[b, a]", view=True)
def turned(x: Array) -> Array:
    return x.T


@local("x[a, b]:any -> out[a, b]", view=True)
def back(x: Array) -> Array:
    return x[:, ::-1]


@local("x[a, b]:any -> out[b, a]", view=True)
def folded(x: Array) -> Array:
    """The elements in their order under another shape: strides may forbid it."""
    return x.reshape(x.shape[1], x.shape[0])


@local("s[a, b] -> out[a, b]")
def look(s: Array) -> Array:
    return s * np.float32(0.5)


@local("x[a, b], &s[a, b] ->")
def put(x: Array, s: Array) -> None:
    s[...] = x


@local("x[a, b], &s[a, b] -> out[a, b]")
def stir(x: Array, s: Array) -> Array:
    s[...] = s * np.float32(0.5) + x
    return s - x


@local("r[a, b], &w[c, d] -> out[a, b]")
def carry(r: Array, w: Array) -> Array:
    w[...] = w * np.float32(0.5) + in_order(r)
    return r + np.float32(1)


OPS = SimpleNamespace(
    mix=mix, two=two, cross=cross, scale=scale, part=part, turned=turned, back=back, folded=folded, look=look,
    put=put, stir=stir, carry=carry,
)  # fmt: skip


def managed_body(op: Operation) -> Callable[..., Any]:
    """The body as a kernel over immutable arrays: it returns the results, then the next version of what it writes."""

    def run(*args: Any, **attrs: Any) -> tuple[Any, ...]:
        given = []
        for p, a in zip(op.params, args, strict=True):
            if isinstance(a, np.ndarray):
                a = np.array(a) if p.mutates else a.view()
                a.setflags(write=p.mutates)
            given.append(a)
        out = op.body(*given, **attrs)
        results = out if isinstance(out, tuple) else () if out is None else (out,)
        return (*results, *(a for p, a in zip(op.params, given, strict=True) if p.mutates))

    return run


def _named(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **attrs: Any) -> Any:
        raise AssertionError(name)

    kernel.__name__ = name
    return kernel


def ops_of(*graphs: Graph) -> list[Op]:
    return list(dict.fromkeys(n.op for g in graphs for n in g.nodes if isinstance(n.op, Op) and not n.op.view))


@dataclass
class Ran:
    """What a step gave and left: outputs and states by name."""

    outputs: dict[str, Array]
    states: dict[str, Array]
    plan: Plan
    executable: Any

    @property
    def bits(self) -> dict[str, bytes]:
        return {f"{k}:{n}": a.tobytes() for k in ("outputs", "states") for n, a in getattr(self, k).items()}


class Kit:
    """Targets made of op bodies, and a way to run a graph on them."""

    ops = OPS
    capacity = Capacity(slots=SLOTS, pages=4, page=4)
    width = WIDTH
    device = DEVICE
    local = staticmethod(local)
    managed_body = staticmethod(managed_body)

    def reference(self, *graphs: Graph) -> Target:
        return ReferenceTarget(DEVICE)

    def addressed(
        self,
        *graphs: Graph,
        without: tuple[Op, ...] = (),
        memory: Any = None,
        fuse: Mapping[str, Any] = MappingProxyType({}),
    ) -> AddressedTarget:
        """Bodies as kernels in an arena, results poisoned before each. `fuse`: patterns by name, by their bodies."""
        table = KernelTable()
        for op in (*ops_of(*graphs), contiguous):
            if op not in without and op not in table.kernels:
                table.body(op)
        for name, meaning in fuse.items():
            table.fuses(meaning)(_named(name))
            table.kernels[table.fusions[-1]] = [Kernel(name, body_kernel(table.fusions[-1]))]
        target = AddressedTarget("addressed", DEVICE, table, memory)
        target.poison = True
        return target

    def managed(
        self,
        *graphs: Graph,
        without: tuple[Op, ...] = (),
        memory: Any = None,
        fuse: Mapping[str, Any] = MappingProxyType({}),
    ) -> ManagedTarget:
        table = KernelTable()
        for op in (*ops_of(*graphs), contiguous):
            if op not in without and op not in table.kernels:
                table.implements(op)(managed_body(op))
        for name, meaning in fuse.items():
            table.fuses(meaning)(_named(name))
            table.kernels[table.fusions[-1]] = [Kernel(name, managed_body(table.fusions[-1]))]
        return ManagedTarget("managed", DEVICE, table, memory)

    def targets(self, *graphs: Graph) -> list[Target]:
        return [self.reference(*graphs), self.addressed(*graphs), self.managed(*graphs)]

    def storage(self, plan: Plan, target: Target, states: Mapping[str, Array]) -> Storage:
        """The plan's states with these contents."""
        host = plan.graph.host_states
        handles = {}
        for name, s in plan.graph.states.items():
            if name not in host:
                handles[name] = target.memory.allocate(s.type)
                target.memory.upload(handles[name], states[name])
        return Storage(handles, {n: states[n].copy() for n in host})

    def run(
        self,
        graph: Graph,
        target: Target,
        inputs: Mapping[str, Array],
        states: Mapping[str, Array] | None = None,
        options: PlanOptions = PlanOptions(),  # noqa: B008
        *,
        plan: Plan | None = None,
        steps: int = 1,
    ) -> Ran:
        """`steps` steps; states that are not given are made of the numbers 1, 2, …"""
        plan = plan or build_plan(graph, target, options)
        begin = {n: self.start(s) if states is None else states[n] for n, s in graph.states.items()}
        storage = self.storage(plan, target, begin)
        executable = target.compile(plan, storage)
        for _ in range(steps):
            outputs = executable.run(inputs)
        after = {n: target.memory.download(h) for n, h in storage.states.items()}
        return Ran(outputs, {**after, **storage.host_states}, plan, executable)

    @staticmethod
    def start(state: State) -> Array:
        size = state.type.size
        return np.arange(1, size + 1).astype(state.type.element.numpy).reshape(state.type.shape)

    @staticmethod
    def graphs(effects: bool = True, most: int = 14) -> st.SearchStrategy[tuple[Graph, dict[str, Array]]]:
        return random_graphs(effects, most)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@st.composite
def random_graphs(draw: st.DrawFn, effects: bool, most: int) -> tuple[Graph, dict[str, Array]]:
    """A graph of pure ops, views and accesses to regions of two states, some of it in the prologue; and inputs."""
    g = Graph(Kit.capacity)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    inputs = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in {"x": (4, 6), "y": (3, 4)}.items()}
    values = [g.input(n, *a.shape) for n, a in inputs.items()]
    if draw(st.booleans()):
        with g.prologue():
            values += two(values[0])
            values.append(part(values[-1], start=1, size=draw(st.integers(1, 5))))

    def pick() -> Value:
        return values[draw(st.integers(0, len(values) - 1))]

    def like(shape: tuple[int, ...]) -> Value:
        fits = [v for v in values if v.type.shape == shape]
        return fits[draw(st.integers(0, len(fits) - 1))]

    def region(shape: tuple[int, ...] | None = None) -> State | None:
        if shape and (shape[0] > SLOTS or shape[1] > WIDTH):
            return None
        s = g.state(draw(st.sampled_from("st")), PerSequence((WIDTH,)))
        for axis, full in enumerate((SLOTS, WIDTH)):
            size = shape[axis] if shape else draw(st.integers(1, full))
            start = draw(st.integers(0, full - size))
            s = s.view(axis, start, start + size) if size < full else s
        return s

    kinds = ["mix", "scale", "scale", "two", "cross", "part", "turned", "back", "folded"] + [
        "look",
        "put",
        "put",
        "stir",
        "carry",
    ] * effects
    for _ in range(draw(st.integers(1, most))):
        kind, x = draw(st.sampled_from(kinds)), pick()
        match kind:
            case "mix" | "cross":
                values.append(getattr(OPS, kind)(x, like(x.type.shape)))
            case "scale":
                values.append(scale(x, by=draw(st.sampled_from([0.5, 2.0])), shift=draw(st.sampled_from([0.0, 1.0]))))
            case "two":
                values += two(x)
            case "part":
                start = draw(st.integers(0, x.type.shape[1] - 1))
                values.append(part(x, start=start, size=draw(st.integers(1, x.type.shape[1] - start))))
            case "turned" | "back" | "folded":
                values.append(getattr(OPS, kind)(x))
            case "look":
                values.append(look(region()))
            case "put" | "stir":
                if (s := region(x.type.shape)) is not None:
                    out = getattr(OPS, kind)(x, s)
                    values += [out] if out is not None else []
            case "carry":
                r, w = region(), region()
                if r is not None and w is not None and not r.overlaps(w):
                    values.append(carry(r, w))
                else:
                    values.append(carry(x, w))
    for name, s in list(g.states.items()):
        if not any(r.root is s for n in g.nodes for r, _ in n.effects):
            look(g.states[name])
    for i in range(draw(st.integers(1, 3))):
        g.output(f"out{i}", pick())
    return g, inputs
