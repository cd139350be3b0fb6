"""A node on its own in a file: its graph, what it was given, states and weights included; and running that on a backend.

The file is safetensors; the graph is JSON in its metadata. Knows graphs and the harness; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

import trueup.core.ops  # noqa: F401  # registers the ops that a file may name
from trueup.core.alone import Alone
from trueup.core.errors import ArgumentError, GraphError
from trueup.core.files import whole_file
from trueup.core.graph import Graph, Input, State, Value
from trueup.core.op import OPS
from trueup.core.plan import PlanOptions
from trueup.core.state import Capacity, PerSequence, PerToken, StateKind
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .compare import same_bits
from .errors import KitError
from .harness import Rig
from .whole import WholeGraph

Array = NDArray[Any]
FORMAT = "1"
"""Version of the files; another one is refused."""


@dataclass
class Saved:
    """A node's graph with what it is given. `about`: where it comes from, as `Finding.about` says it."""

    made: Alone
    inputs: dict[str, Array]
    states: dict[str, Array]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ran:
    """What a backend gives for a saved node; `refused` says why where it does not run it. `changed`: an input that it
    wrote to."""

    results: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)
    refused: str = ""
    changed: str = ""


def run(rig: Rig, made: Alone, inputs: Mapping[str, Array], states: Mapping[str, Array], options: PlanOptions) -> Ran:
    """The graph of a node compiled on a target by itself, and run once; Refused, Blamed and MemoryError come through."""
    with WholeGraph(rig, made.graph, options) as whole:
        whole.put(states)
        results = whole.run(inputs)
        handles = getattr(whole.exe, "inputs", None)
        after = {k: rig.target.memory.download(h) for k, h in handles.items()} if isinstance(handles, dict) else {}
        changed = next((k for k, v in after.items() if k in inputs and not same_bits(v, inputs[k])), "")
        return Ran(results, whole.states(), changed=changed)


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, saved: Saved) -> None:
    """The file, whole or not at all."""
    graph = saved.made.graph
    tensors = {f"input/{k}": v for k, v in saved.inputs.items()} | {f"state/{k}": v for k, v in saved.states.items()}
    tensors |= {f"{w.leaf}/{k}": w.data.data for k, w in graph.weights.items() if w.data is not None}
    tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    data = save(
        tensors,
        {"trueup": FORMAT, "kind": "replay", "graph": json.dumps(_described(graph)), "about": json.dumps(saved.about)},
    )
    with whole_file(path) as part:
        part.write_bytes(data)


def read(path: Path) -> Saved:
    """A file that `write` wrote; KitError where it is none, or holds what does not fit together."""
    try:
        with safe_open(str(path), "np") as f:
            meta, tensors = f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
    except (SafetensorError, OSError) as e:
        raise KitError(f"{path}: not a replay file: {e}") from None
    if meta.get("kind") != "replay" or meta.get("trueup") != FORMAT:
        found = f"kind {meta.get('kind')}, version {meta.get('trueup')}"
        raise KitError(f"{path}: not a replay file of version {FORMAT}: {found}")

    def of(kind: str) -> dict[str, Array]:
        return {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{kind}/")}

    try:
        graph = _rebuilt(json.loads(meta["graph"]), of("weight"), of("constant"))
        inputs, states = of("input"), of("state")
        for what, leaves, arrays in (("input", graph.inputs, inputs), ("state", graph.states, states)):
            for name, v in leaves.items():
                if name not in arrays or TensorType.of(arrays[name]) != v.type:
                    raise ValueError(f"{what} {name} must be {v.type}")
        return Saved(Alone(graph), inputs, states, json.loads(meta.get("about", "{}")))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArgumentError, GraphError) as e:
        raise KitError(f"{path}: its graph can't be read: {type(e).__name__}: {e}") from None


def _described(graph: Graph) -> dict[str, Any]:
    """A graph of ops as JSON data."""
    places = {o: [i, j] for i, n in enumerate(graph.nodes) for j, o in enumerate(n.outputs)}

    def refer(v: Input) -> Any:
        if v is None:
            return None
        if isinstance(v, tuple):
            return {"list": [refer(x) for x in v]}
        if isinstance(v, State):
            return {"state": v.root.name, "region": v.region}
        return {"node": places[v]} if v.node is not None else {v.leaf: v.name}

    c = graph.capacity
    return {
        "capacity": None if c is None else [c.slots, c.pages, c.page],
        "inputs": {k: [v.type.shape, v.type.dtype] for k, v in graph.inputs.items()},
        "weights": {k: [v.type.shape, v.type.dtype, v.leaf] for k, v in graph.weights.items()},
        "states": {k: _kind(s.kind) for k, s in graph.states.items()},
        "nodes": [{"op": n.op.name, "inputs": [refer(g) for g in n.inputs], "attrs": n.attrs} for n in graph.nodes],
        "outputs": {k: refer(v) for k, v in graph.outputs.items()},
    }


def _kind(kind: StateKind | None) -> dict[str, Any]:
    if isinstance(kind, PerToken):
        return {"per": "token", "width": kind.width, "every": kind.every, "dtype": kind.dtype}
    assert kind is not None
    return {"per": "sequence", "width": kind.width, "dtype": kind.dtype, "fill": kind.fill}


def _rebuilt(data: Any, weights: Mapping[str, Array], constants: Mapping[str, Array]) -> Graph:
    graph = Graph(None if data["capacity"] is None else Capacity(*data["capacity"]))
    for name, (shape, dtype) in data["inputs"].items():
        graph.input(name, *shape, dtype=dtype)
    leaves: dict[str, Value] = {}
    for name, (shape, dtype, leaf) in data["weights"].items():
        stored = Weight(name, TensorType(tuple(shape), dtype), (weights if leaf == "weight" else constants)[name])
        leaves[name] = graph.weight(stored) if leaf == "weight" else graph.constant(name, np.asarray(stored))
    for name, k in data["states"].items():
        width = tuple(k["width"])
        per_token = k["per"] == "token"
        kind = PerToken(width, k["every"], k["dtype"]) if per_token else PerSequence(width, k["dtype"], k["fill"])
        graph.state(name, kind)

    def find(r: Any) -> Any:
        if r is None:
            return None
        if "list" in r:
            return [find(x) for x in r["list"]]
        if "node" in r:
            i, j = r["node"]
            return graph.nodes[i].outputs[j]
        if "state" in r:
            part = graph.states[r["state"]]
            for axis, (low, high) in enumerate(r["region"]):
                if (low, high) != part.region[axis]:
                    part = part.view(axis, low, high)
            return part
        return graph.inputs[r["input"]] if "input" in r else leaves[r.get("weight", r.get("constant"))]

    for n in data["nodes"]:
        if n["op"] not in OPS:
            raise ValueError(f"there is no op '{n['op']}'")
        OPS[n["op"]](*map(find, n["inputs"]), **n["attrs"])
    for name, r in data["outputs"].items():
        graph.output(name, find(r))
    return graph
