"""Native maps, norms, rotations and short convolutions, against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38, 88.8, -88.8, 104, -104], np.float32)


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    isa, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(isa)
    native.set_threads(threads)


def blank(*shape: int) -> F32:
    return np.full(shape, 7, np.float32)


def ulps(found: F32, want: F64, n: float, floor: float = 0) -> None:
    """Equal within n units in the last place of the exact value; NaN and infinities in their places."""
    want32 = want.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want32))
    with np.errstate(all="ignore"):
        unit = np.spacing(np.abs(want32)).astype(np.float64)
        near = np.abs(found.astype(np.float64) - want) <= n * unit + floor
    good = near | (found == want32) | np.isnan(want32)
    assert np.all(good), (found[~good][:5], want[~good][:5])


def sigmoid64(x: F64) -> F64:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def wide_range(seed: int, *shape: int) -> F32:
    """Numbers of every size, and the special ones."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3, shape)).astype(np.float32)
    x.reshape(-1)[: len(SPECIAL)] = SPECIAL
    return x


@pytest.mark.filterwarnings("ignore")
def test_activations_over_the_whole_range() -> None:
    x, up = wide_range(1, 60_011), wide_range(2, 60_011)[::-1].copy()
    x64, up64 = x.astype(np.float64), up.astype(np.float64)
    for threads in (1, 2):
        native.set_threads(threads)
        out = blank(*x.shape)
        native.sigmoid(out, x)
        ulps(out, sigmoid64(x64), 3)
        native.silu(out, x)
        ulps(out, x64 * sigmoid64(x64), 4)
        native.silu(out, x, scale=1.5)
        ulps(out, 1.5 * x64 * sigmoid64(1.5 * x64), 180)  # e^-1.5x carries the rounding of 1.5 x, at most 89 half units
        native.softplus(out, x)
        ulps(out, np.logaddexp(0, x64), 1)
        for limit in (np.inf, 7.0):
            native.swiglu(out, x, up, limit=limit)
            g, u = np.minimum(x64, limit), np.minimum(np.maximum(up64, -limit), limit)
            ulps(out, g * sigmoid64(g) * u, 6, floor=1e-42)


@pytest.mark.filterwarnings("ignore")
def test_sums_and_products_round_once_in_any_shape_and_stride() -> None:
    a, b = wide_range(3, 5, 9, 40), wide_range(4, 5, 9, 40)
    out = blank(5, 9, 40)
    native.add(out, a, b)
    np.testing.assert_array_equal(out, a + b)
    native.mul(out, a, b)
    np.testing.assert_array_equal(out, a * b)
    views = blank(6, 9, 80)[1:, ::2, 3:22], a[:, 1::2, 5:24].repeat(2, 1)[:, :5], b[:, :5, 21:]
    native.add(*views)
    np.testing.assert_array_equal(views[0], views[1] + views[2])
    for shape in ((), (1,), (0, 3), (3, 0)):
        out = blank(*shape)
        native.mul(out, np.full(shape, 2, np.float32), np.full(shape, 3, np.float32))
        np.testing.assert_array_equal(out, np.full(shape, 6, np.float32))
    native.add(a, a, b)  # in place
    out = blank(5, 40)
    native.scale_rows(out, b[:, 0], b[:, 1, :1])
    np.testing.assert_array_equal(out, b[:, 0] * b[:, 1, :1])


def test_softmax_and_normalize_judge_each_row_alone() -> None:
    rng = np.random.default_rng(5)
    x = (5 * rng.standard_normal((9, 131))).astype(np.float32)
    x[1], x[2, 7], x[3, 7], x[4, ::2] = -np.inf, np.nan, np.inf, -np.inf
    out = blank(9, 131)
    native.softmax(out, x)
    plain = [0, 4, 5, 6, 7, 8]
    e = np.exp(x[plain].astype(np.float64) - x[plain].max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    assert np.all(np.abs(out[plain] - want) <= 40 * 2.0**-23 * want)
    assert np.all(out[1] == 0) and np.isnan(out[2:4]).all()

    x = np.abs(x)
    x[1], x[3], x[4] = 0, 1e-30, np.abs(rng.standard_normal(131))
    native.normalize(out, x, floor=1e-20)
    ulps(out[3:], x[3:].astype(np.float64) / np.maximum(x[3:].astype(np.float64).sum(1, keepdims=True), 1e-20), 1)
    assert np.all(out[1] == 0) and np.isnan(out[2]).all()
    native.normalize(out, np.zeros((9, 131), np.float32))
    assert np.all(out == 0)


@pytest.mark.parametrize("n", [1, 7, 8, 100, 4096])
def test_norms_divide_by_the_root_of_the_squares(n: int) -> None:
    rng = np.random.default_rng(n)
    x, gate = rng.standard_normal((6, 3, n)).astype(np.float32), rng.standard_normal((6, 3, n)).astype(np.float32)
    weight, groups = rng.standard_normal(n).astype(np.float32), rng.standard_normal(3 * n).astype(np.float32)
    x[0], x[1] = 0, 1e30 * x[1]
    x[2, 0, 0] = np.nan
    x64, out = x.astype(np.float64), blank(6, 3, n)
    squares = (x64 * x64).sum(-1, keepdims=True)
    rms = x64 / np.sqrt(squares / n + 1e-6)
    native.rms_norm(out, x, eps=1e-6)
    ulps(out, rms, 0.51)
    native.rms_norm(out, x, weight, eps=1e-6)
    ulps(out, rms * weight, 0.51)
    native.l2_norm(out, x, eps=1e-6)
    ulps(out, x64 / np.sqrt(squares + 1e-6), 0.51)
    native.group_rms_norm(out, x, groups, eps=1e-6)
    ulps(out, rms * groups.reshape(3, n), 0.51)
    opened = sigmoid64(gate.astype(np.float64))
    native.gated_rms_norm(out, x, gate, weight, eps=1e-6, activation="sigmoid")
    ulps(out, rms * weight * opened, 6)
    native.gated_rms_norm(out, x, gate, weight, eps=1e-6, activation="silu")
    ulps(out, rms * weight * opened * gate, 7)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((50, 333)).astype(np.float32)
    maps: list[Callable[[F32, F32], Any]] = [
        native.sigmoid,
        native.softmax,
        native.silu,
        native.normalize,
        lambda out, x: native.rms_norm(out, x, eps=1e-5),
        lambda out, x: native.swiglu(out, x, x),
        lambda out, x: native.hc_read(out, x[:, None], x),
    ]
    for run in maps:
        whole = blank(50, 333)
        native.set_threads(1)
        run(whole, x)
        native.set_threads(2)
        again = blank(50, 333)
        run(again, x)
        np.testing.assert_array_equal(again, whole)
        for r in (0, 17, 49):
            one = blank(1, 333)
            run(one, x[r : r + 1])
            np.testing.assert_array_equal(one[0], whole[r])


def test_hyper_connections_read_and_write_streams() -> None:
    rng = np.random.default_rng(7)
    normed, gate = rng.standard_normal((5, 4, 37)).astype(np.float32), rng.standard_normal((5, 148)).astype(np.float32)
    y, inject = rng.standard_normal((5, 37)).astype(np.float32), rng.standard_normal((5, 4)).astype(np.float32)
    inject[0] = 0
    out = blank(5, 37)
    native.hc_read(out, normed, gate)
    opened = normed * sigmoid64(gate.reshape(5, 4, 37).astype(np.float64))
    assert np.all(np.abs(out - opened.mean(1)) <= 7 * 2.0**-23 * np.abs(opened).mean(1))
    out = blank(5, 4, 37)
    native.hc_write(out, normed, y, inject)
    added = 2 * sigmoid64(inject.astype(np.float64) / 4)[:, :, None] * y[:, None]
    assert np.all(np.abs(out - (normed + added)) <= 2 * 2.0**-23 * (np.abs(normed) + np.abs(added)))
    np.testing.assert_array_equal(out[0], normed[0] + y[0])


def test_the_decay_is_the_rate_times_softplus() -> None:
    a = np.array([[-np.inf, 0, 3, np.inf, -100]], np.float32)
    bias, rate = np.array([1, 0, 0.5, 0, 0], np.float32), np.array([-1, -2, -0.5, -1, -1], np.float32)
    out = blank(1, 5)
    native.gdn_decay(out, a, bias, rate)
    np.testing.assert_allclose(
        out[0], [0, -2 * np.log(2), -0.5 * np.log1p(np.exp(3.5)), -np.inf, -np.exp(-100)], 1e-7, 1e-45
    )


def test_the_gate_of_embeddings_steps_at_zero() -> None:
    key = np.array([[[1, 0], [1, 1], [-3, 0], [np.nan, 0]]], np.float32)
    query, value = np.array([[[0, 5], [1, 1], [3, 0], [1, 0]]], np.float32), np.array([[2, -4]], np.float32)
    out = blank(1, 4, 2)
    native.ple_gate(out, key, query, value)
    u = np.array([0, 2, -9]) / np.sqrt(2)
    gates = 1 / (1 + np.exp(-np.sign(u) * np.sqrt(np.maximum(np.abs(u), 1e-6))))
    ulps(out[0, :3], gates[:, None] * value[0].astype(np.float64), 2)
    assert np.isnan(out[0, 3]).all()
    key[0, 0] = [1e-20, 0]
    query[0, 0] = [1e-20, 0]  # their product is no float32 number, and yet above 0
    native.ple_gate(out, key, query, value)
    assert out[0, 0, 0] == np.float32(2 / (1 + np.exp(-1e-3)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope_turns_pairs_in_the_complex_plane(interleaved: bool, inverse: bool) -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((6, 3, 20)).astype(np.float32)
    positions = rng.integers(0, 1 << 20, (6, 2)).astype(np.int32)
    freqs, component = (10000.0 ** -np.arange(0, 1, 0.125)).astype(np.float32), np.array([0, 1] * 4, np.int32)
    out = blank(6, 3, 20)
    native.rope(out, x, positions, freqs, component, start=2, interleaved=interleaved, inverse=inverse)
    first = np.arange(2, 18, 2) if interleaved else np.arange(2, 10)
    second = first + (1 if interleaved else 8)
    turn = np.exp((-1j if inverse else 1j) * positions[:, component].astype(np.float64) * freqs.astype(np.float64))
    want = (x[..., first] + 1j * x[..., second].astype(np.float64)) * turn[:, None]
    ulps(out[..., first], want.real, 1)
    ulps(out[..., second], want.imag, 1)
    np.testing.assert_array_equal(out[..., [0, 1, 18, 19]], x[..., [0, 1, 18, 19]])


def history(x: F32, tail: F32, cu: list[int], slots: list[int]) -> list[F64]:
    rows = [np.concatenate([tail[slots[s]], x[cu[s] : cu[s + 1]]]) for s in range(len(slots)) if cu[s] < cu[s + 1]]
    return [r.astype(np.float64) for r in rows]


@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (2, 3), (1, 1)])
def test_convolutions_and_means_look_back_through_the_tail(taps: int, dilation: int) -> None:
    rng = np.random.default_rng(taps)
    back, cu, slots = (taps - 1) * dilation, [0, 2, 2, 11], [3, -1, 1]
    x, weight = rng.standard_normal((13, 600)).astype(np.float32), rng.standard_normal((600, taps)).astype(np.float32)
    start = rng.standard_normal((6, back, 600)).astype(np.float32)
    keep = np.array([-1, -1, 0, -1, 5, -1, 1, -1, -1, -1, 4, 2, 2], np.int32)
    past = history(x, start, cu, slots)
    index = (np.array(cu, np.int32), np.array(slots, np.int32))

    out, tail = blank(13, 600), start.copy()
    native.causal_conv(out, x, weight, *index, tail, keep, dilation=dilation)
    for h, first, last, slot in ((past[0], 0, 2, 3), (past[1], 2, 11, 1)):
        n = last - first
        parts = [weight[:, j] * h[j * dilation : j * dilation + n] for j in range(taps)]
        bound = (taps + 1) * 2.0**-23 * np.sum(np.abs(parts), axis=0)
        assert np.all(np.abs(out[first:last] - np.sum(parts, axis=0)) <= bound)
        np.testing.assert_array_equal(tail[slot], h[n:])
    np.testing.assert_array_equal(tail[0], past[1][1 : 1 + back])
    np.testing.assert_array_equal(tail[5], past[1][3 : 3 + back])
    np.testing.assert_array_equal(tail[4], tail[1])
    np.testing.assert_array_equal(tail[2], start[2])
    assert np.all(out[11:] == 0)

    out, tail = blank(13, 600), start.copy()
    native.trailing_mean(out, x, *index, tail, keep, every=back + 1)
    for h, first, last in ((past[0], 0, 2), (past[1], 2, 11)):
        want = np.mean([h[j : j + last - first] for j in range(back + 1)], axis=0)
        ulps(out[first:last], want, 0.51)
    np.testing.assert_array_equal(tail[1], past[1][9:])


def test_any_split_into_steps_gives_the_same_bits() -> None:
    rng = np.random.default_rng(9)
    x, weight = rng.standard_normal((9, 70)).astype(np.float32), rng.standard_normal((70, 4)).astype(np.float32)
    whole, tail, slots = blank(9, 70), np.zeros((1, 3, 70), np.float32), np.zeros(1, np.int32)
    native.causal_conv(whole, x, weight, np.array([0, 9], np.int32), slots, tail)
    again, rows = np.zeros_like(tail), []
    for a, b in ((0, 1), (1, 3), (3, 9)):
        out = blank(b - a, 70)
        native.causal_conv(out, x[a:b], weight, np.array([0, b - a], np.int32), slots, again)
        rows.append(out)
    np.testing.assert_array_equal(np.concatenate(rows), whole)
    np.testing.assert_array_equal(again, tail)


z = lambda *shape: np.zeros(shape, np.float32)
i = lambda *values: np.array(values, np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: native.add(z(2, 3), z(2, 3), z(3, 2)), r"add: b is float32\[3, 2\], expected the shape of a"),
        (lambda: native.sigmoid(z(2, 3), z(6)), r"sigmoid: out is float32\[2, 3\], expected the shape of x"),
        (lambda: native.silu(z(2), np.zeros(2)), r"silu: x is float64\[2\], expected float32\[...\]"),
        (lambda: native.rms_norm(z(2, 3), z(2, 3), z(4), eps=0), "rms_norm: weight has n = 4, expected 3 as in x"),
        (lambda: native.group_rms_norm(z(2, 2, 3), z(2, 2, 3), z(5), eps=0), "weight has groups"),
        (lambda: native.gated_rms_norm(z(1), z(1), z(1), z(1), eps=0, activation="relu"), "activation is 'relu'"),
        (lambda: native.scale_rows(z(2, 3), z(2, 3), z(2, 2)), "scale has columns = 2, expected 1"),
        (lambda: native.hc_read(z(2, 3), z(2, 4, 3), z(2, 11)), "gate has streams.n = 11, expected 12"),
        (
            lambda: native.rope(z(1, 1, 4), z(1, 1, 4), np.zeros((1, 1), np.int32), z(3), i(0, 0, 0)),
            "leave a head of 4",
        ),
        (
            lambda: native.rope(z(1, 1, 4), z(1, 1, 4), np.zeros((1, 1), np.int32), z(2), i(0, 1)),
            r"component\[1\] is 1",
        ),
        (lambda: native.causal_conv(z(2, 3), z(2, 3), z(3, 4), i(0, 2), i(0), z(1, 2, 3)), "tail has rows back = 2"),
        (lambda: native.causal_conv(z(2, 3), z(2, 3), z(3, 4), i(0, 2), i(1), z(1, 3, 3)), r"slots\[0\] is 1"),
        (lambda: native.trailing_mean(z(2, 3), z(2, 3), i(0, 2), i(0), z(1, 3, 3), every=0), "every is 0"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
