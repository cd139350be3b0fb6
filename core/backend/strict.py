"""The strict mode at run time: before each node, the integers that it is given are held against its op's conditions.

A watcher for `observe`. On a device nobody else may look at them: a kernel reads an index as it is. Computes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.alone import alone
from trueup.core.errors import StrictError
from trueup.core.graph import Node, State, Value
from trueup.core.op import Op
from trueup.core.plan import Plan

from .contract import Target
from .trace import Look, Watch


def conditions(target: Target, plan: Plan) -> Watch:
    """A watcher that refuses, in every step, what ops' conditions exclude: StrictError names the node and the value."""
    return Conditions()


class Conditions:
    """Looks on at one step. Of a fused node the conditions of its ops count, as far as their integers come from outside."""

    def wants(self, node: Node) -> bool:
        if isinstance(node.op, Op):
            return node.op.has_conditions
        graph = getattr(node.op, "graph", None)
        return graph is not None and any(isinstance(n.op, Op) and n.op.has_conditions for n in graph.nodes)

    def before(self, node: Node, look: Look) -> None:
        made = alone(node)
        known: dict[Value, Any] = {
            v: look.read(made.inputs[name]).reshape(v.type.shape)
            for name, v in made.graph.inputs.items()
            if v.type.dtype in ("i32", "i64")
        }
        known.update((v, np.asarray(v.data)) for v in made.graph.weights.values() if v.type.dtype in ("i32", "i64"))
        for n in made.graph.nodes:
            if n.op.view and n.values[0] in known:
                known[n.outputs[0]] = n.op.body(known[n.values[0]], **n.attrs)
            elif isinstance(n.op, Op) and n.op.has_conditions:
                self._check(node, n, known)

    def _check(self, node: Node, n: Node, known: dict[Value, Any]) -> None:
        def give(v: Value) -> Any:
            return known.get(v, v.type) if not isinstance(v, State) else v.type

        args = [tuple(map(give, g)) if isinstance(g, tuple) else g and give(g) for g in n.inputs]
        whole = all(
            p.dtype not in ("i32", "i64") or g is None or isinstance(g, tuple) or g in known
            for p, g in zip(n.op.params, n.inputs, strict=True)
        )
        if not whole:
            return
        try:
            assert isinstance(n.op, Op)
            n.op.check_data(args, n.attrs)
        except ValueError as e:
            raise StrictError([f"{node.describe()}: {e}"]) from None

    def after(self, node: Node, look: Look) -> None: ...

    def end(self) -> None: ...
