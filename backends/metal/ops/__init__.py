"""The table of kernels: every op that computes, in terms of MLX's operations."""

from __future__ import annotations

from trueup.core.backend import KernelTable

from . import attention, caches, delta, elementwise, indexer, norms, products, rope, select


def table() -> KernelTable:
    """A new table of all families."""
    out = KernelTable()
    for family in (attention, caches, delta, elementwise, indexer, norms, products, rope, select):
        for op, kernels in family.kernels.kernels.items():
            out.kernels.setdefault(op, []).extend(kernels)
    return out
