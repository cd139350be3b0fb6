"""Rewriting a graph: a new graph, unit by unit, in an order that respects every edge of the old one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from trueup.core.graph import Graph, Input, Node, State, Value
from trueup.core.types import TensorType

from .verify import topological, verify, verify_rewrite


class Group:
    """Nodes that are emitted together."""

    nodes: list[Node]


Emit = Callable[[Graph, "Node | Group", Callable[[Input], Input]], dict[Value, Value]]
"""Records a unit into the new graph and returns what its values became; the third argument maps an input."""


def rewrite(graph: Graph, emit: Emit, groups: Sequence[Group] = ()) -> tuple[Graph, list[Group]]:
    """A new graph with `emit` called for every group and every other node, in program order as far as edges allow.

    A group that would have to wait for itself (something outside needs one of its nodes and is needed by another) is
    taken apart; those are returned too. The new graph is verified against the old one.
    """
    kept, waiting = list(groups), []
    while (order := _order(graph, kept)) is None:
        if not kept:
            topological(graph.edges())  # which tells the cycle
        waiting.append(kept.pop(_cyclic(graph, kept)))
    new, copies = _copy_leaves(graph)

    def one(v: Value) -> Value:
        if isinstance(v, State) and v not in copies:
            root = copies[v.root]
            assert isinstance(root, State)
            made = State(new, v.name, v.type, leaf="state", kind=v.kind, root=root, region=v.region)
            copies[v] = new.regions.setdefault((root, v.region), made)
        return copies[v]

    def get(v: Input) -> Input:
        return tuple(map(one, v)) if isinstance(v, tuple) else v and one(v)

    heirs: dict[Node, list[Node]] = {}
    for unit in order:
        nodes = unit.nodes if isinstance(unit, Group) else [unit]
        new._host = nodes[0].host
        first = len(new.nodes)
        results = emit(new, unit, get)
        copies.update(results)
        # a node that is equal to an earlier one is not recorded again
        heirs.update(
            dict.fromkeys(nodes, new.nodes[first:] or [v.node for v in results.values() if v.node is not None])
        )
    new._host = False
    for before, after in graph.constraints:
        for a in heirs[before]:
            for b in heirs[after]:
                if a is not b:
                    new.order(a, b)
    for name, v in graph.outputs.items():
        new.outputs[name] = copies[v]
    verify(new)
    verify_rewrite(graph, new)
    return new, waiting


def _copy_leaves(graph: Graph) -> tuple[Graph, dict[Value, Value]]:
    new = Graph(graph.capacity)
    copies: dict[Value, Value] = {}
    for name, v in graph.inputs.items():
        new.inputs[name] = copies[v] = Value(new, name, v.type, leaf=v.leaf)
    for name, v in graph.weights.items():
        new.weights[name] = copies[v] = Value(new, name, v.type, leaf=v.leaf, data=v.data)
    for name, s in graph.states.items():
        new.states[name] = made = State(new, name, s.type, leaf="state", kind=s.kind)
        copies[s] = made
    return new, copies


def _order(graph: Graph, groups: Sequence[Group]) -> list[Node | Group] | None:
    """Units in program order as far as edges allow; None where a group would wait for itself."""
    unit: dict[Node, Node | Group] = {n: n for n in graph.nodes}
    for g in groups:
        unit.update(dict.fromkeys(g.nodes, g))
    first = {u: min(n.id for n in (u.nodes if isinstance(u, Group) else [u])) for u in unit.values()}
    needs: dict[Node | Group, set[Node | Group]] = {u: set() for u in first}
    for n, before in graph.edges().items():
        needs[unit[n]].update(unit[m] for m in before if unit[m] is not unit[n])
    after: dict[Node | Group, list[Node | Group]] = {u: [] for u in needs}
    for u, units in needs.items():
        for b in units:
            after[b].append(u)
    waits = {u: len(b) for u, b in needs.items()}
    ready = [(first[u], i, u) for i, u in enumerate(needs) if not waits[u]]
    heapq.heapify(ready)
    serial, order = len(ready), []
    while ready:
        u = heapq.heappop(ready)[2]
        order.append(u)
        for a in after[u]:
            waits[a] -= 1
            if not waits[a]:
                serial += 1
                heapq.heappush(ready, (first[a], len(needs) + serial, a))
    return order if len(order) == len(needs) else None


def _cyclic(graph: Graph, groups: Sequence[Group]) -> int:
    """The index of a group that makes a cycle: the first without which, or alone with which, the order fails."""
    for i, g in enumerate(groups):
        if _order(graph, [g]) is None:
            return i
    return len(groups) - 1


def keep(new: Graph, node: Node, get: Callable[[Input], Input]) -> dict[Value, Value]:
    """Emit a node as it is."""
    types = [o.type and TensorType(o.type.shape, o.type.dtype) for o in node.outputs]
    made = new.record(node.op, tuple(get(i) for i in node.inputs), node.attrs, types, origin=node.origin)
    return dict(zip(node.outputs, made, strict=True))
