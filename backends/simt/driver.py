"""What this package asks of a device's driver: memory, programs, launches and graphs, all on one queue; no tensor and no op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class CompileError(RuntimeError):
    """The compiler refused a text; the message holds its log."""


class Driver(Protocol):
    """A device. All work goes to one queue, in order; nothing waits but what says so.

    `attributes` are integers: multiprocessor_count, max_grid_dim_x, max_shared_memory_per_block and whatever else a backend
    tunes by. Arguments of kernels are NumPy scalars of their parameters' sizes, bytes for a struct; pointers are integers of
    64 bits.
    """

    @property
    def attributes(self) -> Mapping[str, int]: ...

    def alloc(self, nbytes: int) -> int:
        """Device memory; MemoryError where there is none."""

    def free(self, ptr: int) -> None: ...

    def memset(self, ptr: int, value: int, nbytes: int) -> None: ...

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies read and write when their turn comes; given back with its last array."""

    def copy_to_device(self, ptr: int, array: NDArray[Any]) -> None:
        """From pinned memory when its turn comes, from other memory as it is now."""

    def copy_to_host(self, array: NDArray[Any], ptr: int) -> None:
        """To pinned memory when its turn comes; to other memory it waits."""

    def copy(self, to: int, source: int, nbytes: int) -> None: ...

    def synchronize(self) -> None:
        """Wait for the queue; what went wrong in it is raised here."""

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """A program's image, for which no device is needed; CompileError with the compiler's log."""

    def load(self, image: bytes) -> Any:
        """A module; `function(name)` of it is a kernel."""

    def launch(
        self, kernel: Any, grid: Sequence[int], block: Sequence[int], shared: int, args: Sequence[Any]
    ) -> None: ...

    def begin_capture(self) -> None:
        """From here on work goes into a graph and not into the queue."""

    def end_capture(self) -> Any: ...

    def launch_graph(self, graph: Any) -> None: ...

    def close(self) -> None: ...
