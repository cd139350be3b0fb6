"""Which CUDA devices there are, as data. Compiles and runs nothing."""

from __future__ import annotations

from trueup.core.backend import Device
from trueup.core.errors import Unavailable

from .driver import attributes, bindings, call, nvrtc_version


def find() -> list[Device]:
    """All devices, by their number; Unavailable with what is missing where there is none."""
    cu = bindings()
    compiler = nvrtc_version()
    count = call(cu, "cuDeviceGetCount")
    if not count:
        raise Unavailable("the NVIDIA driver has no device")
    version = call(cu, "cuDriverGetVersion")
    found = []
    for i in range(count):
        device = call(cu, "cuDeviceGet", i)
        a = attributes(cu, device)
        name = call(cu, "cuDeviceGetName", 256, device).split(b"\0", 1)[0].decode().strip()
        found.append(
            Device(
                name=name,
                kind="gpu",
                memory=int(call(cu, "cuDeviceTotalMem", device)),
                limits={k: v for k, v in a.items() if not k.startswith("pci_")} | {"ordinal": i},
                features=frozenset({f"sm_{a['compute_capability_major']}{a['compute_capability_minor']}"}),
                versions={"driver": f"{version // 1000}.{version % 1000 // 10}", "nvrtc": compiler},
                hardware=f"{a['pci_domain_id']:04x}:{a['pci_bus_id']:02x}:{a['pci_device_id']:02x}.0",
            )
        )
    return found
