"""Which OpenCL devices there are, as data: each piece of hardware once, with its limits. Compiles and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trueup.core.backend import Device
from trueup.core.errors import Unavailable

Found = tuple[Device, Any]
"""A device as trueup describes it, and as pyopencl does."""


def opencl() -> Any:
    """pyopencl; Unavailable with what to do where it can't be imported."""
    try:
        import pyopencl
    except ImportError as e:
        raise Unavailable(f"pyopencl can't be imported ({e}); pip install 'trueup[opencl]' brings it") from e
    return pyopencl


def find() -> list[Found]:
    """All devices of all platforms, each piece of hardware once; Unavailable where there is none."""
    cl = opencl()
    try:
        platforms = cl.get_platforms()
    except cl.Error as e:
        raise Unavailable(f"OpenCL has no platform: {e}; pip install 'trueup[opencl]' brings one for processors") from e
    found: list[Found] = []
    empty: list[str] = []
    for p in platforms:
        try:
            devices = p.get_devices()
        except cl.Error as e:
            devices = []
            empty.append(f"{p.name} ({e})")
        found += [(describe(cl, d, i), d) for i, d in enumerate(devices)]
    if not found:
        raise Unavailable(f"no OpenCL platform has a device: {', '.join(empty) or 'there is no platform'}")
    return once(found)


def once(found: Iterable[Found]) -> list[Found]:
    """Each piece of hardware by the platform of the newest version; GPUs before processors, else as listed."""
    best: dict[str, Found] = {}
    for d in found:
        key = d[0].hardware or d[0].name
        if key not in best or _version(d[0]) > _version(best[key][0]):
            best[key] = d
    return sorted(best.values(), key=lambda d: d[0].kind == "cpu")


def describe(cl: Any, device: Any, index: int) -> Device:
    """A device as data; `index` is its place in its platform."""
    kind = _kind(cl, device)
    extensions = frozenset(device.extensions.split())
    config = device.single_fp_config
    features = set(extensions)
    if config & cl.device_fp_config.DENORM:
        features.add("denormals")
    if config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
        features.add("correctly_rounded_divide_sqrt")
    if kind == "gpu" and device.host_unified_memory:
        features.add("unified_memory")
    return Device(
        name=device.name.strip(),
        kind=kind,
        memory=device.global_mem_size,
        limits={
            "work_group": device.max_work_group_size,
            "local_memory": device.local_mem_size,
            "allocation": device.max_mem_alloc_size,
            "compute_units": device.max_compute_units,
        },
        features=frozenset(features),
        versions={
            "opencl": device.version.strip(),
            "driver": device.driver_version.strip(),
            "platform": f"{device.platform.name.strip()} {device.platform.version.strip()}",
        },
        hardware="host" if kind == "cpu" else _pci(cl, device) or f"{device.platform.name.strip()} {index}",
    )


def _kind(cl: Any, device: Any) -> str:
    if device.type & cl.device_type.CPU:
        return "cpu"
    return "gpu" if device.type & cl.device_type.GPU else "accelerator"


def _pci(cl: Any, device: Any) -> str | None:
    """The PCI address, as the system writes it, where an extension gives it."""

    def ask(name: str) -> Any:
        key = getattr(cl.device_info, name, None)
        try:
            return None if key is None else device.get_info(key)
        except cl.Error:
            return None

    bus, slot, domain = ask("PCI_BUS_ID_NV"), ask("PCI_SLOT_ID_NV"), ask("PCI_DOMAIN_ID_NV")
    if bus is not None and slot is not None:
        return f"{domain or 0:04x}:{bus:02x}:{slot >> 3:02x}.{slot & 7}"
    amd = ask("TOPOLOGY_AMD")
    if amd is not None and hasattr(amd, "bus"):
        return f"0000:{amd.bus & 255:02x}:{amd.device & 255:02x}.{amd.function & 255}"
    return None


def _version(device: Device) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What decides between two platforms that offer one piece of hardware: OpenCL's version, then the driver's."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(n) for n in re.findall(r"\d+", text))

    return numbers(device.versions.get("opencl", ""))[:2], numbers(device.versions.get("driver", ""))
