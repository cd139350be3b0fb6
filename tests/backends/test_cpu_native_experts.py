"""The native mixture-of-experts products, against float64 sums over each row's experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native

EPS = float(np.finfo(np.float32).eps)
F32 = NDArray[np.float32]


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    isa, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(isa)
    native.set_threads(threads)


def weights(rng: np.random.Generator, e: int, m: int, n: int, dtype: str) -> tuple[NDArray[np.uint8], F32]:
    """Stored bytes [e, m, row_bytes], and the values that they mean."""
    kind = GGMLQuantizationType[dtype.upper()]
    raw = quantize(rng.standard_normal((e * m, n)).astype(np.float32), kind).view(np.uint8)
    return raw.reshape(e, m, -1), dequantize(raw, kind).reshape(e, m, n)


def choices(rng: np.random.Generator, tokens: int, k: int, e: int) -> NDArray[np.int32]:
    ids = np.stack([rng.permutation(e)[:k] for _ in range(tokens)]) if tokens else np.zeros((0, k))
    return np.where(rng.random((tokens, k)) < 0.2, -1, ids).astype(np.int32)


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 300])
def test_each_row_goes_through_each_of_its_experts(tokens: int, dtype: str) -> None:
    rng = np.random.default_rng(tokens)
    raw, w = weights(rng, 5, 37, 96, dtype)
    x, ids = rng.standard_normal((tokens, 96)).astype(np.float32), choices(rng, tokens, 3, 5)
    out = np.full((tokens, 3, 37), np.nan, np.float32)
    native.expert_linear(out, x, ids, raw, dtype)
    chosen = w[np.maximum(ids, 0)].astype(np.float64)
    want = np.einsum("tkmn,tn->tkm", chosen, x.astype(np.float64))
    bound = 97 * EPS * np.einsum("tkmn,tn->tkm", np.abs(chosen), np.abs(x))
    assert np.all(np.abs(out - want)[ids >= 0] <= bound[ids >= 0])
    assert np.all(out[ids < 0] == 0)


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 1100])
def test_the_experts_are_mixed_over_the_choices_that_are_there(tokens: int, dtype: str) -> None:
    rng = np.random.default_rng(tokens + 1)
    raw, w = weights(rng, 4, 21, 32, dtype)
    h, ids = rng.standard_normal((tokens, 2, 32)).astype(np.float32), choices(rng, tokens, 2, 4)
    mix = rng.random((tokens, 2)).astype(np.float32)
    h[ids < 0], mix[ids < 0] = np.nan, np.inf
    out = np.full((tokens, 21), np.nan, np.float32)
    native.expert_combine(out, h, ids, mix, raw, dtype)
    weight = np.where(ids < 0, 0, mix).astype(np.float64)
    chosen, values = w[np.maximum(ids, 0)].astype(np.float64), np.where(ids[..., None] < 0, 0, h).astype(np.float64)
    want = np.einsum("tk,tknm,tkm->tn", weight, chosen, values)
    bound = 36 * EPS * np.einsum("tk,tknm,tkm->tn", weight, np.abs(chosen), np.abs(values))
    assert np.all(np.abs(out - want) <= bound)


@pytest.mark.fault("B42")
def test_a_row_has_the_same_bits_whoever_shares_its_experts() -> None:
    rng = np.random.default_rng(9)
    raw, _ = weights(rng, 3, 64, 256, "q8_0")
    x, ids = rng.standard_normal((150, 256)).astype(np.float32), choices(rng, 150, 2, 3)
    mix = rng.random((150, 2)).astype(np.float32)

    def both(rows: slice) -> tuple[F32, F32]:
        a = np.full((len(x[rows]), 2, 64), np.nan, np.float32)
        b = np.full((len(x[rows]), 64), np.nan, np.float32)
        native.expert_linear(a, x[rows], ids[rows], raw, "q8_0")
        native.expert_combine(b, np.repeat(x[rows, None], 2, 1), ids[rows], mix[rows], raw, "q8_0")
        return a, b

    native.set_threads(1)
    alone = [both(slice(t, t + 1)) for t in range(150)]
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for rows in (slice(0, 2), slice(0, 67), slice(31, 150), slice(0, 150)):
            a, b = both(rows)
            np.testing.assert_array_equal(a, np.concatenate([x[0] for x in alone[rows]]))
            np.testing.assert_array_equal(b, np.concatenate([x[1] for x in alone[rows]]))


def test_a_product_with_an_expert_equals_the_dense_one() -> None:
    rng = np.random.default_rng(10)
    raw, _ = weights(rng, 2, 40, 64, "q4_0")
    x = rng.standard_normal((6, 64)).astype(np.float32)
    dense, sparse = np.zeros((6, 40), np.float32), np.zeros((6, 1, 40), np.float32)
    native.linear(dense, x, raw[1], "q4_0")
    native.expert_linear(sparse, x, np.ones((6, 1), np.int32), raw, "q4_0")
    np.testing.assert_array_equal(sparse[:, 0], dense)


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1, -(2**31)])
def test_an_expert_that_is_not_there_is_refused_before_any_work(bad: int) -> None:
    rng = np.random.default_rng(11)
    raw, _ = weights(rng, 4, 8, 32, "q8_0")
    ids = np.zeros((3, 2), np.int32)
    ids[2, 1] = bad
    out, total = np.full((3, 2, 8), 7, np.float32), np.full((3, 8), 7, np.float32)
    with pytest.raises(ValueError, match=rf"expert_linear: experts\[2, 1\] is {bad}, expected -1 or one of 4 experts"):
        native.expert_linear(out, np.zeros((3, 32), np.float32), ids, raw, "q8_0")
    with pytest.raises(ValueError, match=rf"expert_combine: experts\[2, 1\] is {bad}, expected -1 or one of 4 experts"):
        native.expert_combine(total, np.zeros((3, 2, 32), np.float32), ids, np.ones((3, 2), np.float32), raw, "q8_0")
    assert np.all(out == 7) and np.all(total == 7)
