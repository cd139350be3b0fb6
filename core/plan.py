"""A plan: what a backend compiles. Asks a target what it supports; runs nothing.

    fuse → legalize → place → schedule → plan memory

A plan is static for the shapes of one step. It is verified after each pass; a fault is an error that names the nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .graph import Graph, Node
from .passes.fuse import FusionReport, fuse
from .passes.legalize import legalize
from .passes.memory import MemoryPlan, plan_memory
from .passes.place import Placement, place
from .passes.schedule import schedule
from .passes.strict import strict
from .passes.verify import verify

if TYPE_CHECKING:
    from .backend import Target


@dataclass(frozen=True)
class PlanOptions:
    """How a graph becomes a plan. Part of the key by which plans are cached.

    `order_seed`: a random legal order instead of program order, for tests and for those who hunt a race. `strict`: what
    the strict mode refuses is a StrictError (`passes.strict`).
    """

    allow_fallback: bool = False
    fusion: bool = True
    order_seed: int | None = None
    strict: bool = False


@dataclass(eq=False)
class Plan:
    """A graph with place, order and storage for everything. `order` holds the device's part, `prologue` the host's."""

    graph: Graph
    prologue: list[Node]
    order: list[Node]
    placements: dict[Node, Placement]
    kernels: dict[Node, Any]
    memory: MemoryPlan
    fusions: list[FusionReport] = field(default_factory=list)

    @property
    def fallbacks(self) -> list[tuple[Node, Placement]]:
        """Nodes that the device refused and the reference runs, with the reason."""
        return [(n, p) for n, p in self.placements.items() if p.where == "fallback"]

    def counts(self) -> dict[str, int]:
        """Number of nodes by where they run."""
        return dict(Counter(p.where for p in self.placements.values()))


def build_plan(graph: Graph, target: Target, options: PlanOptions = PlanOptions()) -> Plan:
    """The plan of a graph on a target; Refused where the target refuses a node and falling back was not asked for."""
    verify(graph)
    if options.strict:
        strict(graph)
    fusions: list[FusionReport] = []
    if options.fusion and target.patterns:
        graph, fusions = fuse(graph, target.patterns, target.accepts)
    graph = legalize(graph, target.supports)
    placements, kernels = place(
        graph, target.supports, target.kernel, backend=target.name, allow_fallback=options.allow_fallback
    )
    rng = None if options.order_seed is None else random.Random(options.order_seed)
    order = schedule(graph, rng=rng)
    prologue, device = [n for n in order if n.host], [n for n in order if not n.host]
    memory = plan_memory(graph, device, reuse=not target.overlaps)
    return Plan(graph, prologue, device, placements, kernels, memory, fusions)
