"""Arguments that are weights, for kernels: as they are stored, or as float32 values."""

from __future__ import annotations

from typing import Any

from trueup.backends.opencl.memory import OpenCLTensor
from trueup.backends.opencl.weight import NATIVE

FORMATS = (*NATIVE, None)
"""For each a kernel of its own; None stands for all types that are expanded to float32."""


def label(op: str, format: str | None) -> str:
    """What plans call a kernel that reads this type of weight."""
    return f"{op} {format}" if format else f"{op}, weight expanded to f32"


def reads(format: str | None, dtype: str) -> bool | str:
    """Whether the kernel for `format` is the one for a weight of this type."""
    return (dtype not in NATIVE if format is None else dtype == format) or f"reads {format}, not {dtype}"


def values(weight: Any) -> OpenCLTensor | None:
    """Float32 values."""
    return None if weight is None else weight.values
