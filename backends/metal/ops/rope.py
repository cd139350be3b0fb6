"""Rotary embedding. The turns are the host's, in float64, which Apple GPUs lack: angles grow with positions."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from trueup.backends.metal.steps import host
from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()


@lru_cache(maxsize=16)
def _turns(
    positions: bytes, components: int, freqs: bytes, component: bytes, inverse: bool
) -> tuple[mx.array, mx.array]:
    """Cosines and sines `[tokens, 1, half]` of a step, which its layers share."""
    named, which = np.frombuffer(positions, np.int32).reshape(-1, components), np.frombuffer(component, np.int32)
    angle = named[:, which] * np.frombuffer(freqs, np.float32).astype(np.float64) * (-1 if inverse else 1)
    with np.errstate(invalid="ignore"):  # an infinite frequency has no direction
        cos, sin = np.cos(angle), np.sin(angle)
    return mx.array(cos[:, None].astype(np.float32)), mx.array(sin[:, None].astype(np.float32))


@kernels.implements(ops.rope)
def rope(
    x: mx.array,
    positions: mx.array,
    freqs: mx.array,
    component: mx.array,
    *,
    start: int,
    interleaved: bool,
    inverse: bool,
) -> mx.array:
    half, which, components = freqs.shape[0], host(component), positions.shape[1]
    if np.any((which < 0) | (which >= components)):
        raise ValueError(f"rope: component {which.tolist()} of {components} components of a position")
    if not x.size or not half:
        return mx.contiguous(x)
    cos, sin = _turns(host(positions).tobytes(), components, host(freqs).tobytes(), which.tobytes(), inverse)
    end = start + 2 * half
    turning = x[..., start:end].reshape(*x.shape[:2], *((half, 2) if interleaved else (2, half)))
    axis = -1 if interleaved else -2
    a, b = (part.squeeze(axis) for part in mx.split(turning, 2, axis=axis))
    turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=axis).reshape(*x.shape[:2], 2 * half)
    return mx.concatenate([x[..., :start], turned, x[..., end:]], axis=-1)
