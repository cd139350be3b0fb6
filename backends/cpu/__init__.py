"""The CPU backend: native kernels in C++ for the ops that take the time, the op's NumPy body for the rest.

`kernels.py` is the table. Weights stay as they are stored; float32 activations are never rounded. Results depend neither on
the number of threads nor on the other rows of a step.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from trueup.core.backend import AddressedTarget, Backend, Capabilities, Device, Executable, Storage
from trueup.core.errors import Unavailable
from trueup.core.plan import Plan
from trueup.core.plugins import hookimpl
from trueup.core.weight import Weight

from .weight import CpuWeight


class Cpu(Backend):
    """This machine's processor."""

    name = "cpu"
    driver = False

    def devices(self) -> list[Device]:
        native = native_module()
        return [
            Device(
                _processor(), "cpu", memory=_memory(), limits={"cores": native.physical_cores()},
                features=frozenset(native.isas()), versions={"isa": native.isa()}, hardware="host",
            )
        ]  # fmt: skip

    def open(self, device: Device, *, threads: int | None = None, activations: str = "f32") -> CpuTarget:
        """`threads`: how many work on a kernel, by default one for each physical core; the setting is the process's.
        `activations`: "q8" rounds them to int8 in blocks of 32 before products of a few rows with the types that
        `_native.ROUNDED` names, as other engines always do; twice as fast and less exact. By default they are not rounded.
        """
        if activations not in ("f32", "q8"):
            raise ValueError(f"activations must be 'f32' or 'q8', got {activations!r}")
        native = native_module()
        if threads is not None:
            if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
                raise ValueError(f"threads must be a positive integer, got {threads!r}")
            native.set_threads(threads)
        return CpuTarget(device, activations)


class CpuTarget(AddressedTarget):
    """Kernels over host memory."""

    capabilities = Capabilities(deterministic=True, batch_invariant=True)

    def __init__(self, device: Device, activations: str = "f32") -> None:
        from .kernels import kernels

        super().__init__("cpu", device, kernels)
        self.rounds = activations == "q8"
        if self.rounds:  # a few rows are rounded, more are not
            self.capabilities = Capabilities(
                deterministic=True, activations="q8", thresholds={"rows": (native_module().FEW_ROWS,)}
            )

    def prepare_weight(self, weight: Weight) -> CpuWeight:
        return CpuWeight(weight)

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        from .executable import CpuExecutable

        return CpuExecutable(plan, self, storage)


def native_module():  # type: ignore[no-untyped-def]  # the extension module, built with the package
    try:
        from . import _native
    except ImportError as e:
        raise Unavailable(f"the native module of the cpu backend can't be loaded: {e}") from e
    return _native


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [Cpu]
