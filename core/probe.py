"""Asks one backend for its devices and prints them as JSON; in a process of its own, as a driver may crash or hang."""

from __future__ import annotations

import json
import sys

from .plugins import ANSWER, ask_devices, device_json, host


def main(name: str) -> None:
    """Print a line of its own: `ANSWER` and `{"devices": […], "reason": "…"}`."""
    devices, reason = ask_devices(type(host().backend(name)))
    answer = json.dumps({"devices": [device_json(d) for d in devices], "reason": reason})
    print(f"\n{ANSWER}{answer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
