"""A worker process: opens a backend and judges the cases that it is sent, one JSON line each. It may crash or hang.

Talks on the descriptors given on its command line; what kernels print goes to standard error, and into the report.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from typing import Any

import trueup.core.ops  # noqa: F401  # the ops are known by name
from trueup.core.errors import Unavailable

from .errors import KitError
from .harness import Spec
from .levels import Bench


def main(asked: int, answered: int, spec: Spec) -> None:
    """Serve until the pipe is closed."""
    faulthandler.enable()
    requests, answers = os.fdopen(asked), os.fdopen(answered, "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        bench = Bench(spec)
    except Unavailable as e:
        say(error=str(e))
        return
    say(**about(bench))
    for line in requests:
        request = json.loads(line)
        try:
            if "speed" in request:
                from .speed import measure

                say(speed=measure(bench.rig, request["speed"]))
            else:
                say(verdict=bench.run(request["case"]).json())
        except KitError as e:
            say(error=str(e))
        except Exception:
            say(fault=traceback.format_exc())


def about(bench: Bench) -> dict[str, Any]:
    """The device, its claims, and the ops that it has kernels for."""
    from trueup.core.plugins import device_json

    from .properties import claimed

    target = bench.rig.target
    claims = target.capabilities
    return {
        "device": device_json(target.device),
        "target": target.name,
        "memory": "managed" if bench.rig.managed else "host" if bench.rig.guards else "its own",
        "claims": {
            "deterministic": claims.deterministic, "batch_invariant": claims.batch_invariant, "max_rows": claims.max_rows,
            "thresholds": {k: list(v) for k, v in claims.thresholds.items()},
        },
        "claimed": sorted(claimed(bench.rig)),
        "fusions": [p.name for p in target.patterns],
    }  # fmt: skip


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(given["asked"], given["answered"], Spec(given["name"], tuple(given["plugins"]), given["options"]))
