"""Memory of an OpenCL device: buffers, moved over one queue. Knows no op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from trueup.core.backend.recorded import RecordedMemory


class OpenCLMemory(RecordedMemory):
    """Buffers of one context, moved over one in-order queue."""

    def __init__(self, context: Any, queue: Any, *, largest: int) -> None:
        super().__init__(largest=largest)
        self.context, self.queue = context, queue

    def make(self, nbytes: int) -> Any:
        try:
            return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, nbytes)
        except cl.Error as e:  # which class it is differs between implementations
            raise MemoryError(str(e)) from e

    def release(self, buffer: Any) -> None:
        buffer.release()

    def put(self, buffer: Any, start: int, data: NDArray[np.uint8]) -> None:
        cl.enqueue_copy(self.queue, buffer, data, dst_offset=start, is_blocking=False)

    def fetch(self, out: NDArray[np.uint8], buffer: Any, start: int) -> None:
        cl.enqueue_copy(self.queue, out, buffer, src_offset=start, is_blocking=False)

    def move(self, buffer: Any, to: int, source: int, nbytes: int) -> None:
        cl.enqueue_copy(self.queue, buffer, buffer, src_offset=source, dst_offset=to, byte_count=nbytes)

    def fill(self, buffer: Any, start: int, nbytes: int, pattern: bytes) -> None:
        if nbytes:
            cl.enqueue_fill_buffer(self.queue, buffer, np.frombuffer(pattern, np.uint8), start, nbytes)

    def wait(self) -> None:
        self.queue.finish()
