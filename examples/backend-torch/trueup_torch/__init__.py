"""The backend `torch`: PyTorch, eagerly, on the CPU, CUDA or MPS. Nothing here imports torch before devices are asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from trueup.core.backend import Backend, Device, Target
from trueup.core.errors import Unavailable
from trueup.core.plugins import hookimpl


class Torch(Backend):
    """Every device that PyTorch has; the name of each begins with torch's own name of it."""

    name = "torch"
    API = (1, 0)

    def devices(self) -> list[Device]:
        torch = _torch()
        versions = {"torch": torch.__version__}
        found = [Device("cpu", "cpu", versions=versions, hardware="host")]
        if torch.cuda.is_available():
            for i in range(torch.cuda.device_count()):
                p = torch.cuda.get_device_properties(i)
                place = "pci_domain_id", "pci_bus_id", "pci_device_id"
                pci = "{:04x}:{:02x}:{:02x}.0".format(*(getattr(p, n) for n in place)) if hasattr(p, place[0]) else None
                more = versions | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
                found.append(Device(f"cuda:{i} {p.name}", "gpu", memory=p.total_memory, versions=more, hardware=pci))
        if torch.backends.mps.is_available():
            found.append(Device("mps", "gpu", versions=versions))
        return found

    def open(self, device: Device) -> Target:
        torch = _torch()
        from .target import TorchTarget

        return TorchTarget(device, torch.device(device.name.partition(" ")[0]))


def _torch() -> ModuleType:
    try:
        import torch
    except Exception as e:  # a broken installation raises whatever its libraries raise
        raise Unavailable(f"PyTorch can't be imported: {type(e).__name__}: {e}") from e
    return torch


@hookimpl
def trueup_backends() -> list[type[Any]]:
    return [Torch]
