"""Which Vulkan devices there are, as data, and what kernels need of one. Compiles and runs nothing."""

from __future__ import annotations

import re
from typing import Any

from trueup.core.backend import Device
from trueup.core.errors import Unavailable

from .api import VERSION_1_2, VERSION_1_3, instance, vulkan

FEATURES = ("shaderInt64", "shaderInt16")
FEATURES_11 = ("storageBuffer16BitAccess",)
FEATURES_12 = ("bufferDeviceAddress", "shaderInt8", "storageBuffer8BitAccess", "timelineSemaphore", "scalarBlockLayout")
"""Features that every kernel stands on, by the version of Vulkan that has them."""
EXTENSIONS = ("VK_KHR_maintenance4",)
"""Extensions likewise, of devices older than Vulkan 1.3, of which they are part."""

LAVAPIPE, LAVAPIPE_FROM = 13, 25
"""The driver's number, and the release of Mesa from which it is known to run the kernels: 22.3 crashes in them."""

KINDS = {1: "gpu", 2: "gpu", 3: "gpu", 4: "cpu"}
Found = tuple[Device, Any]
"""A device as trueup describes it, and Vulkan's handle."""


def find() -> list[Found]:
    """All devices that can run the kernels, GPUs before processors; Unavailable with what is missing where there is none."""
    api = vulkan()
    found, lacking = [], []
    for handle in api.listed("vkEnumeratePhysicalDevices", "VkPhysicalDevice", instance()):
        device, missing = describe(handle)
        if missing:
            lacking.append(f"{device.name} lacks {', '.join(missing)}")
        else:
            found.append((device, handle))
    if not found:
        raise Unavailable("; ".join(lacking) or "no Vulkan driver has a device")
    return sorted(found, key=lambda d: d[0].kind == "cpu")


def describe(handle: Any) -> tuple[Device, list[str]]:
    """A device as data, and what kernels need that it lacks."""
    api = vulkan()
    lib, ffi = api.lib, api.ffi
    plain = ffi.new("VkPhysicalDeviceProperties *")
    lib.vkGetPhysicalDeviceProperties(handle, plain)
    name = ffi.string(plain.deviceName).decode().strip()
    version = plain.apiVersion
    extensions = _extensions(handle)
    limits = plain.limits
    device = Device(name=name, kind=KINDS.get(plain.deviceType, "accelerator"))
    if version < VERSION_1_2:
        return device, ["Vulkan 1.2"]
    subgroup = api.structure("VkPhysicalDeviceSubgroupProperties")
    third = api.structure("VkPhysicalDeviceMaintenance3Properties", {"pNext": subgroup})
    driver = api.structure("VkPhysicalDeviceDriverProperties", {"pNext": third})
    pci = api.structure("VkPhysicalDevicePCIBusInfoPropertiesEXT", {"pNext": driver})
    on_bus = "VK_EXT_pci_bus_info" in extensions
    lib.vkGetPhysicalDeviceProperties2(
        handle, api.structure("VkPhysicalDeviceProperties2", {"pNext": pci if on_bus else driver})
    )
    missing = _missing(handle, extensions, version)
    mesa = re.match(r"Mesa (\d+)", ffi.string(driver.driverInfo).decode())
    if driver.driverID == LAVAPIPE and mesa and int(mesa[1]) < LAVAPIPE_FROM:
        missing.append(
            f"Mesa {LAVAPIPE_FROM} or newer (it has {mesa[1]}, whose idle threads follow addresses that are none)"
        )
    heaps, unified = _heaps(handle)
    device = Device(
        name=name,
        kind=device.kind,
        memory=heaps,
        limits={
            "max_grid_dim_x": limits.maxComputeWorkGroupCount[0],
            "max_grid_dim_y": limits.maxComputeWorkGroupCount[1],
            "max_shared_memory_per_block": limits.maxComputeSharedMemorySize,
            "max_threads_per_block": limits.maxComputeWorkGroupInvocations,
            "subgroup": subgroup.subgroupSize,
            "largest": third.maxMemoryAllocationSize,
            "version": version,
        },
        features=frozenset({"unified_memory"} if unified else ()),
        versions={
            "vulkan": f"{version >> 22}.{version >> 12 & 1023}.{version & 4095}",
            "driver": f"{ffi.string(driver.driverName).decode()} {ffi.string(driver.driverInfo).decode()}".strip(),
        },
        hardware="host" if device.kind == "cpu"
        else f"{pci.pciDomain:04x}:{pci.pciBus:02x}:{pci.pciDevice:02x}.{pci.pciFunction}" if on_bus
        else f"vulkan {plain.vendorID:04x}:{plain.deviceID:04x}",
    )  # fmt: skip
    return device, missing


def _extensions(handle: Any) -> set[str]:
    api = vulkan()
    count = api.ffi.new("uint32_t *")
    api.do("vkEnumerateDeviceExtensionProperties", handle, api.ffi.NULL, count, api.ffi.NULL)
    out = api.ffi.new("VkExtensionProperties[]", max(count[0], 1))
    api.do("vkEnumerateDeviceExtensionProperties", handle, api.ffi.NULL, count, out)
    return {api.ffi.string(out[i].extensionName).decode() for i in range(count[0])}


def _missing(handle: Any, extensions: set[str], version: int) -> list[str]:
    api = vulkan()
    chain, (second, first, all) = features()
    api.lib.vkGetPhysicalDeviceFeatures2(handle, chain)
    found = [(FEATURES, all), (FEATURES_11, first), (FEATURES_12, second)]
    out = [name for names, where in found for name in names if not getattr(where, name)]
    newer = version >= VERSION_1_3
    return out + [e for e in EXTENSIONS if not newer and e not in extensions]


def features() -> tuple[Any, tuple[Any, Any, Any]]:
    """A chain of features, and its parts, which the caller holds: of Vulkan 1.2, 1.1 and 1.0."""
    api = vulkan()
    second = api.structure("VkPhysicalDeviceVulkan12Features")
    first = api.structure("VkPhysicalDeviceVulkan11Features", {"pNext": second})
    chain = api.structure("VkPhysicalDeviceFeatures2", {"pNext": first})
    return chain, (second, first, chain.features)


def _heaps(handle: Any) -> tuple[int, bool]:
    """Bytes of the largest heap that is the device's own, and whether the host sees all of that."""
    api = vulkan()
    m = api.ffi.new("VkPhysicalDeviceMemoryProperties *")
    api.lib.vkGetPhysicalDeviceMemoryProperties(handle, m)
    own = [i for i in range(m.memoryHeapCount) if m.memoryHeaps[i].flags & 1]
    heap = max(own or range(m.memoryHeapCount), key=lambda i: m.memoryHeaps[i].size)
    kinds = [m.memoryTypes[i] for i in range(m.memoryTypeCount) if m.memoryTypes[i].heapIndex == heap]
    others = any(i not in own for i in range(m.memoryHeapCount))
    return int(m.memoryHeaps[heap].size), not others and any(k.propertyFlags & 2 for k in kinds)
