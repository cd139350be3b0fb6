"""The whole table of kernels."""

from __future__ import annotations

from trueup.core.backend import KernelTable

from . import attention, caches, delta, dense, experts, select

kernels = KernelTable()
for family in (attention, caches, delta, dense, experts, select):
    kernels.kernels.update(family.kernels.kernels)
