"""N-gram rows in exact integers, and the gate that lets them in."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.core.ops import ngram_rows, ple_gate

pytestmark = pytest.mark.filterwarnings("error")

F, I, L = np.float32, np.int32, np.int64
EOS = 9


def hashed(ids: list[int], context: np.ndarray, keep: list[int] | None = None) -> list[list[int]]:
    return ngram_rows(  # type: ignore[no-any-return]
        I(ids), I([0, len(ids)]), I([0]), L([3, 5, 7]), L([0, 11]), L([11, 13]), context,
        None if keep is None else I(keep), eos=EOS,
    ).tolist()  # fmt: skip


def test_by_hand() -> None:
    context = np.full((1, 2), EOS, I)
    # 2 after the start: 2·3 ^ 9·5 = 6 ^ 45 = 43, mod 11 = 10; 43 ^ 9·7 = 43 ^ 63 = 20, mod 13 = 7, + 11 = 18
    # 4 after 2: 4·3 ^ 2·5 = 12 ^ 10 = 6; 6 ^ 63 = 57, mod 13 = 5, + 11 = 16
    assert hashed([2, 4], context) == [[10, 18], [6, 16]]
    assert context.tolist() == [[2, 4]]
    # 1 after 4 after 2: 1·3 ^ 4·5 = 3 ^ 20 = 23, mod 11 = 1; 23 ^ 2·7 = 23 ^ 14 = 25, mod 13 = 12, + 11 = 23
    assert hashed([1], context) == [[1, 23]]


def test_eos_cuts_what_is_older_but_not_its_own_context() -> None:
    fresh = np.full((1, 2), EOS, I)
    start = hashed([4], fresh.copy())
    # behind an eos a token sees what it sees at the start of a sequence, even two behind
    assert hashed([3, EOS, 4], fresh.copy())[2] == start[0]
    assert hashed([3, EOS, 6, 4], fresh.copy())[3] == hashed([6, 4], fresh.copy())[1]
    # eos itself, after 4 after 2: 9·3 ^ 4·5 = 27 ^ 20 = 15, mod 11 = 4; 15 ^ 14 = 1, + 11 = 12
    assert hashed([2, 4, EOS], fresh.copy())[2] == [4, 12]


def test_constants_of_45_bits_stay_exact() -> None:
    m, size, offset = [4295158889766209, 8433018892997163, 1270917961435699], [293, 283], [0, 293]
    ids = [1023, 7, 1017]  # of a vocabulary of 1024, for which these constants were made
    rows = ngram_rows(I(ids), I([0, 3]), I([0]), L(m), L(offset), L(size), np.full((1, 2), 1018, I), eos=1018)
    a, b, c = ids
    assert rows[2].tolist() == [(c * m[0] ^ b * m[1]) % 293, (c * m[0] ^ b * m[1] ^ a * m[2]) % 283 + 293]


def test_products_beyond_64_bits_wrap_and_rows_stay_in_their_table() -> None:
    m, ids = [2**45 + 1, 2**44 + 3, 5], [2**21, 2**30 + 7, 2**31 - 1]
    rows = ngram_rows(I(ids), I([0, 3]), I([0]), L(m), L([0, 293]), L([293, 283]), np.full((1, 2), EOS, I), eos=EOS)

    def signed(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    mix = signed(ids[2] * m[0]) ^ signed(ids[1] * m[1])
    assert mix < 0 and rows[2, 0] == mix % 293 and 293 <= rows[2, 1] < 576


def oracle(ids: list[int], m: list[int], offsets: list[int], sizes: list[int], eos: int) -> list[list[int]]:
    """The definition a token at a time, in Python's integers."""
    n, out = len(m), []
    per = len(sizes) // (n - 1)
    for p in range(len(ids)):
        c = [ids[p]]
        for s in range(1, n):
            gone = p - s < 0 or eos in ids[p - s : p]
            c.append(eos if gone else ids[p - s])
        row = []
        for length in range(2, n + 1):
            mix = 0
            for j in range(length):
                mix ^= c[j] * m[j]
            row += [mix % sizes[h] + offsets[h] for h in range((length - 2) * per, (length - 1) * per)]
        out.append(row)
    return out


@given(st.integers(0, 2**32 - 1), st.integers(0, 14), st.integers(2, 5), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_any_split_is_the_definition(seed: int, tokens: int, n: int, per: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, tokens).tolist()  # 3 is eos, and frequent
    m = rng.integers(1, 2**45, n)
    sizes = rng.integers(1, 300, (n - 1) * per)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    context, got, at = np.full((3, n - 1), 3, I), [], 0
    context[[0, 2]] = -5
    while at < tokens:
        count = data.draw(st.integers(1, tokens - at))
        step = I(ids[at : at + count] + [123] * 2)
        rows = ngram_rows(step, I([0, 0, count]), I([-1, 1]), L(m), L(offsets), L(sizes), context, eos=3)
        assert not rows[count:].any()
        got += rows[:count].tolist()
        at += count
    assert got == oracle(ids, m.tolist(), offsets.tolist(), sizes.tolist(), 3)
    assert context[1].tolist() == ([3] * (n - 1) + ids)[len(ids) :] and (context[[0, 2]] == -5).all()


def test_keep_takes_the_context_after_its_row() -> None:
    context = np.full((3, 2), EOS, I)
    hashed([2, 4, 1], context, [2, 1, -1])
    assert context.tolist() == [[4, 1], [2, 4], [EOS, 2]]


@pytest.mark.parametrize(("offsets", "sizes"), [([0, 11], [11, 0]), ([0, 2**31 - 12], [11, 13]), ([-1, 11], [11, 13])])
def test_tables_that_int32_cannot_index_are_refused(offsets: list[int], sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="must be rows of an int32 table"):
        ngram_rows(I([1]), I([0, 1]), I([0]), L([3, 5, 7]), L(offsets), L(sizes), np.zeros((1, 2), I), eos=EOS)


def test_gate_by_hand() -> None:
    # u = (2·3 + 2·5) / sqrt 4 = 8 … of n = 4: key·query = 16, u = 8, sqrt = 2.828427; sigmoid = .944194
    key, query = F([[[2, 2, 0, 0]]]), F([[[3, 5, 0, 0]]])
    gate = 1 / (1 + math.exp(-math.sqrt(8)))
    np.testing.assert_allclose(
        ple_gate(key, query, F([[1, -2, 0, 4]]))[0, 0], [gate, -2 * gate, 0, 4 * gate], rtol=1e-7
    )
    np.testing.assert_allclose(ple_gate(-key, query, F([[1, 0, 0, 0]]))[0, 0, 0], 1 - gate, rtol=1e-6)


def test_gate_near_zero() -> None:
    def at(u: float) -> float:
        return float(ple_gate(F([[[u]]]), F([[[1]]]), F([[1]]))[0, 0, 0])

    step = 1 / (1 + math.exp(-1e-3))
    assert at(0.0) == 0.5
    assert at(1e-9) == pytest.approx(step, rel=1e-7) and at(-1e-9) == pytest.approx(1 - step, rel=1e-7)
    assert math.isnan(at(math.nan)) and at(math.inf) == 1 and at(-math.inf) == 0


def test_gate_keeps_rows_and_streams_apart() -> None:
    rng = np.random.default_rng(0)
    key, query = rng.standard_normal((2, 5, 3, 33)).astype(F)
    value = rng.standard_normal((5, 33)).astype(F)
    key[2, 1] = np.nan
    out = ple_gate(key, query, value)
    assert np.isnan(out).all(axis=2).tolist() == [[(r, s) == (2, 1) for s in range(3)] for r in range(5)]
    for r in range(5):
        assert np.array_equal(out[r], ple_gate(key[[r]], query[[r]], value[[r]])[0], equal_nan=True)
    assert ple_gate(key[:0], query[:0], value[:0]).shape == (0, 3, 33)
