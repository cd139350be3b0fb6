"""GGUF's blocks as MLX multiplies them: the values that gguf-py reads, and a reason where they had to be expanded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

pytest.importorskip("mlx.core")

import mlx.core as mx

from trueup.backends.metal import Metal
from trueup.backends.metal.target import MetalTarget
from trueup.backends.metal.weights import FORMATS, Packed, plain, prepare, rows
from trueup.conformance.weights import BLOCKS, weight
from trueup.core.dtypes import ggml_type
from trueup.core.graph import Graph
from trueup.core.ops import expert_linear, linear
from trueup.core.plan import build_plan
from trueup.core.weight import Weight

RNG = np.random.default_rng(7)


def blocks(dtype: str, *shape: int) -> Weight:
    return weight("w", shape, dtype, np.zeros(shape, np.float32), RNG)


@np.errstate(all="ignore")
def values(w: Weight) -> Any:
    return dequantize(np.ascontiguousarray(w.data), ggml_type(w.type.dtype)).reshape(w.shape)


@pytest.mark.parametrize("dtype", FORMATS)
def test_packed_values_are_gguf_pys_bit_for_bit(dtype: str) -> None:
    w = blocks(dtype, 3, 5, 512)
    made = prepare(w)
    assert isinstance(made, Packed)
    assert np.array_equal(np.array(plain(made)), values(w))


def test_a_weight_of_several_pieces_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.backends.metal.weights.PIECE", 3 * 256)
    for dtype in FORMATS:
        w = blocks(dtype, 5, 512)
        assert np.array_equal(np.array(plain(prepare(w))), values(w))


def test_rows_are_read_alone() -> None:
    w = blocks("q5_k", 9, 256)
    at = np.array([[8, 0], [3, 3]])
    assert np.array_equal(np.array(rows(prepare(w), mx.array(at))), values(w)[at])


def test_packed_weights_take_less_than_expanded_ones() -> None:
    for dtype in FORMATS:
        assert prepare(blocks(dtype, 64, 512)).nbytes <= 64 * 512 * 1.25


@pytest.mark.parametrize("dtype", [t for t in FORMATS if t != "mxfp4"])
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_expanded(dtype: str, scale: float) -> None:
    w = blocks(dtype, 2, 256)
    raw = w.data.copy().reshape(-1, GGML_QUANT_SIZES[ggml_type(dtype)][1])
    raw[0, :2] = np.array([scale], np.float16).view(np.uint8)
    w = Weight("w", w.type, raw.reshape(w.data.shape))
    made = prepare(w)
    assert not isinstance(made, Packed)
    assert np.array_equal(np.array(made), values(w), equal_nan=True)


def kernel(op: Any, dtype: str) -> str:
    """The name that a plan gives to the kernel of a product with this type."""
    g = Graph()
    experts = op is expert_linear
    x = g.input("x", 2, 256)
    w = g.weight(blocks(dtype, 4, 8, 256) if experts else blocks(dtype, 8, 256))
    g.output("y", op(x, g.input("experts", 2, 1, dtype="i32"), w) if experts else op(x, w))
    target = Metal().open(Metal().devices()[0])
    (placed,) = build_plan(g, target).placements.values()
    return placed.kernel


def test_a_plan_names_the_kernel_and_why_a_type_was_expanded() -> None:
    assert kernel(linear, "q8_0") == "quantized_matmul"
    assert kernel(linear, "q6_k") == "matmul, q6_k expanded: groups of 16, MLX has 32"
    assert kernel(linear, "iq4_nl") == "matmul, iq4_nl expanded: no such format in MLX"
    assert kernel(linear, "bf16") == "matmul"
    assert kernel(expert_linear, "mxfp4") == "gather_qmm"
    assert {t for t in BLOCKS if "expanded" in kernel(linear, t)} == set(BLOCKS) - set(FORMATS)


def test_weights_above_the_recommended_working_set_are_refused() -> None:
    (device,) = Metal().devices()
    small = MetalTarget(replace(device, name="Small", memory=mx.get_active_memory() + 400_000))
    held = small.prepare_weight(blocks("q8_0", 512, 512))  # of 327,680 bytes
    with pytest.raises(MemoryError, match=r"^metal: with weight w [\d,]+ bytes are in use; Small recommends at most "):
        small.prepare_weight(blocks("q8_0", 512, 512))
    assert held.nbytes == 327_680
