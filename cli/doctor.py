"""`trueup doctor`: runs something small on every device."""

from __future__ import annotations

import json as json_format
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import typer

from trueup.cli.options import AsJson
from trueup.cli.show import dump, lines, table

if TYPE_CHECKING:
    from trueup.core.plugins import BackendInfo

TIMEOUT = 60.0
"""Seconds that a device has for a handful of numbers, drivers and compilers included."""


def doctor(ctx: typer.Context, json: AsJson = False) -> None:
    """Run a small graph on every device.

    The results are compared with values made by hand. Each device is tried in a process of its own with a time limit.
    Exit code 1 where a backend that calls itself usable fails.

    Examples:

    \b
        trueup doctor
        trueup doctor --json
    """
    from trueup.core.plugins import host

    found = host().info()
    ctx.find_root().command.plugin_commands()  # type: ignore[attr-defined]  # so that broken commands show, too
    devices = [(b.name, i, d.name) for b in found for i, d in enumerate(b.devices)]
    with ThreadPoolExecutor(4) as pool:
        tried = pool.map(lambda d: try_device(d[0], d[1]), devices)
        outcomes = [
            {"backend": name, "device": device, **t} for (name, _, device), t in zip(devices, tried, strict=True)
        ]
    unusable = [{"backend": b.name, "reason": b.reason} for b in found if not b.available]
    broken = [{"plugin": p.name, "dist": p.dist, "version": p.version, "status": p.status, "reason": p.reason}
              for p in host().plugins if p.status != "ok"]  # fmt: skip
    system = about(found)
    if json:
        dump({"system": system, "devices": outcomes, "unusable": unusable, "plugins": broken})
    else:
        lines([(k, v) for k, v in system.items() if v], indent=0)
        print()
        rows = [
            (
                o["backend"],
                o["device"],
                "ok" if o["ok"] else "FAILED",
                seconds(o["seconds"]),
                places(o),
                o["reason"] or refused(o),
            )
            for o in outcomes
        ]
        rows += [(u["backend"], "", "not usable", "", "", u["reason"]) for u in unusable]
        rows += [(f"plugin {p['plugin']}", "", p["status"], "", "", p["reason"]) for p in broken]
        table(("backend", "device", "result", "time", "nodes", "reason"), rows, right=("time",))
    if not all(o["ok"] for o in outcomes):
        raise typer.Exit(1)


def try_device(name: str, number: int, timeout: float = TIMEOUT) -> dict[str, Any]:
    """What `trueup.cli.checkup` says of a device; a crash or a hang of its process is a failure with that reason."""
    command = [sys.executable, "-m", "trueup.cli.checkup", name, str(number)]
    failed: dict[str, Any] = {"ok": False, "reason": "", "seconds": None, "nodes": {}, "refused": []}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return failed | {"reason": f"no result within {timeout:g} s"}
    try:
        outcome: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return failed | {"reason": f"its process ended with code {done.returncode}: {last}"}
    return outcome


def about(found: list[BackendInfo]) -> dict[str, str]:
    """Versions and processor."""
    import numpy

    import trueup

    cpu = next((d for b in found if b.name == "cpu" for d in b.devices), None)
    return {
        "trueup": trueup.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "numpy": numpy.__version__,
        "system": platform.platform(),
        "processor": cpu.name if cpu else platform.processor(),
        "cores": str(cpu.limits.get("cores", "") if cpu else os.cpu_count()),
        "instruction sets": f"{', '.join(sorted(cpu.features))}; in use: {cpu.versions.get('isa')}" if cpu else "",
    }


def places(outcome: dict[str, Any]) -> str:
    """Nodes by where they ran, in short."""
    return ", ".join(f"{n} {where}" for where, n in outcome["nodes"].items())


def refused(outcome: dict[str, Any]) -> str:
    return "".join(f"refuses {r}" for r in outcome["refused"][:1])


def seconds(t: float | None) -> str:
    return "" if t is None else f"{t * 1000:.0f} ms"
