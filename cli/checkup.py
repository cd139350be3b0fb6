"""Runs a small graph on one device and compares with values made by hand; in its own process, as drivers may crash.

`python -m trueup.cli.checkup NAME DEVICE` prints the outcome as JSON on the last line of standard output.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

X = np.array([[1, 2, 3, 4], [0, -1, 2, 0.5]], np.float32)
W = np.array([[1, 0, 0, 0], [0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5]], np.float32)
VALUES = [[6, 5], [0.75, 0]]
INDICES = [[1, 2], [2, 0]]
"""Of X times W transposed, [[1, 6, 5], [0, -0.5, 0.75]], the two largest of each row: exact in bfloat16, too."""


def check(name: str, number: int) -> dict[str, Any]:
    """Outcome for a device: `ok`, the `reason` where it is not, `seconds` from opening to result, nodes by place.

    What the device refuses runs on the reference; a device that runs nothing itself is not ok.
    """
    from trueup.core.backend import Storage
    from trueup.core.graph import Graph
    from trueup.core.ops import linear, top_k
    from trueup.core.plan import PlanOptions, build_plan
    from trueup.core.plugins import host
    from trueup.core.weight import Weight

    graph = Graph()
    values, indices = top_k(linear(graph.input("x", *X.shape), graph.weight(Weight.of("w", W))), k=2)
    graph.output("values", values)
    graph.output("indices", indices)

    backend = host().backend(name)
    start = time.perf_counter()
    target = backend.open(backend.devices()[number])
    try:
        plan = build_plan(graph, target, PlanOptions(allow_fallback=True))
        executable = target.compile(plan, Storage())
        out = executable.run({"x": X})
        executable.close()
    finally:
        target.close()
    seconds = time.perf_counter() - start
    reasons = [f"{node.op.name}: {p.reason}" for node, p in plan.fallbacks]
    found = {"values": out["values"].tolist(), "indices": out["indices"].tolist()}
    wanted = {"values": VALUES, "indices": INDICES}
    if len(plan.fallbacks) == len(plan.placements):
        reason = f"it refuses everything: {'; '.join(reasons)}"
    else:
        reason = "; ".join(f"{k} are {found[k]}, expected {wanted[k]}" for k in wanted if found[k] != wanted[k])
    return {"ok": not reason, "reason": reason, "seconds": seconds, "nodes": plan.counts(), "refused": reasons}


def main(name: str, number: int) -> None:
    try:
        outcome = check(name, number)
    except Exception as e:  # whatever a third party's backend raises is the answer
        outcome = {"ok": False, "reason": f"{type(e).__name__}: {e}", "seconds": None, "nodes": {}, "refused": []}
    print()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
