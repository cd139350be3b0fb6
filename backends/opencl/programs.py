"""Kernels from the `.cl` files beside this module: built once a process and device, kept on disk under device, driver
version and source (see `caches`). Knows no op."""

from __future__ import annotations

import functools
import warnings
from importlib.resources import files
from typing import Any

import pyopencl as cl

from trueup.core.backend import Device

from .caches import POCL, Binaries, kept_by_driver, mend_pocl
from .tuning import Tuning

OPS = ("common", "elementwise", "norm", "rows", "rope", "conv", "attention", "gdn", "topk")
"""The files of the program that knows no type of weight."""
NATIVE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
"""Types that kernels read as they are stored; all others are expanded to float32."""
WEIGHTS = ("common", "formats", "linear", "moe", "fused")
"""The files of the programs that there is one of for each type of weight."""


class BuildError(RuntimeError):
    """The device's compiler refused a kernel; the message holds its log."""


class Programs:
    """Built programs of one device; each is built when the first of its kernels is asked for."""

    def __init__(self, context: Any, device: Device, tuning: Tuning) -> None:
        self.context, self.device, self.tuning = context, device, tuning
        self.binaries = None if kept_by_driver(context.devices[0]) else Binaries()
        self._built: dict[str, Any] = {}

    def kernel(self, name: str, format: str = "") -> Any:
        """A kernel object of its own, whose arguments the caller sets. `format`: the type of weight it reads, or ""."""
        if format not in self._built:
            self._built[format] = self._build(format)
        return cl.Kernel(self._built[format], name)

    def _build(self, format: str) -> Any:
        macros = {k: str(v) for k, v in self.tuning.macros().items()}
        if format:
            macros[f"FORMAT_{format.upper()}"] = "1"
        text = "".join(f"#define {k} {v}\n" for k, v in macros.items())
        text += "".join(source(name) for name in (WEIGHTS if format else OPS))
        options = ["-cl-std=CL1.2", "-w"]
        if "correctly_rounded_divide_sqrt" in self.device.features:
            options.append("-cl-fp32-correctly-rounded-divide-sqrt")

        def build() -> Any:
            return cl.Program(self.context, text).build(options)

        (handle,) = self.context.devices
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cl.CompilerWarning)
                if self.binaries is None:
                    return build()
                return self.binaries.program(self.context, handle, text, options, build)
        except cl.RuntimeError as e:
            raise BuildError(f"OpenCL kernels ({format or 'ops'}) do not build on {self.device.name}: {e}") from e


@functools.cache
def source(name: str) -> str:
    """The text of a `.cl` file."""
    return (files(__package__) / "cl" / f"{name}.cl").read_text()


_shared: dict[tuple[int, Tuning], tuple[Any, Programs]] = {}


def shared(device: Device, handle: Any, tuning: Tuning) -> tuple[Any, Programs]:
    """The context of a device in this process, and its programs."""
    key = handle.int_ptr, tuning
    if key not in _shared:
        if handle.platform.name == POCL:
            mend_pocl()
        context = cl.Context([handle])
        _shared[key] = context, Programs(context, device, tuning)
    return _shared[key]
