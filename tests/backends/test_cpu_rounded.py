"""Products with activations rounded to int8: the integers by their rule in NumPy, the weights by gguf-py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from typer.testing import CliRunner

import trueup
from trueup.backends.cpu import _native as native
from trueup.cli.app import app
from trueup.conformance.bounds import ACTIVATIONS, Blocks, Judged, bounds
from trueup.convert.blocks import BLOCKS

F32 = NDArray[np.float32]
M, N = 13, 512


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    before = native.isa()
    native.set_isa(request.param)
    yield
    native.set_isa(before)


def stored(dtype: str, rows: int = M) -> NDArray[np.uint8]:
    """Every field of a block takes every value; scales stay of one size."""
    rng, kind = np.random.default_rng(5), GGMLQuantizationType[dtype.upper()]
    if kind not in BLOCKS:
        return np.asarray(quantize(rng.standard_normal((rows, N), np.float32), kind))
    made = BLOCKS[kind](rng, rows * N // 256, 1.0).copy()
    first, last = (192, 208) if dtype == "q6_k" else (4, 16)
    made[:, first:last] = rng.integers(0, 256, (len(made), last - first))
    return made.reshape(rows, -1)


def rounded(x: F32) -> NDArray[np.float64]:
    blocks = x.reshape(len(x), -1, 32).astype(np.float64)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    with np.errstate(invalid="ignore"):
        return np.where(scale > 0, np.rint(blocks / scale) * scale, 0).reshape(x.shape)


def test_the_types_that_have_such_products() -> None:
    assert native.ROUNDED == ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k") and native.FEW_ROWS == 4


@pytest.mark.parametrize("dtype", native.ROUNDED)
def test_rows_are_rounded_and_multiplied(dtype: str) -> None:
    weight = stored(dtype)
    values = dequantize(weight, GGMLQuantizationType[dtype.upper()]).astype(np.float64)
    x = np.random.default_rng(1).standard_normal((3, N)).astype(np.float32)
    x[0, 32:64] = 0
    out = np.full((3, M), 7, np.float32)
    native.linear(out, x, weight, dtype, True)
    want = rounded(x) @ values.T
    # A quotient near a half may round to either side; each such entry is one step of its block, at most.
    size = np.abs(x) @ np.abs(values).T
    assert np.abs(out - want).max() < 2e-6 * size.max() + 0.02 * np.abs(x).max() / 127 * np.abs(values).max()
    assert np.abs(out - x.astype(np.float64) @ values.T).max() > 1e-5 * size.max(), "they are rounded indeed"
    alone = np.empty((1, M), np.float32)
    native.linear(alone, x[1:2], weight, dtype, True)
    np.testing.assert_array_equal(alone[0], out[1])


@pytest.mark.parametrize("dtype", native.ROUNDED)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e31, 1e-31])
def test_rows_that_can_not_be_rounded_are_not(dtype: str, wrong: float) -> None:
    x = np.random.default_rng(2).standard_normal((2, N)).astype(np.float32)
    if wrong == 1e-31:
        x[0, 64:96] = 0
    x[0, 70] = wrong
    found, plain = np.empty((2, M), np.float32), np.empty((2, M), np.float32)
    native.linear(found, x, stored(dtype), dtype, True)
    native.linear(plain, x[:1].repeat(2, 0), stored(dtype), dtype)
    np.testing.assert_array_equal(found[0].view(np.int32), plain[0].view(np.int32))


def test_many_rows_and_other_types_are_not_rounded() -> None:
    x = np.random.default_rng(3).standard_normal((5, N)).astype(np.float32)
    for dtype, rows in (("q8_0", 5), ("q4_1", 1)):
        weight = np.asarray(quantize(x, GGMLQuantizationType[dtype.upper()]))
        out = [np.empty((rows, 5), np.float32) for _ in range(2)]
        for o, flag in zip(out, (True, False), strict=True):
            native.linear(o, x[:rows], weight, dtype, flag)
        np.testing.assert_array_equal(*out)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_k"])
def test_experts_are_linear_by_linear(dtype: str) -> None:
    weight = stored(dtype, 3 * M).reshape(3, M, -1)
    x = np.random.default_rng(4).standard_normal((2, N)).astype(np.float32)
    chosen = np.array([[2, -1, 0], [1, 2, 2]], np.int32)
    out = np.full((2, 3, M), 7, np.float32)
    native.expert_linear(out, x, chosen, weight, dtype, True)
    h = np.random.default_rng(6).standard_normal((2, 3, N)).astype(np.float32)
    mix = np.array([[1, 9, -2], [0.5, 0.25, 4]], np.float32)
    sums = np.full((2, M), 7, np.float32)
    native.expert_combine(sums, h, chosen, mix, weight, dtype, True)
    for t in range(2):
        total = np.zeros(M, np.float32)
        for j, e in enumerate(chosen[t]):
            one = np.zeros((2, M), np.float32)
            if e >= 0:
                native.linear(one, np.stack([x[t], h[t, j]]), weight[e], dtype, True)
            np.testing.assert_array_equal(out[t, j], one[0])
            total += mix[t, j] * one[1]
        np.testing.assert_allclose(sums[t], total, rtol=2e-6, atol=1e-4)


def test_the_bound_is_of_the_block_and_no_more() -> None:
    """A row whose second block is a thousandth of its first: what that one may be off by is a thousandth, too."""
    from types import SimpleNamespace

    from trueup.core.ops import linear

    x, w = np.ones((1, 64), np.float32), np.zeros((2, 64), np.float32)
    x[0, 32:] = 1e-3
    w[0, 0], w[1, 40] = 1, 1
    call = SimpleNamespace(op=linear, args={"x": x, "weight": w}, attrs={})
    (found,), _ = bounds(Judged(call, (x @ w.T,), {}, Blocks()))  # type: ignore[arg-type]
    assert ACTIVATIONS["q8"] == 0 and found is not None
    np.testing.assert_allclose(found[0], [0.5 / 127, 0.5e-3 / 127], rtol=0.01)


def test_a_backend_opened_so_says_so_and_passes_the_kit(isa: None) -> None:
    engine = trueup.load(None, backend="cpu", context=64, activations="q8")
    claimed = engine.target.capabilities
    engine.close()
    assert claimed.activations == "q8" and not claimed.batch_invariant and claimed.thresholds == {"rows": (4,)}
    with pytest.raises(ValueError, match="activations must be 'f32' or 'q8', got 'q4'"):
        trueup.load(None, backend="cpu", activations="q4")
    args = ["check", "--backend", "cpu", "--activations", "q8", "--level", "ops", "--examples", "3", "--op", "linear"]
    run = CliRunner().invoke(app, [*args, "--op", "expert_combine"])
    assert run.exit_code == 0, run.output


def test_the_option_of_commands(isa: None) -> None:
    run = CliRunner().invoke(app, ["run", "-n", "2", "--activations", "q8", "--json", "--prompt", "x"])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(app, ["run", "-n", "2", "--backend", "reference", "--activations", "q8", "--prompt", "x"])
    assert run.exit_code == 1 and "backend reference has no activations to set" in run.output
