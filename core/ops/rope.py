"""Rotary position embedding, and the tables that describe its variants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trueup.core.op import op
from trueup.core.types import TensorType

from ._arrays import F32, Array, narrow, wide


@op("x[tokens, heads, d], positions[tokens, components]:i32, freqs[half], component[half]:i32 -> out[tokens, heads, d]")
@np.errstate(all="ignore")
def rope(
    x: F32,
    positions: Array,
    freqs: F32,
    component: Array,
    *,
    start: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
) -> F32:
    """Rotate pairs of each head by an angle that grows with the token's position (Su et al., RoFormer, arXiv
    2104.09864).

    The dims start … start + 2 half - 1 form pairs i = 0 … half-1: NeoX pairs (start + i, start + half + i), or,
    interleaved, (start + 2i, start + 2i + 1). Pair (a, b) becomes (a cos t - b sin t, b cos t + a sin t) with the
    angle t = positions[token, component[i]] · freqs[i], negated if `inverse`. All other dims pass as they are.

    `positions` holds one component a token, or several (M-RoPE: time, height, width), of which `component` picks one
    for each frequency. Angle, sine and cosine are float64. ValueError where the pairs leave the head or a component
    is missing.
    """
    half = len(freqs)
    _check(component, positions)
    angle = positions[:, component] * wide(freqs) * (-1 if inverse else 1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    if interleaved:
        first, second = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
    else:
        first, second = slice(start, start + half), slice(start + half, start + 2 * half)
    a, b = wide(x[..., first]), wide(x[..., second])
    out = np.array(x, order="C")
    out[..., first] = narrow(a * cos - b * sin)
    out[..., second] = narrow(b * cos + a * sin)
    return out


def _check(component: Array, positions: Array) -> None:
    if np.any((component < 0) | (component >= positions.shape[1])):
        raise ValueError(f"rope: component {component.tolist()} of {positions.shape[1]} components of a position")


@rope.requires
def _(
    x: TensorType, positions: TensorType, freqs: TensorType, component: TensorType, *, start: int, interleaved: bool,
    inverse: bool,
) -> bool | str:  # fmt: skip
    half = freqs.shape[0]
    fits = 0 <= start and start + 2 * half <= x.shape[2]
    return fits or f"{half} pairs from dim {start} on leave a head of {x.shape[2]}"


@rope.conditions
def _(
    x: Array, positions: Array, freqs: Array, component: Array, *, start: int, interleaved: bool, inverse: bool
) -> None:
    _check(component, positions)


def rope_frequencies(*, dims: int, base: float) -> F32:
    """The plain table, float32 [dims/2]: base^(-2i/dims), computed in float64.

    ValueError for odd or negative dims, and for a base below 1.
    """
    if dims < 0 or dims % 2 or not base >= 1:
        raise ValueError(f"rope_frequencies: dims must be even and base at least 1, got {dims} and {base}")
    return narrow(float(base) ** (-2.0 * np.arange(dims // 2) / max(dims, 1)))


def mrope_components(sections: Sequence[int], half: int) -> Array:
    """Interleaved M-RoPE (Qwen3-VL and later): which component of the position each frequency takes, int32 [half].

    Frequency i takes height (1) where i % 3 == 1 and i < 3 sections[1], width (2) where i % 3 == 2 and i < 3
    sections[2], and time (0) elsewhere. For text all components are equal, and this is plain RoPE.
    """
    i = np.arange(half)
    height = (i % 3 == 1) & (i < 3 * sections[1])
    width = (i % 3 == 2) & (i < 3 * sections[2])
    return np.where(height, 1, np.where(width, 2, 0)).astype(np.int32)
