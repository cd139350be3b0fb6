"""Which backend and device a name means: a named one is taken or refused, `auto` is chosen from what each backend offers.

Knows devices as data; opens one at the end and nothing before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trueup.core.backend import Device, Target
from trueup.core.errors import Unavailable
from trueup.core.plugins import BackendInfo, host

AUTO = "auto"
OWN = ("cuda",)
"""Backends in the tree that speak a device's own language; of one card offered twice theirs is taken."""


def resolve(name: str) -> str:
    """`auto` as the NAME:DEVICE that it means here; another name as it is, so that it is opened or refused."""
    return choose(host().info()) if name == AUTO else name


def choose(found: Iterable[BackendInfo]) -> str:
    """The best device that computes for itself, as NAME:DEVICE, or "cpu" where there is none.

    Devices of kind "cpu" are never taken, software that a GPU's API offers among them. One piece of hardware, by
    `Device.hardware`, is taken once: by a backend of its own language, else by the first that lists it. Of several
    devices one with memory of its own comes first, then the one with more.
    """
    order = sorted(found, key=lambda b: b.name not in OWN)
    offers: dict[str, tuple[str, Device]] = {}
    for b in order:
        for i, d in enumerate(b.devices):
            if d.kind != "cpu":
                offers.setdefault(d.hardware or f"{b.name}:{i}", (f"{b.name}:{i}", d))
    if not offers:
        return "cpu"
    return max(offers.values(), key=lambda o: ("unified_memory" not in o[1].features, o[1].memory or 0))[0]


def open_target(name: str, options: dict[str, Any]) -> Target:
    """Open a backend's device: `cpu`, `auto`, or `opencl:1` and `opencl:NAME` for another than the first. Unavailable
    says why not."""
    backend_name, _, wanted = resolve(name).partition(":")
    backend = host().backend(backend_name)
    devices = backend.devices()
    if not devices:
        raise Unavailable(f"backend {backend_name} has no device here")
    return backend.open(_pick(backend_name, devices, wanted), **options)


def _pick(backend: str, devices: list[Device], wanted: str) -> Device:
    if not wanted:
        return devices[0]
    if wanted.isdecimal() and int(wanted) < len(devices):
        return devices[int(wanted)]
    named = [d for d in devices if wanted.lower() in d.name.lower()]
    if len(named) == 1:
        return named[0]
    have = ", ".join(f"{i}: {d.name}" for i, d in enumerate(devices))
    raise Unavailable(
        f"backend {backend} has {'no' if not named else 'more than one'} device '{wanted}'; it has {have}"
    )
