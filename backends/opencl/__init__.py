"""The OpenCL backend: OpenCL C 1.2 kernels, built at run time, for any device that a platform of this machine offers.

The files in `cl/` are the kernels, `ops/` says which runs which op. Importing this module touches no driver.
"""

from __future__ import annotations

from trueup.core.backend import Backend, Device, Target
from trueup.core.errors import Unavailable
from trueup.core.plugins import hookimpl

from .devices import find
from .tuning import Tuning


class OpenCL(Backend):
    """Every device of every OpenCL platform, each piece of hardware once."""

    name = "opencl"

    def devices(self) -> list[Device]:
        return [device for device, _ in find()]

    def open(self, device: Device, *, invariant: bool = False) -> Target:
        """`invariant`: a row's bits depend on nothing but its own sequence up to it, at the cost of speed in prompts (on
        processors they never do). Unavailable where the device is no longer there."""
        for found, handle in find():
            if found.hardware == device.hardware and found.name == device.name:
                from .target import OpenCLTarget

                return OpenCLTarget(found, handle, tuning=Tuning.of(found, invariant=invariant))
        raise Unavailable(f"the OpenCL device {device.name} ({device.hardware}) is gone")


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [OpenCL]
