"""Errors in numbers that lie on the device: a condition is queued beside the step's results and read once, with them.

To look at such a number at once would make the host wait in the middle of every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import numpy as np

Check = tuple[mx.array, Callable[[], str]]
"""A boolean scalar that must hold, and what to say where it does not."""

_queue: ContextVar[list[Check] | None] = ContextVar("queue", default=None)


def require(holds: mx.array, otherwise: Callable[[], str]) -> None:
    """ValueError with `otherwise()` where `holds[]` is false: at the end of the step, or at once outside of any."""
    queue = _queue.get()
    if queue is None:
        settle([(holds, otherwise)])
    else:
        queue.append((holds, otherwise))


def in_range(op: str, what: str, at: mx.array, low: int, high: int) -> None:
    """Every entry of `at[...]`, integers, must be in low … high - 1."""

    def say() -> str:
        found = np.array(at)
        wrong = found[(found < low) | (found >= high)]
        return f"{op}: the {what} {int(wrong.flat[0])} is not in {low}:{high}"

    if at.size:
        require(mx.all((at >= low) & (at < high)), say)


@contextmanager
def collected() -> Iterator[list[Check]]:
    """What is required inside is put on this list, for `settle`."""
    queue: list[Check] = []
    token = _queue.set(queue)
    try:
        yield queue
    finally:
        _queue.reset(token)


def settle(checks: list[Check]) -> None:
    """ValueError of the first that does not hold. Evaluates them all."""
    mx.eval([holds for holds, _ in checks])
    for holds, otherwise in checks:
        if not holds.item():
            raise ValueError(otherwise())
