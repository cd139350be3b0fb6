"""Running nodes by their bodies on the host: the prologue of every plan, and nodes that fell back to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Input, Node, State, Value
from trueup.core.op import check_results
from trueup.core.plan import Plan

from .contract import Memory

ROW_INDICES = {"slot": ("slots", "keep"), "pages": ("block_table",)}
"""By the name of a state's first axis, the arguments that hold indices into it. What they don't name is not touched."""


def resolve(given: Input, get: Callable[[Value], Any]) -> Any:
    """What stands at a parameter, with `get` applied to each value."""
    if given is None:
        return None
    return tuple(get(v) for v in given) if isinstance(given, tuple) else get(given)


def stored(leaf: Value) -> Any:
    """What a body gets for a weight or a constant: the stored weight, of which it may read some rows, or an array."""
    return leaf.data if leaf.leaf == "weight" else np.asarray(leaf.data)


def run_body(node: Node, get: Callable[[Value], Any]) -> tuple[Any, ...]:
    """The node's results by its op's body, checked against the inferred types. States are mutated in place."""
    out = node.op.body(*(resolve(g, get) for g in node.inputs), **node.attrs)
    return check_results(node.op, [o.type for o in node.outputs], out)


class Prologue:
    """The part of a plan that runs on the host before the step; its states are host arrays."""

    def __init__(self, plan: Plan, host_states: Mapping[str, NDArray[Any]]) -> None:
        self.nodes = plan.prologue
        self.results = [o for n in self.nodes for o in n.outputs]
        self.leaves: dict[Value, Any] = {v: stored(v) for n in self.nodes for v in n.values if v.data is not None}
        for n in self.nodes:
            for s, _ in n.effects:
                self.leaves[s] = s.slice(host_states[s.root.name])
        self.inputs = plan.graph.inputs

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[Value, NDArray[Any]]:
        """The results of all its nodes, for the step's inputs by name."""
        if not self.nodes:
            return {}
        env = dict(self.leaves)
        env.update((v, inputs[name]) for name, v in self.inputs.items() if name in inputs)
        for n in self.nodes:
            env.update(zip(n.outputs, run_body(n, env.__getitem__), strict=True))
        return {o: env[o] for o in self.results}


class FallbackStep:
    """One refused node on the reference.

    Of a state only the rows that the step's indices name are moved, and back only those that changed. `bytes` counts
    both ways, values included.
    """

    def __init__(self, node: Node, memory: Memory, handle: Callable[[Value], Any]) -> None:
        """`handle`: where a value or a whole state lies on the device. Weights are read as the host holds them."""
        self.node, self.memory, self.handle = node, memory, handle
        self.bytes = 0

    def run(self) -> None:
        params = self.node.op.params
        args: list[Any] = [None if isinstance(g, State) else resolve(g, self._read) for g in self.node.inputs]
        rows: dict[str, list[int]] = {}
        parts: list[tuple[int, State, list[int] | None, NDArray[Any]]] = []
        for i, g in enumerate(self.node.inputs):
            if not isinstance(g, State):
                continue
            axis = params[i].axes[0].text if params[i].axes else ""
            if axis in ROW_INDICES and g.root is g:
                if axis not in rows:
                    rows[axis] = self._compact(axis, args)
                args[i] = self.memory.read_rows(self.handle(g), rows[axis])
                parts.append((i, g, rows[axis], args[i].copy()))
            else:
                whole = self.memory.download(self.handle(g.root))
                args[i] = g.slice(whole)
                parts.append((i, g, None, whole))
            self.bytes += args[i].nbytes
        out = self.node.op.body(*args, **self.node.attrs)
        for o, r in zip(
            self.node.outputs, check_results(self.node.op, [o.type for o in self.node.outputs], out), strict=True
        ):
            self.memory.upload(self.handle(o), r)
            self.bytes += r.nbytes
        for i, state, index, before in parts:
            if params[i].mutates:
                self._write_back(state, index, before, args[i])

    def _compact(self, axis: str, args: list[Any]) -> list[int]:
        """The rows that the index arguments name; the arguments are renumbered to count in them."""
        at = [i for i, p in enumerate(self.node.op.params) if p.name in ROW_INDICES[axis] and args[i] is not None]
        named = np.unique(np.concatenate([args[i].ravel() for i in at]))
        named = named[named >= 0]
        for i in at:
            args[i] = np.where(args[i] < 0, -1, np.searchsorted(named, args[i])).astype(args[i].dtype)
        return [int(r) for r in named]

    def _write_back(self, state: State, rows: list[int] | None, before: NDArray[Any], after: NDArray[Any]) -> None:
        if rows is None:  # `after` is a part of `before`, the whole state, and was written in place
            self.memory.upload(self.handle(state.root), before)
            self.bytes += before.nbytes
            return
        flat = (len(rows), -1)
        changed = (before.reshape(flat).view(np.uint8) != after.reshape(flat).view(np.uint8)).any(1) if rows else []
        picked = np.flatnonzero(changed)
        if len(picked):
            self.memory.write_rows(self.handle(state), [rows[i] for i in picked], after[picked])
            self.bytes += after[picked].nbytes

    def _read(self, v: Value) -> Any:
        if v.data is not None:
            return stored(v)
        array = self.memory.download(self.handle(v))
        self.bytes += array.nbytes
        return array
