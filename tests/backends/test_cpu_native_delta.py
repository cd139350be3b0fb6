"""The native gated delta rule, against constants by hand and the paper's form S = S (I - beta k k^T) + beta v k^T."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
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


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def step(state: F32, parts: dict[str, F32], cu: NDArray[np.int32], slots: NDArray[np.int32], **options: Any) -> F32:
    out = np.full(parts["v"].shape, np.nan, np.float32)
    native.gated_delta_rule(
        out, **parts, cu_seqlens=cu, slots=slots, state=state, **({"scale": 0.5, "tiled": False} | options)
    )
    return out


def random_parts(rng: np.random.Generator, tokens: int, kheads: int, rep: int, dk: int, dv: int) -> dict[str, F32]:
    keys = rng.standard_normal((tokens, kheads, dk))
    parts = {
        "q": rng.standard_normal((tokens, kheads, dk)),
        "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "v": rng.standard_normal((tokens, kheads * rep, dv)),
        "decay": -rng.exponential(0.3, (tokens, kheads * rep)),
        "beta": rng.random((tokens, kheads * rep)),
    }
    return {name: a.astype(np.float32) for name, a in parts.items()}


def paper(s: Any, parts: dict[str, F32], t: int, head: int, key: int, scale: float) -> tuple[Any, Any]:
    """One row of arXiv 2412.06464, equation 10, transposed to [dk, dv]; float64."""
    q, k = parts["q"][t, key].astype(np.float64), parts["k"][t, key].astype(np.float64)
    alpha, beta = np.exp(float(parts["decay"][t, head])), float(parts["beta"][t, head])
    s = alpha * (np.eye(len(k)) - beta * np.outer(k, k)) @ s + beta * np.outer(
        k, parts["v"][t, head].astype(np.float64)
    )
    return s, scale * s.T @ q


@pytest.mark.fault("B35")
def test_one_row_by_hand() -> None:
    """dk = dv = 2, S = I, decay ln 0.5, beta 0.5: S^T k after the decay is (.3, .4), d = (.85, -.7)."""
    state = np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)
    parts = {"q": [[[1, 0]]], "k": [[[0.6, 0.8]]], "v": [[[2, -1]]], "decay": [[np.log(0.5)]], "beta": [[0.5]]}
    parts = {name: np.array(a, np.float32) for name, a in parts.items()}
    out = step(state, parts, i32(0, 1), i32(0), scale=2**-0.5)
    np.testing.assert_allclose(state[0, 0], [[1.01, -0.42], [0.68, -0.06]], rtol=0, atol=2e-7)
    np.testing.assert_allclose(out[0, 0], [0.714178, -0.296985], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("dk", "dv"), [(1, 1), (7, 5), (16, 32), (33, 70), (128, 128)])
def test_sequences_follow_the_papers_recurrence(dk: int, dv: int, tiled: bool) -> None:
    rng = np.random.default_rng(dk)
    parts = random_parts(rng, 9, 2, 3, dk, dv)
    state = rng.standard_normal((6, 6, dk, dv)).astype(np.float32)
    before = state.copy()
    cu, slots, keep = i32(0, 4, 4, 7), i32(3, -1, 0), i32(-1, 5, -1, -1, 1, -1, -1, 5, 5)
    out = step(state, parts, cu, slots, keep=keep, tiled=tiled)
    for first, last, slot in ((0, 4, 3), (4, 7, 0)):
        for h in range(6):
            s = before[slot, h].astype(np.float64)
            for t in range(first, last):
                s, o = paper(s, parts, t, h, h % 2 if tiled else h // 3, 0.5)
                size = max(1.0, np.abs(s).max()) * (t - first + 1)
                tolerance = (dk + 8) * 4 * EPS * size
                assert np.all(np.abs(out[t, h] - o) <= tolerance * (1 + np.abs(parts["q"][t]).max()) * np.sqrt(dk))
                if keep[t] >= 0:
                    assert np.all(np.abs(state[keep[t], h] - s) <= tolerance)
            assert np.all(np.abs(state[slot, h] - s) <= tolerance)
    np.testing.assert_array_equal(state[[2, 4]], before[[2, 4]])
    assert np.all(out[7:] == 0), "padding"


def test_any_split_into_steps_any_neighbours_and_any_threads_give_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    parts = random_parts(rng, 12, 2, 2, 24, 44)
    start = rng.standard_normal((3, 4, 24, 44)).astype(np.float32)
    native.set_threads(1)
    whole = start.copy()
    out = step(whole, parts, i32(0, 12), i32(1))
    for threads in (1, 2, 3):
        native.set_threads(threads)
        state, rows = start.copy(), []
        for a, b in ((0, 1), (1, 6), (6, 7), (7, 12)):
            rows.append(step(state, {name: x[a:b] for name, x in parts.items()}, i32(0, b - a), i32(1)))
        np.testing.assert_array_equal(np.concatenate(rows), out)
        np.testing.assert_array_equal(state, whole)
        doubled = {name: np.concatenate([x[::-1], x]) for name, x in parts.items()}
        state = start.copy()
        np.testing.assert_array_equal(step(state, doubled, i32(0, 12, 24), i32(0, 1))[12:], out)
        np.testing.assert_array_equal(state[1], whole[1])


def test_the_kept_state_is_the_state_that_goes_on() -> None:
    rng = np.random.default_rng(4)
    parts = random_parts(rng, 5, 1, 1, 16, 16)
    state = np.zeros((4, 1, 16, 16), np.float32)
    out = step(state, parts, i32(0, 5), i32(0), keep=i32(-1, 2, 3, -1, 1))
    np.testing.assert_array_equal(state[1], state[0])
    again = step(state, {name: x[2:] for name, x in parts.items()}, i32(0, 3), i32(2))
    np.testing.assert_array_equal(again, out[2:])
    np.testing.assert_array_equal(state[2], state[0])


def test_minus_infinity_forgets_all_beta_zero_writes_nothing_and_nan_stays_in_its_head() -> None:
    rng = np.random.default_rng(5)
    parts = random_parts(rng, 1, 1, 3, 8, 8)
    parts["decay"][0] = [-np.inf, 0, -0.1]
    parts["beta"][0] = [1, 0, 0.5]
    parts["v"][0, 2, 3] = np.nan
    state = rng.standard_normal((1, 3, 8, 8)).astype(np.float32)
    before = state.copy()
    step(state, parts, i32(0, 1), i32(0))
    np.testing.assert_array_equal(state[0, 0], parts["k"][0, 0][:, None] * parts["v"][0, 0])
    np.testing.assert_array_equal(state[0, 1], before[0, 1])
    assert np.isnan(state[0, 2, :, 3]).all() and np.isfinite(np.delete(state[0, 2], 3, axis=1)).all()


def test_no_rows_and_empty_heads_do_nothing() -> None:
    state = np.ones((2, 2, 4, 4), np.float32)
    parts = random_parts(np.random.default_rng(6), 0, 1, 2, 4, 4)
    assert step(state, parts, i32(0, 0), i32(-1)).shape == (0, 2, 4)
    assert np.all(state == 1)


def test_views_of_a_projection_and_of_the_slots_are_used_in_place() -> None:
    rng = np.random.default_rng(7)
    parts = random_parts(rng, 4, 1, 2, 16, 16)
    start = rng.standard_normal((2, 2, 16, 16)).astype(np.float32)
    plain = start.copy()
    want = step(plain, parts, i32(0, 4), i32(1))
    wide = np.full((4, 100), np.nan, np.float32)
    wide[:, 10:26], wide[:, 30:46], wide[:, 50:82] = parts["q"][:, 0], parts["k"][:, 0], parts["v"].reshape(4, 32)
    views = {"q": wide[:, 10:26].reshape(4, 1, 16), "k": wide[:, 30:46].reshape(4, 1, 16)}
    views["v"] = np.lib.stride_tricks.as_strided(wide[:, 50:], (4, 2, 16), (400, 64, 4))
    spread = np.full((3, 2, 2, 16, 20), 7, np.float32)
    spread[:2, 1, :, :, 2:18] = start
    np.testing.assert_array_equal(step(spread[:2, 1, :, :, 2:18], parts | views, i32(0, 4), i32(1)), want)
    np.testing.assert_array_equal(spread[:2, 1, :, :, 2:18], plain)
    spread[:2, 1, :, :, 2:18] = 7
    assert np.all(spread == 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": i32(2)}, r"slots\[0\] is 2 for a sequence with rows, expected one of 2 slots"),
        ({"slots": i32(-1)}, r"slots\[0\] is -1"),
        ({"keep": i32(-1, 0, 2)}, r"keep\[2\] is 2, expected -1 or one of 2 slots"),
        ({"keep": i32(-1, -2, 0)}, r"keep\[1\] is -2"),
        ({"keep": i32(-1, 0)}, "keep has tokens = 2, expected 3"),
        (
            {"cu_seqlens": i32(0, 1, 3), "slots": i32(1, 1)},
            r"slots\[1\] is 1, which sequence 0 of this step writes too",
        ),
        ({"cu_seqlens": i32(0, 1, 3), "slots": i32(0, 1), "keep": i32(-1, 0, -1)}, r"keep\[1\] is 0, which sequence 0"),
        ({"cu_seqlens": i32(0, 4)}, r"cu_seqlens is \[0, 4\]"),
        ({"q": np.zeros((3, 3, 8), np.float32)}, "k has kheads = 2, expected 3 as in q"),
        ({"beta": np.zeros((3, 3), np.float32)}, "beta has heads = 3, expected 4 as in v"),
        ({"state": np.zeros((2, 4, 8, 8))}, r"state is float64\[2, 4, 8, 8\], expected float32"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    state = np.full((2, 4, 8, 8), 7, np.float32)
    given: dict[str, Any] = random_parts(np.random.default_rng(8), 3, 2, 2, 8, 8)
    given |= {"cu_seqlens": i32(0, 3), "slots": i32(0), "state": state} | changes
    out = np.full((3, 4, 8), 7, np.float32)
    with pytest.raises(ValueError, match=f"gated_delta_rule: .*{message}"):
        native.gated_delta_rule(out, scale=1.0, tiled=True, **given)
    assert np.all(state == 7) and np.all(out == 7)
