"""Views: the same storage under another shape. No arithmetic, and no kernel where strides allow it."""

from __future__ import annotations

import numpy as np

from trueup.core.op import op

from ._arrays import Array


@op("x[..., heads*d]:any -> out[..., heads, d]", view=True)
def split_heads(x: Array, *, heads: int) -> Array:
    """The last axis cut into `heads` equal parts: out[..., h, i] = x[..., h*d + i]. `heads` must divide the axis."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads if heads else 0)


@op("x[..., heads, d]:any -> out[..., heads*d]", view=True)
def merge_heads(x: Array) -> Array:
    """The last two axes joined: out[..., h*d + i] = x[..., h, i]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


@op("x[..., n]:any -> out[..., size]", view=True)
def columns(x: Array, *, start: int, size: int) -> Array:
    """Entries start … start+size-1 of the last axis, a strided view. ValueError where they leave the axis."""
    if start < 0 or size < 0 or start + size > x.shape[-1]:
        raise ValueError(f"columns: {start}:{start + size} leaves the axis of {x.shape[-1]}")
    return x[..., start : start + size]


@op("x[...]:any -> out[...]")
def contiguous(x: Array) -> Array:
    """The same values in row-major order: a copy, for what can't read strides."""
    return np.array(x, order="C")
