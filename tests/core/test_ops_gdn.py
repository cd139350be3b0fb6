"""The gated delta rule against hand-computed constants, the paper's form in float64, and its chunked form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.errors import ArgumentError
from trueup.core.op import Cost
from trueup.core.ops import chunk_delta_scan, chunk_wy, gated_delta_rule, gdn_decay
from trueup.core.types import TensorType

pytestmark = pytest.mark.filterwarnings("error")

F, I = np.float32, np.int32
HALF_ULP = 2.0**-24


class Step:
    """Rows of random, well-formed inputs: unit keys, beta in [0, 1], decay at most 0."""

    def __init__(
        self, seed: int, tokens: int, kheads: int = 2, rep: int = 2, dk: int = 4, dv: int = 3, strength: float = 1
    ) -> None:
        rng = np.random.default_rng(seed)
        heads = rep * kheads
        self.q, self.k = (unit(rng.standard_normal((tokens, kheads, dk))) for _ in range(2))
        self.v = rng.standard_normal((tokens, heads, dv)).astype(F)
        self.decay = (-strength * rng.random((tokens, heads)) ** 3).astype(F)
        self.beta = rng.choice([0, 1, 0.5, 0.1, 0.9], (tokens, heads)).astype(F)
        self.state = rng.standard_normal((4, heads, dk, dv)).astype(F)

    @property
    def rows(self) -> list[np.ndarray]:
        return [self.q, self.k, self.v, self.decay, self.beta]

    def cut(self, rows: slice) -> list[np.ndarray]:
        return [x[rows] for x in self.rows]


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(F)


def paper(
    step: Step, start: np.ndarray, rows: slice, *, scale: float, tiled: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """arXiv 2412.06464's rule, transposed: S = alpha (I - beta k k^T) S + beta k v^T, in float64, head by head."""
    q, k, v, decay, beta = (x.astype(np.float64) for x in step.cut(rows))
    heads, kheads = v.shape[1], k.shape[1]
    out, states = np.zeros(v.shape), []
    s = start.astype(np.float64)
    for t in range(len(v)):
        s = s.copy()
        for h in range(heads):
            g = h % kheads if tiled else h * kheads // heads
            a, b, key = math.exp(decay[t, h]), beta[t, h], k[t, g]
            s[h] = a * (np.eye(len(key)) - b * np.outer(key, key)) @ s[h] + b * np.outer(key, v[t, h])
            out[t, h] = scale * s[h].T @ q[t, g]
        states.append(s)
    return out, states


def chunked(*args: object, **attrs: object) -> np.ndarray:
    assert gated_delta_rule.decomposition is not None
    return gated_delta_rule.decomposition(*args, **attrs)  # type: ignore[no-any-return]


@pytest.mark.fault("B35")
def test_b35_the_recurrence_by_hand() -> None:
    # .5 S = .5 I; S^T k = (.3, .4); d = .5 (1.7, -1.4) = (.85, -.7); S = .5 I + k d^T; o = S^T q / sqrt 2
    state = np.eye(2, dtype=F)[None, None].copy()
    o = gated_delta_rule(
        F([[[1, 0]]]), F([[[0.6, 0.8]]]), F([[[2, -1]]]), F([[math.log(0.5)]]), F([[0.5]]),
        I([0, 1]), I([0]), state, scale=2**-0.5, tiled=False,
    )  # fmt: skip
    np.testing.assert_allclose(state[0, 0], [[1.01, -0.42], [0.68, -0.06]], rtol=1e-6)
    np.testing.assert_allclose(o[0, 0], [0.714178, -0.296985], rtol=1e-6)
    naive = [[1.10, -0.30], [0.80, 0.10]]  # beta k v^T without taking off what S says
    assert np.abs(state[0, 0] - naive).max() > 0.05


@pytest.mark.fault("B35")
def test_b35_holds_for_the_chunked_form() -> None:
    state = np.eye(2, dtype=F)[None, None].copy()
    o = chunked(
        F([[[1, 0]]]), F([[[0.6, 0.8]]]), F([[[2, -1]]]), F([[math.log(0.5)]]), F([[0.5]]),
        I([0, 1]), I([0]), state, scale=2**-0.5, tiled=False,
    )  # fmt: skip
    np.testing.assert_allclose(state[0, 0], [[1.01, -0.42], [0.68, -0.06]], rtol=1e-6)
    np.testing.assert_allclose(o[0, 0], [0.714178, -0.296985], rtol=1e-6)


def test_decay_by_hand() -> None:
    # -2 · ln(1 + e^(1 - 1)) = -2 ln 2
    assert gdn_decay(F([[1]]), F([-1]), F([-2]))[0, 0] == F(-2 * math.log(2))
    ends = gdn_decay(F([[-np.inf], [np.inf], [np.nan], [200]]), F([0]), F([-3]))[:, 0]
    assert ends[0] == 0 and ends[1] == -np.inf and np.isnan(ends[2]) and ends[3] == -600
    assert gdn_decay(np.zeros((0, 2), F), F([0, 0]), F([0, 0])).shape == (0, 2)


def test_beta_one_stores_the_value_and_beta_zero_nothing() -> None:
    state = np.zeros((1, 1, 2, 2), F)
    key, value = F([[[0, 1]]]), F([[[5, 6]]])
    common = (I([0, 1]), I([0]), state)
    assert gated_delta_rule(key, key, value, F([[0]]), F([[1]]), *common, scale=1.0, tiled=True).tolist() == [[[5, 6]]]
    assert gated_delta_rule(key, key, -value, F([[0]]), F([[0]]), *common, scale=1.0, tiled=True).tolist() == [[[5, 6]]]
    forgot = gated_delta_rule(key, key, value, F([[-np.inf]]), F([[0]]), *common, scale=1.0, tiled=True)
    assert not forgot.any() and not state.any()


def test_which_key_head_a_value_head_reads() -> None:
    # key head g is the unit vector g; a value head that reads it with beta 1 fills row g of its state
    k, v = np.eye(2, dtype=F)[None], np.ones((1, 4, 1), F)
    for tiled, expected in ((True, [0, 1, 0, 1]), (False, [0, 0, 1, 1])):
        for rule in (gated_delta_rule, chunked):
            state = np.zeros((1, 4, 2, 1), F)
            rule(k, k, v, np.zeros((1, 4), F), np.ones((1, 4), F), I([0, 1]), I([0]), state, scale=1.0, tiled=tiled)
            assert state[0, :, :, 0].argmax(axis=1).tolist() == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.booleans(), st.sampled_from([0.01, 1, 50, 300]))
@settings(max_examples=30, deadline=None)
def test_against_the_papers_form_in_float64(seed: int, tokens: int, tiled: bool, strength: float) -> None:
    step = Step(seed, tokens, strength=strength)
    want, states = paper(step, step.state[1], slice(0, tokens), scale=0.5, tiled=tiled)
    got = gated_delta_rule(*step.rows, I([0, tokens]), I([1]), step.state, scale=0.5, tiled=tiled)
    # |k| = 1, beta in [0, 1] and decay <= 0 never stretch an error: each row adds its rounding of S, a column at a time
    column = max(np.linalg.norm(s, axis=-2).max() for s in states)
    bound = (tokens + 1) * HALF_ULP * column * 1.01
    assert np.abs(step.state[1] - states[-1]).max() <= bound
    assert np.abs(got - want).max() <= 0.5 * bound + HALF_ULP * np.abs(want).max()


@pytest.mark.fault("B34")
def test_b34_no_drift_in_256_rows_and_a_state_of_less_is_refused() -> None:
    step = Step(0, 256, dk=16, dv=16)
    step.decay[:], step.beta[:] = math.log(0.999), 0.1
    step.state[:] = 0
    want, states = paper(step, step.state[0], slice(0, 256), scale=0.25, tiled=True)
    for rule in (gated_delta_rule, chunked):
        state = step.state.copy()
        got = rule(*step.rows, I([0, 256]), I([0]), state, scale=0.25, tiled=True)
        assert np.abs(state[0] - states[-1]).max() < 1e-4 and np.abs(got - want).max() < 1e-4
    with pytest.raises(ArgumentError, match="state must be f32, got f16"):
        gated_delta_rule(*step.rows, I([0, 256]), I([0]), step.state.astype(np.float16), scale=0.25, tiled=True)


@pytest.mark.fault("B32")
@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
def test_b32_padding_and_neighbours_leave_a_sequence_alone(rule) -> None:  # type: ignore[no-untyped-def]
    step = Step(3, 14)
    for x in step.rows:
        x[10:] = np.nan
    alone = []
    for rows, slot in ((slice(0, 3), 2), (slice(3, 10), 0)):
        state = step.state.copy()
        out = rule(*step.cut(rows), I([0, rows.stop - rows.start]), I([slot]), state, scale=0.5, tiled=True)
        alone.append((out, state[slot]))
    state = step.state.copy()
    out = rule(*step.rows, I([0, 3, 3, 10, 10]), I([2, -1, 0, 77]), state, scale=0.5, tiled=True)
    assert np.array_equal(out[:3], alone[0][0]) and np.array_equal(out[3:10], alone[1][0]) and not out[10:].any()
    assert np.array_equal(state[2], alone[0][1]) and np.array_equal(state[0], alone[1][1])
    assert np.array_equal(state[[1, 3]], step.state[[1, 3]])


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
def test_nan_reaches_its_head_from_its_row_on(rule) -> None:  # type: ignore[no-untyped-def]
    step = Step(4, 9)
    step.v[5, 2] = np.nan
    step.beta[5] = 0.5
    out = rule(*step.rows, I([0, 9]), I([0]), step.state, scale=0.5, tiled=True)
    assert np.isnan(out[5:, 2]).all() and np.isfinite(out[:5]).all() and np.isfinite(out[:, [0, 1, 3]]).all()
    assert np.isfinite(step.state[1:]).all()


def bound_of_chunks(step: Step, tokens: int, states: list[np.ndarray]) -> float:
    """How far the chunked state may be from the exact one.

    A row's d = u - S^T w carries the rounding of u and of w, S the rounding of its float32 at a chunk's end and the
    errors of all d before it, weighted by unit keys and fades of at most 1.
    """
    w, u = chunk_wy(step.k, step.v, step.decay, step.beta, I([0, tokens]), chunk=64, tiled=True)
    column = max(np.linalg.norm(s, axis=-2).max() for s in states)
    write = np.abs(u).max() + np.linalg.norm(w, axis=-1).max() * column
    return HALF_ULP * (tokens * write + (tokens // 64 + 1) * column) * 1.01


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("strength", [0.0, 0.1, 20, 1000])
def test_the_chunked_form_at_the_borders_of_chunks(tokens: int, strength: float) -> None:
    step = Step(tokens, tokens, strength=strength)
    want, states = paper(step, step.state[0], slice(0, tokens), scale=0.5, tiled=True)
    keep = np.full(tokens, -1, I)
    keep[tokens // 2], keep[tokens - 1] = 2, 3
    out = chunked(*step.rows, I([0, tokens]), I([0]), step.state, keep, scale=0.5, tiled=True)
    bound = bound_of_chunks(step, tokens, [step.state[1], *states])
    assert np.abs(step.state[0] - states[-1]).max() <= bound
    assert np.abs(out - want).max() <= 0.5 * bound + HALF_ULP * np.abs(want).max()
    if tokens > 1:
        assert np.abs(step.state[2] - states[tokens // 2]).max() <= bound + HALF_ULP * np.abs(states[tokens // 2]).max()
    assert np.array_equal(step.state[3], step.state[0])


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 90), min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_the_chunked_form_equals_the_rows_in_ragged_batches(seed: int, lengths: list[int], padding: int) -> None:
    tokens = sum(lengths)
    step = Step(seed, tokens + padding)
    for x in step.rows:
        x[tokens:] = np.nan
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(I)
    slots = I([s if n else -1 for s, n in enumerate(lengths)])
    one, other = step.state.copy(), step.state.copy()
    a = gated_delta_rule(*step.rows, cu, slots, one, scale=0.5, tiled=True)
    b = chunked(*step.rows, cu, slots, other, scale=0.5, tiled=True)
    for s, n in enumerate(lengths):
        rows = slice(cu[s], cu[s + 1])
        want, states = paper(step, step.state[s], rows, scale=0.5, tiled=True)
        alone = Step(0, 0)
        alone.q, alone.k, alone.v, alone.decay, alone.beta = step.cut(rows)
        if n:
            bound = bound_of_chunks(alone, n, [step.state[s], *states])
            assert np.abs(one[s] - other[s]).max() <= 2 * bound  # each within it of the exact one
            assert np.abs(a[rows] - b[rows]).max() <= bound + 2 * HALF_ULP * np.abs(want).max()
    assert np.array_equal(one[len(lengths) :], other[len(lengths) :])
    assert not a[tokens:].any() and not b[tokens:].any()


def test_a_total_reset_inside_a_chunk() -> None:
    step = Step(8, 10)
    step.decay[4] = -np.inf
    one, other = step.state.copy(), step.state.copy()
    a = gated_delta_rule(*step.rows, I([0, 10]), I([0]), one, scale=0.5, tiled=True)
    b = chunked(*step.rows, I([0, 10]), I([0]), other, scale=0.5, tiled=True)
    np.testing.assert_allclose(a, b, atol=1e-6)
    other[:] = 0
    c = gated_delta_rule(*step.cut(slice(4, 10)), I([0, 6]), I([0]), other, scale=0.5, tiled=True)
    assert np.array_equal(a[4:], c)  # nothing of before is left


def test_late_rows_of_a_strongly_decayed_chunk_keep_their_precision() -> None:
    # after 60 rows of -100 a sum from the chunk's start is -6000, where float32 has steps of 5e-4
    step = Step(9, 64)
    step.decay[:60], step.decay[60:] = -100, -0.01
    want, _ = paper(step, step.state[0], slice(0, 64), scale=1.0, tiled=True)
    out = chunked(*step.rows, I([0, 64]), I([0]), step.state, scale=1.0, tiled=True)
    np.testing.assert_allclose(out, want, atol=64 * HALF_ULP * np.abs(want).max())


def test_chunk_wy_by_hand() -> None:
    # two rows of one head with k = (1, 0), decays ln .5, betas .5 and 1, v = 2 and 3:
    # w1 = .5 · .5 k = .25 k, u1 = .5 · 2 = 1; e^(decay 2) k·k = .5
    # w2 = 1 (.25 - .5 · .25) k = .125 k, u2 = 3 - .5 · 1 = 2.5
    rows = F([[[1, 0]], [[1, 0]]]), F([[[2]], [[3]]]), F([[math.log(0.5)]] * 2), F([[0.5], [1]])
    w, u = chunk_wy(*rows, I([0, 2]), chunk=2, tiled=True)
    np.testing.assert_allclose(w[:, 0], [[0.25, 0], [0.125, 0]], rtol=1e-6)
    np.testing.assert_allclose(u[:, 0], [[1], [2.5]], rtol=1e-6)
    # cut into chunks of one row, each stands alone
    w, u = chunk_wy(*rows, I([0, 2]), chunk=1, tiled=True)
    np.testing.assert_allclose(w[:, 0], [[0.25, 0], [0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(u[:, 0], [[1], [3]], rtol=1e-6)


def test_any_chunk_size_means_the_same() -> None:
    step = Step(10, 23)
    outs = []
    for chunk in (1, 2, 7, 23, 64):
        state = step.state.copy()
        w, u = chunk_wy(step.k, step.v, step.decay, step.beta, I([0, 23]), chunk=chunk, tiled=False)
        out = chunk_delta_scan(
            step.q, step.k, w, u, step.decay, I([0, 23]), I([0]), state, chunk=chunk, scale=1.0, tiled=False
        )
        outs.append((out, state))
    for out, state in outs[1:]:
        np.testing.assert_allclose(out, outs[0][0], atol=1e-5)
        np.testing.assert_allclose(state, outs[0][1], atol=1e-5)


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
def test_no_rows(rule) -> None:  # type: ignore[no-untyped-def]
    step = Step(11, 0)
    before = step.state.copy()
    out = rule(*step.rows, I([0, 0]), I([-1]), step.state, I([]), scale=1.0, tiled=True)
    assert out.shape == (0, 4, 3) and np.array_equal(step.state, before)


def test_cost_counts_the_state_once_in_and_once_out() -> None:
    i32 = lambda *n: TensorType(n, "i32")
    types = [
        TensorType((5, 2, 8)),
        TensorType((5, 2, 8)),
        TensorType((5, 4, 6)),
        TensorType((5, 4)),
        TensorType((5, 4)),
    ]
    cost = gated_delta_rule.cost(
        [*types, i32(3), i32(2), TensorType((9, 4, 8, 6)), None], {"scale": 1.0, "tiled": True}
    )
    # 7 operations an entry of 5·4·8·6; q, k, v, out, decay, beta: 4 (80 + 80 + 120 + 120 + 20 + 20); S: 2 · 2·4·8·6·4
    assert cost == Cost(6720, 1760 + 3072)
