"""The native products with stored weights, against gguf-py's dequantized values in float64, within a derived bound."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native

EPS = float(np.finfo(np.float32).eps)
FORMATS = native.DTYPES
ISAS = native.isas()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)


def block(dtype: str) -> tuple[int, int]:
    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype.upper()]]


def read(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """gguf-py's float32 values; it can't read nothing."""
    if raw.size == 0:
        return np.zeros(raw.shape, np.float32)
    with np.errstate(all="ignore"):
        return dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[dtype.upper()]).astype(np.float32, copy=False)


def stored(rng: np.random.Generator, dtype: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Random bytes of a type with finite values: each float16 scale is replaced by one of ordinary size."""
    _, size = block(dtype)
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scale = lambda: rng.uniform(-0.1, 0.1, (rows, blocks)).astype(np.float16)[..., None].view(np.uint8)
    at = {"q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q2_k": [80, 82], "q3_k": [108]}
    at |= {"q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0], "f16": [0]}
    for byte in at.get(dtype, []):
        raw[..., byte : byte + 2] = scale()
    if dtype == "mxfp4":
        raw[..., 0] = rng.integers(118, 130, (rows, blocks))
    if dtype in ("f32", "bf16"):
        raw = rng.standard_normal((rows, blocks)).astype(np.float32)[..., None].view(np.uint8)[..., -size:]
    return np.ascontiguousarray(raw).reshape(rows, blocks * size)


def product(x: NDArray[np.float32], raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    out = np.full((len(x), len(raw)), np.nan, np.float32)
    native.linear(out, x, raw, dtype)
    return out


def within_bound(out: NDArray[np.float32], x: NDArray[np.float32], raw: NDArray[np.uint8], dtype: str) -> bool:
    """n float32 multiply-adds in any order are off by at most n eps times the sum of magnitudes."""
    w, x64 = read(raw, dtype).astype(np.float64), x.astype(np.float64)
    bound = (w.shape[1] + 1) * EPS * (np.abs(x64) @ np.abs(w).T) + 1e-37
    return bool(np.all(np.abs(out - x64 @ w.T) <= bound))


def test_the_required_types_are_there() -> None:
    assert {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"} <= set(FORMATS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_dequantized_values_are_gguf_pys_bit_for_bit(dtype: str, isa: str) -> None:
    native.set_isa(isa)
    size, nbytes = block(dtype)
    raw = np.random.default_rng(1).integers(0, 256, (67, 3 * nbytes if size > 1 else 37 * nbytes), dtype=np.uint8)
    got, want = native.dequantize(raw, dtype), read(raw, dtype)
    assert got.shape == want.shape
    assert np.all((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want)))


@pytest.mark.parametrize("isa", ISAS)
def test_every_float16_and_bfloat16_is_read_exactly(isa: str) -> None:
    native.set_isa(isa)
    bits = np.arange(1 << 16, dtype=np.uint16)
    for dtype, want in (
        ("f16", bits.view(np.float16).astype(np.float32)),
        ("bf16", (bits.astype(np.uint32) << 16).view(np.float32)),
    ):
        got = native.dequantize(bits.view(np.uint8)[None], dtype)[0]
        assert np.all((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 97])
def test_linear_is_the_product_within_n_eps(dtype: str, rows: int, isa: str) -> None:
    native.set_isa(isa)
    rng = np.random.default_rng(rows)
    size, _ = block(dtype)
    for m, n in (
        ((1, 256), (5, 1280), (35, 2304), (4, 0)) if size > 1 else ((1, 1), (7, 13), (35, 1031), (4, 2048), (3, 0))
    ):
        raw = stored(rng, dtype, m, n // size)
        x = rng.standard_normal((rows, n)).astype(np.float32)
        assert within_bound(product(x, raw, dtype), x, raw, dtype), (m, n)


@pytest.mark.fault("B42")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_k"])
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_number_of_threads(dtype: str, isa: str) -> None:
    native.set_isa(isa)
    rng = np.random.default_rng(5)
    size, _ = block(dtype)
    n = 1280 if size > 1 else 1283
    raw = stored(rng, dtype, 131, n // size)
    x = rng.standard_normal((67, n)).astype(np.float32)
    native.set_threads(1)
    alone = np.concatenate([product(x[r : r + 1], raw, dtype) for r in range(67)])
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for rows in (*range(1, 8), 31, 64, 66, 67):
            np.testing.assert_array_equal(product(x[:rows], raw, dtype), alone[:rows])
            np.testing.assert_array_equal(product(x[67 - rows :], raw, dtype), alone[67 - rows :])


@pytest.mark.parametrize("dtype", ["f32", "q4_0"])
def test_a_nan_or_infinity_stays_in_its_own_row(dtype: str) -> None:
    rng = np.random.default_rng(6)
    raw = stored(rng, dtype, 9, 64 // block(dtype)[0])
    x = rng.standard_normal((5, 64)).astype(np.float32)
    clean = product(x, raw, dtype)
    x[1, 63], x[3, 0], x[3, 1] = np.nan, np.inf, -np.inf
    out = product(x, raw, dtype)
    np.testing.assert_array_equal(out[[0, 2, 4]], clean[[0, 2, 4]])
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[3]).any()


def test_strided_rows_of_every_argument_are_read_in_place() -> None:
    rng = np.random.default_rng(7)
    wide, raw, out = rng.standard_normal((10, 300)), stored(rng, "q8_0", 14, 12), np.full((9, 31), 7, np.float32)
    x = wide.astype(np.float32)[1::2, 20:148]
    native.linear(out[1:6, 3:10], x, raw[::2, 34 : 34 * 5], "q8_0")
    want = product(np.ascontiguousarray(x), np.ascontiguousarray(raw[::2, 34 : 34 * 5]), "q8_0")
    np.testing.assert_array_equal(out[1:6, 3:10], want)
    out[1:6, 3:10] = 7
    assert np.all(out == 7), "nothing beside the output is written"


def test_instruction_sets_agree_within_the_bound() -> None:
    rng = np.random.default_rng(8)
    raw, x = stored(rng, "q6_k", 33, 5), rng.standard_normal((6, 1280)).astype(np.float32)
    for isa in ISAS:
        native.set_isa(isa)
        assert native.isa() == isa
        assert within_bound(product(x, raw, "q6_k"), x, raw, "q6_k")


f32 = lambda *shape: np.zeros(shape, np.float32)
u8 = lambda *shape: np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((f32(2, 3), f32(2, 32), u8(3, 34), "q9_0"), "dtype is 'q9_0', expected one of f32, f16"),
        (
            (f32(2, 3), f32(2, 32), u8(3, 35), "q8_0"),
            "rows of 35 bytes, expected a multiple of the 34",
        ),
        ((f32(2, 3), f32(2, 64), u8(3, 34), "q8_0"), "x has n = 64, expected 32 as in a row of weight_bytes"),
        ((f32(2, 4), f32(2, 32), u8(3, 34), "q8_0"), "out has m = 4, expected 3 as in weight_bytes"),
        ((f32(1, 3), f32(2, 32), u8(3, 34), "q8_0"), "out has rows = 1, expected 2 as in x"),
        ((f32(2, 3), np.zeros((2, 32)), u8(3, 34), "q8_0"), r"x is float64\[2, 32\], expected float32\[rows, n\]"),
        (
            (f32(2, 3), f32(2, 32).astype(">f4"), u8(3, 34), "q8_0"),
            r"x is >f4\[2, 32\], expected float32",
        ),
        ((f32(2, 3), f32(32), u8(3, 34), "q8_0"), r"x is float32\[32\]"),
        (
            (f32(2, 3), f32(2, 64)[:, ::2], u8(3, 34), "q8_0"),
            "8 bytes on axis 1, expected a contiguous last",
        ),
        ((np.broadcast_to(f32(1, 3), (2, 3)), f32(2, 32), u8(3, 34), "q8_0"), "out is read-only"),
        ((f32(2, 3), f32(2, 32), np.zeros((3, 34), np.int8), "q8_0"), r"weight_bytes is int8\[3, 34\], expected uint8"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        native.linear(*arguments)
    assert str(refusal.value).startswith("linear: ")
