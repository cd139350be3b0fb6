"""The strict mode for authors of graphs: what plans well, and is outside of what ops promise or surely not meant.

`node_faults` looks at one node, as it is recorded in a strict graph; `strict` at a whole graph. Repairs nothing.
"""

from __future__ import annotations

from math import isfinite, isinf, isnan

import numpy as np

from trueup.core.errors import StrictError
from trueup.core.graph import Graph, Node, State, Value
from trueup.core.op import Op
from trueup.core.state import PerToken


def strict(graph: Graph) -> None:
    """StrictError with everything that the strict mode refuses in a recorded graph:

    - an attribute that is not finite, where the op does not itself have an infinite default (a limit that is none);
    - a view that strides forbid, so that a copy would take its place unseen;
    - a constant that holds NaN or an infinity;
    - a node whose results nobody uses and that writes no state; a weight or a constant that no node uses;
    - a graph that gives nothing: no output, and no state written;
    - a state that is read and that nothing in the graph writes; a state per token that is read before the step's own
      rows are written to it, so that a row would not see itself.
    """
    faults = [f for n in graph.nodes for f in node_faults(n)]
    for c in graph.weights.values():
        if c.leaf == "constant" and c.data is not None and c.type.dtype.startswith(("f", "bf")):
            if not np.all(np.isfinite(np.asarray(c.data))):
                faults.append(f"constant {c.name}: {c.type} holds NaN or an infinity")
    faults += _unused(graph) + _unwritten(graph)
    if faults:
        raise StrictError(faults)


def node_faults(node: Node) -> list[str]:
    """What is wrong with a node by itself."""
    faults = []
    for name, value in node.attrs.items():
        if not isinstance(value, float) or isfinite(value):
            continue
        known = node.op.attributes.get(name) if isinstance(node.op, Op) else None
        limit = known is not None and isinstance(known.default, float) and isinf(known.default)
        if isnan(value) or not limit:
            faults.append(f"{node.describe()}: the attribute {name} is {value}")
    if node.op.view and node.outputs[0].base is None and node.outputs[0].type.size:
        faults.append(f"{node.describe()} is no view: strides forbid it; take contiguous() of its argument")
    return faults


def _unused(graph: Graph) -> list[str]:
    used: set[Value] = {v for n in graph.nodes for v in n.values} | set(graph.outputs.values())
    faults = [
        f"nobody uses what {n.describe()} gives"
        for n in graph.nodes
        if not any(writes for _, writes in n.effects) and not used & set(n.outputs)
    ]
    faults += [f"no node uses {v.leaf} {v.name}" for v in graph.weights.values() if v not in used]
    if not graph.outputs and not any(writes for n in graph.nodes for _, writes in n.effects):
        faults.append("the graph has no output and writes no state")
    return faults


def _unwritten(graph: Graph) -> list[str]:
    """Reads of what nothing writes, or of what is written only later in the step."""
    written: list[State] = [s for n in graph.nodes for s, writes in n.effects if writes]
    before: list[State] = []
    faults = []
    for n in graph.nodes:
        for s, writes in n.effects:
            if writes:
                continue
            if not any(w.overlaps(s) for w in written):
                faults.append(f"{n.describe()} reads state {s.name}, which nothing in the graph writes")
            elif isinstance(s.kind, PerToken) and not any(w.overlaps(s) for w in before):
                later = next(m for m in graph.nodes if any(w and t.overlaps(s) for t, w in m.effects))
                faults.append(f"{n.describe()} reads state {s.name} before {later} writes the step's rows to it")
        before += [s for s, writes in n.effects if writes]
    return faults
