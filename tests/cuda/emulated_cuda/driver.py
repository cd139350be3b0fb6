"""A CUDA driver without a GPU: memory, modules, launches, and graphs, over the engine. Kernels run in the order in which they
were put into the stream, when somebody waits for it: not before, so that who forgets to wait sees it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.backends.cuda.driver import CudaError
from trueup.backends.simt.driver import CompileError

from . import build


class KernelFault(CudaError):
    """A kernel did what it must not: where, and what."""


ATTRIBUTES = {
    "max_threads_per_block": 1024,
    "max_block_dim_x": 1024,
    "max_block_dim_y": 1024,
    "max_block_dim_z": 64,
    "max_grid_dim_x": 2**31 - 1,
    "max_grid_dim_y": 65535,
    "max_grid_dim_z": 65535,
    "max_shared_memory_per_block": 48 * 1024,
    "max_shared_memory_per_block_optin": 227 * 1024,
    "warp_size": 32,
    "multiprocessor_count": 4,
    "compute_capability_major": 9,
    "compute_capability_minor": 0,
    "l2_cache_size": 4 << 20,
    "pci_domain_id": 0,
    "pci_bus_id": 0,
    "pci_device_id": 0,
    "integrated": 0,
}


class Engine:
    """The engine's functions."""

    _loaded: Engine | None = None

    def __init__(self) -> None:
        self.lib = lib = ctypes.CDLL(str(build.engine()), mode=ctypes.RTLD_GLOBAL)
        lib.emu_alloc.restype = ctypes.c_void_p
        lib.emu_alloc.argtypes = [ctypes.c_size_t]
        lib.emu_span.restype = ctypes.c_long
        lib.emu_span.argtypes = [ctypes.c_void_p]
        lib.emu_written.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        lib.emu_zone.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    @classmethod
    def get(cls) -> Engine:
        if cls._loaded is None:
            cls._loaded = cls()
        return cls._loaded

    def says(self, name: str, *args: Any) -> tuple[int, str]:
        """The answer of a function whose last arguments are room for a message."""
        text = ctypes.create_string_buffer(1000)
        code = getattr(self.lib, name)(*args, text, ctypes.c_size_t(len(text)))
        return code, text.value.decode(errors="replace")


class Entry(ctypes.Structure):
    """A kernel as the engine's header has it."""

    _fields_ = [
        ("call", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("arguments", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("kinds", ctypes.c_char_p),
        ("bound", ctypes.c_int),
    ]


@dataclass
class Kernel:
    """A kernel of a loaded module, in its plain and, where there is one, its checked form."""

    name: str
    module: Module
    entry: Any
    shared_limit: int = 48 * 1024

    @property
    def arguments(self) -> int:
        return int(self.entry.contents.arguments)


class Module:
    """A loaded image."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))

    def function(self, name: str) -> Kernel:
        try:
            entry = getattr(self.lib, f"emu_entry_{name}")
        except AttributeError:
            raise CudaError(f'CUDA_ERROR_NOT_FOUND: no kernel extern "C" is named {name}') from None
        entry.restype = ctypes.POINTER(Entry)
        return Kernel(name, self, entry())


@dataclass
class Graph:
    """What was put into a stream while it was captured."""

    work: list[Callable[[], None]] = field(default_factory=list)


class EmulatedDriver:
    """The emulated device, with the names that the backend's driver protocol asks for."""

    def __init__(
        self, *, memory: int = 1 << 32, orders: Sequence[int] = (0,), checked: bool = False, workers: int = 1
    ) -> None:
        """`memory`: bytes that can be allocated in all. `orders`: each launch runs once in each of these orders of threads
        and blocks, from the same memory, and must leave the same bytes; 0 as numbered, 1 backwards, others at random.
        `checked`: each access is looked at, as compute-sanitizer does. `workers`: OS threads that blocks are spread over."""
        self.engine = Engine.get()
        self.memory, self.orders, self.checked, self.workers = memory, tuple(orders), checked, workers
        self.live: dict[int, int] = {}
        self.dead: set[int] = set()
        self.stream: list[Callable[[], None]] = []
        self.capturing: Graph | None = None
        self.launches = 0
        self.pins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.attributes: dict[str, int] = dict(ATTRIBUTES)
        weakref.finalize(self, _give_back, self.engine, self.live)

    @property
    def used(self) -> int:
        """Bytes allocated and not freed."""
        return sum(self.live.values())

    def room(self) -> tuple[int, int]:
        """Bytes that are free, and in all."""
        return self.memory - self.used, self.memory

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise CudaError(f"CUDA_ERROR_INVALID_VALUE: {nbytes} bytes can't be allocated")
        self._uncaptured("an allocation")
        if self.used + nbytes > self.memory:
            raise MemoryError(f"CUDA_ERROR_OUT_OF_MEMORY: {nbytes:,} bytes, {self.used:,} of {self.memory:,} in use")
        ptr = self.engine.lib.emu_alloc(nbytes)
        if not ptr:
            raise MemoryError(f"CUDA_ERROR_OUT_OF_MEMORY: {nbytes:,} bytes")
        self.live[ptr] = nbytes
        return int(ptr)

    def free(self, ptr: int) -> None:
        """As cuMemFree: it waits for all work before it."""
        self._uncaptured("a free")
        self._drain()
        if ptr not in self.live:
            found = "is freed twice" if ptr in self.dead else "is no allocation"
            raise CudaError(f"CUDA_ERROR_INVALID_VALUE: {ptr:#x} {found}")
        del self.live[ptr]
        self.dead.add(ptr)
        code, text = self.engine.says("emu_free", ctypes.c_void_p(ptr))
        if code:
            raise KernelFault(f"found when it was freed: {text}")

    def zone(self, ptr: int, nbytes: int) -> None:
        """Bytes of an allocation that belong to nothing: who writes them is found out."""
        if nbytes and self.engine.lib.emu_zone(ptr, nbytes):
            raise ValueError(f"{nbytes} bytes from {ptr:#x} on are not inside an allocation")

    def _span(self, ptr: int, nbytes: int, what: str) -> None:
        if self.engine.lib.emu_span(ptr) < nbytes:
            _, text = self.engine.says("emu_describe", ctypes.c_void_p(ptr))
            raise CudaError(f"CUDA_ERROR_INVALID_VALUE: {what} of {nbytes:,} bytes: {text}")

    def _write(self, ptr: int, array: NDArray[Any]) -> None:
        self._span(ptr, array.nbytes, "a copy to the device")
        ctypes.memmove(ptr, array.ctypes.data, array.nbytes)
        self.engine.lib.emu_written(ptr, array.nbytes)

    def _read(self, array: NDArray[Any], ptr: int) -> None:
        self._span(ptr, array.nbytes, "a copy to the host")
        ctypes.memmove(array.ctypes.data, ptr, array.nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        self._span(source, nbytes, "a copy from")
        self._span(to, nbytes, "a copy to")
        if abs(to - source) < nbytes and nbytes:
            raise CudaError("CUDA_ERROR_INVALID_VALUE: the two ends of a copy overlap")
        ctypes.memmove(to, source, nbytes)
        self.engine.lib.emu_written(to, nbytes)

    def _set(self, ptr: int, pattern: bytes, count: int) -> None:
        nbytes = len(pattern) * count
        self._span(ptr, nbytes, "a memset")
        if ptr % len(pattern):
            raise CudaError(f"CUDA_ERROR_INVALID_VALUE: a memset of {len(pattern)} bytes at {ptr:#x}")
        if len(set(pattern)) <= 1:
            ctypes.memset(ptr, pattern[0] if pattern else 0, nbytes)
        else:
            data = np.frombuffer(pattern * count, np.uint8)
            ctypes.memmove(ptr, data.ctypes.data, nbytes)
        self.engine.lib.emu_written(ptr, nbytes)

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        """Every byte to `value`, in the order of the stream."""
        self._span(ptr, nbytes, "a memset")
        self._put(lambda: self._set(ptr, bytes([value & 255]), nbytes))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies read and write when they run, not when they are asked for."""
        block = (ctypes.c_uint8 * max(nbytes, 1))()
        ctypes.memset(block, 0xFF, len(block))
        self.pins[ctypes.addressof(block)] = block
        return np.frombuffer(block, np.uint8)[:nbytes]

    def _pinned(self, array: NDArray[Any]) -> bool:
        start = array.ctypes.data
        return any(p <= start and start + array.nbytes <= p + len(b) for p, b in list(self.pins.items()))

    def copy_to_device(self, ptr: int, array: NDArray[Any]) -> None:
        """From pinned memory when its turn comes; from other memory as it is now."""
        if not array.flags.c_contiguous:
            raise ValueError("an array that lies in strides can't be copied")
        self._span(ptr, array.nbytes, "a copy to the device")
        if not self._pinned(array):
            self._uncaptured("a copy from memory that is not pinned")
            array = array.copy()
        self._put(lambda: self._write(ptr, array))

    def copy_to_host(self, array: NDArray[Any], ptr: int) -> None:
        """To pinned memory when its turn comes; to other memory it waits."""
        if not array.flags.c_contiguous:
            raise ValueError("an array that lies in strides can't be copied")
        self._span(ptr, array.nbytes, "a copy to the host")
        if self._pinned(array):
            self._put(lambda: self._read(array, ptr))
            return
        self._uncaptured("a copy to memory that is not pinned")
        self._drain()
        self._read(array, ptr)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Within the device."""
        self._span(source, nbytes, "a copy from")
        self._span(to, nbytes, "a copy to")
        self._put(lambda: self._copy(to, source, nbytes))

    # -- the stream ----------------------------------------------------------------------------------------------------

    def _put(self, work: Callable[[], None]) -> None:
        (self.stream if self.capturing is None else self.capturing.work).append(work)

    def _uncaptured(self, what: str) -> None:
        if self.capturing is not None:
            raise CudaError(f"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: {what} while the stream is captured")

    def _drain(self) -> None:
        """Run all that is in the stream, then look at what nobody may have written."""
        work, self.stream = self.stream, []
        for w in work:
            w()
        if not work:
            return
        code, text = self.engine.says("emu_check")
        if code:
            raise KernelFault(f"found when the stream was waited for: {text}")

    def synchronize(self) -> None:
        """Wait for all that was put into the stream; what went wrong in it is raised here."""
        self._uncaptured("a synchronization")
        self._drain()

    def begin_capture(self) -> None:
        self._uncaptured("another capture")
        self.capturing = Graph()

    def end_capture(self) -> Graph:
        if self.capturing is None:
            raise CudaError("CUDA_ERROR_ILLEGAL_STATE: no capture has begun")
        graph, self.capturing = self.capturing, None
        return graph

    def launch_graph(self, graph: Graph) -> None:
        for work in graph.work:
            self._put(work)

    def close(self) -> None:
        self._drain()

    # -- kernels -------------------------------------------------------------------------------------------------------

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        try:
            return build.compile_kernels(source, name, options, checked=self.checked).path.read_bytes()
        except build.TextError as e:
            raise CompileError(f"{name}: {e}") from e

    def load(self, image: bytes) -> Module:
        path = build.cache() / f"image-{hashlib.sha256(image).hexdigest()[:20]}.so"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(image)
            os.replace(part, path)
        return Module(path)

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, args: Sequence[Any]
    ) -> None:
        grid, block = [*grid, 1, 1][:3], [*block, 1, 1][:3]
        self._limits(kernel, grid, block, shared)
        packed = self._packed(kernel, args)
        self.launches += 1
        self._put(lambda: self._run(kernel, grid, block, shared, packed))

    def _limits(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int) -> None:
        a, what = ATTRIBUTES, f"CUDA_ERROR_INVALID_VALUE: kernel {kernel.name}"
        for axis, g, b in zip("xyz", grid, block, strict=True):
            for size, most, name in ((g, a[f"max_grid_dim_{axis}"], "grid"), (b, a[f"max_block_dim_{axis}"], "block")):
                if not 1 <= size <= most:
                    raise CudaError(f"{what}: {name}.{axis} is {size}, the device allows 1 to {most}")
        threads, bound = block[0] * block[1] * block[2], kernel.entry.contents.bound
        if threads > a["max_threads_per_block"]:
            raise CudaError(f"{what}: a block of {threads} threads, the device allows {a['max_threads_per_block']}")
        if bound and threads > bound:
            raise CudaError(f"{what}: a block of {threads} threads, its __launch_bounds__ allow {bound}")
        if not 0 <= shared <= kernel.shared_limit:
            raise CudaError(f"{what}: {shared} bytes of dynamic shared memory, it may have {kernel.shared_limit}")

    @staticmethod
    def _packed(kernel: Kernel, args: Sequence[Any]) -> Any:
        """The arguments as the kernel's parameters, each checked for its size and kind."""
        entry = kernel.entry.contents
        if len(args) != entry.arguments:
            raise CudaError(
                f"CUDA_ERROR_INVALID_VALUE: kernel {kernel.name} takes {entry.arguments} arguments, not {len(args)}"
            )
        values = []
        for i, a in enumerate(args):
            kind, size = chr(entry.kinds[i]), entry.sizes[i]
            try:
                values.append(ctypes.create_string_buffer(_bytes(a, kind, size), size))
            except (TypeError, ValueError, struct.error) as e:
                raise CudaError(f"argument {i} of kernel {kernel.name}: {e}") from None
        return values, (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])

    def _run(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, packed: Any) -> None:
        before = self._snapshot() if len(self.orders) > 1 else {}
        first: dict[int, bytes] = {}
        for i, order in enumerate(self.orders):
            for ptr, data in before.items() if i else ():
                ctypes.memmove(ptr, data, len(data))
            code, text = self.engine.says(
                "emu_launch", kernel.entry, kernel.name.encode(), (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(*block), ctypes.c_size_t(shared), packed[1], ctypes.c_uint(order),
                ctypes.c_uint(self.workers), ctypes.c_int(self.checked),
            )  # fmt: skip
            if code:
                raise KernelFault(text)
            if len(self.orders) == 1:
                return
            after = self._snapshot()
            first = first or after
            for n, (ptr, data) in enumerate(after.items()):
                if data != first[ptr]:
                    at = next(j for j, (x, y) in enumerate(zip(data, first[ptr], strict=True)) if x != y)
                    raise KernelFault(
                        f"kernel {kernel.name}: what it leaves depends on the order of its threads: byte {at} of allocation "
                        f"{n} ({len(data)} bytes), orders {self.orders[0]} and {order}"
                    )

    def _snapshot(self) -> dict[int, bytes]:
        return {ptr: ctypes.string_at(ptr, n) for ptr, n in self.live.items()}


def _give_back(engine: Engine, live: dict[int, int]) -> None:
    """The memory of a driver that nobody holds any more."""
    for ptr in live:
        engine.says("emu_free", ctypes.c_void_p(ptr))


def _bytes(value: Any, kind: str, size: int) -> bytes:
    """A value as a parameter of this kind and size. Python's numbers take the parameter's form; those that have a form of
    their own (NumPy's, ctypes') must have the parameter's."""
    if value is None and kind == "p":
        value = 0
    if isinstance(value, np.generic):
        have = {"f": "f", "i": "i", "u": "i", "b": "i"}.get(value.dtype.kind, "s")
        if value.nbytes != size or (have != kind and not (kind == "p" and have == "i")):
            raise TypeError(f"{value.dtype} for a parameter {_named(kind, size)}")
        return value.tobytes()
    if isinstance(value, ctypes._SimpleCData):
        if ctypes.sizeof(value) != size:
            raise TypeError(f"{type(value).__name__} for a parameter {_named(kind, size)}")
        return bytes(value)
    if isinstance(value, bytes | np.ndarray) and kind == "s":
        data = value if isinstance(value, bytes) else value.tobytes()
        if len(data) != size:
            raise TypeError(f"{len(data)} bytes for a parameter {_named(kind, size)}")
        return data
    if isinstance(value, bool | int) and kind in "pi":
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise ValueError(f"{value} for a parameter {_named(kind, size)}")
        return int(value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    if isinstance(value, float) and kind == "f":
        return struct.pack("<d" if size == 8 else "<f", value)
    raise TypeError(f"{type(value).__name__} for a parameter {_named(kind, size)}")


def _named(kind: str, size: int) -> str:
    return {
        "p": "that is a pointer",
        "i": f"that is an integer of {size} bytes",
        "f": f"that is a float of {size} bytes",
    }.get(kind, f"that is a struct of {size} bytes")
