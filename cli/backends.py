"""`trueup backends`: what can compute here, and why not the rest."""

from __future__ import annotations

import sys

from trueup.cli.options import AsJson
from trueup.cli.show import dump, size, table


def backends(json: AsJson = False) -> None:
    """List the backends and their devices.

    Where one can't be used here, the reason is shown. Each driver is asked in a process of its own, so that one that
    crashes or hangs disturbs nothing.

    Examples:

    \b
        trueup backends
        trueup backends --json
    """
    from trueup.core.plugins import device_json, host

    found = host().info()
    if json:
        dump(
            [
                {
                    "name": b.name, "available": b.available, "reason": b.reason, "plugin": b.plugin, "dist": b.dist,
                    "version": b.version, "api": list(b.api), "devices": [device_json(d) for d in b.devices],
                }
                for b in found
            ]
        )  # fmt: skip
        return
    rows = []
    for b in found:
        origin = f"{b.dist} {b.version}", f"{b.api[0]}.{b.api[1]}"
        for i, d in enumerate(b.devices):
            first = (b.name, "yes", *origin) if i == 0 else ("", "", "", "")
            rows.append((*first[:2], f"{i}: {d.name}", d.kind, size(d.memory), *first[2:], ""))
        if not b.devices:
            rows.append((b.name, "no", "", "", "", *origin, b.reason))
    table(("backend", "usable", "device", "kind", "memory", "from", "contract", "reason"), rows, right=("memory",))
    broken = [p.name for p in host().plugins if p.status == "broken"]  # who blocks one knows it
    if broken:
        print(f"trueup: plugins that did not load: {', '.join(broken)}; see trueup plugins", file=sys.stderr)
