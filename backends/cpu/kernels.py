"""The table of the CPU backend: which native function runs which op, and the NumPy bodies that stand in for the rest."""

from __future__ import annotations

from typing import Any

from trueup.core.backend import Context, KernelTable
from trueup.core.op import OPS
from trueup.core.ops import (
    attention,
    expert_combine,
    expert_linear,
    gated_delta_rule,
    index_scores,
    linear,
    top_k,
)
from trueup.core.types import TensorType

from . import _native as native

kernels = KernelTable()


def stored(weight: TensorType) -> bool | str:
    """Whether native kernels read weights of this type."""
    return weight.dtype in native.DTYPES or f"no native kernel reads {weight.dtype}"


def flat(array: Any) -> Any:
    """Leading axes as one; a view of what lies contiguously."""
    return array.reshape(-1, array.shape[-1])


@kernels.implements(
    linear, when=lambda x, weight: stored(weight) is True and (len(x.shape) == 2 or x.contiguous) or stored(weight)
)
def _(ctx: Context, x: Any, weight: Any) -> None:
    native.linear(flat(ctx.out), flat(x), weight.data, weight.dtype)
