"""The CUDA backend: kernels compiled by NVRTC when they are first needed, a step replayed as one graph.

The files in `cu/` are the kernels; the rest of the package is its driver. Importing this module touches no driver.
"""

from __future__ import annotations

from trueup.core.backend import Backend, Device, Target
from trueup.core.errors import Unavailable
from trueup.core.plugins import hookimpl

from .devices import find


class CUDA(Backend):
    """Every NVIDIA device that the driver offers."""

    name = "cuda"

    def devices(self) -> list[Device]:
        return find()

    def open(self, device: Device, *, invariant: bool = False) -> Target:
        """`invariant`: a row's bits depend on nothing but its own sequence up to it, at the cost of speed in prompts.
        Unavailable where the device is no longer there."""
        for found in find():
            if found.hardware == device.hardware and found.name == device.name:
                from trueup.backends.simt.tuning import Tuning

                from .driver import CudaDriver
                from .target import CudaTarget

                driver = CudaDriver(found.limits["ordinal"])
                tuning = Tuning.of(driver.attributes, invariant=invariant)
                return CudaTarget(found, driver, tuning=tuning, compiler=found.versions["nvrtc"])
        raise Unavailable(f"the CUDA device {device.name} ({device.hardware}) is gone")


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [CUDA]
