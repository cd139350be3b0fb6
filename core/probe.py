"""Imports a plugin, and asks one of its backends for devices, in a process of its own: an import or a driver may crash or hang.

`python -m trueup.core.probe import PLUGIN MODULE` or `… devices PLUGIN MODULE BACKEND` prints a line of its own: `ANSWER` and
JSON. No answer is an answer, too.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .plugins import ANSWER, GROUP, PluginHost, ask_devices, device_json


def main(asked: str, plugin: str, module: str, backend: str = "") -> None:
    """Load this plugin alone and answer: `{}`, or `{"devices": […], "reason": "…"}`."""
    installed = (p for p in entry_points(group=GROUP) if (p.name, p.value) == (plugin, module))
    point = next(installed, EntryPoint(plugin, module, GROUP))
    host = PluginHost([point], isolate=False).load()
    answer: dict[str, Any] = {}
    if asked == "devices":
        devices, reason = ask_devices(type(host.backend(backend)))
        answer = {"devices": [device_json(d) for d in devices], "reason": reason}
    print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # what was started is not waited for
