"""A compiled plan: launches whose arguments are packed once, captured into one graph with the copies around them, and
replayed for every step. Nothing waits within a step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend.contract import Storage
from trueup.core.backend.recorded import ALIGN, DeviceTensor, RecordedExecutable, Recording, Rows
from trueup.core.plan import Plan

ENTRIES, ROW = 256, 128
"""Threads of a block whose threads do an entry each, and of one that does a row."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its arguments, and how many blocks of how many threads with how much shared memory."""

    kernel: Any
    blocks: int
    threads: int
    shared: int
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Recorder(Recording):
    """How kernel functions put launches into a plan. Each takes the kernel's name, how much there is to do, its arguments,
    and the type of weight that it reads."""

    def flat(self, kernel: str, rows: int, n: int, *args: Any, format: str = "") -> None:
        """A thread for each entry of rows of n; the kernel's first two arguments are these."""
        self.items(kernel, rows * n, rows, n, *args, format=format)

    def items(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A thread for each of `count`."""
        self._add(kernel, -(-count // ENTRIES), ENTRIES, 0, args, format)

    def warps(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A warp for each of `count`."""
        target: Any = self.executable.target
        warps = target.tuning.warps
        self._add(kernel, -(-count // warps), 32 * warps, 0, args, format)

    def blocks(self, kernel: str, count: int, *args: Any, threads: int = ROW, shared: int = 0) -> None:
        """A block for each of `count`."""
        self._add(kernel, count, threads, shared, args, "")

    def _add(self, name: str, blocks: int, threads: int, shared: int, args: tuple[Any, ...], format: str) -> None:
        if blocks <= 0:
            return
        target: Any = self.executable.target
        most = target.driver.attributes["max_grid_dim_x"]
        if blocks > most:
            raise ValueError(f"{self.node.describe()}: {blocks:,} blocks of {name}; the device starts {most:,} at most")
        kernel = target.programs.kernel(name, format)
        self.launches.append(Launch(kernel, blocks, threads, shared, tuple(packed(args))))


def packed(args: tuple[Any, ...]) -> list[Any]:
    """Arguments as kernels take them: int as i64, float as float, a tensor as its address, None as null."""
    out: list[Any] = []
    for a in args:
        if a is None:
            out.append(np.uint64(0))
        elif isinstance(a, DeviceTensor):
            out.append(np.uint64(a.buffer + a.start))
        elif isinstance(a, Rows):
            out += [np.uint64(a.tensor.buffer + a.tensor.start), *map(np.int64, (a.inner, a.outer, a.step))]
        elif isinstance(a, tuple):
            out += packed(a)
        elif isinstance(a, bool | int):
            out.append(np.int64(a))
        elif isinstance(a, float):
            out.append(np.float32(a))
        else:
            out.append(a)
    return out


class SimtExecutable(RecordedExecutable):
    """Launches in order; a graph of them from the first step on, where no node falls back to the host."""

    recording = Recorder
    target: Any  # a SimtTarget

    def __init__(self, plan: Plan, target: Any, storage: Storage) -> None:
        self.driver = target.driver
        self.graph: Any = None
        self._answers: NDArray[np.uint8] | None = None
        super().__init__(plan, target, storage)

    def host_room(self, nbytes: int) -> NDArray[np.uint8]:
        room: NDArray[np.uint8] = self.driver.pinned(max(nbytes, 1))[:nbytes]
        return room

    def start(self, launch: Launch) -> None:
        self.driver.launch(launch.kernel, (launch.blocks,), (launch.threads,), launch.shared, launch.args)

    def wait(self) -> None:
        self.driver.synchronize()

    def play(self) -> tuple[int, dict[str, NDArray[np.uint8]]]:
        if self.fallbacks or self.target.poison:
            self._put()
        else:
            if self.graph is None:
                self.graph = self._captured()
            self.driver.launch_graph(self.graph)
        self.driver.synchronize()
        answers = self._room()
        word = int(answers[:4].view(np.int32)[0])
        return word, {name: answers[at : at + n].copy() for name, (at, n) in self._places().items()}

    def _places(self) -> Mapping[str, tuple[int, int]]:
        """Where each output's bytes lie in the array that is read back, behind the fault word."""
        places, at = {}, ALIGN
        for name, handle in self.outputs.items():
            places[name] = at, handle.extent
            at += -(-handle.extent // ALIGN) * ALIGN
        return places

    def _room(self) -> NDArray[np.uint8]:
        if self._answers is None:
            ends = [at + n for at, n in self._places().values()]
            self._answers = self.driver.pinned(max([ALIGN, *ends]))
        return self._answers

    def _put(self) -> None:
        """All of a step: one copy up, the launches, and the copies back."""
        driver, answers = self.driver, self._room()
        if self.staging.size:
            driver.copy_to_device(self.staged.buffer + self.staged.start, self.staging)
        for step in self.steps:
            step()
        driver.copy_to_host(answers[:4], self.fault.buffer + self.fault.start)
        for name, (at, n) in self._places().items():
            if n:
                driver.copy_to_host(answers[at : at + n], self.outputs[name].buffer + self.outputs[name].start)

    def _captured(self) -> Any:
        self._room()
        self.driver.begin_capture()
        try:
            self._put()
        except BaseException:
            with suppress(RuntimeError):  # a capture that failed can't be made a graph
                self.driver.end_capture()
            raise
        return self.driver.end_capture()

    def close(self) -> None:
        self.graph = None
        super().close()
