"""Sampling against plain enumeration of small vocabularies, and its random numbers against Philox written out."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from trueup.runtime.sampling import NonFiniteLogits, Sampler, SamplerError, distribution, sample, uniform

F32 = np.float32


def row(*logits: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(logits, F32)


def enumerated(logits: list[float], s: Sampler) -> dict[int, float]:
    """The filters as their definitions say, token by token, in Python floats."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.top_k:
        order = order[: s.top_k]
    top = logits[order[0]]
    weight = {i: math.exp((logits[i] - top) / s.temperature) for i in order}

    def normalized(kept: list[int]) -> dict[int, float]:
        total = math.fsum(weight[i] for i in kept)
        return {i: weight[i] / total for i in kept}

    p = normalized(order)
    if s.top_p < 1:
        n = next((n for n in range(1, len(order)) if math.fsum(p[i] for i in order[:n]) >= s.top_p), len(order))
        order = order[:n]
        p = normalized(order)
    order = [i for i in order if p[i] >= s.min_p * p[order[0]]]
    return {i: q for i, q in normalized(order).items() if q > 0}


small_logits = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0, 10.0]), min_size=1, max_size=6)
settings = st.builds(
    Sampler,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 7),
    # Off the sums that the few logits above can make, where float rounding would decide.
    top_p=st.sampled_from([0.0, 0.1234567, 0.4567891, 0.8765432, 0.9876543, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123457, 0.3456789, 1.0]),
)


@given(small_logits, settings)
@example([0.0, 0.0, 0.0, 0.0], Sampler(temperature=1.0, top_k=2))
@example([1.0, 3.0, 3.0, 1.0], Sampler(temperature=1.0, top_k=1))
def test_the_distribution_equals_plain_enumeration(logits: list[float], s: Sampler) -> None:
    ids, probs = distribution(row(*logits), s)
    want = enumerated(logits, s)
    assert ids.tolist() == sorted(want)
    np.testing.assert_allclose(probs, [want[i] for i in sorted(want)], rtol=1e-12)
    assert probs.dtype == np.float64


@given(small_logits, settings)
def test_draws_cut_the_unit_interval_as_the_distribution_says(logits: list[float], s: Sampler) -> None:
    """Each token is chosen on an interval as long as its probability, in the order of ids."""
    ids, probs = distribution(row(*logits), s)
    at = 0.0
    for token, p in zip(ids.tolist(), probs.tolist(), strict=True):
        if p > 1e-9:  # else the interval is as short as the rounding of its ends
            for draw in (at + 1e-3 * p, at + p / 2, at + p * (1 - 1e-3)):
                assert sample(row(*logits), s, draw=draw).token == token
        at += p
    assert sample(row(*logits), s, draw=0.0).token == ids[0]
    if probs[-1] > 1e-9:
        assert sample(row(*logits), s, draw=math.nextafter(1, 0)).token == ids[-1]


def test_a_draw_on_a_border_takes_the_token_that_begins_there() -> None:
    for draw, token in ((0.0, 0), (0.25, 1), (math.nextafter(0.25, 0), 0), (0.5, 2), (0.75, 3)):
        assert sample(row(0, 0, 0, 0), Sampler(temperature=1.0), draw=draw).token == token


any_row = npst.arrays(
    F32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, math.inf, -math.inf])
)


@given(any_row, settings, st.floats(0, 1, exclude_max=True))
def test_any_logits_give_a_possible_token_and_its_plain_log_probability(
    logits: np.ndarray[Any, np.dtype[np.float32]], s: Sampler, draw: float
) -> None:
    assume(logits.max() > -np.inf)
    ids, probs = distribution(logits, s)
    assert abs(probs.sum() - 1) < 1e-12 and (probs > 0).all() and (np.diff(ids) > 0).all()
    got = sample(logits, s, draw=draw)
    assert got.token in ids and logits[got.token] > -np.inf
    if logits.max() == np.inf:
        want = -math.log(np.isinf(logits[logits > 0]).sum())
    else:
        x = logits.astype(np.float64)
        want = x[got.token] - x.max() - math.log(math.fsum(np.exp(x - x.max())))
    assert got.logprob == pytest.approx(want, rel=1e-12, abs=1e-12)


@given(any_row)
def test_temperature_zero_is_argmax_with_ties_to_the_lowest_id(logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    assume(logits.max() > -np.inf)
    want = next(i for i, x in enumerate(logits) if x == max(logits))
    assert sample(logits, Sampler(), draw=0.999).token == want
    ids, probs = distribution(logits, Sampler(top_k=3, top_p=0.5))
    assert (ids.tolist(), probs.tolist()) == ([want], [1.0])


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-6])
def test_a_tiny_temperature_is_greedy_but_for_ties(temperature: float) -> None:
    ids, probs = distribution(row(1, 3, 2, 3), Sampler(temperature=temperature))
    assert (ids.tolist(), probs.tolist()) == ([1, 3], [0.5, 0.5])


def test_a_huge_temperature_is_uniform_over_the_possible() -> None:
    ids, probs = distribution(row(-50, 60, -np.inf, 0), Sampler(temperature=1e300))
    assert ids.tolist() == [0, 1, 3]
    np.testing.assert_allclose(probs, 1 / 3)


def test_equal_logits() -> None:
    equal = row(*[2.5] * 8)
    assert distribution(equal, Sampler(temperature=0.7))[1].tolist() == [1 / 8] * 8
    assert distribution(equal, Sampler(temperature=0.7, top_k=3))[0].tolist() == [0, 1, 2]
    assert distribution(equal, Sampler(temperature=0.7, top_p=0.5))[0].tolist() == [0, 1, 2, 3]
    assert distribution(equal, Sampler(temperature=0.7, top_p=0.51))[0].tolist() == [0, 1, 2, 3, 4]
    assert distribution(equal, Sampler(temperature=0.7, min_p=1.0))[0].tolist() == list(range(8))
    assert sample(equal, Sampler(), draw=0.9) == (0, pytest.approx(-math.log(8)))


def test_filters_apply_in_order_each_on_what_is_left() -> None:
    """p = 1/2, 1/4, 1/8, 1/8: alone, top_p=0.6 keeps two; after top_k=2 (2/3, 1/3) it keeps the first only."""
    logits = row(*(math.log(p) for p in (0.5, 0.25, 0.125, 0.125)))
    assert distribution(logits, Sampler(temperature=1, top_p=0.6))[0].tolist() == [0, 1]
    assert distribution(logits, Sampler(temperature=1, top_p=0.6, top_k=2))[0].tolist() == [0]
    assert distribution(logits, Sampler(temperature=1, min_p=0.4))[0].tolist() == [0, 1]
    # Temperature comes first: at T=1/2 the probabilities are as 16:4:1:1, so min_p=0.4 keeps one.
    assert distribution(logits, Sampler(temperature=0.5, min_p=0.4))[0].tolist() == [0]


@pytest.mark.parametrize("s", [Sampler(), Sampler(temperature=1.0), Sampler(temperature=1e9, top_p=0.9, min_p=0.1)])
def test_one_possible_token(s: Sampler) -> None:
    logits = np.full(50, -np.inf, F32)
    logits[17] = -3e38
    for draw in (0.0, 0.5, math.nextafter(1, 0)):
        assert sample(logits, s, draw=draw) == (17, 0.0)
        assert sample(row(-7), s, draw=draw) == (0, 0.0)


def test_infinite_logits_take_all_probability() -> None:
    logits = row(1, np.inf, 3, np.inf, -np.inf)
    assert sample(logits, Sampler(), draw=0.5) == (1, -math.log(2))
    ids, probs = distribution(logits, Sampler(temperature=0.8))
    assert (ids.tolist(), probs.tolist()) == ([1, 3], [0.5, 0.5])
    assert distribution(logits, Sampler(temperature=0.8, top_k=1))[0].tolist() == [1]


@pytest.mark.fault("B05")
@pytest.mark.parametrize("s", [Sampler(), Sampler(temperature=1.0, top_k=2)])
def test_nan_is_refused_by_position_and_never_token_zero(s: Sampler) -> None:
    with pytest.raises(NonFiniteLogits, match=r"logits\[2\] is NaN \(2 of 5 are\)") as e:
        sample(row(1, 2, np.nan, 3, np.nan), s, draw=0.5)
    assert e.value.position == 2
    with pytest.raises(NonFiniteLogits, match="all 3 logits are -inf"):
        sample(row(*[-np.inf] * 3), s, draw=0.5)


def test_wrong_arrays_and_draws_are_refused() -> None:
    for logits in (np.zeros((2, 2), F32), np.zeros(0, F32), np.zeros(3, np.int32)):
        with pytest.raises(ValueError, match="logits: found"):
            sample(logits, Sampler(), draw=0.5)
    for draw in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="draw: found"):
            sample(row(1), Sampler(), draw=draw)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", v) for v in (-0.1, math.nan, math.inf, "1", True, None, 10**400)]
    + [("top_k", v) for v in (-1, 1.0, True, "3", None)]
    + [("top_p", v) for v in (-0.1, 1.1, math.nan, "x", None)]
    + [("min_p", v) for v in (-0.1, 1.1, math.nan, None)]
    + [("seed", v) for v in (-1, 2**64, 1.5, True, "7")],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplerError, match=f"^{field}: found .*, expected a") as e:
        Sampler(**{field: value})  # type: ignore[arg-type]
    assert e.value.field == field


def test_seeded_keeps_a_seed_and_else_picks_one() -> None:
    assert Sampler(seed=0).seeded() == Sampler(seed=0)
    a, b = (Sampler(temperature=1.0).seeded() for _ in range(2))
    assert a.seed is not None and a.seed != b.seed and a.temperature == 1.0


def test_a_full_vocabulary_agrees_with_sorting_everything() -> None:
    """The shortcuts for large rows (partition, no sort of the improbable) change nothing."""
    logits = np.random.default_rng(5).normal(size=50_000).astype(F32).round(2)  # rounded: many ties
    order = np.lexsort((np.arange(logits.size), -logits))
    p = np.exp(logits[order].astype(np.float64))
    for top_p in (0.1, 0.5, 0.95, 0.999):
        kept = order[: int(np.searchsorted(np.cumsum(p / p.sum()), top_p)) + 1]
        assert distribution(logits, Sampler(temperature=1.0, top_p=top_p))[0].tolist() == sorted(kept.tolist())
    for k in (1, 40, 1000, 49_999):
        assert distribution(logits, Sampler(temperature=1.0, top_k=k))[0].tolist() == sorted(order[:k].tolist())


def chi_square_limit(freedom: int, z: float = 3.1) -> float:
    """Wilson-Hilferty's approximation of the chi-square quantile; z = 3.1 is a chance of 1 in 1000."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: np.ndarray[Any, Any], probs: np.ndarray[Any, Any]) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("s", [Sampler(temperature=1.0), Sampler(temperature=0.6, top_k=5, top_p=0.9, min_p=0.05)])
def test_frequencies_fit_the_distribution(s: Sampler) -> None:
    logits = row(1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -0.5, 0.0)
    want = enumerated([float(x) for x in logits], s)
    chosen = [sample(logits, s, draw=uniform(11, 0, i, "sample")).token for i in range(20_000)]
    counts = np.bincount(chosen, minlength=logits.size)
    ids = sorted(want)
    assert counts[ids].sum() == len(chosen)
    assert chi_square(counts[ids], np.array([want[i] for i in ids])) < chi_square_limit(len(ids) - 1)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 by its paper (Salmon et al. 2011), constants from there."""
    word = 2**64 - 1
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k0, b & word, (a >> 64) ^ c[3] ^ k1, a & word]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & word, (k1 + 0xBB67AE8584CAA73B) & word
    return c


def test_philox_written_out_gives_the_published_vector() -> None:
    """Random123's known answer for a zero counter and key."""
    got = philox([0] * 4, [0] * 2)
    assert got == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


word = st.integers(0, 2**64 - 1)


@given(word, word, word)
@example(0, 0, 0)
@example(2**64 - 1, 2**64 - 1, 2**64 - 1)
def test_uniform_is_philox_of_its_arguments(seed: int, sequence: int, position: int) -> None:
    """NumPy counts up before its first block, hence counter word 0 = 1. The purpose's word is `b2sum -l 64`."""
    sample_word = int.from_bytes(bytes.fromhex("1e7d7cb01fe10e0d"), "little")
    want = Fraction(philox([1, position, sequence, 0], [seed, sample_word])[0] >> 11, 2**53)
    got = uniform(seed, sequence, position, "sample")
    assert Fraction(got) == want and 0 <= got < 1


def test_streams_are_uniform_and_independent() -> None:
    n = 4000
    base = (7, 0, "sample")
    streams = {base: None, (8, 0, "sample"): None, (7, 1, "sample"): None, (7, 0, "accept"): None}
    draws = {k: np.array([uniform(k[0], k[1], i, k[2]) for i in range(n)]) for k in streams}
    limit = chi_square_limit(15)
    for k, x in draws.items():
        assert chi_square(np.bincount((x * 16).astype(int), minlength=16), np.full(16, 1 / 16)) < limit, k
        pairs = (x[:-1] * 4).astype(int) * 4 + (x[1:] * 4).astype(int)  # a number and the next
        assert chi_square(np.bincount(pairs, minlength=16), np.full(16, 1 / 16)) < limit, k
        if k != base:
            pairs = (draws[base] * 4).astype(int) * 4 + (x * 4).astype(int)
            assert chi_square(np.bincount(pairs, minlength=16), np.full(16, 1 / 16)) < limit, k


@pytest.mark.fault("B88")
def test_choices_of_one_seed_differ_and_come_again() -> None:
    """n = 3 with seed 7: three texts at T=1, the same ones on the next run; three equal ones at T=0."""
    logits = np.random.default_rng(0).normal(size=(12, 50)).astype(F32)

    def texts(s: Sampler) -> list[list[int]]:
        return [
            [sample(logits[p], s, draw=uniform(7, choice, p, "sample")).token for p in range(12)] for choice in range(3)
        ]

    first = texts(Sampler(temperature=1.0, seed=7))
    assert first == texts(Sampler(temperature=1.0, seed=7))
    assert len({tuple(t) for t in first}) == 3
    assert len({tuple(t) for t in texts(Sampler(seed=7))}) == 1


@pytest.mark.parametrize(
    ("args", "name"), [((-1, 0, 0), "seed"), ((0, 2**64, 0), "sequence"), ((0, 0, -1), "position")]
)
def test_uniform_refuses_numbers_out_of_range(args: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: found"):
        uniform(*args, "sample")
