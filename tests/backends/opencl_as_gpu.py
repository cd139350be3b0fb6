"""A plugin for tests: the first OpenCL device with its kernels shaped as for a GPU, or for one with small limits.

`trueup check --backend opencl_as_gpu --plugin opencl_as_gpu` with this folder in PYTHONPATH.
"""

from __future__ import annotations

from dataclasses import replace

from trueup.backends.opencl.devices import find
from trueup.core.backend import Backend, Device, Target
from trueup.core.plugins import hookimpl

LIMITS = {"opencl_as_gpu": {}, "opencl_as_small": {"work_group": 32, "local_memory": 16 << 10, "allocation": 32 << 20}}


class AsGpu(Backend):
    name = "opencl_as_gpu"
    API = (1, 0)

    def devices(self) -> list[Device]:
        device, _ = find()[0]
        return [replace(device, kind="gpu", limits={**device.limits, **LIMITS[self.name]})]

    def open(self, device: Device) -> Target:
        from trueup.backends.opencl.target import OpenCLTarget

        return OpenCLTarget(device, find()[0][1])


class AsSmall(AsGpu):
    name = "opencl_as_small"
    API = (1, 0)


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [AsGpu, AsSmall]
