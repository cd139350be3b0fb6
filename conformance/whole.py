"""A whole graph on the target under test: compiled with its states, run step by step. Knows no graph in particular."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import AddressedTarget, HostMemory, Storage
from trueup.core.graph import Graph
from trueup.core.plan import Plan, PlanOptions, build_plan
from trueup.core.state import PerSequence

from .harness import Rig, blame

Array = NDArray[Any]


def fresh_states(graph: Graph, *, poison: bool = True) -> dict[str, Array]:
    """Every state as an engine begins with it: fills in slots; in pages what was there, which nobody may read."""
    out: dict[str, Array] = {}
    for name, s in graph.states.items():
        if isinstance(s.kind, PerSequence):
            out[name] = np.full(s.type.shape, s.kind.fill, s.type.element.numpy)
        else:
            odd: Any = np.nan if poison and s.type.dtype.startswith("f") else 0
            out[name] = np.full(s.type.shape, odd, s.type.element.numpy)
    return out


ELSEWHERE = "the backend runs no node of it"
"""Why a graph that the reference alone runs says nothing of the backend."""


class WholeGraph:
    """A graph compiled on a rig. A context manager: leaving it gives everything back."""

    def __init__(self, rig: Rig, graph: Graph, options: PlanOptions) -> None:
        """Refused where the target refuses a node and `options` allow no fallback."""
        self.rig, self.graph = rig, graph
        with blame():
            self.plan: Plan = build_plan(graph, rig.target, options)
        on_host, memory = graph.host_states, rig.target.memory
        self.memories = {n: HostMemory() if n in on_host else memory for n in graph.states}
        self.handles: dict[str, Any] = {}
        self.exe: Any = None
        try:
            for name, s in graph.states.items():
                self.handles[name] = self.memories[name].allocate(s.type)
            storage = Storage(
                {n: h for n, h in self.handles.items() if n not in on_host},
                {n: h for n, h in self.handles.items() if n in on_host},
            )
            with blame():
                self.exe = rig.target.compile(self.plan, storage)
        except BaseException:
            self.close()
            raise
        if isinstance(rig.target, AddressedTarget):
            rig.target.poison = True

    def __enter__(self) -> WholeGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def put(self, states: Mapping[str, Array]) -> None:
        for name, array in states.items():
            self.memories[name].upload(self.handles[name], array)

    @property
    def where(self) -> str:
        """Where its nodes run, for a verdict: "device", and which ops on the reference; "" where the reference runs all."""
        fell = {n.op.name for n, _ in self.plan.fallbacks}
        if not any(p.where in ("device", "reference body") for p in self.plan.placements.values()):
            return ""
        return "device" + (f", {', '.join(sorted(fell))} on the reference" if fell else "")

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One step; its outputs."""
        with blame():
            return {k: np.asarray(v) for k, v in self.exe.run(inputs).items()}

    def states(self) -> dict[str, Array]:
        return {n: self.memories[n].download(h) for n, h in self.handles.items()}

    def broken(self) -> str:
        """A canary that was overwritten, or ""."""
        return self.rig.guards.broken() if self.rig.guards else ""

    def close(self) -> None:
        if self.exe is not None:
            self.exe.close()
        for name, handle in self.handles.items():
            self.memories[name].free(handle)
        self.exe, self.handles = None, {}
        if isinstance(self.rig.target, AddressedTarget):
            self.rig.target.poison = False
