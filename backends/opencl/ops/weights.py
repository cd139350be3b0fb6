"""Kernels by the type of weight that they read."""

from __future__ import annotations

from trueup.backends.opencl.programs import NATIVE

FORMATS = (*NATIVE, None)
"""For each a kernel of its own; None stands for all types that are expanded to float32."""


def label(op: str, format: str | None) -> str:
    """What plans call a kernel that reads this type of weight."""
    return f"{op} {format}" if format else f"{op}, weight expanded to f32"


def reads(format: str | None, dtype: str) -> bool | str:
    """Whether the kernel for `format` is the one for a weight of this type."""
    return (dtype not in NATIVE if format is None else dtype == format) or f"reads {format}, not {dtype}"
