"""The backend `minimal`: one op in NumPy. All others are refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.backend import AddressedTarget, Backend, Context, Device, KernelTable, Target
from trueup.core.ops import linear
from trueup.core.plugins import hookimpl

kernels = KernelTable()


@kernels.implements(linear)
@np.errstate(all="ignore")  # NaN and infinities pass on by IEEE's rules, which the op asks for
def matmul(ctx: Context, x: Any, weight: Any) -> None:
    """x[..., n] times weight[m, n] transposed; a weight is float32 when read as an array, however it is stored."""
    ctx.out[...] = np.matmul(x, np.asarray(weight, np.float64).T)


class Minimal(Backend):
    """NumPy on the host."""

    name = "minimal"
    API = (1, 0)  # the version of trueup's contract that this was written against
    driver = False  # listing the devices loads no driver

    def devices(self) -> list[Device]:
        return [Device("NumPy", "cpu", versions={"numpy": np.__version__}, hardware="host")]

    def open(self, device: Device) -> Target:
        return AddressedTarget("minimal", device, kernels)


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [Minimal]
