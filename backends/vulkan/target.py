"""An open Vulkan device."""

from __future__ import annotations

from trueup.backends.simt.programs import Programs
from trueup.backends.simt.target import SimtTarget
from trueup.backends.simt.tuning import PROMPT, Tuning
from trueup.core.backend import Device
from trueup.core.backend.recorded.images import Images

from . import compiler
from .driver import VulkanDriver
from .programs import TEXTS, options

NEAR = 16 * 1024
"""Bytes of top_k's keys in shared memory: half of what every device has."""
FEW = 64
"""Rows below which processors are taken to be idle: Vulkan does not say how many there are."""


class VulkanTarget(SimtTarget):
    """The kernels in `slang/` over the memory of one device."""

    def __init__(
        self,
        device: Device,
        driver: VulkanDriver,
        *,
        name: str = "vulkan",
        invariant: bool = False,
        images: Images | None = None,
    ) -> None:
        """`images`: where compiled programs are kept."""
        room = driver.attributes["max_shared_memory_per_block"]
        tuning = Tuning(room, FEW, 0 if invariant else PROMPT, warps=1, near=NEAR)
        programs = Programs(driver, TEXTS, options(tuning), compiler.version(), images)
        super().__init__(name, device, driver, programs, tuning)
