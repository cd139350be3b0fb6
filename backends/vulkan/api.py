"""Vulkan's functions as the `vulkan` package's cffi layer has them, without its wrappers: a wrapped call costs some ten times a
raw one. Importing this loads nothing; `vulkan()` does, and says what is missing where it can't."""

from __future__ import annotations

import functools
from typing import Any

from trueup.core.errors import Unavailable

HINT = "pip install 'trueup[vulkan]' brings it"

# What the package's constants lack or give as None.
BUFFER_USAGE_SHADER_DEVICE_ADDRESS, MEMORY_ALLOCATE_DEVICE_ADDRESS = 0x20000, 0x2
FOREVER = (1 << 64) - 1
VERSION_1_2, VERSION_1_3 = 1 << 22 | 2 << 12, 1 << 22 | 3 << 12
SUCCESS, TIMEOUT, OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_LOST = 0, 2, -1, -2, -4
INITIALIZATION_FAILED, INCOMPATIBLE_DRIVER = -3, -9
NAMES = {
    OUT_OF_HOST_MEMORY: "VK_ERROR_OUT_OF_HOST_MEMORY", OUT_OF_DEVICE_MEMORY: "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    INITIALIZATION_FAILED: "VK_ERROR_INITIALIZATION_FAILED", DEVICE_LOST: "VK_ERROR_DEVICE_LOST",
    -5: "VK_ERROR_MEMORY_MAP_FAILED", -6: "VK_ERROR_LAYER_NOT_PRESENT", -7: "VK_ERROR_EXTENSION_NOT_PRESENT",
    -8: "VK_ERROR_FEATURE_NOT_PRESENT", INCOMPATIBLE_DRIVER: "VK_ERROR_INCOMPATIBLE_DRIVER",
    -10: "VK_ERROR_TOO_MANY_OBJECTS", -13: "VK_ERROR_UNKNOWN", -1000012000: "VK_ERROR_INVALID_SHADER_NV",
}  # fmt: skip

TYPES = {
    "VkApplicationInfo": 0, "VkInstanceCreateInfo": 1, "VkDeviceQueueCreateInfo": 2, "VkDeviceCreateInfo": 3,
    "VkSubmitInfo": 4, "VkMemoryAllocateInfo": 5, "VkSemaphoreCreateInfo": 9, "VkBufferCreateInfo": 12,
    "VkShaderModuleCreateInfo": 16, "VkPipelineCacheCreateInfo": 17, "VkPipelineShaderStageCreateInfo": 18,
    "VkComputePipelineCreateInfo": 29, "VkPipelineLayoutCreateInfo": 30, "VkCommandPoolCreateInfo": 39,
    "VkCommandBufferAllocateInfo": 40, "VkCommandBufferBeginInfo": 42, "VkMemoryBarrier": 46,
    "VkPhysicalDeviceVulkan11Features": 49, "VkPhysicalDeviceVulkan12Features": 51,
    "VkPhysicalDeviceFeatures2": 1000059000, "VkPhysicalDeviceProperties2": 1000059001,
    "VkMemoryAllocateFlagsInfo": 1000060000, "VkPhysicalDeviceSubgroupProperties": 1000094000,
    "VkPhysicalDeviceMaintenance3Properties": 1000168000, "VkPhysicalDeviceDriverProperties": 1000196000,
    "VkSemaphoreTypeCreateInfo": 1000207002, "VkTimelineSemaphoreSubmitInfo": 1000207003,
    "VkSemaphoreWaitInfo": 1000207004, "VkPhysicalDevicePCIBusInfoPropertiesEXT": 1000212000,
    "VkBufferDeviceAddressInfo": 1000244001, "VkPhysicalDeviceMaintenance4Features": 1000413000,
}  # fmt: skip
"""What `sType` of each struct says."""


class VulkanError(RuntimeError):
    """A call that the driver refused, or what a submission came to; the message begins with Vulkan's name for it."""


class Api:
    """`lib` and `ffi` of the `vulkan` package, and what all calls share."""

    def __init__(self, package: Any) -> None:
        self.lib, self.ffi = package._vulkan.lib, package._vulkan.ffi

    def structure(self, name: str, fields: dict[str, Any] | None = None) -> Any:
        """A Vulkan struct with its type filled in. What its pointers name must be held by the caller."""
        made = self.ffi.new(f"{name} *", fields or {})
        made.sType = TYPES[name]
        return made

    def do(self, function: str, *args: Any) -> None:
        """A call whose result says whether it worked; MemoryError and VulkanError with its name."""
        code = getattr(self.lib, function)(*args)
        if code in (OUT_OF_DEVICE_MEMORY, OUT_OF_HOST_MEMORY):
            raise MemoryError(f"{function}: {NAMES[code]}")
        if code != SUCCESS:
            raise VulkanError(f"{NAMES.get(code, code)} (in {function})")

    def made(self, function: str, type: str, *args: Any) -> Any:
        """The handle that a vkCreate… call leaves behind its last argument."""
        out = self.ffi.new(f"{type} *")
        self.do(function, *args, out)
        return out[0]

    def listed(self, function: str, type: str, *args: Any) -> list[Any]:
        """All handles that a vkEnumerate… call has."""
        count = self.ffi.new("uint32_t *")
        self.do(function, *args, count, self.ffi.NULL)
        out = self.ffi.new(f"{type}[]", max(count[0], 1))
        self.do(function, *args, count, out)
        return list(out[0 : count[0]])


@functools.cache
def vulkan() -> Api:
    """The package with the loader behind it; Unavailable with what to do where either is missing."""
    try:
        import vulkan
    except ImportError as e:
        raise Unavailable(f"the package vulkan can't be imported ({e}); {HINT}") from e
    except OSError as e:
        raise Unavailable(f"this machine has no Vulkan loader (libvulkan.so.1, vulkan-1.dll): {e}") from e
    return Api(vulkan)


@functools.cache
def instance() -> Any:
    """The one instance of this process; Unavailable where the loader finds no driver."""
    api = vulkan()
    app = api.structure("VkApplicationInfo", {"apiVersion": VERSION_1_3})
    info = api.structure("VkInstanceCreateInfo", {"pApplicationInfo": app})
    try:
        return api.made("vkCreateInstance", "VkInstance", info, api.ffi.NULL)
    except (VulkanError, MemoryError) as e:
        raise Unavailable(f"Vulkan does not start: {e}; is a driver installed?") from e
