"""Schedule: a legal order of a graph's nodes, by default program order; any other must give the same bits."""

from __future__ import annotations

import random

from trueup.core.graph import Graph, Node

from .verify import topological, verify_order


def schedule(graph: Graph, *, rng: random.Random | None = None) -> list[Node]:
    """The nodes in program order as far as edges allow, or, with `rng`, in a random order that respects every edge."""
    if rng is None and not graph.constraints:
        return list(graph.nodes)
    edges = graph.edges()
    waits = {n: len(b) for n, b in edges.items()}
    after: dict[Node, list[Node]] = {n: [] for n in edges}
    for n, before in edges.items():
        for b in before:
            after[b].append(n)
    ready = [n for n in edges if not waits[n]]
    order = []
    while ready:
        i = rng.randrange(len(ready)) if rng else min(range(len(ready)), key=lambda i: ready[i].id)
        ready[i], ready[-1] = ready[-1], ready[i]
        n = ready.pop()
        order.append(n)
        for a in after[n]:
            waits[a] -= 1
            if not waits[a]:
                ready.append(a)
    if len(order) < len(edges):
        topological(edges)  # which tells the cycle
    verify_order(graph, order, edges)
    return order
