"""A compiled plan: kernels whose arguments are set once, enqueued in order for every step. Inputs go up in one copy,
and nothing comes back before the outputs do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from trueup.core.backend.recorded import DeviceTensor, RecordedExecutable, Recording, Rows


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its arguments, and how many work-items in groups of how many."""

    kernel: Any
    items: tuple[int]
    group: tuple[int]


@dataclass(frozen=True)
class Recorder(Recording):
    """How kernel functions put launches into a plan."""

    executable: OpenCLExecutable

    @property
    def fault(self) -> tuple[Any, int]:
        return self.executable.fault.buffer, self.node.id

    def flat(self, kernel: str, rows: int, n: int, *args: Any, format: str = "") -> None:
        """An elementwise kernel over rows of n; its first two arguments are these."""
        self.over(kernel, rows, n, rows, n, *args, format=format)

    def over(self, kernel: str, rows: int, n: int, *args: Any, format: str = "") -> None:
        """An elementwise kernel over rows of n."""
        tuning = self.executable.target.tuning
        self._add(kernel, rows * -(-n // tuning.run), tuning.group, args, format)

    def items(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A kernel of `count` independent work-items."""
        self._add(kernel, count, self.executable.target.tuning.group, args, format)

    def groups(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A kernel of `count` work-groups, each as many lanes as share a reduction."""
        lanes = self.executable.target.tuning.lanes
        self._add(kernel, count * lanes, lanes, args, format)

    def sides(self, kernel: str, count: int, *args: Any, format: str = "") -> None:
        """A kernel of `count` work-groups that share local memory."""
        side = self.executable.target.tuning.side
        self._add(kernel, count * side, side, args, format)

    def _add(self, name: str, items: int, group: int, args: tuple[Any, ...], format: str) -> None:
        if items <= 0:
            return
        kernel = self.executable.target.programs.kernel(name, format)
        kernel.set_args(*packed(args))
        self.launches.append(Launch(kernel, (-(-items // group) * group,), (group,)))


def packed(args: tuple[Any, ...]) -> list[Any]:
    """Arguments as kernels take them: int as long, float as float, a tensor as its buffer and offset, None as none."""
    out: list[Any] = []
    for a in args:
        if a is None:
            out += [None, np.uint64(0)]
        elif isinstance(a, DeviceTensor):
            out += [a.buffer, np.uint64(a.offset)]
        elif isinstance(a, Rows):
            out += [a.tensor.buffer, np.uint64(a.tensor.offset), *map(np.int64, (a.inner, a.outer, a.step))]
        elif isinstance(a, tuple):
            out += packed(a)
        elif isinstance(a, bool | int):
            out.append(np.int64(a))
        elif isinstance(a, float):
            out.append(np.float32(a))
        else:
            out.append(a)
    return out


class OpenCLExecutable(RecordedExecutable):
    """Launches in the order of the plan, on one queue."""

    recording = Recorder
    target: Any  # an OpenCLTarget

    def start(self, launch: Launch) -> None:
        cl.enqueue_nd_range_kernel(self.target.queue, launch.kernel, launch.items, launch.group)

    def wait(self) -> None:
        self.target.queue.finish()

    def play(self) -> tuple[int, dict[str, NDArray[np.uint8]]]:
        memory, word = self.memory, np.empty(4, np.uint8)
        raws = {name: np.empty(handle.extent, np.uint8) for name, handle in self.outputs.items()}
        try:
            if self.staging.size:
                memory.put(self.staged.buffer, self.staged.start, self.staging)
            for step in self.steps:
                step()
            memory.fetch(word, self.fault.buffer, self.fault.start)
            for name, handle in self.outputs.items():
                if handle.extent:
                    memory.fetch(raws[name], handle.buffer, handle.start)
        finally:
            memory.wait()
        return int(word.view(np.int32)[0]), raws
