"""Asks one backend for its devices and prints them as JSON; in a process of its own, as a driver may crash or hang."""

from __future__ import annotations

import json
import sys

from .plugins import ask_devices, device_json, host


def main(name: str) -> None:
    """Print `{"devices": […], "reason": "…"}` on the last line of standard output."""
    devices, reason = ask_devices(type(host().backend(name)))
    print(json.dumps({"devices": [device_json(d) for d in devices], "reason": reason}))


if __name__ == "__main__":
    main(sys.argv[1])
