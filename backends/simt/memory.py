"""Memory of a device: addresses, moved over the driver's queue. Knows no op."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend.recorded import RecordedMemory

from .driver import Driver

PIECE = 1 << 24
"""Bytes of a pattern that are copied at a time."""


class SimtMemory(RecordedMemory):
    """Allocations of one device; a buffer is its address."""

    def __init__(self, driver: Driver, *, largest: int | None = None) -> None:
        super().__init__(largest=largest)
        self.driver = driver

    def make(self, nbytes: int) -> int:
        return self.driver.alloc(nbytes)

    def release(self, buffer: int) -> None:
        self.driver.free(buffer)

    def put(self, buffer: int, start: int, data: NDArray[np.uint8]) -> None:
        self.driver.copy_to_device(buffer + start, data)

    def fetch(self, out: NDArray[np.uint8], buffer: int, start: int) -> None:
        self.driver.copy_to_host(out, buffer + start)

    def move(self, buffer: int, to: int, source: int, nbytes: int) -> None:
        self.driver.copy(buffer + to, buffer + source, nbytes)

    def fill(self, buffer: int, start: int, nbytes: int, pattern: bytes) -> None:
        if not nbytes:
            return
        if len(set(pattern)) == 1:
            self.driver.memset(buffer + start, pattern[0], nbytes)
            return
        piece = np.frombuffer(pattern * (min(nbytes, PIECE) // len(pattern)), np.uint8)
        for at in range(0, nbytes, piece.nbytes):
            self.put(buffer, start + at, piece[: nbytes - at])
        self.wait()

    def wait(self) -> None:
        self.driver.synchronize()
