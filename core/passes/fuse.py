"""Fusion: patterns written with the ops themselves, found in a graph and replaced by one node. Knows no backend."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from trueup.core.graph import Graph, Input, Node, State, Value
from trueup.core.signature import Axis, Param
from trueup.core.types import TensorType

from .rewrite import Group, keep, rewrite

_ANY_AXES = (Axis.parse("...", "pattern"),)


@dataclass(frozen=True, eq=False)
class Hole:
    """Stands for an attribute in a pattern; the kernel is given what it matched."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Pattern:
    """A function of ops, traced once without shapes; as an operation its meaning is the function itself.

    Positional parameters stand for values, keyword-only ones for attributes. Attributes that the function writes out
    must be equal. It may return several results, or none, if it ends in a write.
    """

    view = False
    decomposition: Callable[..., Any] | None = None

    def __init__(self, meaning: Callable[..., Any], *, name: str) -> None:
        self.name, self.body, self.__doc__ = name, meaning, inspect.getdoc(meaning)
        self.graph = Graph(pattern=True)
        parameters = inspect.signature(meaning).parameters.values()
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            raise ValueError(f"pattern {name}: values are plain positional parameters, attributes keyword-only ones")
        self.places = [
            Value(self.graph, p.name, None, leaf="input")  # type: ignore[arg-type]  # a pattern has no shapes
            for p in parameters
            if p.kind is not p.KEYWORD_ONLY
        ]
        holes = {p.name: Hole(p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
        returned = meaning(*self.places, **holes)
        self.outs: tuple[Value, ...] = (
            returned if isinstance(returned, tuple) else () if returned is None else (returned,)
        )
        if any(not isinstance(v, Value) or v.node is None for v in self.outs):
            raise ValueError(f"pattern {name}: it returns {returned!r}, not what its ops compute")
        used = {v.node for n in self.graph.nodes for v in n.values}
        ends = [v.node for v in self.outs if v.node is not None] + [n for n in self.graph.nodes if n not in used]
        self.roots = list(dict.fromkeys(ends))
        if not self.roots:
            raise ValueError(f"pattern {name}: it calls no op")
        taken = {v.name for n in self.graph.nodes for v in n.values if v.node is None}
        taken |= {a.name for n in self.graph.nodes for a in n.attrs.values() if isinstance(a, Hole)}
        if unused := [p.name for p in parameters if p.name not in taken]:
            raise ValueError(f"pattern {name}: the parameter {unused[0]} is used by no op")
        mutated = {
            v
            for n in self.graph.nodes
            for p, g in zip(n.op.params, n.inputs, strict=True)
            if p.mutates and isinstance(v := g, Value)
        }
        self.params = tuple(Param(v.name, _ANY_AXES, "any", mutates=v in mutated) for v in self.places)
        self.results = tuple(Param(f"r{i}", _ANY_AXES) for i in range(len(self.outs)))

    @property
    def signature_text(self) -> str:
        return "; ".join(f"{n.op.name}{tuple(v.name for v in n.values)}" for n in self.graph.nodes)

    def layout(self, type: TensorType, attrs: Mapping[str, Any]) -> None:
        return None

    # -- matching ------------------------------------------------------------------------------------------------------

    def matches(self, graph: Graph, used: Collection[Node] = ()) -> tuple[list[Match], str]:
        """Disjoint matches in program order, without nodes that are `used`; where there is none, the difference that came
        latest in the pattern."""
        return self._matches(graph, *_index(graph), used)

    def _matches(
        self, graph: Graph, by_op: Mapping[Any, list[Node]], users: Mapping[Value, set[Node]], used: Collection[Node]
    ) -> tuple[list[Match], str]:
        outputs = set(graph.outputs.values())
        found: list[Match] = []
        taken = set(used)
        search = _Search(by_op, users, used)
        for start in by_op.get(self.roots[0].op, ()):
            for b in search.extend(_Binding(), self.roots[0], start, self.roots[1:]):
                nodes = sorted(set(b.nodes.values()), key=lambda n: n.id)
                results = {b.values[r] for r in self.outs}
                inner = [v for n in nodes for v in n.outputs if v not in results]
                if taken & set(nodes):
                    continue
                leaking = next((v for v in inner if users.get(v, set()) - set(nodes) or v in outputs), None)
                if leaking is not None:
                    search.note(len(b.nodes), f"{leaking!r} is used outside the pattern")
                    continue
                if (why := self._obstacle(b)) is not None:
                    search.note(len(b.nodes), why)
                    continue
                found.append(Match(self, nodes, b.values, b.attrs))
                taken |= set(nodes)
                break
        return found, "" if found else search.difference or f"the graph has no {self.roots[0].op.name}"

    def _obstacle(self, b: _Binding) -> str | None:
        """Why nodes that fit the pattern one by one are not what it means as a whole.

        The fused node runs in the pattern's order, after all that its places stand for, and takes each state at one.
        """
        nodes = [b.nodes[n] for n in self.graph.nodes]
        if len({n.host for n in nodes}) > 1:
            return f"{nodes[0]} and {nodes[-1]} are not on one side of the prologue"
        for i, n in enumerate(nodes):
            for m in nodes[i + 1 :]:
                for (s, writes), (t, wrote) in product(n.effects, m.effects):
                    if (writes or wrote) and s.overlaps(t) and n.id > m.id:
                        return f"{m} comes before {n}, and they meet in state {t.name}"
        inner = next((v for v in self.places if b.values[v].node in nodes), None)
        if inner is not None:
            return f"{b.values[inner]!r} is computed inside the pattern, which takes it as {inner.name}"
        places = [(b.values[v], p.mutates) for v, p in zip(self.places, self.params, strict=True)]
        for i, (v, writes) in enumerate(places):
            for w, wrote in places[i + 1 :]:
                if (writes or wrote) and isinstance(v, State) and isinstance(w, State) and v.overlaps(w):
                    return f"{v.name} and {w.name} overlap where the pattern has two states"
        return None


@dataclass(eq=False)
class Match(Group):
    """A pattern found: its nodes, and what its places and holes stand for."""

    pattern: Pattern
    nodes: list[Node]
    values: dict[Value, Value]
    attrs: dict[str, Any]

    def types(self) -> list[TensorType]:
        return [self.values[p].type for p in self.pattern.places]


@dataclass(frozen=True)
class _Binding:
    values: dict[Value, Value] = field(default_factory=dict)
    nodes: dict[Node, Node] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)


class _Search:
    """Extends a binding over a pattern's nodes; remembers the mismatch that was met deepest."""

    def __init__(
        self, by_op: Mapping[Any, list[Node]], users: Mapping[Value, set[Node]], used: Collection[Node]
    ) -> None:
        self.by_op, self.users, self.used = by_op, users, used
        self.depth = -1
        self._difference: str | Callable[[], str] = ""

    @property
    def difference(self) -> str:
        found = self._difference
        return found if isinstance(found, str) else found()

    def note(self, depth: int, difference: str | Callable[[], str]) -> None:
        """A mismatch; as a function where its words cost more than the search itself."""
        if depth > self.depth:
            self.depth, self._difference = depth, difference

    def candidates(self, b: _Binding, pattern: Node) -> Sequence[Node]:
        """The nodes that may be this one, in program order: users of what it takes, where that is known."""
        known = next((b.values[v] for v in pattern.values if v in b.values), None)
        if known is None:
            return self.by_op.get(pattern.op, ())
        return sorted((n for n in self.users.get(known, ()) if n.op is pattern.op), key=lambda n: n.id)

    def extend(self, b: _Binding, pattern: Node, node: Node, rest: Sequence[Node]) -> Iterator[_Binding]:
        bound = self.node(b, pattern, node)
        if bound is None:
            return
        if not rest:
            yield bound
            return
        if rest[0].op not in self.by_op:
            self.note(len(bound.nodes), f"the graph has no {rest[0].op.name}")
        for n in self.candidates(bound, rest[0]):
            yield from self.extend(bound, rest[0], n, rest[1:])

    def value(self, b: _Binding, pattern: Input, given: Input) -> _Binding | None:
        if isinstance(pattern, tuple) or isinstance(given, tuple):
            if not isinstance(pattern, tuple) or not isinstance(given, tuple) or len(pattern) != len(given):
                return None
            bound: _Binding | None = b
            for p, g in zip(pattern, given, strict=True):
                bound = bound and self.value(bound, p, g)
            return bound
        if pattern is None or given is None:
            return b if pattern is given else None
        if pattern in b.values:
            return b if b.values[pattern] is given else None
        if pattern.node is None:
            return _Binding({**b.values, pattern: given}, b.nodes, b.attrs)
        if given.node is None or pattern.node.outputs.index(pattern) != given.node.outputs.index(given):
            wanted = pattern.node.op.name
            self.note(len(b.nodes), lambda: f"{given!r} where the pattern has {wanted}")
            return None
        return self.node(b, pattern.node, given.node)

    def node(self, b: _Binding, pattern: Node, node: Node) -> _Binding | None:
        if pattern in b.nodes:
            return b if b.nodes[pattern] is node else None
        if node in self.used:
            return None
        if node.op is not pattern.op:
            self.note(len(b.nodes), lambda: f"{node} where the pattern has {pattern.op.name}")
            return None
        if node in b.nodes.values():
            self.note(len(b.nodes), lambda: f"{node} where the pattern has another {pattern.op.name}")
            return None
        attrs = b.attrs
        for k, want in pattern.attrs.items():
            have = node.attrs[k]
            if isinstance(want, Hole):
                if attrs.get(want.name, have) != have:
                    before = attrs[want.name]
                    self.note(len(b.nodes), f"{node} has {k}={have} where {want.name} is {before} already")
                    return None
                attrs = {**attrs, want.name: have}
            elif want != have:
                self.note(len(b.nodes), f"{node} has {k}={have} where the pattern has {k}={want}")
                return None
        values = {**b.values, **dict(zip(pattern.outputs, node.outputs, strict=True))}
        bound: _Binding | None = _Binding(values, {**b.nodes, pattern: node}, attrs)
        for p, param, given in zip(pattern.inputs, pattern.op.params, node.inputs, strict=True):
            before = bound
            bound = bound and self.value(bound, p, given)
            if bound is None:
                name = param.name
                self.note(
                    len(before.nodes) if before else 0,
                    lambda: f"the argument {name} of {node} differs from the pattern's",  # noqa: B023 # returns at once
                )
                return None
        return bound


@dataclass(frozen=True)
class FusionReport:
    """What became of a pattern: how often it was fused, why a kernel declined, the first difference if none matched."""

    name: str
    fused: int
    declined: tuple[str, ...] = ()
    difference: str = ""


def fuse(graph: Graph, patterns: Sequence[Pattern], accepts: Callable[..., Any]) -> tuple[Graph, list[FusionReport]]:
    """Replace what matches and is accepted, the largest patterns first, then in the order of registration."""
    index = _index(graph)
    used: set[Node] = set()
    taken: list[Match] = []
    said: list[tuple[Pattern, list[str], str]] = []
    for p in sorted(patterns, key=lambda p: -len(p.graph.nodes)):
        found, difference = p._matches(graph, *index, used)
        declined = []
        for m in found:
            answer = accepts(p, m.types(), m.attrs)
            if answer:
                taken.append(m)
                used.update(m.nodes)
            else:
                declined.append(answer.reason)
        said.append((p, declined, difference))
    fused, waiting = rewrite(graph, _emit, taken) if taken else (graph, [])
    counts = Counter(m.pattern for m in taken if m not in waiting)
    reports = []
    for p, declined, difference in said:
        if any(isinstance(m, Match) and m.pattern is p for m in waiting):
            declined.append("it would have to wait for itself")
        reports.append(FusionReport(p.name, counts[p], tuple(dict.fromkeys(declined)), difference))
    return fused, reports


def _index(graph: Graph) -> tuple[dict[Any, list[Node]], dict[Value, set[Node]]]:
    """The nodes of each op, and the users of each value."""
    by_op: dict[Any, list[Node]] = {}
    users: dict[Value, set[Node]] = {}
    for n in graph.nodes:
        by_op.setdefault(n.op, []).append(n)
        for v in n.values:
            users.setdefault(v, set()).add(n)
    return by_op, users


def _emit(new: Graph, unit: Node | Group, get: Callable[[Input], Any]) -> dict[Value, Value]:
    if not isinstance(unit, Match):
        assert isinstance(unit, Node)
        return keep(new, unit, get)
    p = unit.pattern
    outs = [unit.values[r] for r in p.outs]
    inputs = tuple(get(unit.values[v]) for v in p.places)
    origin = frozenset().union(*(n.origin for n in unit.nodes))
    made = new.record(p, inputs, unit.attrs, [TensorType(o.type.shape, o.type.dtype) for o in outs], origin=origin)
    return dict(zip(outs, made, strict=True))
