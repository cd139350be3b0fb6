"""Running nodes by their bodies on the host: the prologue of every plan, and nodes that fell back to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.errors import ArgumentError
from trueup.core.graph import Input, Node, State, Value
from trueup.core.op import body_arguments, check_results
from trueup.core.plan import Plan
from trueup.core.types import TensorType

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
    out = node.op.body(*body_arguments(node.op, [resolve(g, get) for g in node.inputs]), **node.attrs)
    return check_results(node.op, [o.type for o in node.outputs], out)


def check_inputs(declared: Mapping[str, Value], given: Mapping[str, NDArray[Any]]) -> None:
    """ArgumentError for an input that is missing, or that is not an array of the declared shape and type."""
    for name, v in declared.items():
        array = given.get(name)
        if array is None:
            raise ArgumentError(f"input {name}: {v.type} is missing")
        want = v.type.element.numpy
        if want is not None and (getattr(array, "shape", None) != v.type.shape or array.dtype != want):
            raise ArgumentError(f"input {name} must be {v.type}, got {_shown(array)}")


def _shown(array: Any) -> str:
    try:
        return str(TensorType.of(array))
    except TypeError as e:
        return str(e)


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
        """The results of all its nodes for the step's inputs by name; ArgumentError where those don't fit the graph."""
        check_inputs(self.inputs, inputs)
        if not self.nodes:
            return {}
        env = dict(self.leaves)
        env.update((v, inputs[name]) for name, v in self.inputs.items())
        for n in self.nodes:
            env.update(zip(n.outputs, run_body(n, env.__getitem__), strict=True))
        return {o: env[o] for o in self.results}


class FallbackStep:
    """One refused node on the reference.

    Of a state only the rows that the step's indices name are moved, and back only those that changed: of the whole
    state or of a region of it, and once where the node takes it at several places. `bytes` counts both ways, values
    included. Nothing is written where the body fails.
    """

    def __init__(self, node: Node, memory: Memory, handle: Callable[[Value], Any]) -> None:
        """`handle`: where a value or a whole state lies on the device. Weights are read as the host holds them."""
        self.node, self.memory, self.handle = node, memory, handle
        self.bytes = 0

    def run(self) -> None:
        node = self.node
        args: list[Any] = [resolve(g, self._read) for g in node.inputs]
        named = self._renumber(args)
        rows = {s: self._rows(s, axis, named) for s, axis in self._states()}
        parts = {
            root: _Rows(self.memory, self.handle(root), root, found) for root, found in self._by_root(rows).items()
        }
        taken = {s: parts[s.root].take(s, r) for s, r in rows.items()}
        for i, g in enumerate(node.inputs):
            if isinstance(g, tuple):
                args[i] = tuple(taken[v] if isinstance(v, State) else a for v, a in zip(g, args[i], strict=True))
            elif isinstance(g, State):
                args[i] = taken[g]
        types = [o.type for o in node.outputs]
        results = check_results(node.op, types, node.op.body(*body_arguments(node.op, args), **node.attrs))
        for o, r in zip(node.outputs, results, strict=True):
            self.memory.upload(self.handle(o), r)
            self.bytes += r.nbytes
        for s, writes in node.effects:
            if writes:
                parts[s.root].put(s, rows[s], taken[s])
        for part in parts.values():
            part.write_back()
            self.bytes += part.bytes

    def _states(self) -> list[tuple[State, str]]:
        """The states that the node takes, and the name of the first axis of each."""
        out = []
        for p, g in zip(self.node.op.params, self.node.inputs, strict=True):
            for v in g if isinstance(g, tuple) else (g,):
                if isinstance(v, State):
                    out.append((v, p.axes[0].text if p.axes else ""))
        return out

    def _renumber(self, args: list[Any]) -> dict[str, NDArray[np.intp]]:
        """By the name of a first axis, the rows that index arguments name; these are made to count in them."""
        named: dict[str, NDArray[np.intp]] = {}
        for axis in {axis for _, axis in self._states()} & ROW_INDICES.keys():
            at = [i for i, p in enumerate(self.node.op.params) if p.name in ROW_INDICES[axis] and args[i] is not None]
            if not at:
                continue
            found = np.unique(np.concatenate([args[i].ravel() for i in at])).astype(np.intp)
            named[axis] = found = found[found >= 0]
            for i in at:
                args[i] = np.where(args[i] < 0, args[i], np.searchsorted(found, args[i])).astype(args[i].dtype)
        return named

    def _rows(self, state: State, axis: str, named: Mapping[str, NDArray[np.intp]]) -> NDArray[np.intp]:
        """The rows of the whole state that the node takes through this region of it."""
        low, high = state.region[0]
        rows = named.get(axis, np.arange(high - low))
        if len(rows) and rows[-1] >= high - low:
            raise ValueError(f"{self.node}: an index names row {rows[-1]} of state {state.name}, of {high - low} rows")
        return low + rows

    @staticmethod
    def _by_root(rows: Mapping[State, NDArray[np.intp]]) -> dict[State, NDArray[np.intp]]:
        out: dict[State, NDArray[np.intp]] = {}
        for s, r in rows.items():
            out[s.root] = np.union1d(out[s.root], r) if s.root in out else r
        return out

    def _read(self, v: Value) -> Any:
        if isinstance(v, State):
            return None
        if v.data is not None:
            return stored(v)
        array = self.memory.download(self.handle(v))
        self.bytes += array.nbytes
        return array


class _Rows:
    """Some rows of a state, on the host while a node runs."""

    def __init__(self, memory: Memory, handle: Any, root: State, rows: NDArray[np.intp]) -> None:
        self.memory, self.handle, self.rows = memory, handle, rows
        if len(rows):
            self.array = memory.read_rows(handle, rows.tolist())
        else:
            self.array = np.empty((0, *root.type.shape[1:]), root.type.element.numpy)
        self.before = self.array.copy()
        self.bytes = int(self.array.nbytes)

    def _at(self, state: State, rows: NDArray[np.intp]) -> tuple[Any, ...]:
        return (np.searchsorted(self.rows, rows), *(slice(a, b) for a, b in state.region[1:]))

    def take(self, state: State, rows: NDArray[np.intp]) -> NDArray[Any]:
        """A copy of these rows of a region, which the body may write."""
        part: NDArray[Any] = self.array[self._at(state, rows)]
        return part

    def put(self, state: State, rows: NDArray[np.intp], part: NDArray[Any]) -> None:
        self.array[self._at(state, rows)] = part

    def write_back(self) -> None:
        """The rows of which a bit has changed."""
        if not self.array.size:
            return
        flat = (len(self.rows), -1)
        bits = [np.ascontiguousarray(a).reshape(flat).view(np.uint8) for a in (self.before, self.array)]
        changed = np.flatnonzero((bits[0] != bits[1]).any(1))
        if len(changed):
            self.memory.write_rows(self.handle, self.rows[changed].tolist(), self.array[changed])
            self.bytes += int(self.array[changed].nbytes)
