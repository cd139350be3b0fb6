"""Weights of every stored type, as random bytes: every code and every scale that a block can hold, all finite.

Knows the places of scales in GGUF's blocks; knows no op and no backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.dtypes import DTYPES
from trueup.core.types import TensorType
from trueup.core.weight import Weight

SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "iq4_nl": (0,), "iq4_xs": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip
"""For each type of blocks, where in a block its float16 scales lie (ggml-common.h)."""

PLAIN = ("f32", "f16", "bf16")
BLOCKS = (*SCALES, "mxfp4")
"""Types that random bytes can make: those whose scales are known."""


def weight(
    name: str, shape: tuple[int, ...], dtype: str, values: NDArray[np.float32], rng: np.random.Generator
) -> Weight:
    """A weight of this type: `values` rounded to it, or, for types of blocks, random codes and scales of about 0.02."""
    if dtype == "f32":
        return Weight.of(name, values)
    if dtype == "f16":
        with np.errstate(all="ignore"):
            return Weight.of(name, values.astype(np.float16))
    type = TensorType(shape, dtype)
    e = DTYPES[dtype]
    if dtype == "bf16":
        raw: Any = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return Weight(name, type, raw.reshape(*shape[:-1], shape[-1] * 2))
    blocks = rng.integers(0, 256, size=(type.nbytes // e.block_bytes, e.block_bytes), dtype=np.uint8)
    for at in SCALES.get(dtype, ()):
        scales = ((rng.random(len(blocks)) - 0.3) * 0.02).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if dtype == "mxfp4":
        least = values.size and not np.any(values)  # the smallest powers of two, some of them subnormal
        blocks[:, 0] = rng.integers(0, 3, size=len(blocks)) if least else rng.integers(112, 130, size=len(blocks))
    return Weight(name, type, blocks.reshape(*shape[:-1], -1) if type.size else np.zeros(_raw(type), np.uint8))


def _raw(type: TensorType) -> tuple[int, ...]:
    return (*type.shape[:-1], TensorType(type.shape[-1:], type.dtype).nbytes)


def magnitude(w: Weight) -> NDArray[np.float64]:
    """What rounding in the dequantizing of `w` goes by: |d q| + |m|, from above by 4 times the largest of its block."""
    values = np.abs(np.asarray(w, np.float64))
    e = w.type.element
    if e.plain or not values.size:
        return values
    blocks = values.reshape(-1, e.block)
    return np.broadcast_to(4 * blocks.max(-1, keepdims=True), blocks.shape).reshape(values.shape)
