"""Place: for each node the kernel that runs it, or, where that was asked for, the reference, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trueup.core.errors import Refused
from trueup.core.graph import Graph, Node, State

Where = Literal["device", "reference body", "view", "prologue", "fallback"]


@dataclass(frozen=True)
class Placement:
    """Where a node runs and by what.

    `device`: a kernel of the backend. `reference body`: the op's NumPy body, registered by a backend on the host as its
    kernel. `view`: no kernel. `prologue`: on the host before the step. `fallback`: on the reference because the device
    refused, for `reason`; `bytes` is the most that moves for it in a step besides the pages and slots of its states.
    """

    where: Where
    kernel: str
    reason: str = ""
    bytes: int = 0


def place(
    graph: Graph, supports: Callable[[Node], Any], kernel: Callable[[Node], Any], *, backend: str, allow_fallback: bool
) -> tuple[dict[Node, Placement], dict[Node, Any]]:
    """Placements of all nodes and kernels of those on the device.

    Refused, naming the node and the reason, where the device refuses and falling back was not asked for.
    """
    placements: dict[Node, Placement] = {}
    kernels: dict[Node, Any] = {}
    for n in graph.nodes:
        if n.host:
            placements[n] = Placement("prologue", n.op.name)
        elif n.op.view:
            placements[n] = Placement("view", "")
        elif answer := supports(n):
            k = kernels[n] = kernel(n)
            placements[n] = Placement("reference body" if k.reference else "device", k.name)
        elif allow_fallback:
            moved = sum(v.type.nbytes for v in (*n.values, *n.outputs) if not isinstance(v, State) and v.data is None)
            placements[n] = Placement("fallback", n.op.name, answer.reason, moved)
        else:
            raise Refused(
                f"backend {backend} refuses {n.describe()}: {answer.reason}; "
                "--allow-fallback runs such nodes on the reference"
            )
    return placements, kernels
