"""The property that every op with a sequence axis owes: how a sequence is cut into steps, and who shares them,
changes nothing.

Each op is run on whole sequences alone, and then in random steps: ragged, in any order of places, with places that
hold no sequence, pages and slots scattered, and padding rows of NaN. Results and state must have the same bits; of
the chunked delta rule, whose chunks begin where a step begins, the same values within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import (
    attention,
    causal_conv,
    delay,
    gated_delta_rule,
    index_scores,
    ngram_rows,
    paged_append,
    rope,
    rope_frequencies,
    top_k,
    trailing_mean,
)

pytestmark = pytest.mark.filterwarnings("error")

F, I, L = np.float32, np.int32, np.int64
PAGE, BLOCKS, PAGES = 4, 6, 20
SLOTS = 12

Rows = dict[str, np.ndarray]


@dataclass
class Batch:
    """What a step gives to an op besides its rows, and the states, which it may write."""

    cu: np.ndarray
    slots: np.ndarray
    past: np.ndarray
    table: np.ndarray
    keep: np.ndarray
    state: Rows = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """`rows(rng, tokens)` makes inputs, `fresh()` the states of all slots and pages, `run` a step's results."""

    rows: Callable[[np.random.Generator, int], Rows]
    fresh: Callable[[], Rows]
    run: Callable[[Rows, Batch], list[np.ndarray]]
    exact: bool = True


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(F)


def normal(**shapes: tuple[int, ...]) -> Callable[[np.random.Generator, int], Rows]:
    return lambda rng, tokens: {k: rng.standard_normal((tokens, *s)).astype(F) for k, s in shapes.items()}


def delta_rows(rng: np.random.Generator, tokens: int) -> Rows:
    return {
        "q": unit(rng.standard_normal((tokens, 2, 5))),
        "k": unit(rng.standard_normal((tokens, 2, 5))),
        "v": rng.standard_normal((tokens, 4, 3)).astype(F),
        "decay": -rng.random((tokens, 4)).astype(F),
        "beta": rng.random((tokens, 4)).astype(F),
    }


def delta(rule: Callable[..., np.ndarray]) -> Callable[[Rows, Batch], list[np.ndarray]]:
    return lambda x, b: [rule(*x.values(), b.cu, b.slots, b.state["s"], b.keep, scale=0.4, tiled=True)]


TAPS = np.random.default_rng(0).standard_normal((3, 4)).astype(F)
FREQS, FIRST = rope_frequencies(dims=4, base=100.0), np.zeros(2, I)


def selective(x: Rows, b: Batch) -> list[np.ndarray]:
    """Keys and values written, block keys pooled and turned, blocks scored and chosen, attention over them."""
    paged = b.cu, b.past, b.table
    positions = x["positions"]
    keys = rope(x["k"], positions, FREQS, FIRST)
    paged_append(keys, *paged, b.state["k"])
    paged_append(x["v"], *paged, b.state["v"])
    mean = trailing_mean(x["raw"], b.cu, b.slots, b.state["mean"], b.keep, every=2)
    first = delay(positions, b.cu, b.slots, b.state["first"], b.keep, by=1)
    turned = rope(mean[:, None], first, FREQS, FIRST)
    paged_append(turned[:, 0], *paged, b.state["index"], every=2)
    scores = index_scores(x["iq"], b.state["index"], *paged, every=2, scale=0.5)
    chosen = top_k(scores, k=2)[1]
    out, lse = attention(x["q"], b.state["k"], b.state["v"], *paged, chosen, scale=0.5, block=2)
    near, near_lse = attention(x["q"], b.state["k"], b.state["v"], *paged, scale=0.5, window=3)
    return [scores, chosen, out, lse, near, near_lse]


def selective_rows(rng: np.random.Generator, tokens: int) -> Rows:
    made = normal(q=(4, 6), k=(2, 6), v=(2, 3), raw=(6,), iq=(2, 6))(rng, tokens)
    return made | {"positions": np.arange(tokens, dtype=I)[:, None]}


assert gated_delta_rule.decomposition is not None

CASES = {
    "conv": Case(
        normal(x=(3,)),
        lambda: {"s": np.zeros((SLOTS, 6, 3), F)},
        lambda x, b: [causal_conv(x["x"], TAPS, b.cu, b.slots, b.state["s"], b.keep, dilation=2)],
    ),
    "mean": Case(
        normal(x=(3,)),
        lambda: {"s": np.zeros((SLOTS, 4, 3), F)},
        lambda x, b: [trailing_mean(x["x"], b.cu, b.slots, b.state["s"], b.keep, every=5)],
    ),
    "delay": Case(
        normal(x=(2, 3)),
        lambda: {"s": np.zeros((SLOTS, 3, 2, 3), F)},
        lambda x, b: [delay(x["x"], b.cu, b.slots, b.state["s"], b.keep, by=3)],
    ),
    "ngram": Case(
        lambda rng, tokens: {"ids": rng.integers(0, 5, tokens).astype(I)},
        lambda: {"s": np.full((SLOTS, 2), 4, I)},
        lambda x, b: [
            ngram_rows(x["ids"], b.cu, b.slots, L([3, 5, 7]), L([0, 11]), L([11, 13]), b.state["s"], b.keep, eos=4)
        ],
    ),
    "delta": Case(delta_rows, lambda: {"s": np.zeros((SLOTS, 4, 5, 3), F)}, delta(gated_delta_rule)),
    "chunked": Case(
        delta_rows, lambda: {"s": np.zeros((SLOTS, 4, 5, 3), F)}, delta(gated_delta_rule.decomposition), exact=False
    ),
    "selective": Case(
        selective_rows,
        lambda: {
            "k": np.full((PAGES, PAGE, 2, 6), np.nan, F),
            "v": np.full((PAGES, PAGE, 2, 3), np.nan, F),
            "index": np.full((PAGES, PAGE // 2, 6), np.nan, F),
            "mean": np.zeros((SLOTS, 1, 6), F),
            "first": np.zeros((SLOTS, 1, 1), I),
        },
        selective,
    ),
}
PER_SEQUENCE = {"s", "mean", "first"}


def alone(case: Case, rows: Rows, tokens: int) -> tuple[list[np.ndarray], Rows]:
    """One sequence in one step, in slot 0 and pages 0, 1, …"""
    batch = Batch(I([0, tokens]), I([0]), I([0]), I([range(BLOCKS)]), np.full(tokens, -1, I), case.fresh())
    return case.run(rows, batch), batch.state


def poison(like: np.ndarray, rows: int) -> np.ndarray:
    return np.full((rows, *like.shape[1:]), np.nan if like.dtype == F else 2**31 - 1, like.dtype)


def agree(case: Case, got: np.ndarray, want: np.ndarray, what: str) -> None:
    if case.exact:
        assert np.array_equal(got, want, equal_nan=got.dtype == F), what
    else:
        # unit keys and at most 24 rows of values of a few
        np.testing.assert_allclose(got, want, atol=24 * 8 * 2.0**-24, err_msg=what)


@pytest.mark.parametrize("name", CASES)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, PAGE * BLOCKS), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_any_cut_into_steps_and_any_packing_gives_the_same(name: str, seed: int, lengths: list[int]) -> None:
    case, rng = CASES[name], np.random.default_rng(seed)
    rows = [case.rows(rng, n) for n in lengths]
    state = case.fresh()
    slots = rng.permutation(SLOTS - 1)[: len(lengths)]
    spare = SLOTS - 1  # takes a snapshot
    tables = rng.permutation(PAGES)[: len(lengths) * BLOCKS].reshape(len(lengths), BLOCKS)
    done, results = [0] * len(lengths), [[] for _ in lengths]  # type: ignore[var-annotated]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        places = [*rng.permutation(len(lengths)), -1, -1]
        rng.shuffle(places)
        counts = [0 if s < 0 else int(rng.integers(0, min(7, lengths[s] - done[s]) + 1)) for s in places]
        padding = int(rng.integers(0, 4))
        parts = [{k: v[done[s] : done[s] + n] for k, v in rows[s].items()} for s, n in zip(places, counts, strict=True)]
        step = {k: np.concatenate([*(p[k] for p in parts), poison(v, padding)]) for k, v in rows[0].items()}
        keep = np.full(sum(counts) + padding, -1, I)
        if sum(counts):
            keep[rng.integers(sum(counts))] = spare
        keep[sum(counts) :] = 3  # padding keeps nothing
        used = [s if n else -1 for s, n in zip(places, counts, strict=True)]
        batch = Batch(
            np.concatenate([[0], np.cumsum(counts)]).astype(I),
            I([slots[s] if s >= 0 else -1 for s in used]),
            I([done[s] if s >= 0 else -1 for s in used]),
            I([tables[s] if s >= 0 else [-1] * BLOCKS for s in used]),
            keep,
            state,
        )
        out = case.run(step, batch)
        at = 0
        for s, n in zip(places, counts, strict=True):
            if n:
                results[s].append([o[at : at + n] for o in out])
                done[s] += n
            at += n
        for o in out:
            tail = o[at:]
            assert not tail.any() or (tail == -np.inf).all() or (tail == -1).all()  # scores and their choice
    for s, n in enumerate(lengths):
        want, states = alone(case, rows[s], n)
        for i, w in enumerate(want):
            agree(case, np.concatenate([r[i] for r in results[s]]), w, f"result {i} of sequence {s}")
        for k, w in states.items():
            got = state[k][slots[s]] if k in PER_SEQUENCE else state[k][tables[s]]
            agree(case, got, w[0] if k in PER_SEQUENCE else w[:BLOCKS], f"state {k} of sequence {s}")
    untouched = case.fresh()
    for k, v in state.items():
        others = [i for i in range(len(v)) if i not in (slots if k in PER_SEQUENCE else tables)]
        others = [i for i in others if k not in PER_SEQUENCE or i != spare]
        assert np.array_equal(v[others], untouched[k][others], equal_nan=v.dtype == F)


@pytest.mark.fault("B46")
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.exact])
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_b46_slot_keep_of_a_row_holds_the_state_after_that_row(name: str, seed: int, tokens: int) -> None:
    case, rng = CASES[name], np.random.default_rng(seed)
    rows = case.rows(rng, tokens)
    wanted = rng.permutation(tokens)[: min(3, tokens)]
    keep = np.full(tokens, -1, I)
    keep[wanted] = np.arange(1, 1 + len(wanted))
    batch = Batch(I([0, tokens]), I([0]), I([0]), I([range(BLOCKS)]), keep, case.fresh())
    case.run(rows, batch)
    for t in wanted:
        _, prefix = alone(case, {k: v[: t + 1] for k, v in rows.items()}, int(t) + 1)
        for k in PER_SEQUENCE & set(prefix):
            assert np.array_equal(batch.state[k][keep[t]], prefix[k][0])


@pytest.mark.parametrize("name", CASES)
def test_a_step_without_rows_does_nothing(name: str) -> None:
    case = CASES[name]
    rows = case.rows(np.random.default_rng(0), 0)
    batch = Batch(I([0, 0]), I([-1]), I([-1]), I([[-1] * BLOCKS]), I([]), case.fresh())
    assert all(len(o) == 0 for o in case.run(rows, batch))
    for k, v in case.fresh().items():
        assert np.array_equal(batch.state[k], v, equal_nan=v.dtype == F)
