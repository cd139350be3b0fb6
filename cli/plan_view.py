"""A plan as rows for people and programs: what each node is called, takes, gives, and where it runs. Draws nothing.

Nodes are grouped by layer, as their weights' and states' names (`blk.N.…`) say; a node without either belongs to the
group before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trueup.core.graph import Node, Value
from trueup.core.passes.place import Placement
from trueup.core.plan import Plan
from trueup.core.state import PerToken

LAYER = re.compile(r"blk\.(\d+)\.")
PLAIN = bool | int | float | str | None


@dataclass(frozen=True)
class Argument:
    """What stands at a parameter. `kind`: "node" (a node's result), "input", "weight", "constant" or "state" (then
    `writes` says whether it is mutated)."""

    parameter: str
    value: Value
    writes: bool = False

    @property
    def kind(self) -> str:
        return "node" if self.value.node is not None else str(self.value.leaf)

    def short(self, *, views: bool) -> str:
        """`#12`, `ids`, `attn_qkv q8_0[512, 256]`, `&delta`; without `views`, `~#12` for a view of 12's result."""
        v, looked = self.value, ""
        while not views and v.node is not None and is_view(v.node):
            v, looked = v.node.values[0], "~"
        if v.node is not None:
            part = v.name.partition(f".{v.node.id}.")[2]
            return f"{looked}#{v.node.id}" + (f".{part}" if part else "")
        name = LAYER.sub("", v.name, count=1).removesuffix(".weight")
        return f"{looked}{name} {v.type}" if v.leaf == "weight" else f"&{name}" if self.writes else f"{looked}{name}"


@dataclass(frozen=True)
class Row:
    """A node of a plan with everything that is shown of it. `group` is a layer's number as text, or a name."""

    node: Node
    group: str
    placement: Placement
    arguments: tuple[Argument, ...]
    results: tuple[tuple[str, str, int, int | None], ...]
    """Name, type, bytes, and offset in the arena of each result; no offset for views and what the prologue gives."""

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The attributes as JSON data."""
        return {k: v if isinstance(v, PLAIN) and not _endless(v) else str(v) for k, v in self.node.attrs.items()}

    @property
    def kernel(self) -> str:
        """The kernel's name where it says more than the op's and the place do."""
        p = self.placement
        return "" if p.where != "device" or p.kernel == self.node.op.name else p.kernel

    def call(self, *, views: bool) -> str:
        """`linear(#10, attn_qkv q8_0[512, 256])`, attributes after a semicolon."""
        attrs = ", ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.attributes.items())
        given = ", ".join(a.short(views=views) for a in self.arguments)
        return f"{self.node.op.name}({given}{'; ' + attrs if attrs else ''})"

    @cached_property
    def gives(self) -> str:
        return ", ".join(type for _, type, _, _ in self.results)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.node.id,
            "op": self.node.op.name,
            "group": self.group,
            "where": self.placement.where,
            "kernel": self.placement.kernel,
            "reason": self.placement.reason,
            "moved_bytes": self.placement.bytes,
            "arguments": [
                {"parameter": a.parameter, "kind": a.kind, "name": a.value.name, "type": str(a.value.type),
                 "node": None if a.value.node is None else a.value.node.id, "writes": a.writes}
                for a in self.arguments
            ],
            "attributes": self.attributes,
            "results": [{"name": n, "type": t, "bytes": b, "offset": at} for n, t, b, at in self.results],
        }  # fmt: skip


def rows(plan: Plan) -> list[Row]:
    """The prologue's nodes, then the device's in the plan's order."""
    out = []
    group = "input"
    for node in (*plan.prologue, *plan.order):
        group = "prologue" if node.host else _group(node, "input" if group == "prologue" else group)
        results = tuple(
            (v.name, str(v.type), v.type.nbytes, None if v.base is not None else plan.memory.offsets.get(v))
            for v in node.outputs
        )
        out.append(Row(node, group, plan.placements[node], tuple(_arguments(node)), results))
    return out


def _group(node: Node, before: str) -> str:
    named = [v for v in node.values if v.leaf in ("weight", "state")]
    for v in named:
        if found := LAYER.match(v.name):
            return found[1]
    if any(v.leaf == "weight" for v in named):
        return "input" if before == "input" else "output"
    return before


def _arguments(node: Node) -> list[Argument]:
    return [
        Argument(p.name, v, p.mutates)
        for p, given in zip(node.op.params, node.inputs, strict=True)
        for v in (given if isinstance(given, tuple) else (given,))
        if v is not None
    ]


def _endless(v: Any) -> bool:
    return isinstance(v, float) and not math.isfinite(v)


def is_view(node: Node) -> bool:
    """Whether a node only looks at its argument's storage in another way; on the host none is taken for that."""
    return node.op.view and not node.host


def through_views(node: Node) -> list[Node]:
    """The nodes that a node's values come from, views looked through."""
    found: dict[Node, None] = {}
    for v in node.values:
        at: Value = v
        while at.node is not None and is_view(at.node):
            at = at.node.values[0]
        if at.node is not None:
            found[at.node] = None
    return list(found)


def group_title(group: str, layers: Sequence[str]) -> str:
    """`blk.3 qsa`, or the group's name."""
    if not group.isdecimal():
        return group
    return f"blk.{group} {layers[int(group)]}" if int(group) < len(layers) else f"blk.{group}"


def states(plan: Plan) -> list[dict[str, Any]]:
    """Every state of the plan's graph: name, type, bytes, whether per token or per sequence, where it lies."""
    return [
        {
            "name": name,
            "type": str(s.type),
            "bytes": s.type.nbytes,
            "per": "token" if isinstance(s.kind, PerToken) else "sequence",
            "on": "host" if name in plan.graph.host_states else "device",
        }
        for name, s in plan.graph.states.items()
    ]


def memory(plan: Plan) -> dict[str, int]:
    """Bytes: the arena, what its values would take without reuse, the most alive at once, states, weights."""
    m = plan.memory
    return {
        "arena": m.arena,
        "total_without_reuse": m.total,
        "peak": m.peak,
        "states": sum(s["bytes"] for s in states(plan)),
        "weights": sum(v.type.nbytes for v in plan.graph.weights.values() if v.leaf == "weight"),
    }
