"""A Vulkan device behind the SIMT driver's face: memory by address, kernels as pipelines, work recorded into command buffers.
Knows no tensor and no op.

Work goes into an open command buffer, which `synchronize` submits and waits for; a captured one is kept, and submitted again
for every step. Commands follow one another with a barrier between any two: each sees what those before it wrote. A timeline
semaphore counts submissions.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import Device

from .api import DEVICE_LOST, FOREVER, NAMES, SUCCESS, VERSION_1_3, VulkanError, vulkan
from .compiler import compile_text
from .devices import EXTENSIONS, FEATURES, FEATURES_11, FEATURES_12, features
from .memory import Pool, destroy_buffer, make_buffer, mapped
from .programs import entries

ANY, WRITES, ALL = 0x800 | 0x1000, 0x40 | 0x1000, 0x20 | 0x40 | 0x800 | 0x1000
"""Pipeline stages compute and transfer; access by shaders' and copies' writes; and by both and their reads."""
HOST = 0x4000
STAGE = 4 << 20
"""Bytes of host memory through which copies of other memory go."""


class Kernel:
    """An entry point of a module; a pipeline for each number of threads that it was started with."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self._pipelines: dict[int, Any] = {}

    def pipeline(self, threads: int) -> Any:
        """The pipeline whose groups have so many threads."""
        if threads not in self._pipelines:
            self._pipelines[threads] = self.module.driver._pipeline(self.module.handle, self.name, threads)
        return self._pipelines[threads]


class Module:
    """A program on the device."""

    def __init__(self, driver: VulkanDriver, image: bytes) -> None:
        api = driver.api
        words = api.ffi.from_buffer("uint32_t[]", bytearray(image))
        info = api.structure("VkShaderModuleCreateInfo", {"codeSize": len(image), "pCode": words})
        self.driver = driver
        self.handle = api.made("vkCreateShaderModule", "VkShaderModule", driver.device, info, api.ffi.NULL)
        driver._modules.append(self.handle)

    def function(self, name: str) -> Kernel:
        return Kernel(self, name)


class Recorded:
    """A command buffer, with the arguments of its launches. Memory that it names must outlive it."""

    def __init__(self, driver: VulkanDriver) -> None:
        self.driver, self.commands = driver, driver._command_buffer()
        self.held: list[int] = []  # addresses of arguments
        self.empty = True
        weakref.finalize(self, driver._release, self.commands, self.held)


class VulkanDriver:
    """A device with one queue."""

    def __init__(self, physical: Any, device: Device) -> None:
        self.api, self.physical = vulkan(), physical
        self._closed = False
        self.attributes: Mapping[str, int] = {
            **device.limits,
            "max_grid_dim_x": device.limits["max_grid_dim_x"] * device.limits["max_grid_dim_y"],
            "line": device.limits["max_grid_dim_x"],
        }
        api, null = self.api, self.api.ffi.NULL
        self.family = self._family()
        self.device = self._open(device)
        queue = api.ffi.new("VkQueue *")
        api.lib.vkGetDeviceQueue(self.device, self.family, 0, queue)
        self.queue = queue[0]
        own, near, seen = self._kinds()
        self.pool, self.host_kind = Pool(api, self.device, own), near
        self.arguments = Pool(api, self.device, seen, mapped=True)
        info = api.structure("VkCommandPoolCreateInfo", {"flags": 2, "queueFamilyIndex": self.family})
        self.commands = api.made("vkCreateCommandPool", "VkCommandPool", self.device, info, null)
        kind = api.structure("VkSemaphoreTypeCreateInfo", {"semaphoreType": 1})
        info = api.structure("VkSemaphoreCreateInfo", {"pNext": kind})
        self.semaphore = api.made("vkCreateSemaphore", "VkSemaphore", self.device, info, null)
        pushed = api.ffi.new("VkPushConstantRange *", {"stageFlags": 0x20, "offset": 0, "size": 16})
        info = api.structure("VkPipelineLayoutCreateInfo", {"pushConstantRangeCount": 1, "pPushConstantRanges": pushed})
        self.layout = api.made("vkCreatePipelineLayout", "VkPipelineLayout", self.device, info, null)
        info = api.structure("VkPipelineCacheCreateInfo")
        self.cache = api.made("vkCreatePipelineCache", "VkPipelineCache", self.device, info, null)
        self._modules: list[Any] = []
        self._pipelines: list[Any] = []
        self._pins: dict[int, tuple[int, Any, Any]] = {}  # address on the host: bytes, buffer, memory
        self._dropped: list[tuple[Any, list[int]]] = []
        self._done = 0
        self._barrier = api.structure("VkMemoryBarrier", {"srcAccessMask": WRITES, "dstAccessMask": ALL})
        self._answer = api.structure("VkMemoryBarrier", {"srcAccessMask": WRITES, "dstAccessMask": 0x2000})
        self._push = api.ffi.new("uint8_t[16]")
        self._current: Recorded | None = None
        self._capturing = False
        self._stage: NDArray[np.uint8] | None = None

    # -- opening -------------------------------------------------------------------------------------------------------

    def _family(self) -> int:
        """The first family of queues that computes."""
        lib, ffi = self.api.lib, self.api.ffi
        count = ffi.new("uint32_t *")
        lib.vkGetPhysicalDeviceQueueFamilyProperties(self.physical, count, ffi.NULL)
        found = ffi.new("VkQueueFamilyProperties[]", max(count[0], 1))
        lib.vkGetPhysicalDeviceQueueFamilyProperties(self.physical, count, found)
        for i in range(count[0]):
            if found[i].queueFlags & 2:
                return i
        raise VulkanError("the device has no queue that computes")

    def _open(self, device: Device) -> Any:
        api = self.api
        chain, (second, first, plain) = features()
        for names, where in ((FEATURES, plain), (FEATURES_11, first), (FEATURES_12, second)):
            for name in names:
                setattr(where, name, 1)
        fourth = api.structure("VkPhysicalDeviceMaintenance4Features", {"maintenance4": 1, "pNext": chain})
        priority = api.ffi.new("float[]", [1.0])
        queue = api.structure(
            "VkDeviceQueueCreateInfo",
            {"queueFamilyIndex": self.family, "queueCount": 1, "pQueuePriorities": priority},
        )
        needed = EXTENSIONS if device.limits["version"] < VERSION_1_3 else ()
        words = [api.ffi.new("char[]", e.encode()) for e in needed]
        names = api.ffi.new("char *[]", words)
        info = api.structure(
            "VkDeviceCreateInfo",
            {
                "pNext": fourth, "queueCreateInfoCount": 1, "pQueueCreateInfos": queue,
                "enabledExtensionCount": len(words), "ppEnabledExtensionNames": names,
            },
        )  # fmt: skip
        return api.made("vkCreateDevice", "VkDevice", self.physical, info, api.ffi.NULL)

    def _kinds(self) -> tuple[int, int, int]:
        """The types of memory that are the device's own, that the host reads best, and that the host writes and the device
        reads best."""
        m = self.api.ffi.new("VkPhysicalDeviceMemoryProperties *")
        self.api.lib.vkGetPhysicalDeviceMemoryProperties(self.physical, m)
        kinds = [
            (m.memoryTypes[i].propertyFlags, m.memoryHeaps[m.memoryTypes[i].heapIndex].size)
            for i in range(m.memoryTypeCount)
        ]
        own = max(range(len(kinds)), key=lambda i: (kinds[i][0] & 1, kinds[i][1], -i))
        seen = [i for i, (flags, _) in enumerate(kinds) if flags & 6 == 6]
        if not seen:
            raise VulkanError("the device has no memory that the host sees")
        near = max(seen, key=lambda i: (kinds[i][0] & 8, not kinds[i][0] & 1, -i))  # cached, and not the device's
        return own, near, max(seen, key=lambda i: (kinds[i][0] & 1, -i))

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        self._sweep()
        return self.pool.alloc(nbytes)

    def free(self, ptr: int) -> None:
        self.synchronize()
        self.pool.free(ptr)

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        if not nbytes:
            return
        if ptr % 4 or nbytes % 4:  # vkCmdFillBuffer writes whole words
            self.copy_to_device(ptr, np.full(nbytes, value & 255, np.uint8))
            return
        block, start = self.pool.place(ptr)
        word = (value & 255) * 0x01010101
        self.api.lib.vkCmdFillBuffer(self._next(), block.buffer, start, nbytes, word)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        api, size = self.api, max(nbytes, 1)
        self._sweep()
        buffer, memory = make_buffer(api, self.device, size, self.host_kind)
        base = int(api.ffi.cast("uintptr_t", mapped(api, self.device, memory, size)))
        block = (ctypes.c_uint8 * size).from_address(base)
        self._pins[base] = size, buffer, memory
        weakref.finalize(block, self._unpin, base)
        return np.frombuffer(memoryview(block), np.uint8)[:nbytes]

    def _unpin(self, base: int) -> None:
        self._dropped.append((self._pins.pop(base), []))

    def _pin(self, array: NDArray[Any]) -> tuple[Any, int] | None:
        """The buffer of pinned memory in which an array lies, and where."""
        start = array.ctypes.data
        for base, (size, buffer, _) in self._pins.items():
            if base <= start and start + array.nbytes <= base + size:
                return buffer, start - base
        return None

    def copy_to_device(self, ptr: int, array: NDArray[Any]) -> None:
        pin = self._pin(array)
        if pin:
            block, start = self.pool.place(ptr)
            self._copy(pin[0], pin[1], block.buffer, start, array.nbytes)
            return
        raw, stage = np.ascontiguousarray(array).reshape(-1).view(np.uint8), self._staging()
        for at in range(0, raw.nbytes, STAGE):
            part = raw[at : at + STAGE]
            self.synchronize()
            stage[: part.nbytes] = part
            self.copy_to_device(ptr + at, stage[: part.nbytes])
        self.synchronize()

    def copy_to_host(self, array: NDArray[Any], ptr: int) -> None:
        pin = self._pin(array)
        if pin:
            block, start = self.pool.place(ptr)
            self._copy(block.buffer, start, pin[0], pin[1], array.nbytes)
            return
        raw, stage = array.reshape(-1).view(np.uint8), self._staging()
        for at in range(0, raw.nbytes, STAGE):
            part = raw[at : at + STAGE]
            self.copy_to_host(stage[: part.nbytes], ptr + at)
            self.synchronize()
            part[...] = stage[: part.nbytes]

    def copy(self, to: int, source: int, nbytes: int) -> None:
        a, start = self.pool.place(source)
        b, at = self.pool.place(to)
        self._copy(a.buffer, start, b.buffer, at, nbytes)

    def _copy(self, source: Any, start: int, to: Any, at: int, nbytes: int) -> None:
        if nbytes:
            region = self.api.ffi.new("VkBufferCopy *", {"srcOffset": start, "dstOffset": at, "size": nbytes})
            self.api.lib.vkCmdCopyBuffer(self._next(), source, to, 1, region)

    def _staging(self) -> NDArray[np.uint8]:
        if self._stage is None:
            self._stage = self.pinned(STAGE)
        return self._stage

    # -- kernels -------------------------------------------------------------------------------------------------------

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        return compile_text(source, name, entries(source), options)

    def load(self, image: bytes) -> Module:
        return Module(self, image)

    def _pipeline(self, module: Any, name: str, threads: int) -> Any:
        api, ffi = self.api, self.api.ffi
        value = ffi.new("int32_t *", threads)
        entry = ffi.new("VkSpecializationMapEntry *", {"constantID": 0, "offset": 0, "size": 4})
        special = ffi.new(
            "VkSpecializationInfo *", {"mapEntryCount": 1, "pMapEntries": entry, "dataSize": 4, "pData": value}
        )
        word = ffi.new("char[]", name.encode())
        stage = api.structure(
            "VkPipelineShaderStageCreateInfo",
            {"stage": 0x20, "module": module, "pName": word, "pSpecializationInfo": special},
        )
        info = api.structure("VkComputePipelineCreateInfo", {"stage": stage[0], "layout": self.layout})
        out = ffi.new("VkPipeline *")
        api.do("vkCreateComputePipelines", self.device, self.cache, 1, info, ffi.NULL, out)
        self._pipelines.append(out[0])
        return out[0]

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, args: Sequence[Any]
    ) -> None:
        lib, groups = self.api.lib, int(grid[0])
        raw = packed(args)
        pipeline = kernel.pipeline(int(block[0]))
        address = self.arguments.alloc(len(raw))
        self.arguments.write(address, raw)
        commands = self._next()
        assert self._current is not None
        self._current.held.append(address)
        width = min(groups, self.attributes["line"])
        self.api.ffi.memmove(self._push, np.array([address, width | groups << 32], np.uint64).tobytes(), 16)
        lib.vkCmdBindPipeline(commands, 1, pipeline)
        lib.vkCmdPushConstants(commands, self.layout, 0x20, 0, 16, self._push)
        lib.vkCmdDispatch(commands, width, -(-groups // width), 1)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _command_buffer(self) -> Any:
        fields = {"commandPool": self.commands, "level": 0, "commandBufferCount": 1}
        return self.api.made(
            "vkAllocateCommandBuffers", "VkCommandBuffer", self.device,
            self.api.structure("VkCommandBufferAllocateInfo", fields),
        )  # fmt: skip

    def _begin(self) -> Recorded:
        made = Recorded(self)
        info = self.api.structure("VkCommandBufferBeginInfo", {"flags": 0 if self._capturing else 1})
        self.api.do("vkBeginCommandBuffer", made.commands, info)
        return made

    def _next(self) -> Any:
        """The open command buffer, behind a barrier."""
        if self._current is None:
            self._current = self._begin()
        self._fence(self._current.commands)
        self._current.empty = False
        return self._current.commands

    def _fence(self, commands: Any) -> None:
        null = self.api.ffi.NULL
        self.api.lib.vkCmdPipelineBarrier(commands, ANY, ANY, 0, 1, self._barrier, 0, null, 0, null)

    def _ended(self) -> Recorded:
        made = self._current if self._current is not None else self._begin()
        self._current = None
        null = self.api.ffi.NULL
        self.api.lib.vkCmdPipelineBarrier(made.commands, ANY, HOST, 0, 1, self._answer, 0, null, 0, null)
        self.api.do("vkEndCommandBuffer", made.commands)
        return made

    def _submit(self, recorded: Recorded) -> None:
        api, ffi = self.api, self.api.ffi
        self._done += 1
        commands, semaphores, values = (
            ffi.new("VkCommandBuffer[]", [recorded.commands]),
            ffi.new("VkSemaphore[]", [self.semaphore]),
            ffi.new("uint64_t[]", [self._done]),
        )
        timeline = api.structure(
            "VkTimelineSemaphoreSubmitInfo", {"signalSemaphoreValueCount": 1, "pSignalSemaphoreValues": values}
        )
        info = api.structure(
            "VkSubmitInfo",
            {
                "pNext": timeline, "commandBufferCount": 1, "pCommandBuffers": commands,
                "signalSemaphoreCount": 1, "pSignalSemaphores": semaphores,
            },
        )  # fmt: skip
        api.do("vkQueueSubmit", self.queue, 1, info, ffi.NULL)

    def _flush(self) -> Recorded | None:
        """Submit what is open."""
        if self._current is None or self._capturing:
            return None
        made = self._ended()
        self._submit(made)
        return made

    def synchronize(self) -> None:
        made = self._flush()
        ffi = self.api.ffi
        semaphores, values = ffi.new("VkSemaphore[]", [self.semaphore]), ffi.new("uint64_t[]", [self._done])
        fields = {"semaphoreCount": 1, "pSemaphores": semaphores, "pValues": values}
        info = self.api.structure("VkSemaphoreWaitInfo", fields)
        code = self.api.lib.vkWaitSemaphores(self.device, info, FOREVER)
        if code != SUCCESS:
            what = (
                "; a kernel ran past the device's limit, or touched memory that is not there"
                if code == DEVICE_LOST
                else ""
            )
            raise VulkanError(f"{NAMES.get(code, code)} (in vkWaitSemaphores){what}")
        del made
        if not self._capturing:
            self._sweep()

    def begin_capture(self) -> None:
        self.synchronize()
        self._capturing = True
        self._current = self._begin()

    def end_capture(self) -> Recorded:
        try:
            return self._ended()
        finally:
            self._capturing = False

    def launch_graph(self, graph: Recorded) -> None:
        self._flush()
        self._submit(graph)

    def _release(self, commands: Any, held: list[int]) -> None:
        """A command buffer that nobody holds any more; it may still be running."""
        self._dropped.append((commands, held))

    def _sweep(self) -> None:
        """Give back what was dropped, once the queue is idle."""
        if not self._dropped or self._current is not None or self._closed:
            return
        dropped, self._dropped = self._dropped, []
        api = self.api
        api.do("vkQueueWaitIdle", self.queue)
        for what, held in dropped:
            if isinstance(what, tuple):
                _, buffer, memory = what
                destroy_buffer(api, self.device, buffer, memory)
                continue
            api.lib.vkFreeCommandBuffers(self.device, self.commands, 1, api.ffi.new("VkCommandBuffer[]", [what]))
            for address in held:
                self.arguments.free(address)

    def close(self) -> None:
        """Give everything back; closing twice is nothing."""
        if self._closed:
            return
        self.synchronize()
        self._sweep()
        self._closed = True
        lib, null, device = self.api.lib, self.api.ffi.NULL, self.device
        for pipeline in self._pipelines:
            lib.vkDestroyPipeline(device, pipeline, null)
        for module in self._modules:
            lib.vkDestroyShaderModule(device, module, null)
        lib.vkDestroyPipelineCache(device, self.cache, null)
        lib.vkDestroyPipelineLayout(device, self.layout, null)
        lib.vkDestroySemaphore(device, self.semaphore, null)
        lib.vkDestroyCommandPool(device, self.commands, null)
        self.arguments.close()
        self.pool.close()
        if not self._pins:  # arrays that somebody holds still lie in the device's memory
            lib.vkDestroyDevice(device, null)


def packed(args: Sequence[Any]) -> bytes:
    """Arguments as a struct of C layout."""
    out = b""
    for a in args:
        raw = a if isinstance(a, bytes) else a.tobytes()
        align = 8 if isinstance(a, bytes) else len(raw)
        out += b"\0" * (-len(out) % align) + raw
    return out + b"\0" * (-len(out) % 8)
