"""Legalize: what the device refuses is replaced by the op's decomposition, a strided argument by a contiguous copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trueup.core.errors import PlanError
from trueup.core.graph import Graph, Input, Node, Value
from trueup.core.ops.views import contiguous
from trueup.core.types import TensorType

from .rewrite import Group, keep, rewrite

Supports = Callable[[Node], Any]
ROUNDS = 64
"""How deep decompositions may go; one that leads to itself would never end."""


def legalize(graph: Graph, supports: Supports) -> Graph:
    """Rewrite until every node is supported, or refused with nothing left to try.

    Tried in this order: a copy where a view can't be made of strides; a copy of strided arguments, if the device
    accepts the node then; the decomposition.
    """
    for _ in range(ROUNDS):
        todo: dict[Node, Callable[[Graph, Node, Callable[[Input], Any]], dict[Value, Value]]] = {}
        for n in graph.nodes:
            if n.op.view:
                if n.outputs[0].base is None and not _strided(n):
                    raise PlanError(f"{n.describe()} is no view: it copies even what lies contiguously")
                if n.outputs[0].base is None:
                    todo[n] = _copy_arguments
            elif n.host or supports(n):
                continue
            elif n.op is not contiguous and _strided(n) and supports(_as_contiguous(n)):
                todo[n] = _copy_arguments
            elif n.op.decomposition is not None:
                todo[n] = _decompose
        if not todo:
            return graph

        def emit(new: Graph, unit: Node | Group, get: Callable[[Input], Input]) -> dict[Value, Value]:
            assert isinstance(unit, Node)
            return todo[unit](new, unit, get) if unit in todo else keep(new, unit, get)  # noqa: B023

        graph, _ = rewrite(graph, emit)
    raise PlanError(f"{next(iter(todo)).describe()} is still decomposed after {ROUNDS} rounds")


def _strided(node: Node) -> bool:
    return any(not v.type.contiguous and v.leaf != "state" for v in node.values)


def _as_contiguous(node: Node) -> Node:
    """The node as it would be if its values lay contiguously; for asking only."""

    def plain(v: Value) -> Value:
        return (
            v
            if v.leaf == "state" or v.type.contiguous
            else Value(v.graph, v.name, TensorType(v.type.shape, v.type.dtype), v.node)
        )

    inputs = tuple(tuple(map(plain, g)) if isinstance(g, tuple) else g and plain(g) for g in node.inputs)
    return Node(node.op, inputs, node.attrs, node.id, node.host, node.origin, node.outputs)


def _copy_arguments(new: Graph, node: Node, get: Callable[[Input], Any]) -> dict[Value, Value]:
    def lay(v: Value) -> Value:
        copy: Value = get(v)
        return copy if copy.type.contiguous or copy.leaf == "state" else contiguous(copy)

    inputs = tuple(tuple(map(lay, g)) if isinstance(g, tuple) else g and lay(g) for g in node.inputs)
    types = [TensorType(o.type.shape, o.type.dtype) for o in node.outputs]
    return dict(zip(node.outputs, new.record(node.op, inputs, node.attrs, types, origin=node.origin), strict=True))


def _decompose(new: Graph, node: Node, get: Callable[[Input], Any]) -> dict[Value, Value]:
    assert node.op.decomposition is not None
    first = len(new.nodes)
    made = node.op.decomposition(*map(get, node.inputs), **node.attrs)
    for n in new.nodes[first:]:
        object.__setattr__(n, "origin", node.origin)
    results = made if isinstance(made, tuple) else () if made is None else (made,)
    found, want = [getattr(r, "type", r) for r in results], [o.type for o in node.outputs]
    if found != want:
        raise PlanError(f"{node}: its decomposition gives {_listed(found)}, the op {_listed(want)}")
    return dict(zip(node.outputs, results, strict=True))


def _listed(types: list[Any]) -> str:
    return ", ".join(map(str, types)) or "nothing"
