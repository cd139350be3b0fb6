"""One node of a plan as a graph of its own: its op, or the ops of its pattern, fed with what the node is given.

A view comes with what it views, so that strides are what they are in the plan. Knows graphs; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .graph import Graph, Input, Node, State, Value
from .op import Op


@dataclass
class Alone:
    """`inputs`: by the graph's names the values of the plan that feed it; `states`: by name the plan's whole states.

    The node's results are the graph's outputs, in order.
    """

    graph: Graph
    inputs: dict[str, Value] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    @property
    def ops(self) -> list[Node]:
        """What the node computes: one op, or those of a fusion."""
        return [n for n in self.graph.nodes if not n.op.view]


def alone(node: Node) -> Alone:
    """The graph of a node that is no view."""
    source = next(v.graph for v in (*node.values, *node.outputs))
    made = Alone(Graph(source.capacity))
    leaves: dict[Value, Value] = {}

    def lead(v: Value, name: str) -> Value:
        """The value in the new graph; as an input it is named after the parameter that it comes to first."""
        if v not in leaves:
            leaves[v] = _leaf(made, v, name) if v.node is None or not v.node.op.view else _view(v, name)
        return leaves[v]

    def _view(v: Value, name: str) -> Value:
        assert v.node is not None
        given = [x if x is None else lead(x, name) for x in v.node.inputs if not isinstance(x, tuple)]
        made_view: Value = v.node.op(*given, **v.node.attrs)  # type: ignore[operator]  # views are ops
        return made_view

    def argument(given: Input, name: str) -> Any:
        if isinstance(given, tuple):
            return [lead(v, f"{name}.{i}") for i, v in enumerate(given)]
        return given and lead(given, name)

    args = [argument(g, p.name) for p, g in zip(node.op.params, node.inputs, strict=True)]
    call = node.op if isinstance(node.op, Op) else node.op.body
    out = call(*args, **node.attrs)
    results = () if out is None else out if isinstance(out, tuple) else (out,)
    for r, v in zip(node.op.results, results, strict=True):
        made.graph.output(r.name, v)
    return made


def _leaf(made: Alone, v: Value, name: str) -> Value:
    graph = made.graph
    if isinstance(v, State):
        assert v.kind is not None
        made.states[v.root.name] = v.root
        part = graph.state(v.root.name, v.kind)
        for axis, (low, high) in enumerate(v.region):
            if (low, high) != (0, part.type.shape[axis]):
                part = part.view(axis, low, high)
        return part
    if v.data is not None:
        return graph.weight(v.data) if v.leaf == "weight" else graph.constant(v.name, np.asarray(v.data))
    while name in graph.inputs:
        name += "'"
    made.inputs[name] = v
    return graph.input(name, *v.type.shape, dtype=v.type.dtype)
