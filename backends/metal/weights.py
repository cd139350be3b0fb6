"""Weights as MLX multiplies them: GGUF's blocks of 32 in MLX's quantized formats, the same values; all others as float32.

MLX's affine format holds groups of 32 codes, of each group a scale and a bias: a weight is scale · code + bias. What GGUF
calls a block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, and a sub-block of Q4_K or Q5_K, is such a group. Scales and biases are
float32, which holds every product of GGUF's scales exactly. MXFP4 is a format of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trueup.core.weight import Weight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
GROUP = 32
PIECE = 1 << 24
"""Elements that are rearranged at once."""


@dataclass(frozen=True)
class Packed:
    """`shape[..., n]` in one of MLX's quantized formats.

    `codes[..., n*bits/32]` uint32; affine: `scales[..., n/32]` and `biases[..., n/32]` float32; mxfp4: `scales` uint8,
    powers of two, and no biases.
    """

    shape: tuple[int, ...]
    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    mode: str = "affine"

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.codes, self.scales, self.biases) if a is not None)

    @property
    def how(self) -> dict[str, Any]:
        """What MLX's functions want to know of the format."""
        return {"group_size": GROUP, "bits": self.bits, "mode": self.mode}


Prepared = Packed | mx.array


@np.errstate(all="ignore")  # blocks of infinities make NaN
def prepare(weight: Weight) -> Prepared:
    """The weight on the device. Blocks with a scale that is not finite are expanded, as scale · code + bias would be NaN."""
    if weight.ndim < 2 or not weight.type.size or weight.type.dtype not in FORMATS:
        return mx.array(np.asarray(weight))
    bits, split = FORMATS[weight.type.dtype]
    found = _rearranged(weight, bits, split)
    if found is None:
        return mx.array(np.asarray(weight))
    codes, scales, biases = found
    affine = biases.size > 0
    rest = mx.array(scales), mx.array(biases) if affine else None
    return Packed(weight.shape, mx.array(codes), *rest, bits, "affine" if affine else "mxfp4")


def plain(weight: Prepared) -> mx.array:
    """`weight[...]` in float32, whole."""
    return _dequantized(weight, weight.codes, weight.scales, weight.biases) if isinstance(weight, Packed) else weight


def rows(weight: Prepared, at: mx.array) -> mx.array:
    """Rows of `weight[m, n]` in float32: `[..., n]` for `at[...]`. Only these are dequantized."""
    if not isinstance(weight, Packed):
        return weight[at]
    biases = None if weight.biases is None else weight.biases[at]
    return _dequantized(weight, weight.codes[at], weight.scales[at], biases)


def product(x: mx.array, weight: Prepared) -> mx.array:
    """`x[rows, n]` times `weight[m, n]` transposed: `[rows, m]`."""
    if not isinstance(weight, Packed):
        return x @ weight.T
    return mx.quantized_matmul(x, weight.codes, weight.scales, weight.biases, transpose=True, **weight.how)


def expert_product(x: mx.array, experts: mx.array, weight: Prepared) -> mx.array:
    """`x[tokens, k or 1, n]`, each row through `weight[experts[t, j]]` of `weight[e, m, n]`: `[tokens, k, m]`."""
    x = mx.expand_dims(x, -2)
    if not isinstance(weight, Packed):
        return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=experts).squeeze(-2)
    given = weight.codes, weight.scales, weight.biases
    return mx.gather_qmm(x, *given, rhs_indices=experts, transpose=True, **weight.how).squeeze(-2)


def _dequantized(w: Packed, codes: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
    return mx.dequantize(codes, scales, biases, dtype=mx.float32, **w.how)


# -- GGUF's blocks (ggml-common.h) taken apart: `[count, bytes]` -> codes `[count, elements]`, scales, biases `[count, groups]`

Parts = tuple[Bytes, NDArray[Any], Floats]


def _rearranged(weight: Weight, bits: int, split: Callable[[Bytes], Parts]) -> tuple[NDArray[Any], ...] | None:
    """Codes, scales and biases of the whole, piece by piece; None where a scale is not finite."""
    e = weight.type.element
    blocks = weight.data.reshape(-1, e.block_bytes)
    step = max(1, PIECE // e.block)
    pieces = [split(blocks[i : i + step]) for i in range(0, len(blocks), step)]
    for _, scales, biases in pieces:
        if scales.dtype == np.uint8 and np.any(scales == 255):  # no power of two in MLX's reading
            return None
        if scales.dtype != np.uint8 and not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            return None
    lead, n = weight.shape[:-1], weight.shape[-1]
    codes = np.concatenate([_pack(c, bits) for c, _, _ in pieces]).reshape(*lead, n * bits // 32)
    scales, biases = (np.concatenate([p[i] for p in pieces]) for i in (1, 2))
    return codes, scales.reshape(*lead, n // GROUP), biases.reshape(*lead, -1 if biases.size else 0)


def _pack(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """The low bits of each code one after another, lowest first: uint32 `[count, elements*bits/32]`."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.uint32)
    each = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(each.reshape(len(codes), -1), axis=-1, bitorder="little").view(np.uint32)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block: `[count, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth(bits: Bytes) -> Bytes:
    """32 bits, one of each element, as the fifth of its code."""
    return np.unpackbits(bits, axis=-1, bitorder="little") << 4


def _q4_0(b: Bytes) -> Parts:
    d = _half(b, 0)
    return _nibbles(b[:, 2:]), d, -8 * d


def _q4_1(b: Bytes) -> Parts:
    return _nibbles(b[:, 4:]), _half(b, 0), _half(b, 2)


def _q5_0(b: Bytes) -> Parts:
    d = _half(b, 0)
    return _nibbles(b[:, 6:]) | _fifth(b[:, 2:6]), d, -16 * d


def _q5_1(b: Bytes) -> Parts:
    return _nibbles(b[:, 8:]) | _fifth(b[:, 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: Bytes) -> Parts:
    """Codes are signed there and not here, where they are 128 more."""
    d = _half(b, 0)
    return b[:, 2:] ^ 128, d, -128 * d


def _k_scales(b: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of each of the 8 sub-blocks, 6 bits each in 12 bytes, times those of the block."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    least = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    return _half(b, 0) * scale, -_half(b, 2) * least


def _q4_k(b: Bytes) -> Parts:
    codes = _nibbles(b[:, 16:144].reshape(len(b), 4, 32))
    return codes.reshape(len(b), 256), *_k_scales(b)


def _q5_k(b: Bytes) -> Parts:
    codes = _nibbles(b[:, 48:176].reshape(len(b), 4, 32)).reshape(len(b), 8, 32)
    fifth = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (codes | fifth << 4).reshape(len(b), 256), *_k_scales(b)


def _mxfp4(b: Bytes) -> Parts:
    return _nibbles(b[:, 1:]), b[:, :1], np.zeros((len(b), 0), np.float32)


FORMATS: dict[str, tuple[int, Callable[[Bytes], Parts]]] = {
    "q4_0": (4, _q4_0), "q4_1": (4, _q4_1), "q5_0": (5, _q5_0), "q5_1": (5, _q5_1), "q8_0": (8, _q8_0),
    "q4_k": (4, _q4_k), "q5_k": (5, _q5_k), "mxfp4": (4, _mxfp4),
}  # fmt: skip
"""Types that MLX multiplies as they are: bits of a code, and what takes blocks apart."""


def why_expanded(dtype: str, element_block: int) -> str:
    """Why a type is not among them, in a few words for a plan; "" where there is nothing to expand."""
    if dtype in FORMATS or element_block == 1:
        return ""
    groups = {"q2_k": 16, "q3_k": 16, "q6_k": 16}
    if dtype in groups:
        return f"{dtype} expanded: groups of {groups[dtype]}, MLX has 32"
    return f"{dtype} expanded: no such format in MLX"
