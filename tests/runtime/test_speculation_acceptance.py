"""Which drafted tokens stand: exact laws on small vocabularies, samples, records that don't fit, rows that give nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueup.runtime.sampling import NonFiniteLogits, Sampler, distribution, sample, uniform
from trueup.runtime.speculation import Draft
from trueup.runtime.speculation.acceptance import couple, verify
from trueup.runtime.speculation.drafter import Law

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
IDS = np.arange(3)


def law(p: np.ndarray[Any, Any]) -> Law:
    return Law(np.arange(len(p)), np.asarray(p, np.float64))


def outcome(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any], n: int = 200) -> tuple[np.ndarray[Any, Any], float]:
    """The law of what comes out, and the chance that the draft stands, on a fine grid of both draws."""
    out, stood = np.zeros(len(p)), 0.0
    grid = (np.arange(n) + 0.5) / n
    for token in np.flatnonzero(q):
        for accept in grid:
            if accept * q[token] < p[token]:
                out[token] += q[token] / n
                stood += q[token] / n
            else:
                for residual in grid[:: n // 20]:
                    took = couple(law(p), int(token), law(q), accept=accept, residual=residual)
                    assert took != token or p[token] >= q[token]
                    out[took] += q[token] / n / 20
    return out, stood


def test_the_coupling_keeps_the_target_and_is_maximal() -> None:
    """p = (.5, .3, .2), q = (.2, .3, .5): .7 stand, the sum of the minima; what is drawn instead is always token 0."""
    out, stood = outcome(P, Q)
    assert stood == pytest.approx(0.7, abs=2e-3) == pytest.approx(np.minimum(P, Q).sum(), abs=2e-3)
    np.testing.assert_allclose(out, P, atol=2e-3)
    assert {couple(law(P), 2, law(Q), accept=0.99, residual=r) for r in np.linspace(0, 0.999, 50)} == {0}


@pytest.mark.parametrize("seed", range(6))
def test_other_laws_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(5) * 0.5), rng.dirichlet(np.ones(5) * 0.5)
    p[0] = 0 if seed % 2 else p[0]
    p /= p.sum()
    out, stood = outcome(p, q)
    np.testing.assert_allclose(out, p, atol=0.06)
    assert stood == pytest.approx(np.minimum(p, q).sum(), abs=6e-3)
    assert seed % 2 == 0 or out[0] == 0


def test_samples_by_chi_square() -> None:
    """6,000 drafts sampled from q, verified against logits of p: frequencies of p, chi-square below its 99.99 % point."""
    rows = np.log(np.stack([P, P])).astype(np.float32)
    settings, counts, stood = Sampler(temperature=1.0, seed=1), np.zeros(3), 0
    for i in range(6_000):
        token = int(np.searchsorted(np.cumsum(Q), uniform(3, 0, i, "draft"), side="right"))
        verdict = verify(
            rows, Draft((token,), (law(Q),)), settings, lambda row, purpose, i=i: uniform(7, row, i, purpose)
        )
        counts[verdict.chosen[0].token] += 1
        stood += verdict.accepted
    assert float(((counts - 6_000 * P) ** 2 / (6_000 * P)).sum()) < 18.4
    assert stood / 6_000 == pytest.approx(0.7, abs=4 * (0.21 / 6_000) ** 0.5)


def test_a_draft_that_always_proposes_one_token_but_tells_another_law_is_seen() -> None:
    """The law is the one sampled from: (.6, 0, .4) would come out of the mismatch; the record refuses what it can see."""
    with pytest.raises(ValueError, match="2 tokens comes with 1 laws"):
        Draft((2, 2), (law(Q),))
    with pytest.raises(ValueError, match="token 2 has no probability"):
        Draft((2,), (law(np.array([0.5, 0.5, 0.0])),))
    with pytest.raises(ValueError, match="must sum to 1"):
        Draft((2,), (law(np.array([0.5, 0.5, 0.5])),))
    with pytest.raises(ValueError, match="ascending"):
        Draft((2,), (Law(IDS[::-1], Q),))
    cut = Draft((2, 1, 0), (law(Q), None, law(P))).cut(2)
    assert cut.tokens == (2, 1) and len(cut.laws) == 2 and cut.laws[1] is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_token_without_chance_stands_where_plain_sampling_takes_it(temperature: float) -> None:
    """So the text of a seed does not depend on what was drafted; and it stands as often as its probability."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4, 7)).astype(np.float32)
    settings = Sampler(temperature=temperature, top_k=5, seed=11)
    stood = 0
    for i in range(200):
        draw = lambda row, purpose, i=i: uniform(11, 0, 10 * i + row, purpose)
        plain = [sample(r, settings, draw=draw(j, "sample")).token for j, r in enumerate(rows)]
        for draft in ((plain[0], plain[1], 6), (3, 3, 3), tuple(plain[:3])):
            verdict = verify(rows, Draft(draft), settings, draw)
            assert [s.token for s in verdict.chosen] == plain[: len(verdict.chosen)]
            assert verdict.accepted == len(verdict.chosen) - 1
        stood += verify(rows[:2], Draft((2,)), settings, draw).accepted
    ids, probs = distribution(rows[0], settings)
    chance = float(probs[ids == 2].sum())
    assert stood / 200 == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 200) ** 0.5 + 1e-9)


def test_each_row_of_logits_is_judged_by_itself() -> None:
    """Row 0's runner-up is no answer for row 1: every row's own argmax, whatever the draft."""
    rows = np.zeros((4, 9), np.float32)
    for i, best in enumerate((5, 2, 7, 1)):
        rows[i, best] = 3
    rows[0, 2] = rows[0, 7] = 2.9
    for j in range(4):
        draft = tuple(t if i < j else 8 for i, t in enumerate((5, 2, 7)))
        verdict = verify(rows, Draft(draft), Sampler(), lambda *_: 0.0)
        assert ([s.token for s in verdict.chosen], verdict.accepted) == ([5, 2, 7, 1][: j + 1], j)


def test_rows_and_draft_must_agree() -> None:
    for n in (2, 4):
        with pytest.raises(ValueError, match=f"verified by 3 rows of logits, got {n}"):
            verify(np.zeros((n, 5), np.float32), Draft((1, 2)), Sampler(), lambda *_: 0.0)


def test_a_row_that_gives_no_token_ends_the_round_before_it() -> None:
    rows = np.zeros((3, 5), np.float32)
    rows[0, 1] = rows[1, 2] = 1
    rows[2] = np.nan
    verdict = verify(rows, Draft((1, 2)), Sampler(), lambda *_: 0.0)
    assert [s.token for s in verdict.chosen] == [1, 2] and verdict.accepted == 1
    with pytest.raises(NonFiniteLogits):
        verify(rows[2:], Draft(()), Sampler(), lambda *_: 0.0)
