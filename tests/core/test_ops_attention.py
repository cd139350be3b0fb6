"""Paged attention and the merge of several, against dense float64 and hand-computed rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.op import Cost
from trueup.core.ops import attention, merge_attention
from trueup.core.types import TensorType

pytestmark = pytest.mark.filterwarnings("error")

F, I = np.float32, np.int32
INF, NAN = np.inf, np.nan


def paged(x: np.ndarray, size: int, order: list[int]) -> np.ndarray:
    """`x[entries, …]` in pages of `size` in that order; everything else is NaN."""
    cache = np.full((max(order) + 1, size, *x.shape[1:]), NAN, F)
    for e, row in enumerate(x):
        cache[order[e // size], e % size] = row
    return cache


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: list[int], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One query over the entries `seen`, head by head, with Python's exactly rounded sums."""
    heads, group = len(q), len(q) // k.shape[1]
    out, lse = np.zeros((heads, v.shape[2])), np.full(heads, -INF)
    for h in range(heads):
        x = {
            e: scale * math.fsum(float(a) * float(b) for a, b in zip(q[h], k[e, h // group], strict=True)) for e in seen
        }
        if x:
            total = math.fsum(math.exp(s) for s in x.values())
            lse[h] = math.log(total)
            for i in range(v.shape[2]):
                out[h, i] = math.fsum(math.exp(s) * float(v[e, h // group, i]) for e, s in x.items()) / total
    return out, lse


def seen_by(row: np.ndarray) -> list[int]:
    """Which entries a query read, where the values are one-hot."""
    return np.flatnonzero(row).tolist()


def one_hot(q: np.ndarray, entries: int, **how: object) -> list[list[int]]:
    """The entries seen by each query of a sequence of `entries` tokens, of which the last len(q) are the step's."""
    tokens, every = len(q), how.get("every", 1)
    stored = entries // every  # type: ignore[operator]
    v = np.eye(max(stored, 1), dtype=F)[:, None]
    out, _ = attention(
        q, np.zeros((max(stored, 1), 1, 1, q.shape[2]), F), v[:, None], I([0, tokens]), I([entries - tokens]),
        I([range(max(stored, 1))]), scale=1.0, **how,
    )  # fmt: skip
    return [seen_by(row[0]) for row in out]


def test_by_hand() -> None:
    # scores ln 1 and ln 3: weights 1/4 and 3/4, lse = ln 4
    k, v = F([[[[0]], [[math.log(3)]]]]), F([[[[4]], [[8]]]])
    out, lse = attention(F([[[1]]]), k, v, I([0, 1]), I([1]), I([[0]]), scale=1.0)
    np.testing.assert_allclose([out[0, 0, 0], lse[0, 0]], [7, math.log(4)], rtol=1e-7)


def test_heads_read_the_key_head_of_their_group() -> None:
    v = F([[[[1], [2]]]])
    out, _ = attention(np.ones((1, 6, 1), F), np.ones((1, 1, 2, 1), F), v, I([0, 1]), I([0]), I([[0]]), scale=1.0)
    assert out[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_query_sees_itself_and_what_is_before() -> None:
    q = np.zeros((3, 1, 2), F)
    assert one_hot(q, 5) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert one_hot(q, 5, window=2) == [[1, 2], [2, 3], [3, 4]]
    assert one_hot(q, 3, window=9) == [[0], [0, 1], [0, 1, 2]]


def test_entries_of_several_tokens_are_seen_when_complete() -> None:
    assert one_hot(np.zeros((7, 1, 2), F), 7, every=3) == [[], [], [0], [0], [0], [0, 1], [0, 1]]
    assert one_hot(np.zeros((3, 1, 2), F), 9, every=3, window=1) == [[1], [1], [2]]


@pytest.mark.fault("B19")
def test_b19_selected_blocks_and_the_tail() -> None:
    # t = 10: 11 tokens, blocks 0 and 1 whole, tail 8, 9, 10; t = 13: blocks 1 and 2, tail 12, 13
    q = np.zeros((1, 1, 2), F)
    assert one_hot(q, 11, selected=I([[1, 0]]), block=4) == [list(range(11))]
    assert one_hot(q, 14, selected=I([[1, 2]]), block=4) == [[*range(4, 12), 12, 13]]
    assert one_hot(q, 12, selected=I([[-1, -1]]), block=4) == [
        []
    ]  # the block of the query itself is a candidate like any
    assert one_hot(q, 12, selected=I([[2, 2]]), block=4) == [[8, 9, 10, 11]]
    assert one_hot(q, 14, selected=np.zeros((1, 0), I), block=4) == [[12, 13]]
    assert one_hot(q, 14, selected=I([[1, 2]]), block=4, window=5) == [[9, 10, 11, 12, 13]]
    assert one_hot(q, 12, selected=I([[1, -1]]), every=3) == [[1]]


def test_a_block_named_twice_counts_once_and_order_is_nothing() -> None:
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal(n).astype(F) for n in ((1, 2, 3), (1, 12, 1, 3), (1, 12, 1, 3)))
    results = [
        attention(q, k, v, I([0, 1]), I([11]), I([[0]]), I([picks]), scale=1.0, block=4)
        for picks in ([0, 2, -1], [2, 0, -1], [-1, 2, 0], [2, 2, 0], [0, 2, 0])
    ]
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])


@pytest.mark.fault("B19")
@pytest.mark.parametrize("bad", [2, 3, -2])
def test_b19_a_block_of_the_future_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="where 2 whole blocks are seen"):
        one_hot(np.zeros((1, 1, 2), F), 11, selected=I([[0, bad]]), block=4)


@pytest.mark.fault("B07")
def test_b07_a_query_that_sees_nothing_gives_zeros_and_one_key_its_value() -> None:
    q = F([[[1]], [[1]]])
    k, v = F([[[[-1e6]]]]), F([[[[7]]]])
    out, lse = attention(q, k, v, I([0, 2]), I([0]), I([[0]]), scale=1.0, every=2)
    assert out[:, 0, 0].tolist() == [0, 7] and lse[:, 0].tolist() == [-INF, -1e6]
    out, lse = attention(q[:1], F([[[[-INF]]]]), v, I([0, 1]), I([0]), I([[0]]), scale=1.0)
    assert (out[0, 0, 0], lse[0, 0]) == (0, -INF)


@pytest.mark.fault("B16")
def test_b16_pages_and_entries_that_are_not_seen_are_not_read() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 7, 2, 3)).astype(F)
    q = rng.standard_normal((2, 2, 3)).astype(F)
    pages = [3, 1, 4, 0]  # the rest of page 4's sequence, and all of 0 and 2, are NaN
    out, lse = attention(
        q, paged(k[:6], 2, pages), paged(v[:6], 2, pages), I([0, 2]), I([4]), I([[3, 1, 4, -1]]), scale=1.0
    )
    odd, _ = attention(
        q, paged(k[:5], 2, pages), paged(v[:5], 2, pages), I([0, 2]), I([3]), I([[3, 1, 4, -1]]), scale=1.0
    )
    assert np.isfinite(odd).all()
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.fault("B32")
def test_b32_padding_rows_give_zeros_and_reach_nothing() -> None:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 4, 2, 3)).astype(F)
    q = rng.standard_normal((5, 2, 3)).astype(F)
    q[2:] = NAN
    cache = paged(k, 2, [1, 0]), paged(v, 2, [1, 0])
    out, lse = attention(
        q, *cache, I([0, 2, 2]), I([2, 99]), I([[1, 0], [-1, -1]]), I([[0, -1]] * 2 + [[99, -9]] * 3), scale=1.0
    )
    alone, _ = attention(q[:2], *cache, I([0, 2]), I([2]), I([[1, 0]]), I([[0, -1]] * 2), scale=1.0)
    assert np.array_equal(out[:2], alone) and not out[2:].any() and not lse[2:].any()


def test_nan_reaches_the_queries_that_see_it_and_no_other() -> None:
    rng = np.random.default_rng(2)
    k, v, q = (rng.standard_normal((1, 6, 1, 2)).astype(F) for _ in range(3))
    k[0, 3] = NAN
    v[0, 5] = NAN
    q[0, 1] = NAN
    out, _ = attention(q[0], k, v, I([0, 6]), I([0]), I([[0]]), scale=1.0)
    assert np.isnan(out).any(axis=(1, 2)).tolist() == [False, True, False, True, True, True]
    apart, _ = attention(q[0], k, v, I([0, 6]), I([0]), I([[0]]), scale=1.0, window=1)
    assert np.isnan(apart).any(axis=(1, 2)).tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize(("table", "message"), [([[0]], "needs page 1 of a table of 1"), ([[0, -1]], "page 1 is -1")])
def test_a_page_that_is_missing_is_refused(table: list[list[int]], message: str) -> None:
    cache = np.zeros((2, 2, 1, 1), F)
    with pytest.raises(ValueError, match=message):
        attention(np.zeros((1, 1, 1), F), cache, cache, I([0, 1]), I([2]), I(table), scale=1.0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 12), st.sampled_from([1, 3]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_against_dense_attention(seed: int, tokens: int, past: int, every: int, select: bool) -> None:
    rng = np.random.default_rng(seed)
    block, window = int(rng.integers(1, 4)), 0 if select else int(rng.integers(0, 5))
    total = (past + tokens) // every
    q = rng.standard_normal((tokens, 4, 5)).astype(F)
    k, v = rng.standard_normal((total, 2, 5)).astype(F), rng.standard_normal((total, 2, 3)).astype(F)
    order = rng.permutation(9).tolist()
    table = I([[*order[: -(-total // 2)], *[-1] * 9][:9]])
    selected = np.full((tokens, 3), -1, I) if select else None
    seen = []
    for t in range(tokens):
        n = (past + t + 1) // every
        if selected is None:
            seen.append(list(range(max(0, n - window) if window else 0, n)))
            continue
        chosen = rng.permutation(n // block)[:3]
        selected[t, : len(chosen)] = chosen
        seen.append([e for e in range(n) if e // block in chosen or e >= n // block * block])
    out, lse = attention(
        q, paged(k, 2, order), paged(v, 2, order), I([0, tokens]), I([past]), table, selected,
        scale=0.4, every=every, block=block, window=window,
    )  # fmt: skip
    for t in range(tokens):
        want, z = dense(q[t], k, v, seen[t], 0.4)
        np.testing.assert_allclose(out[t], want, rtol=2.0**-22, atol=2.0**-22)
        np.testing.assert_allclose(lse[t], z, rtol=2.0**-22, atol=2.0**-22)


# -- merging -----------------------------------------------------------------------------------------------------------


def test_merge_by_hand() -> None:
    # masses 1 and 3: (1·4 + 3·8) / 4 = 7; with a sink of mass 4: 28 / 8 = 3.5
    outs, lses = [F([[[4]]]), F([[[8]]])], [F([[0]]), F([[math.log(3)]])]
    out, lse = merge_attention(outs, lses)
    np.testing.assert_allclose([out[0, 0, 0], lse[0, 0]], [7, math.log(4)], rtol=1e-7)
    out, lse = merge_attention(outs, lses, F([math.log(4)]))
    np.testing.assert_allclose([out[0, 0, 0], lse[0, 0]], [3.5, math.log(8)], rtol=1e-7)


@pytest.mark.fault("B07")
def test_b07_an_empty_part_is_not_read_and_nothing_merged_is_nothing() -> None:
    empty, full = (F([[[NAN]]]), F([[-INF]])), (F([[[5]]]), F([[-1e6]]))
    for order in ((empty, full), (full, empty)):
        out, lse = merge_attention([o for o, _ in order], [z for _, z in order])
        assert (out[0, 0, 0], lse[0, 0]) == (5, -1e6)
    out, lse = merge_attention([empty[0]], [empty[1]])
    assert (out[0, 0, 0], lse[0, 0]) == (0, -INF)
    out, lse = merge_attention([empty[0]], [empty[1]], F([2]))
    assert (out[0, 0, 0], lse[0, 0]) == (0, 2)
    out, lse = merge_attention([full[0]], [full[1]], F([-INF]))
    assert (out[0, 0, 0], lse[0, 0]) == (5, -1e6)


def test_merge_passes_nan_that_counts_and_keeps_rows_apart() -> None:
    outs, lses = [F([[[1]], [[NAN]], [[1]]])], [F([[0], [0], [NAN]])]
    out, lse = merge_attention(outs, lses)
    assert np.isnan(out[:, 0, 0]).tolist() == [False, True, True] and np.isnan(lse[:, 0]).tolist() == [
        False,
        False,
        True,
    ]
    assert merge_attention([np.zeros((0, 2, 3), F)], [np.zeros((0, 2), F)], F([0, 0]))[0].shape == (0, 2, 3)


@given(st.integers(0, 2**32 - 1), st.integers(0, 11), st.booleans())
@settings(max_examples=30, deadline=None)
def test_merging_two_parts_is_attention_over_both(seed: int, cut: int, sink: bool) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s).astype(F) * 2 for s in ((1, 2, 3), (11, 1, 3), (11, 1, 3)))
    sinks = rng.standard_normal(2).astype(F) if sink else None
    parts = [dense(q[0], k, v, e, 1.0) for e in (list(range(cut)), list(range(cut, 11)))]
    out, lse = merge_attention([F(o)[None] for o, _ in parts], [F(z)[None] for _, z in parts], sinks)
    for h in range(2):
        x = [1.0 * float(q[0, h].astype(float) @ k[e, 0].astype(float)) for e in range(11)]
        mass = sum(map(math.exp, x)) + (math.exp(sinks[h]) if sinks is not None else 0)
        want = sum(math.exp(s) * v[e, 0].astype(float) for e, s in enumerate(x)) / mass
        # an lse of size L carries L 2^-24 of rounding into the weights
        tight = 2.0**-22 * (1 + max(map(abs, x)))
        np.testing.assert_allclose(out[0, h], want, atol=tight * np.abs(v).max())
        np.testing.assert_allclose(lse[0, h], math.log(mass), atol=tight)


def test_cost_counts_what_a_window_or_a_selection_leaves() -> None:
    i32 = lambda *n: TensorType(n, "i32")
    base = [TensorType((5, 4, 8)), TensorType((99, 16, 2, 8)), TensorType((99, 16, 2, 6)), i32(3), i32(2), i32(2, 10)]
    how = {"scale": 1.0, "every": 1, "block": 4, "window": 0}
    # 160 entries, 2 sequences: 2 · 5·4·160·14 operations; q 640, keys and values 2·160·2·14·4, out and lse 4·20·7 bytes
    assert attention.cost([*base, None], how) == Cost(89600, 640 + 35840 + 560)
    assert attention.cost([*base, None], {**how, "window": 16}).flops == 8960
    assert attention.cost([*base, i32(5, 3)], how).flops == 2 * 5 * 4 * 15 * 14  # 3 blocks of 4, and a tail of 3
