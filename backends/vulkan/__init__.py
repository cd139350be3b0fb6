"""The Vulkan backend: kernels in Slang, compiled when they are first needed, a step replayed as one command buffer.

The files in `slang/` are the kernels; the rest of the package is its driver. Importing this module loads no library.
"""

from __future__ import annotations

from trueup.core.backend import Backend, Device, Target
from trueup.core.errors import Unavailable
from trueup.core.plugins import hookimpl

from .devices import find


class Vulkan(Backend):
    """Every device of every driver that has what the kernels need (`devices.FEATURES`…)."""

    name = "vulkan"

    def devices(self) -> list[Device]:
        from .compiler import slang

        found = [d for d, _ in find()]
        slang()
        return found

    def open(self, device: Device, *, invariant: bool = False) -> Target:
        """`invariant`: a row's bits depend on nothing but its own sequence up to it, at the cost of speed in prompts.
        Unavailable where the device is no longer there."""
        for found, handle in find():
            if found.hardware == device.hardware and found.name == device.name:
                from .driver import VulkanDriver
                from .target import VulkanTarget

                return VulkanTarget(found, VulkanDriver(handle, found), invariant=invariant)
        raise Unavailable(f"the Vulkan device {device.name} ({device.hardware}) is gone")


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [Vulkan]
