"""The law of what comes out, by exact enumeration: probabilities are fractions, draws are intervals between the points at
which the outcome can change, and each interval counts by its length."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction as F
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.runtime.sampling import Sampler, distribution, sample
from trueup.runtime.speculation import Draft
from trueup.runtime.speculation.acceptance import couple, verify
from trueup.runtime.speculation.drafter import Law

P, Q = (F(5, 10), F(3, 10), F(2, 10)), (F(2, 10), F(3, 10), F(5, 10))


def law(p: Sequence[F]) -> Law:
    """With ids that are not their places, as a filter leaves them."""
    return Law(10 * np.arange(len(p)), np.array([float(x) for x in p]))


def intervals(points: Sequence[F]) -> list[tuple[float, F]]:
    """Midpoints and lengths of the parts of [0, 1) between these points."""
    ends = sorted({F(0), F(1), *(x for x in points if 0 < x < 1)})
    return [(float((a + b) / 2), b - a) for a, b in pairwise(ends)]


def coupled(p: Sequence[F], q: Sequence[F], token: int) -> tuple[dict[int, F], F]:
    """For a token drafted from q: the law of what comes out, and the chance that it stands."""
    above = [max(a - b, F(0)) for a, b in zip(p, q, strict=True)]
    total = sum(above, F(0))
    sums = [sum(above[: i + 1], F(0)) / total for i in range(len(p))] if total else []
    out = dict.fromkeys(range(len(p)), F(0))
    for accept, width in intervals([p[token] / q[token]]):
        if accept * float(q[token]) < float(p[token]):
            assert couple(law(p), 10 * token, law(q), accept=accept, residual=0.5) == 10 * token
            out[token] += width
            continue
        for residual, part in intervals(sums):
            out[couple(law(p), 10 * token, law(q), accept=accept, residual=residual) // 10] += width * part
    return out, min(F(1), p[token] / q[token])


def outcome(p: Sequence[F], q: Sequence[F], told: Sequence[F] | None = None) -> tuple[list[F], F]:
    """Drafted from q, told to be from `told`: the law of what comes out, and how often the draft stands."""
    out, stands = [F(0)] * len(p), F(0)
    for token, chance in enumerate(q):
        if chance:
            took, stood = coupled(p, q if told is None else told, token)
            out = [o + chance * took[i] for i, o in enumerate(out)]
            stands += chance * stood
    return out, stands


@pytest.mark.fault("B54")
def test_the_figures_of_the_report() -> None:
    """p = (.5, .3, .2), q = (.2, .3, .5): .7 stand, the residual is (1, 0, 0), what comes out is p, all exactly."""
    assert outcome(P, Q) == (list(P), F(7, 10))
    assert coupled(P, Q, 2) == ({0: F(6, 10), 1: F(0), 2: F(4, 10)}, F(4, 10))


@pytest.mark.fault("B55")
def test_a_law_that_is_not_the_one_drafted_from_changes_the_outcome() -> None:
    """The largest of q always, told as q: (.6, 0, .4). Told as it is, a law without chance, it is p again."""
    largest = (F(0), F(0), F(1))
    assert outcome(P, largest, told=Q)[0] == [F(6, 10), F(0), F(4, 10)]
    assert outcome(P, largest) == (list(P), F(2, 10))


fractions = st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any)


@given(fractions, st.data())
def test_any_laws(a: list[int], data: st.DataObject) -> None:
    """Zeros on either side too: the target exactly, and as often standing as any coupling allows."""
    b = data.draw(st.lists(st.integers(0, 9), min_size=len(a), max_size=len(a)).filter(any))
    p, q = ([F(x, sum(n)) for x in n] for n in (a, b))
    assert outcome(p, q) == (p, sum(map(min, p, q), F(0)))


@pytest.mark.fault("B54")
@pytest.mark.parametrize("temperature, powers", [(0.5, 2), (1.0, 1)])
def test_the_target_is_that_of_the_temperature(temperature: float, powers: int) -> None:
    """Logits log p at temperature 1/2 are p squared, renormalized; checked through `verify`, draws and all."""
    weights = [x**powers for x in P]
    want, drafted = [x / sum(weights) for x in weights], (F(1, 10), F(2, 10), F(7, 10))
    rows = np.log(np.array([P, P], np.float64)).astype(np.float32)
    told = Law(np.arange(3), np.array([float(x) for x in drafted]))
    out = [F(0)] * 3
    for token, chance in enumerate(drafted):
        above = [max(a - b, F(0)) for a, b in zip(want, drafted, strict=True)]
        sums = [sum(above[: i + 1], F(0)) / sum(above) for i in range(3)]
        for accept, w in intervals([want[token] / chance]):
            for residual, v in intervals(sums):
                draws = {"accept": accept, "residual": residual, "sample": 0.5}
                verdict = verify(rows, Draft((token,), (told,)), Sampler(temperature), lambda i, why, d=draws: d[why])
                out[verdict.chosen[0].token] += chance * w * v
    assert out == want
    ids, probs = distribution(rows[0], Sampler(temperature))
    np.testing.assert_allclose(probs, [float(x) for x in want], atol=1e-7)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_draft_without_chance_is_plain_sampling_for_every_draw(temperature: float) -> None:
    """Between all points where plain sampling's choice changes: the same token, whatever was drafted."""
    row = np.log(np.array([float(x) for x in P])).astype(np.float32)
    _, probs = distribution(row, Sampler(temperature))
    for draw, _ in intervals([F(float(x)) for x in np.cumsum(probs)[:-1]]):
        want = sample(row, Sampler(temperature), draw=draw).token
        for token in range(3):
            verdict = verify(np.stack([row, row]), Draft((token,)), Sampler(temperature), lambda i, why, d=draw: d)
            assert verdict.chosen[0].token == want and verdict.accepted == (token == want)


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8), st.integers(0, 7), st.booleans())
def test_temperature_zero_is_the_argmax(row: list[float], token: int, told: bool) -> None:
    """Whatever the drafted token is said to come from, and whatever would have been drawn."""
    token %= len(row)
    logits = np.array([row, row], np.float32)
    laws = (Law(np.arange(len(row)), np.full(len(row), 1 / len(row))),) if told else ()

    def draw(i: int, why: str) -> float:
        return 0.999

    verdict = verify(logits, Draft((token,), laws), Sampler(), draw)
    assert verdict.chosen[0].token == int(logits[0].argmax())
    assert verdict.accepted == (token == int(logits[0].argmax()))
