"""The emulated CUDA device on the path, and ways to run text on it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def emulator_on_path() -> Iterator[None]:
    """So that `emulated_cuda` can be imported here and, through the path, in workers."""
    if shutil.which("g++") is None:
        pytest.skip("the emulated CUDA device needs g++")
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


class Runner:
    """A text on an emulated device: arrays go to allocations, which come back as they are afterwards."""

    def __init__(self, source: str, options: tuple[str, ...] = (), **kind: Any) -> None:
        from emulated_cuda.driver import EmulatedDriver

        self.driver = EmulatedDriver(**kind)
        self.module = self.driver.load(self.driver.compile(source, "test.cu", options))

    def __call__(
        self, name: str, *args: Any, grid: Any = (1,), block: Any = (32,), shared: int = 0
    ) -> list[np.ndarray[Any, Any]]:
        """The arrays among `args` after the launch."""
        d = self.driver
        held = [(d.alloc(a.nbytes), a) for a in args if isinstance(a, np.ndarray)]
        try:
            for ptr, a in held:
                d.copy_to_device(ptr, a)
            at = iter(ptr for ptr, _ in held)
            d.launch(
                self.module.function(name), grid, block, shared,
                [next(at) if isinstance(a, np.ndarray) else a for a in args],
            )  # fmt: skip
            d.synchronize()
            out = [np.empty_like(a) for _, a in held]
            for (ptr, _), o in zip(held, out, strict=True):
                d.copy_to_host(o, ptr)
            return out
        finally:
            d.stream.clear()
            for ptr, _ in held:
                d.free(ptr)


@pytest.fixture
def cuda() -> Callable[..., Runner]:
    """A text's kernels on an emulated device of the given kind."""
    return Runner


@pytest.fixture(scope="session")
def emulated() -> Callable[..., Any]:
    """A target of the CUDA backend on an emulated device: `prompt` as in its `Tuning`, the rest the device's."""

    def make(prompt: int = 64, **kind: Any) -> Any:
        from dataclasses import replace

        from emulated_cuda.driver import EmulatedDriver

        from trueup.backends.cuda.target import CudaTarget
        from trueup.backends.simt.tuning import Tuning
        from trueup.core.backend import Device

        driver = EmulatedDriver(**kind)
        tuning = replace(Tuning.of(driver.attributes), prompt=prompt)
        return CudaTarget(Device("emulated", "accelerator"), driver, tuning=tuning)

    return make
