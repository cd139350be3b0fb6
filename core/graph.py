"""A graph: nodes in program order, and the edges that follow from it. Knows types and states; runs and rewrites
nothing.

A node is one call of an op. What it needs before it may run follows from the list alone: the nodes that made its
values, and, for every state that it touches, the earlier nodes whose access to an overlapping region it may not
overtake (a read after a write, a write after a read, a write after a write). A node that only writes state has no
consumer: it is a sink, a root like the outputs, and no pass may drop it.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .errors import GraphError, StrictError
from .state import Capacity, StateKind
from .types import TensorType
from .weight import Weight

if TYPE_CHECKING:
    from .op import Operation


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor in a graph: a node's result, or a leaf (`input`, `weight`, `constant`, `state`).

    `base` and `offset` say where a view lies: in the storage of `base`, from that element on, by the type's strides.
    `type` is None only in a pattern, which is traced without shapes.
    """

    graph: Graph
    name: str
    type: TensorType
    node: Node | None = None
    leaf: str | None = None
    data: Weight | None = None
    base: Value | None = None
    offset: int = 0

    @property
    def storage(self) -> Value:
        """The value in whose storage this one lies; itself where it is no view."""
        return self if self.base is None else self.base

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False, repr=False)
class State(Value):
    """Storage that outlives a step, or a rectangular region of it (`view`). Order between accesses goes by storage."""

    kind: StateKind | None = None
    root: State = None  # type: ignore[assignment]  # itself, set below, unless it is a view
    region: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.root is None:
            object.__setattr__(self, "root", self)
            if self.type is not None:
                object.__setattr__(self, "region", tuple((0, n) for n in self.type.shape))

    def view(self, axis: int, start: int, stop: int) -> State:
        """The region `start:stop` along an axis; accesses to regions that don't overlap need no order.

        The same region is the same value. GraphError where it is empty or leaves the state.
        """
        axis, start, stop = map(operator.index, (axis, start, stop))
        if not 0 <= axis < len(self.region):
            raise GraphError(f"state {self.name}: {self.type} has no axis {axis}")
        low, high = self.region[axis]
        if not 0 <= start < stop <= high - low:
            raise GraphError(
                f"state {self.name}: the view {start}:{stop} of axis {axis} leaves its {high - low} entries"
            )
        region = (*self.region[:axis], (low + start, low + stop), *self.region[axis + 1 :])
        if region == self.root.region:
            return self.root
        type = TensorType(tuple(b - a for a, b in region), self.type.dtype).with_strides(self.root.type.row_major())
        name = f"{self.name}[{axis}:{start}:{stop}]"
        made = State(self.graph, name, type, leaf="state", kind=self.kind, root=self.root, region=region)
        return self.graph.regions.setdefault((self.root, region), made)

    def overlaps(self, other: State) -> bool:
        return self.root is other.root and all(
            a < d and c < b for (a, b), (c, d) in zip(self.region, other.region, strict=True)
        )

    def covers(self, other: State) -> bool:
        """Whether this region holds all of the other; of states of one name, as a rewrite copies them."""
        return self.root.name == other.root.name and all(
            a <= c and d <= b for (a, b), (c, d) in zip(self.region, other.region, strict=True)
        )

    def slice(self, array: Any) -> Any:
        """This region of the root's array."""
        return array[tuple(slice(a, b) for a, b in self.region)]


V = TypeVar("V", bound=Value)

Input = Value | tuple[Value, ...] | None
"""What stands at a parameter of a node: a value, a list of values, or nothing."""


@dataclass(frozen=True, eq=False)
class Node:
    """One call of an op. `host`: it runs in the prologue, before the step. `origin`: ids in the graph as recorded."""

    op: Operation
    inputs: tuple[Input, ...]
    attrs: dict[str, Any]
    id: int
    host: bool
    origin: frozenset[int]
    outputs: list[Value] = field(default_factory=list)

    @property
    def values(self) -> list[Value]:
        """Every value it takes, lists one by one."""
        return [
            v for given in self.inputs if given is not None for v in (given if isinstance(given, tuple) else (given,))
        ]

    @property
    def effects(self) -> list[tuple[State, bool]]:
        """The states that it touches, and whether it writes them. What it writes it may also read."""
        out = []
        for p, given in zip(self.op.params, self.inputs, strict=True):
            for v in given if isinstance(given, tuple) else (given,):
                if isinstance(v, State):
                    out.append((v, p.mutates))
        return out

    @property
    def types(self) -> list[Any]:
        """Per parameter its type, None where it is absent, a tuple for a list; `supports` and `when` are asked so."""
        return [tuple(x.type for x in g) if isinstance(g, tuple) else g and g.type for g in self.inputs]

    def __repr__(self) -> str:
        return f"#{self.id} {self.op.name}"

    def describe(self) -> str:
        """`#7 top_k(scores: f32[4, 16]; k=4)`, for errors and tables."""
        args = [
            f"{p.name}: {', '.join(str(x) for x in t) if isinstance(t, tuple) else t}"
            for p, t in zip(self.op.params, self.types, strict=True)
            if t is not None
        ]
        attrs = ", ".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self}({', '.join(args)}{'; ' + attrs if attrs else ''})"


Edges = dict[Node, set[Node]]
"""Node → the nodes that must run before it."""


class Graph:
    """Records the nodes of one step. `capacity` sizes its states; a pattern is a graph without shapes.

    `strict`: a node that the strict mode refuses by itself is a StrictError where it is recorded; for the rest of that
    mode see `passes.strict`.
    """

    def __init__(self, capacity: Capacity | None = None, *, pattern: bool = False, strict: bool = False) -> None:
        self.capacity, self.pattern, self.strict = capacity, pattern, strict
        self.nodes: list[Node] = []
        self.inputs: dict[str, Value] = {}
        self.weights: dict[str, Value] = {}
        self.states: dict[str, State] = {}
        self.outputs: dict[str, Value] = {}
        self.regions: dict[tuple[State, tuple[tuple[int, int], ...]], State] = {}
        self.constraints: list[tuple[Node, Node]] = []
        self._host = False
        self._pure: dict[Any, Node] = {}

    # -- leaves --------------------------------------------------------------------------------------------------------

    def input(self, name: str, *shape: int, dtype: str = "f32") -> Value:
        """An array given anew for every step."""
        return self._leaf(self.inputs, Value(self, name, TensorType(shape, dtype), leaf="input"))

    def weight(self, weight: Weight) -> Value:
        """A tensor of the model. The same tensor, asked for twice, is one value."""
        known = self.weights.get(weight.name)
        if known is not None and known.data is weight:
            return known
        return self._leaf(self.weights, Value(self, weight.name, weight.type, leaf="weight", data=weight))

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Value:
        """An array that is part of the graph; equal constants of one name are one value."""
        known = self.weights.get(name)
        made = Weight.of(name, array)
        if made.type.dtype in ("f16", "f64"):  # which a weight reads as f32
            raise GraphError(f"constant {name}: {made.type} must be f32 or of integers")
        if known is not None and known.data is not None and known.type == made.type:
            if np.array_equal(known.data.data, made.data):
                return known
        return self._leaf(self.weights, Value(self, name, made.type, leaf="constant", data=made))

    def state(self, name: str, kind: StateKind) -> State:
        """A declared state. The same name must be the same declaration."""
        if self.capacity is None:
            raise GraphError(f"state {name}: the graph has no capacity to size it by")
        known = self.states.get(name)
        if known is not None and known.kind == kind:
            return known
        return self._leaf(self.states, State(self, name, kind.storage(self.capacity), leaf="state", kind=kind))

    def output(self, name: str, value: Value) -> None:
        if not isinstance(value, Value) or value.graph is not self:
            raise GraphError(f"output {name}: {value!r} is no value of this graph")
        if value.storage.leaf not in (None, "input"):
            raise GraphError(f"output {name}: {value!r} is a {value.storage.leaf}; an output is computed or an input")
        if name in self.outputs:
            raise GraphError(f"output '{name}' is declared twice")
        self.outputs[name] = value

    def _leaf(self, table: dict[str, V], value: V) -> V:
        if value.name in table:
            raise GraphError(
                f"{value.leaf} '{value.name}' is declared twice, as {table[value.name].type} and {value.type}"
            )
        table[value.name] = value
        return value

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def prologue(self) -> Iterator[None]:
        """Nodes recorded inside run on the host before the step; their results are inputs of the plan."""
        before, self._host = self._host, True
        try:
            yield
        finally:
            self._host = before

    def record(
        self,
        op: Operation,
        inputs: tuple[Input, ...],
        attrs: dict[str, Any],
        types: Sequence[TensorType],
        *,
        origin: frozenset[int] = frozenset(),
    ) -> list[Value]:
        """Append a node; ops do this when called on values. Equal calls without effects are one node."""
        node = Node(op, inputs, attrs, len(self.nodes), self._host, origin or frozenset((len(self.nodes),)))
        key: Any = None
        if not node.effects and not any(p.mutates for p in op.params):
            ids = tuple(tuple(map(id, g)) if isinstance(g, tuple) else id(g) for g in inputs)
            key = (op, ids, tuple(sorted((k, repr(v)) for k, v in attrs.items())), self._host)
            if key in self._pure:
                return self._pure[key].outputs
        for r, t in zip(op.results, types, strict=True):
            name = f"{op.name}.{node.id}" + (f".{r.name}" if len(types) > 1 else "")
            node.outputs.append(self._view_of(node, name, t) if op.view and t else Value(self, name, t, node))
        if self.strict:
            self._refuse(node)
        self.nodes.append(node)
        if key is not None:
            self._pure[key] = node
        return node.outputs

    @staticmethod
    def _refuse(node: Node) -> None:
        from .passes.strict import node_faults  # which knows graphs

        if faults := node_faults(node):
            raise StrictError(faults)

    def _view_of(self, node: Node, name: str, type: TensorType) -> Value:
        source = node.inputs[0]
        if not isinstance(source, Value) or isinstance(source, State):
            raise GraphError(f"{node}: a view is made of a value; of a state take state.view(axis, start, stop)")
        lies = node.op.layout(source.type, node.attrs)
        if lies is None:
            return Value(self, name, type, node)
        offset, strides = lies
        return Value(self, name, type.with_strides(strides), node, base=source.storage, offset=source.offset + offset)

    def order(self, before: Node, after: Node) -> None:
        """An edge that neither data nor effects give, as a plan adds for storage that two nodes share."""
        for n in (before, after):
            if not (n.id < len(self.nodes) and self.nodes[n.id] is n):
                raise GraphError(f"{n} is a node of another graph")
        self.constraints.append((before, after))

    # -- edges ---------------------------------------------------------------------------------------------------------

    def edges(self) -> Edges:
        """Data edges, then per state and region write→read, read→write and write→write, then the added constraints."""
        before: Edges = {n: set() for n in self.nodes}
        seen: dict[State, list[tuple[Node, State, bool]]] = {}
        for n in self.nodes:
            before[n].update(v.node for v in n.values if v.node is not None)
            for s, writes in n.effects:
                log = seen.setdefault(s.root, [])
                before[n].update(m for m, r, wrote in log if (wrote or writes) and m is not n and r.overlaps(s))
            for s, writes in n.effects:
                log = seen[s.root]
                if writes:  # whoever comes later is ordered after this write, and so after all that it covers
                    log[:] = [e for e in log if e[0] is n or not s.covers(e[1])]
                log.append((n, s, writes))
        for first, then in self.constraints:
            before[then].add(first)
        return before

    @property
    def host_states(self) -> frozenset[str]:
        """Names of the states that the prologue uses; they stay on the host."""
        return frozenset(s.root.name for n in self.nodes if n.host for s, _ in n.effects)

    def fingerprint(self) -> str:
        """A digest of all that a plan depends on: leaves, types, states, nodes, attributes, outputs (no weights)."""
        h = hashlib.sha256()
        names: dict[int, str] = {}
        for table in (self.inputs, self.weights, self.states):
            for name, v in table.items():
                names[id(v)] = f"{v.leaf}:{name}"
                fill = getattr(v, "kind", None)
                h.update(f"{v.leaf}:{name}:{v.type}:{fill}\n".encode())
                if v.leaf == "constant" and v.data is not None:
                    h.update(v.data.data.tobytes())

        def label(v: Input) -> str:
            if v is None:
                return "-"
            if isinstance(v, tuple):
                return "(" + ",".join(map(label, v)) + ")"
            return names.get(id(v)) or (f"{label(v.root)}{v.region}" if isinstance(v, State) else "?")

        for n in self.nodes:
            attrs = sorted((k, repr(a)) for k, a in n.attrs.items())
            line = f"{n.op.name}|{n.op.signature_text}|{[label(g) for g in n.inputs]}|{attrs}|{n.host}"
            h.update((line + "".join(f"|{o.type}" for o in n.outputs) + "\n").encode())
            names.update((id(o), f"{n.id}.{i}") for i, o in enumerate(n.outputs))
        h.update("".join(f"{k}={label(v)}\n" for k, v in self.outputs.items()).encode())
        h.update(repr([(a.id, b.id) for a, b in self.constraints]).encode())
        h.update(repr(self.capacity).encode())
        return h.hexdigest()
