"""Which kernel runs which op, and when: one file a family."""

from __future__ import annotations

from trueup.backends.simt.tuning import Tuning
from trueup.core.backend import KernelTable


def table(tuning: Tuning) -> KernelTable:
    """The kernels of a device that is tuned so."""
    from . import attention, copies, elementwise, linear, sequences, topk

    kernels = KernelTable()
    for family in (linear, elementwise, copies, sequences, attention, topk):
        family.register(kernels, tuning)
    return kernels


__all__ = ["table"]
