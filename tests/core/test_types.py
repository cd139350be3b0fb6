"""Types of tensors, weights as they are stored (the gguf package is the oracle), and declarations of state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from trueup.core.dtypes import DTYPES, ggml_type
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.core.weight import Weight

PLAIN = {"f64": "f8", "f32": "f4", "f16": "f2", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8"}


# -- types -------------------------------------------------------------------------------------------------------------


def test_every_gguf_type_is_a_type() -> None:
    for t in GGMLQuantizationType:
        block, size = GGML_QUANT_SIZES[t]
        d = DTYPES[t.name.lower()]
        assert (d.block, d.block_bytes, d.plain, ggml_type(d.name)) == (block, size, block == 1, t)
        assert TensorType((3, 2 * block), d.name).nbytes == 3 * 2 * size
        assert (None if d.numpy is None else np.dtype(d.numpy).str[1:]) == PLAIN.get(d.name)


@pytest.mark.parametrize("shape", [(3, 33), (), (32, 3)])
def test_rows_are_made_of_whole_blocks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows of q8_0 hold a multiple of 32 elements, not shape \["):
        _ = TensorType(shape, "q8_0").nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3,), "f99", "there is no element type 'f99'"),
        ((3,), "F32", "there is no element type 'F32'"),
        ((3, -1), "f32", r"a shape is made of natural numbers, got \[3, -1\]"),
        ((3.0,), "f32", r"a shape is made of natural numbers, got \[3.0\]"),
    ],
)
def test_types_that_are_none(shape: Any, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorType(shape, dtype)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(SHAPES)
def test_row_major_is_numpys(shape: tuple[int, ...]) -> None:
    t = TensorType(shape)
    assert (t.size, t.nbytes) == (math.prod(shape), 4 * math.prod(shape))
    if t.size:
        assert tuple(4 * s for s in t.row_major()) == np.zeros(shape, np.float32).strides
    assert t.with_strides(t.row_major()).contiguous


@given(SHAPES, st.data())
def test_types_of_arrays(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Any slicing and transposing: contiguous where NumPy says so, and the strides address the same elements."""
    base = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    steps = tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape)
    array = base[steps].transpose(data.draw(st.permutations(range(len(shape)))))
    t = TensorType.of(array)
    assert (t.shape, t.dtype) == (array.shape, "i32")
    assert t.contiguous == (array.flags.c_contiguous or t.strides is None)
    if array.flags.c_contiguous:
        assert t.contiguous
    if array.size:
        lies = np.lib.stride_tricks.as_strided(array, t.shape, [4 * s for s in t.strides or t.row_major()])
        assert np.array_equal(lies, array)


def test_strides_are_no_part_of_equality_and_are_shown() -> None:
    a = TensorType.of(np.zeros((4, 6), np.float32)[:, :3])
    assert a == TensorType((4, 3)) and hash(a) == hash(TensorType((4, 3)))
    assert str(a) == "f32[4, 3] strides [6, 1]" and str(TensorType(())) == "f32[]"


@pytest.mark.parametrize("dtype", ["bool", "c8", ">f4", ">i4", "U3", "O", "u2", "M8[s]"])
def test_arrays_without_a_type(dtype: str) -> None:
    with pytest.raises(TypeError, match="no trueup type for NumPy's"):
        TensorType.of(np.zeros(3, dtype))


# -- weights -----------------------------------------------------------------------------------------------------------

ROWS = {
    "one": 1, "last": -1, "first": -5, "slice": slice(1, 4), "step": slice(None, None, 2),
    "back": slice(None, None, -1), "none": slice(2, 2), "all": slice(None), "list": [3, 0, 3],
    "array": np.array([[4, -1], [0, 2]]), "int32": np.array([2, 2], np.int32), "empty": np.zeros(0, np.int64),
    "mask": np.array([True, False, True, True, False]),
}  # fmt: skip


def random_bytes(t: TensorType) -> np.ndarray[Any, Any]:
    row = TensorType(t.shape[-1:], t.dtype).nbytes
    return np.random.default_rng(7).integers(0, 256, (*t.shape[:-1], row), np.uint8)


def meaning(raw: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The whole tensor's values by NumPy where it has the type, else by the gguf package."""
    if dtype in PLAIN:
        plain = raw.view(f"<{PLAIN[dtype]}")
        return plain.astype(np.float32) if dtype in ("f16", "f64") else plain
    return dequantize(raw, ggml_type(dtype))


def readable(dtype: str) -> bool:
    try:
        meaning(random_bytes(TensorType((1, DTYPES[dtype].block), dtype)), dtype)
    except NotImplementedError:
        return False
    return True


GGUF = [t.name.lower() for t in GGMLQuantizationType]
READABLE = [d for d in GGUF if readable(d)]


def test_most_types_are_readable() -> None:
    assert len(READABLE) >= 28 and {"f32", "bf16", "q8_0", "q4_k", "q6_k", "iq2_xxs", "mxfp4"} <= set(READABLE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", READABLE)
def test_rows_are_those_of_gguf(dtype: str) -> None:
    t = TensorType((5, 3, 2 * DTYPES[dtype].block), dtype)
    raw = random_bytes(t)
    w, want = Weight("w", t, raw), meaning(raw, dtype)
    assert want.dtype == np.float32 or dtype in ("i8", "i16", "i32", "i64")
    np.testing.assert_array_equal(np.asarray(w), want)
    for name, rows in ROWS.items():
        np.testing.assert_array_equal(w[rows], want[rows], err_msg=name)
    matrix = Weight("w", TensorType((5, t.shape[2]), dtype), raw[:, 0])
    for name, rows in ROWS.items():
        np.testing.assert_array_equal(matrix[rows], want[:, 0][rows], err_msg=name)
    vector = Weight("w", TensorType(t.shape[2:], dtype), raw[0, 0])
    np.testing.assert_array_equal(vector[2:7], want[0, 0][2:7])
    np.testing.assert_array_equal(vector[-1], want[0, 0][-1])
    for outside in (5, -6, [0, 5], np.array([[-6]])):
        with pytest.raises(IndexError):
            w[outside]


@pytest.mark.fault("B67")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 254, 255])
def test_exponent_scales_are_powers_of_two_from_end_to_end(scale: int) -> None:
    """Codes of 4 bits by hand, times 2^(scale - 127); what float32 can't hold is an infinity."""
    codes = np.arange(16)
    block = np.array([[scale, *(codes | codes << 4)]], np.uint8)
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = np.concatenate([half, -half]) * 2.0 ** (scale - 127)
    got = np.asarray(Weight("w", TensorType((1, 32), "mxfp4"), block))[0]
    np.testing.assert_array_equal(got, np.concatenate([want, want]).astype(np.float32))


@pytest.mark.parametrize("dtype", GGUF)
@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0), (0,)])
def test_nothing_is_a_weight_too(dtype: str, shape: tuple[int, ...]) -> None:
    t = TensorType((*shape[:-1], shape[-1] * DTYPES[dtype].block), dtype)
    w = Weight("w", t, random_bytes(t))
    assert np.asarray(w).shape == t.shape and w[0:0].shape == (0, *t.shape[1:])
    assert w[np.zeros(0, int)].shape == (0, *t.shape[1:])


@pytest.mark.parametrize("dtype", sorted(set(GGUF) - set(READABLE)))
def test_what_gguf_cannot_read_is_an_error_that_says_so(dtype: str) -> None:
    t = TensorType((2, DTYPES[dtype].block), dtype)
    with pytest.raises(ValueError, match=rf"weight w: {dtype}\[2, \d+\] can't be dequantized"):
        np.asarray(Weight("w", t, random_bytes(t)))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (np.zeros((3, 33), np.uint8), r"uint8\[3, 33\]"),
        (np.zeros((2, 34), np.uint8), r"uint8\[2, 34\]"),
        (np.zeros((3, 34), np.int8), r"int8\[3, 34\]"),
        (np.zeros(3 * 34, np.uint8), r"uint8\[102\]"),
    ],
)
def test_bytes_that_do_not_fit(data: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"weight w: q8_0\[3, 32\] takes uint8\[3, 34\], got {found}"):
        Weight("w", TensorType((3, 32), "q8_0"), data)


@pytest.mark.parametrize("rows", [(0, 1), (slice(None), 0), (..., 0), None, (0,)])
@pytest.mark.parametrize("shape", [(3, 4), (3,)])
def test_only_the_first_axis_has_indices(rows: Any, shape: tuple[int, ...]) -> None:
    """The last axis is stored as bytes, so an index of it would be one of bytes."""
    with pytest.raises(IndexError, match=r"weight w: f32\[3.* takes one index, of its first axis"):
        Weight.of("w", np.zeros(shape, np.float32))[rows]


@given(SHAPES, st.sampled_from(["f4", "i1", "i2", "i4", "i8", "u1"]), st.booleans())
def test_arrays_as_weights(shape: tuple[int, ...], dtype: str, transposed: bool) -> None:
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    array = array.T if transposed else array
    w = Weight.of("w", array)
    assert w.shape == array.shape and w.ndim == array.ndim
    np.testing.assert_array_equal(np.asarray(w), array)
    assert np.asarray(w).dtype == array.dtype
    if shape:
        assert len(w) == len(array)


def test_a_scalar_weight() -> None:
    w = Weight.of("w", np.array(2.5, np.float32))
    assert w.shape == () and float(np.asarray(w)) == 2.5
    with pytest.raises(TypeError, match="weight w is a scalar, without a length"):
        len(w)
    with pytest.raises(IndexError, match="weight w"):
        w[0]


def test_copies_are_copies() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    w = Weight.of("w", array)
    assert np.may_share_memory(np.asarray(w), array), "no copy where none is needed"
    np.array(w)[:] = 9
    w.__array__(copy=True)[:] = 9
    np.asarray(w, np.int32)[:] = 9
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    quantized = Weight("q", TensorType((1, 32), "q8_0"), np.zeros((1, 34), np.uint8))
    with pytest.raises(ValueError, match=r"weight q: q8_0\[1, 32\] can't be read without a copy"):
        np.array(quantized, copy=False)


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Capacity(0, 1, 1), "capacity: slots must be a positive integer, got 0"),
        (lambda: Capacity(1, 1.0, 1), "capacity: pages must be a positive integer, got 1.0"),  # type: ignore[arg-type]
        (lambda: Capacity(1, 1, True), "capacity: page must be a positive integer, got True"),
        (lambda: PerToken((4,), every=0), "a state has an entry for every 1 or more tokens, got every=0"),
        (lambda: PerToken((4,), every=-1), "a state has an entry for every 1 or more tokens, got every=-1"),
        (lambda: PerToken((4,), dtype="f99"), "there is no element type 'f99'"),
        (lambda: PerToken((4,), dtype="q8_0"), "a state can't be of q8_0, which has no NumPy type"),
        (lambda: PerToken([4]), r"the width of a state is a tuple of sizes, got \[4\]"),  # type: ignore[arg-type]
        (lambda: PerSequence((-4,)), r"a shape is made of natural numbers, got \[-4\]"),
        (lambda: PerSequence((4,), "i32", 0.5), "a state of i32 can't start from 0.5"),
        (lambda: PerSequence((4,), "i32", float("-inf")), "a state of i32 can't start from -inf"),
        (lambda: PerSequence((4,), "i32", float("nan")), "a state of i32 can't start from nan"),
        (lambda: PerSequence((4,), "i8", 128), "a state of i8 can't start from 128"),
        (
            lambda: PerToken((4,), every=3).storage(Capacity(1, 1, 16)),
            "a page of 16 tokens is not a whole number of entries of 3 tokens",
        ),
    ],
)
def test_declarations_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_storage_of_states() -> None:
    c = Capacity(slots=3, pages=5, page=8)
    assert PerToken((2, 4), every=4).storage(c) == TensorType((5, 2, 2, 4))
    assert PerToken((), dtype="i32").storage(c) == TensorType((5, 8), "i32")
    assert PerSequence((0, 6)).storage(c) == TensorType((3, 0, 6))
    assert PerSequence((2,), "i32", fill=-1).storage(c) == TensorType((3, 2), "i32")
    PerSequence((2,), fill=float("-inf"))
