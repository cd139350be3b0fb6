"""Blocks of k-quants drawn as they are stored: every one valid, its values even about zero and of a given deviation.

Layouts as in gguf-py's dequantization. Sub-blocks have one scale s, so that with q evenly drawn from 0 … m values are
d s (q - m/2): of deviation d s sqrt(((m + 1)^2 - 1) / 12).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
SCALE = 48
"""The scale s of every sub-block; at most 63."""


def _deviation(most: int) -> float:
    return sqrt(((most + 1) ** 2 - 1) / 12)


def _halves(*values: float) -> Bytes:
    return np.array(values, np.float16).view(np.uint8)


def _scales() -> Bytes:
    """The 12 bytes of eight scales and eight minima of 6 bits, all SCALE."""
    low, high = SCALE & 15, SCALE >> 4
    return np.array([SCALE | high << 6] * 8 + [low | low << 4] * 4, np.uint8)


def _with_minima(most: int) -> Callable[[np.random.Generator, int, float], Bytes]:
    quants = 128 if most == 15 else 160

    def draw(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
        d = deviation / (SCALE * _deviation(most))
        out = np.empty((count, 16 + quants), np.uint8)
        out[:, :4] = _halves(d, d * most / 2)
        out[:, 4:16] = _scales()
        out[:, 16:] = rng.integers(0, 256, (count, quants), np.uint8)
        return out

    return draw


def _q6_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    """Values d s (q - 32), q of 0 … 63: half a step below even."""
    out = np.empty((count, 210), np.uint8)
    out[:, :192] = rng.integers(0, 256, (count, 192), np.uint8)
    out[:, 192:208] = SCALE
    out[:, 208:] = _halves(deviation / (SCALE * _deviation(63)))
    return out


BLOCKS: Mapping[GGMLQuantizationType, Callable[[np.random.Generator, int, float], Bytes]] = {
    GGMLQuantizationType.Q4_K: _with_minima(15),
    GGMLQuantizationType.Q5_K: _with_minima(31),
    GGMLQuantizationType.Q6_K: _q6_k,
}
"""By type: `(rng, blocks, deviation) -> bytes [blocks, bytes of a block]`."""
