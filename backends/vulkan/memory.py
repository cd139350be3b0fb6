"""Device memory by address: buffers of Vulkan, small allocations several to one. Knows no op and no queue."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

from .api import BUFFER_USAGE_SHADER_DEVICE_ADDRESS, MEMORY_ALLOCATE_DEVICE_ADDRESS, Api

STEP = 256
"""Bytes; every allocation begins at a multiple."""
SLAB = 8 << 20
"""Bytes of a buffer that small allocations share."""
USAGE = 0x1 | 0x2 | 0x20 | BUFFER_USAGE_SHADER_DEVICE_ADDRESS  # copies from and to, storage


@dataclass
class Block:
    """A buffer with its memory.

    `mapped`: where the host sees it, if it does. `free`: parts that nobody has, (start, size) by start.
    """

    buffer: Any
    memory: Any
    address: int
    size: int
    shared: bool
    mapped: Any = None
    free: list[tuple[int, int]] = field(default_factory=list)


class Pool:
    """Allocations of one type of memory of one device."""

    def __init__(self, api: Api, device: Any, kind: int, *, mapped: bool = False) -> None:
        """`kind`: the index of the memory type; `mapped`: the host writes to it."""
        self.api, self.device, self.kind, self.mapped = api, device, kind, mapped
        self._blocks: list[Block] = []  # by address
        self._sizes: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        """An address; MemoryError where the device has no room."""
        size = -(-max(nbytes, 1) // STEP) * STEP
        if size > SLAB // 4:
            return self._taken(self._block(size, shared=False), 0, size)
        for block in self._blocks:
            for start, have in block.free if block.shared else ():
                if have >= size:
                    return self._taken(block, start, size)
        return self._taken(self._block(SLAB, shared=True), 0, size)

    def free(self, address: int) -> None:
        """Give an allocation back; neighbours that are free join, and an empty buffer goes."""
        block, start = self.place(address)
        size = self._sizes.pop(address)
        bisect.insort(block.free, (start, size))
        joined: list[tuple[int, int]] = []
        for at, n in block.free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = joined[-1][0], joined[-1][1] + n
            else:
                joined.append((at, n))
        block.free = joined
        if joined == [(0, block.size)]:
            self._blocks.remove(block)
            self._destroy(block)

    def place(self, address: int) -> tuple[Block, int]:
        """The buffer in which an address lies, and where."""
        at = bisect.bisect_right(self._blocks, address, key=lambda b: b.address) - 1
        block = self._blocks[at] if at >= 0 else None
        if block is None or address >= block.address + block.size:
            raise ValueError(f"address {address:#x} is in no buffer")
        return block, address - block.address

    def write(self, address: int, raw: bytes) -> None:
        """Bytes from the host to mapped memory, as it is now."""
        block, start = self.place(address)
        self.api.ffi.memmove(block.mapped + start, raw, len(raw))

    def close(self) -> None:
        for block in self._blocks:
            self._destroy(block)
        self._blocks.clear()

    def _taken(self, block: Block, start: int, size: int) -> int:
        i = next(i for i, (s, n) in enumerate(block.free) if s == start)
        have = block.free.pop(i)[1]
        if have > size:
            block.free.insert(i, (start + size, have - size))
        address = block.address + start
        self._sizes[address] = size
        return address

    def _block(self, size: int, *, shared: bool) -> Block:
        buffer, memory = make_buffer(self.api, self.device, size, self.kind)
        info = self.api.structure("VkBufferDeviceAddressInfo", {"buffer": buffer})
        address = int(self.api.lib.vkGetBufferDeviceAddress(self.device, info))
        block = Block(buffer, memory, address, size, shared, free=[(0, size)])
        if self.mapped:
            block.mapped = mapped(self.api, self.device, memory, size)
        bisect.insort(self._blocks, block, key=lambda b: b.address)
        return block

    def _destroy(self, block: Block) -> None:
        destroy_buffer(self.api, self.device, block.buffer, block.memory)


def make_buffer(api: Api, device: Any, size: int, kind: int) -> tuple[Any, Any]:
    """A buffer of so many bytes and its memory of a type; MemoryError leaves nothing behind."""
    info = api.structure("VkBufferCreateInfo", {"size": size, "usage": USAGE, "sharingMode": 0})
    buffer = api.made("vkCreateBuffer", "VkBuffer", device, info, api.ffi.NULL)
    try:
        needs = api.ffi.new("VkMemoryRequirements *")
        api.lib.vkGetBufferMemoryRequirements(device, buffer, needs)
        flags = api.structure("VkMemoryAllocateFlagsInfo", {"flags": MEMORY_ALLOCATE_DEVICE_ADDRESS})
        fields = {"pNext": flags, "allocationSize": needs.size, "memoryTypeIndex": kind}
        info = api.structure("VkMemoryAllocateInfo", fields)
        memory = api.made("vkAllocateMemory", "VkDeviceMemory", device, info, api.ffi.NULL)
        api.do("vkBindBufferMemory", device, buffer, memory, 0)
    except BaseException:
        api.lib.vkDestroyBuffer(device, buffer, api.ffi.NULL)
        raise
    return buffer, memory


def mapped(api: Api, device: Any, memory: Any, size: int) -> Any:
    """Where the host sees memory, as `uint8_t *`."""
    out = api.ffi.new("void **")
    api.do("vkMapMemory", device, memory, 0, size, 0, out)
    return api.ffi.cast("uint8_t *", out[0])


def destroy_buffer(api: Api, device: Any, buffer: Any, memory: Any) -> None:
    """Both; work that uses them must be over."""
    api.lib.vkDestroyBuffer(device, buffer, api.ffi.NULL)
    api.lib.vkFreeMemory(device, memory, api.ffi.NULL)
