"""The indexer alone, and the whole chain that it feeds: scores, choice, attention over the chosen blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.op import Cost
from trueup.core.ops import attention, index_scores, paged_append, top_k, trailing_mean
from trueup.core.types import TensorType

pytestmark = pytest.mark.filterwarnings("error")

F, I = np.float32, np.int32
INF, NAN = np.inf, np.nan


def score(q: np.ndarray, keys: np.ndarray, past: int, **how: object) -> np.ndarray:
    """Scores of one sequence whose keys `[entries, d]` lie in one page."""
    return index_scores(q, keys[None], I([0, len(q)]), I([past]), I([[0]]), **{"every": 1, "scale": 1.0, **how})


@pytest.mark.fault("B19")
def test_b19_relu_before_the_sum_over_heads() -> None:
    # two heads: key A dots (3, -4), key B dots (1, .5). With relu A = 3 > B = 1.5; without, B would win
    q, keys = F([[[1, 0], [0, 1]]]), F([[3, -4], [1, 0.5]])
    assert score(q, keys, 1).tolist() == [[3, 1.5]]
    assert score(q, keys, 1, scale=0.5).tolist() == [[1.5, 0.75]]


def test_weights_of_heads_may_be_negative() -> None:
    q, keys = F([[[1, 0], [0, 1]]]), F([[3, 4], [1, -5]])
    # 2·3 - 1·4 = 2; 2·1 - 1·0 = 2
    assert score(q, keys, 1, weights=F([[2, -1]])).tolist() == [[2, 2]]


@pytest.mark.fault("B19")
@pytest.mark.parametrize(("past", "seen"), [(0, 0), (2, 0), (3, 1), (6, 1), (7, 2), (10, 2), (13, 3), (15, 4)])
def test_b19_a_block_is_a_candidate_when_all_its_tokens_are_visible(past: int, seen: int) -> None:
    s = score(np.ones((1, 1, 1), F), np.ones((4, 1), F), past, every=4)
    assert s.tolist() == [[1] * seen + [-INF] * (4 - seen)]


def choose(scores: np.ndarray, budget: int, every: int) -> np.ndarray:
    return top_k(scores, k=min(budget // every, scores.shape[1]))[1]


def seen_after(q: np.ndarray, block_keys: np.ndarray, past: int, every: int = 4, budget: int = 8) -> list[list[int]]:
    """The tokens that each row of a sequence attends to: values are one-hot, so out shows them."""
    blocks, tokens = len(block_keys), past + len(q)
    scores = score(q, block_keys, past, every=every)
    v = np.eye(blocks * every, dtype=F)[None, :, None]
    k = np.zeros((1, blocks * every, 1, q.shape[2]), F)
    out, _ = attention(
        q[:, :1], k, v, I([0, len(q)]), I([past]), I([[0]]), choose(scores, budget, every), scale=1.0, block=every
    )
    assert tokens <= blocks * every
    return [np.flatnonzero(row[0]).tolist() for row in out]


@pytest.mark.fault("B19")
def test_b19_within_the_budget_selection_is_dense() -> None:
    q = np.ones((1, 1, 1), F)
    assert seen_after(q, F([[1], [5], [0], [0]]), 10) == [list(range(11))]


@pytest.mark.fault("B19")
def test_b19_the_best_blocks_and_the_tail() -> None:
    q = np.ones((1, 1, 1), F)
    assert seen_after(q, F([[1], [5], [5], [9]]), 13) == [[*range(4, 12), 12, 13]]


@pytest.mark.fault("B19")
def test_b19_ties_go_to_the_lowest_blocks() -> None:
    q = np.ones((1, 1, 1), F)
    assert seen_after(q, F([[2], [2], [2], [2]]), 13) == [[*range(8), 12, 13]]
    assert seen_after(q, F([[-1], [-2], [0], [-3]]), 13) == [[*range(8), 12, 13]]  # relu makes them all 0


@pytest.mark.fault("B19")
def test_b19_at_most_budget_and_tail_and_never_the_future() -> None:
    rng = np.random.default_rng(0)
    q, keys = rng.standard_normal((32, 2, 3)).astype(F), rng.standard_normal((8, 3)).astype(F)
    for t, seen in enumerate(seen_after(q, keys, 0)):
        assert max(seen, default=-1) <= t and len(seen) <= 8 + 3
        assert set(range((t + 1) // 4 * 4, t + 1)) <= set(seen)


def test_equal_keys_score_exactly_alike_wherever_they_lie() -> None:
    rng = np.random.default_rng(1)
    q, key = rng.standard_normal((5, 3, 37)).astype(F), rng.standard_normal(37).astype(F)
    keys = rng.standard_normal((74, 37)).astype(F)
    keys[[0, 13, 66, 69]] = key
    s = score(q, keys, 69, weights=rng.standard_normal((5, 3)).astype(F))
    for j in (13, 66, 69):
        assert np.array_equal(s[:, 0], s[:, j])


@pytest.mark.fault("B12")
def test_b12_every_sequence_has_its_own_past() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((4, 2, 3)).astype(F)
    cache = rng.standard_normal((4, 4, 3)).astype(F)
    table = I([[2, 0], [1, 3]])
    for tokens in (1, 2):  # with as many rows as sequences a mixed-up axis would fit
        cu = I([0, tokens, 2 * tokens])
        both = index_scores(q[: 2 * tokens], cache, cu, I([9, 22]), table, every=4, scale=1.0)
        for s, past in enumerate((9, 22)):
            rows = slice(s * tokens, (s + 1) * tokens)
            one = index_scores(q[rows], cache, I([0, tokens]), I([past]), table[s : s + 1], every=4, scale=1.0)
            assert np.array_equal(both[rows], one)
            assert np.array_equal(choose(both[rows], 8, 4), choose(one, 8, 4))
    assert (both > -INF).sum(axis=1).tolist() == [2, 2, 5, 6]


@pytest.mark.fault("B13")
@pytest.mark.parametrize("tokens", [1, 5])
def test_b13_each_request_finds_its_own_needle_in_any_order(tokens: int) -> None:
    # request r's query is the unit vector r, and only its own block 0 points that way
    rng = np.random.default_rng(3)
    cache = np.zeros((9, 2, 3), F)
    table = I(rng.permutation(9).reshape(3, 3))
    q = np.zeros((3, tokens, 1, 3), F)
    for r in range(3):
        cache[table[r, 0], 0, r] = 1
        q[r, :, 0, r] = 1

    def ask(order: list[int]) -> np.ndarray:
        cu = I(np.arange(4) * tokens)
        s = index_scores(q[order].reshape(3 * tokens, 1, 3), cache, cu, I([19] * 3), table[order], every=4, scale=1.0)
        return s.reshape(3, tokens, -1)

    plain = ask([0, 1, 2])
    assert (top_k(plain.reshape(3 * tokens, -1), k=1)[1] == 0).all()
    assert (plain[:, :, 0] == 1).all() and (plain[:, :, 1:5] == 0).all()
    assert np.array_equal(ask([2, 0, 1]), plain[[2, 0, 1]])


@pytest.mark.fault("B16")
def test_b16_keys_that_this_sequence_did_not_write_are_not_read() -> None:
    cache = np.full((3, 2, 1), NAN, F)
    cache[1, 0] = 5
    s = index_scores(np.ones((2, 1, 1), F), cache, I([0, 2]), I([3]), I([[1, -1]]), every=4, scale=1.0)
    assert s.tolist() == [[5, -INF, -INF, -INF]] * 2


@pytest.mark.fault("B17", "B18")
def test_b17_b18_blocks_are_cut_by_rank_in_the_sequence_whatever_else_is_in_the_step() -> None:
    rng = np.random.default_rng(4)
    raw = [rng.standard_normal((n, 2)).astype(F) for n in (14, 9)]
    cache, tail = np.full((8, 2, 2), NAN, F), np.zeros((2, 3, 2), F)
    table, past = I([[5, 0], [3, 7]]), [0, 0]
    for counts in ((3, 2), (6, 0), (0, 5), (5, 2)):  # interleaved, never at a block's end together
        x = np.concatenate([raw[s][past[s] : past[s] + n] for s, n in enumerate(counts)] + [np.full((2, 2), NAN, F)])
        cu = I([0, counts[0], sum(counts)])
        mean = trailing_mean(x, cu, I([1, 0]), tail, every=4)
        paged_append(mean, cu, I(past), table, cache, every=4)
        past = [p + n for p, n in zip(past, counts, strict=True)]
    for s, blocks in ((0, 3), (1, 2)):
        for b in range(blocks):
            want = raw[s][4 * b : 4 * b + 4].astype(np.float64).mean(axis=0)
            np.testing.assert_allclose(cache[table[s, b // 2], b % 2], want, rtol=1e-6)
    assert np.isnan(cache[table[0, 1], 1]).all() and np.isnan(cache[table[1, 1]]).all()


@pytest.mark.fault("B32")
def test_b32_padding_rows_are_no_candidates_and_empty_sequences_are_not_read() -> None:
    q = np.ones((4, 1, 1), F)
    q[2:] = NAN
    s = index_scores(
        q, np.ones((1, 3, 1), F), I([0, 0, 2, 2]), I([99, 1, -5]), I([[-1], [0], [77]]), every=1, scale=1.0
    )
    assert s.tolist() == [[1, 1, -INF], [1, 1, 1], [-INF] * 3, [-INF] * 3]
    assert top_k(s[2:], k=2)[1].tolist() == [[-1, -1]] * 2


def test_nan_in_a_key_marks_its_score_and_in_a_query_its_row() -> None:
    keys, q = np.ones((3, 1), F), np.ones((2, 1, 1), F)
    keys[1], q[1] = NAN, NAN
    assert np.isnan(score(q, keys, 1)).tolist() == [[False, True, False], [True, True, True]]
    future = score(q[:1], np.concatenate([keys[:1], keys[1:]]), 0)
    assert future.tolist() == [[1, -INF, -INF]]


def test_nothing_to_score() -> None:
    assert score(np.zeros((0, 2, 3), F), np.zeros((4, 3), F), 0).shape == (0, 4)
    assert score(np.zeros((2, 0, 3), F), np.zeros((2, 3), F), 0).tolist() == [[0, -INF], [0, 0]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 9), st.integers(1, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_against_exactly_rounded_sums(seed: int, tokens: int, past: int, every: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    q, keys = rng.standard_normal((tokens, 3, 5)).astype(F), rng.standard_normal((13, 5)).astype(F)
    weights = rng.standard_normal((tokens, 3)).astype(F) if weighted else None
    s = score(q, keys, past, every=every, scale=0.3, weights=weights)
    for t in range(tokens):
        n = (past + t + 1) // every
        assert (s[t, n:] == -INF).all()
        for e in range(n):
            heads = [
                max(0.0, math.fsum(float(a) * float(b) for a, b in zip(q[t, h], keys[e], strict=True)))
                for h in range(3)
            ]
            want = 0.3 * math.fsum(x * (1 if weights is None else float(weights[t, h])) for h, x in enumerate(heads))
            assert abs(s[t, e] - want) <= 2.0**-23 * abs(want) + 1e-12


def test_cost() -> None:
    i32 = lambda *n: TensorType(n, "i32")
    types = [TensorType((5, 3, 8)), TensorType((99, 4, 8)), i32(3), i32(2), i32(2, 10)]
    # 5 · 40 · 3 · (16 + 2); q 480, keys 2·40·8·4, scores 5·40·4 bytes
    assert index_scores.cost([*types, None], {"every": 4, "scale": 1.0}) == Cost(10800, 480 + 2560 + 800)
