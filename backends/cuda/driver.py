"""The CUDA driver and NVRTC, as little of them as this backend stands on. Knows memory, modules, launches and graphs of one
device, all on one stream; no tensor and no op. Importing this touches neither."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.backends.simt.driver import CompileError
from trueup.core.errors import Unavailable

HINT = "pip install 'trueup[cuda]' brings it"


class CudaError(RuntimeError):
    """A call that the driver or NVRTC refused, or what a launch came to; the message begins with CUDA's name for it."""


def bindings() -> Any:
    """cuda.bindings.driver, initialized; Unavailable with what to do where that can't be."""
    try:
        from cuda.bindings import driver as cu
    except ImportError as e:
        raise Unavailable(f"cuda.bindings can't be imported ({e}); {HINT}") from e
    try:
        (code,) = cu.cuInit(0)
    except RuntimeError as e:
        raise Unavailable(f"this machine has no NVIDIA driver: {e}") from e
    if code != cu.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"the NVIDIA driver does not start: {_name(cu, code)}")
    return cu


def _name(cu: Any, code: Any) -> str:
    _, text = cu.cuGetErrorString(code)
    return f"{code.name}: {text.decode() if text else 'no description'}"


def call(cu: Any, function: str, *args: Any) -> Any:
    """The result of a driver function; MemoryError and CudaError with its name."""
    code, *out = getattr(cu, function)(*args)
    if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError(f"{function}: {_name(cu, code)}")
    if code != cu.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{_name(cu, code)} (in {function})")
    return out[0] if len(out) == 1 else tuple(out)


ATTRIBUTES = (
    "max_threads_per_block",
    "max_grid_dim_x",
    "max_grid_dim_y",
    "max_shared_memory_per_block",
    "max_shared_memory_per_block_optin",
    "warp_size",
    "multiprocessor_count",
    "compute_capability_major",
    "compute_capability_minor",
    "l2_cache_size",
    "pci_domain_id",
    "pci_bus_id",
    "pci_device_id",
    "integrated",
)


def attributes(cu: Any, device: Any) -> dict[str, int]:
    """Limits and kind of a device."""
    codes = cu.CUdevice_attribute
    return {
        n: int(call(cu, "cuDeviceGetAttribute", getattr(codes, f"CU_DEVICE_ATTRIBUTE_{n.upper()}"), device))
        for n in ATTRIBUTES
    }


class Kernel:
    """A function of a module, and how large its parameters are."""

    def __init__(self, cu: Any, name: str, handle: Any, most_shared: int) -> None:
        self.name, self.handle, self.sizes = name, handle, _parameters(cu, handle)
        self._cu, self._room, self._most = cu, 48 * 1024, most_shared

    def allow(self, shared: int) -> None:
        """So many bytes of dynamic shared memory in a launch."""
        if shared > self._room:
            key = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(self._cu, "cuFuncSetAttribute", self.handle, key, shared)
            self._room = shared

    def packed(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Arguments as cuLaunchKernel reads them: buffers, which must outlive the call, and their addresses."""
        raw = [a if isinstance(a, bytes) else a.tobytes() for a in args]
        if self.sizes is not None and [len(r) for r in raw] != self.sizes:
            raise CudaError(f"kernel {self.name} takes {self.sizes} bytes, given are {[len(r) for r in raw]}")
        held = [ctypes.create_string_buffer(r, len(r)) for r in raw]
        return held, (ctypes.c_void_p * max(len(held), 1))(*[ctypes.addressof(h) for h in held])


def _parameters(cu: Any, handle: Any) -> list[int] | None:
    """Bytes of each parameter, None where the driver is too old to say."""
    if not hasattr(cu, "cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    while True:
        try:
            code, _, size = cu.cuFuncGetParamInfo(handle, len(sizes))
        except (RuntimeError, AttributeError):
            return None
        if code != cu.CUresult.CUDA_SUCCESS:
            return sizes
        sizes.append(size)


class Module:
    """A loaded image."""

    def __init__(self, driver: CudaDriver, image: bytes) -> None:
        self.driver, self.image = driver, image
        self.handle = driver._do("cuModuleLoadData", image)

    def function(self, name: str) -> Kernel:
        handle = self.driver._do("cuModuleGetFunction", self.handle, name.encode())
        return Kernel(self.driver.cu, name, handle, self.driver.attributes["max_shared_memory_per_block_optin"])


class Graph:
    """What was captured, ready to be launched. Memory that it names must outlive it."""

    def __init__(self, driver: CudaDriver, captured: Any) -> None:
        self.captured = captured
        self.handle = driver._do("cuGraphInstantiate", captured, 0)
        weakref.finalize(self, _destroy, driver.cu, self.handle, captured)


def _destroy(cu: Any, handle: Any, captured: Any) -> None:
    cu.cuGraphExecDestroy(handle)
    cu.cuGraphDestroy(captured)


class CudaDriver:
    """A GPU by its number, through its primary context."""

    def __init__(self, ordinal: int) -> None:
        self.cu = bindings()
        self.device = call(self.cu, "cuDeviceGet", ordinal)
        self.attributes = attributes(self.cu, self.device)
        self.context = call(self.cu, "cuDevicePrimaryCtxRetain", self.device)
        self.stream = self._do("cuStreamCreate", self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._pins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._closed = False

    def _do(self, function: str, *args: Any) -> Any:
        """A call with the device's context current, whatever thread asks."""
        call(self.cu, "cuCtxSetCurrent", self.context)
        return call(self.cu, function, *args)

    # -- memory --------------------------------------------------------------------------------------------------------

    def room(self) -> tuple[int, int]:
        """Bytes that are free, and in all."""
        free, total = self._do("cuMemGetInfo")
        return int(free), int(total)

    def alloc(self, nbytes: int) -> int:
        return int(self._do("cuMemAlloc", nbytes))

    def free(self, ptr: int) -> None:
        self.synchronize()
        self._do("cuMemFree", self.cu.CUdeviceptr(ptr))

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        if nbytes:
            self._do("cuMemsetD8Async", self.cu.CUdeviceptr(ptr), value & 255, nbytes, self.stream)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        ptr = int(self._do("cuMemHostAlloc", max(nbytes, 1), 0))
        block = (ctypes.c_uint8 * max(nbytes, 1)).from_address(ptr)
        weakref.finalize(block, self.cu.cuMemFreeHost, ptr)
        self._pins[ptr] = block
        return np.frombuffer(memoryview(block), np.uint8)[:nbytes]

    def _pinned(self, array: NDArray[Any]) -> bool:
        start = array.ctypes.data
        return any(p <= start and start + array.nbytes <= p + len(b) for p, b in list(self._pins.items()))

    def copy_to_device(self, ptr: int, array: NDArray[Any]) -> None:
        if array.nbytes:
            self._do("cuMemcpyHtoDAsync", self.cu.CUdeviceptr(ptr), array.ctypes.data, array.nbytes, self.stream)
            if not self._pinned(array):
                self.synchronize()

    def copy_to_host(self, array: NDArray[Any], ptr: int) -> None:
        if array.nbytes:
            self._do("cuMemcpyDtoHAsync", array.ctypes.data, self.cu.CUdeviceptr(ptr), array.nbytes, self.stream)
            if not self._pinned(array):
                self.synchronize()

    def copy(self, to: int, source: int, nbytes: int) -> None:
        if nbytes:
            pointers = self.cu.CUdeviceptr(to), self.cu.CUdeviceptr(source)
            self._do("cuMemcpyDtoDAsync", *pointers, nbytes, self.stream)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        return compile_text(source, name, options)

    def load(self, image: bytes) -> Module:
        return Module(self, image)

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, args: Sequence[Any]
    ) -> None:
        kernel.allow(shared)
        held, addresses = kernel.packed(args)
        sizes = [*grid, 1, 1][:3] + [*block, 1, 1][:3]
        self._do("cuLaunchKernel", kernel.handle, *sizes, shared, self.stream, ctypes.addressof(addresses), 0)
        del held

    # -- the stream ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._do("cuStreamSynchronize", self.stream)

    def begin_capture(self) -> None:
        # Relaxed: what the garbage collector happens to give back meanwhile must not spoil the capture.
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._do("cuStreamBeginCapture", self.stream, mode)

    def end_capture(self) -> Graph:
        return Graph(self, self._do("cuStreamEndCapture", self.stream))

    def launch_graph(self, graph: Graph) -> None:
        self._do("cuGraphLaunch", graph.handle, self.stream)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.synchronize()
            self._do("cuStreamDestroy", self.stream)
            call(self.cu, "cuDevicePrimaryCtxRelease", self.device)


def nvrtc() -> Any:
    """cuda.bindings.nvrtc with its library; Unavailable where either is missing."""
    try:
        from cuda.bindings import nvrtc as rtc

        rtc.nvrtcVersion()
    except (ImportError, RuntimeError) as e:
        raise Unavailable(f"NVRTC can't be loaded ({e}); {HINT}") from e
    return rtc


def nvrtc_version() -> str:
    """The version of the compiler."""
    _, major, minor = nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def compile_text(source: str, name: str, options: Sequence[str]) -> bytes:
    """A cubin of a CUDA C++ text, made without a device; CompileError with the compiler's log."""
    rtc = nvrtc()

    def do(function: str, *args: Any) -> Any:
        code, *out = getattr(rtc, function)(*args)
        if code != rtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaError(f"{code.name} (in {function})")
        return out[0] if out else None

    program = do("nvrtcCreateProgram", source.encode(), name.encode(), 0, [], [])
    try:
        (code,) = rtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if code != rtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * do("nvrtcGetProgramLogSize", program)
            do("nvrtcGetProgramLog", program, log)
            raise CompileError(f"{name}: {code.name}: {log.decode(errors='replace').strip()}")
        image: bytes = b" " * do("nvrtcGetCUBINSize", program)
        do("nvrtcGetCUBIN", program, image)
        return image
    finally:
        rtc.nvrtcDestroyProgram(program)
