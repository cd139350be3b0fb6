"""Plan memory: an offset in one arena for every value that a kernel makes. Views take no room; room is used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueup.core.errors import PlanError
from trueup.core.graph import Graph, Node, Value

ALIGN = 64
"""Bytes; the strictest alignment that a vector load of the targets asks for."""


@dataclass(frozen=True)
class MemoryPlan:
    """`offsets`: bytes from the arena's start, for each value with storage of its own.

    `arena` is the arena's size, `total` what the values would take without reuse, `peak` the most alive at one time:
    the arena can't be smaller.
    """

    offsets: dict[Value, int]
    arena: int
    total: int
    peak: int


def lifetimes(graph: Graph, order: Sequence[Node]) -> dict[Value, tuple[int, int]]:
    """For each value with storage in the arena, the first and the last place in the order at which it is alive.

    A view keeps what it views alive. Results of the prologue are inputs and not in the arena.
    """
    life: dict[Value, tuple[int, int]] = {}
    for i, n in enumerate(order):
        for v in n.values:
            if v.storage in life:
                life[v.storage] = (life[v.storage][0], i)
        for o in n.outputs:
            if o.base is None:
                life[o] = (i, i)
    for v in graph.outputs.values():
        if v.storage in life:
            life[v.storage] = (life[v.storage][0], len(order))
    return life


def plan_memory(graph: Graph, order: Sequence[Node], *, reuse: bool = True) -> MemoryPlan:
    """Offsets by falling size, each at the lowest gap among those alive at the same time.

    Without `reuse` nothing shares room, for backends whose kernels overlap in time.
    """
    life = lifetimes(graph, order)
    if not reuse:
        life = dict.fromkeys(life, (0, len(order)))
    size = {v: -(-v.type.nbytes // ALIGN) * ALIGN for v in life}
    placed: list[tuple[int, int, int, int]] = []
    offsets: dict[Value, int] = {}
    for v in sorted(life, key=lambda v: -size[v]):
        born, dies = life[v]
        at = 0
        for low, high in sorted((o, o + s) for o, s, b, d in placed if b <= dies and born <= d and s):
            if at + size[v] <= low:
                break
            at = max(at, high)
        offsets[v] = at
        placed.append((at, size[v], born, dies))
    changes = [0] * (len(order) + 2)
    for v, (born, dies) in life.items():
        changes[born] += size[v]
        changes[dies + 1] -= size[v]
    peak = alive = 0
    for c in changes:
        alive += c
        peak = max(peak, alive)
    plan = MemoryPlan(offsets, max((o + s for o, s, *_ in placed), default=0), sum(size.values()), peak)
    verify_memory(graph, order, plan)
    return plan


def verify_memory(graph: Graph, order: Sequence[Node], plan: MemoryPlan) -> None:
    """PlanError where two values that are alive at the same time overlap, or a value has no room."""
    life = lifetimes(graph, order)
    events = [(born, dies, v) for v, (born, dies) in life.items() if v.type.nbytes]
    alive: list[tuple[int, Value]] = []
    for born, dies, v in sorted(events, key=lambda e: e[0]):
        at = plan.offsets.get(v)
        if at is None or at + v.type.nbytes > plan.arena:
            raise PlanError(f"{v!r} has no room in the arena of {plan.arena} bytes")
        alive = [(d, w) for d, w in alive if d >= born]
        for _, w in alive:
            other = plan.offsets[w]
            if at < other + w.type.nbytes and other < at + v.type.nbytes:
                raise PlanError(f"{v!r} and {w!r} are alive at the same time and share bytes of the arena")
        alive.append((dies, v))
