"""A plugin for tests: the CUDA backend on the emulated device.

`trueup check --backend cuda_emulated --plugin emulated_cuda.plugin` with `tests/cuda` in PYTHONPATH.
"""

from __future__ import annotations

from trueup.backends.cuda.target import CudaTarget
from trueup.core.backend import Backend, Device, Target
from trueup.core.plugins import hookimpl


class EmulatedCUDA(Backend):
    name = "cuda_emulated"
    API = (1, 0)

    def devices(self) -> list[Device]:
        return [Device("emulated", "accelerator", memory=1 << 32, hardware="emulated cuda")]

    def open(self, device: Device) -> Target:
        from .driver import EmulatedDriver

        return CudaTarget(device, EmulatedDriver(), name=self.name)


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [EmulatedCUDA]
