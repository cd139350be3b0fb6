"""The Metal backend: every op in terms of MLX's operations, on an Apple GPU; elsewhere on MLX's CPU build, to be tested.

`ops/` says which operations an op is made of, `weights.py` how GGUF's blocks lie in MLX's formats. Importing this module
does not import MLX.
"""

from __future__ import annotations

from trueup.core.backend import Backend, Device, Target
from trueup.core.errors import Unavailable
from trueup.core.plugins import hookimpl

from .devices import find


class Metal(Backend):
    """The Apple GPU of this machine, or the test device where there is none."""

    name = "metal"

    def devices(self) -> list[Device]:
        return find()

    def open(self, device: Device) -> Target:
        """MLX's default device becomes this one. Unavailable where the device is no longer there."""
        if device.name not in (d.name for d in find()):
            raise Unavailable(f"the Metal device {device.name} is gone")
        from .target import MetalTarget

        return MetalTarget(device)


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [Metal]
