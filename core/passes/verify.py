"""The verifier that runs after each pass: a graph is a graph, a rewrite kept the effects, an order is legal.

A fault here is a GraphError or PlanError that names the nodes; nothing is repaired silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trueup.core.errors import GraphError, PlanError
from trueup.core.graph import Edges, Graph, Node, State


def verify(graph: Graph) -> None:
    """GraphError where a rule of graphs is broken.

    A value of another graph or one used before it is computed; a prologue node that needs what the device computes, or
    a state used on both sides; overlapping regions of a state in one node that writes one of them; a declared state
    that nothing uses; added constraints that make a cycle or let the prologue wait for the device.
    """
    done: set[Node] = set()
    side: dict[State, Node] = {}
    for n in graph.nodes:
        for v in n.values:
            if v.graph is not graph:
                raise GraphError(f"{n}: {v!r} is a value of another graph")
            if v.node is not None and v.node not in done:
                raise GraphError(f"{n}: {v!r} is used before {v.node} computes it")
            if n.host and v.node is not None and not v.node.host:
                raise GraphError(f"{n} belongs to the prologue but needs {v!r}, which the device computes")
        effects = n.effects
        for i, (s, writes) in enumerate(effects):
            for t, wrote in effects[i + 1 :]:
                if (writes or wrote) and s.overlaps(t):
                    raise GraphError(f"{n}: {s.name} and {t.name} overlap, and the node writes one of them")
            other = side.setdefault(s.root, n)
            if other.host != n.host:
                raise GraphError(f"state {s.root.name} is used in the prologue and on the device, by {other} and {n}")
        done.add(n)
    for name, v in graph.outputs.items():
        if v.graph is not graph:
            raise GraphError(f"output {name}: {v!r} is a value of another graph")
        if v.node is not None and v.node not in done:
            raise GraphError(f"output {name}: no node computes {v!r}")
    for first, then in graph.constraints:
        if then.host and not first.host:
            raise GraphError(f"{then} belongs to the prologue but must follow {first}, which the device runs")
    unused = [name for name, s in graph.states.items() if s not in side]
    if unused:
        raise GraphError(f"state {unused[0]} is declared but no node uses it")
    if graph.constraints:
        topological(graph.edges())


def topological(edges: Edges) -> list[Node]:
    """The nodes in an order that respects the edges; GraphError with the path of a cycle."""
    waits = {n: len(b) for n, b in edges.items()}
    after: dict[Node, list[Node]] = {n: [] for n in edges}
    for n, before in edges.items():
        for b in before:
            after[b].append(n)
    order = [n for n in edges if not waits[n]]
    for n in order:
        for a in after[n]:
            waits[a] -= 1
            if not waits[a]:
                order.append(a)
    if len(order) < len(edges):
        raise GraphError(
            "the graph has a cycle: " + " → ".join(map(str, _cycle(edges, [n for n in edges if waits[n]])))
        )
    return order


def _cycle(edges: Edges, stuck: Sequence[Node]) -> list[Node]:
    """A path that ends where it begins, in running order; every stuck node waits for another stuck one."""
    left, path = set(stuck), [stuck[0]]
    while True:
        n = next(b for b in sorted(edges[path[-1]], key=lambda n: n.id) if b in left)
        if n in path:
            return [n, *reversed(path[path.index(n) :])]
        path.append(n)


def verify_order(graph: Graph, order: Iterable[Node], edges: Edges | None = None) -> None:
    """PlanError where `order` is not each node once, after everything it must wait for."""
    edges = graph.edges() if edges is None else edges
    done: set[Node] = set()
    for n in order:
        if n not in edges:
            raise PlanError(f"{n} is a node of another graph")
        missing = edges[n] - done
        if missing:
            first = min(missing, key=lambda m: m.id)
            raise PlanError(f"{n} runs before {first}, which it must follow: {_why(n, first)}")
        if n in done:
            raise PlanError(f"{n} runs twice")
        done.add(n)
    dropped = [n for n in graph.nodes if n not in done]
    if dropped:
        raise PlanError(f"{dropped[0]} is dropped from the schedule" + (", a sink" if dropped[0].effects else ""))


def verify_edges(graph: Graph, edges: Edges) -> None:
    """GraphError where two conflicting accesses to a state are not ordered by a path of `edges`, or edges make a cycle.

    For whoever makes its own edges, as a backend that runs kernels at the same time does.
    """
    for n in graph.nodes:
        if n not in edges:
            raise GraphError(f"the edges lack {n}")
    order = topological(edges)
    place = {n: i for i, n in enumerate(order)}
    reach: dict[Node, int] = {}  # bit i: the node at place i comes before
    for n in order:
        bits = 0
        for b in edges[n]:
            bits |= reach[b] | 1 << place[b]
        reach[n] = bits
    for n, before in graph.edges().items():
        for m in before:
            if not reach[n] >> place[m] & 1:
                raise GraphError(
                    f"{m} and {n} have no order: {_why(n, m)}, and no path leads from the one to the other"
                )


def _why(node: Node, before: Node) -> str:
    for v in node.values:
        if v.node is before:
            return f"it needs {v!r}"
    for s, writes in node.effects:
        for t, wrote in before.effects:
            if (writes or wrote) and s.overlaps(t):
                verbs = {True: "writes", False: "reads"}
                return f"{before} {verbs[wrote]} state {t.name}, {node} {verbs[writes]} {s.name}"
    return "a constraint was added"


def verify_rewrite(old: Graph, new: Graph) -> None:
    """PlanError where a rewrite dropped or reordered an effect.

    Every write of the old graph must be in a node of the new one that descends from it, on a region that covers it, and
    conflicting accesses must come in the same order, unless one node holds both.
    """
    heirs: dict[int, list[tuple[int, Node]]] = {}
    for i, n in enumerate(new.nodes):
        for o in n.origin:
            heirs.setdefault(o, []).append((i, n))

    def touching(node: Node, state: State, writing: bool) -> list[tuple[int, Node]]:
        out = []
        for o in node.origin:
            for i, n in heirs.get(o, ()):
                for s, w in n.effects:
                    if s.root.name == state.root.name and (w or not writing):
                        out.append((i, n))
        return out

    def written(node: Node, state: State) -> bool:
        return any(
            w and s.root.name == state.root.name and s.covers(state)
            for o in node.origin
            for _, n in heirs.get(o, ())
            for s, w in n.effects
        )

    for n in old.nodes:
        for s, writes in n.effects:
            if writes and not written(n, s):
                raise PlanError(f"a rewrite dropped the write of {n} to state {s.name}, or a part of it")
    for n, before in old.edges().items():
        for m in before:
            for s, writes in n.effects:
                for t, wrote in m.effects:
                    if not (writes or wrote) or not s.overlaps(t):
                        continue
                    first, then = touching(m, t, wrote), touching(n, s, writes)
                    if first and then and max(i for i, _ in first) > min(i for i, _ in then):
                        raise PlanError(f"a rewrite put {n} before {m}: {_why(n, m)}")
