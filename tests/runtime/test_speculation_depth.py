"""How deep to draft, in a simulator: what is lost against the depth that would have been best all along.

A round of depth d costs `cost(d, round)` and its i-th drafted token stands with the chance `stands(i, round)`; all in units of
a plain step. Regret: time a token over that of the best fixed depth, less one. Noise is lognormal with a sigma of 20 %, and 2 %
of the rounds take five times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from trueup.runtime.speculation.depth import DepthController
from trueup.runtime.speculation.rollback import WAYS, Choice

ROUNDS, MOST = 2000, 8
Cost = Callable[[int, int], float]
Stands = Callable[[int, int], float]


@dataclass
class Ran:
    regret: float
    depths: list[int]


def simulate(cost: Cost, stands: Stands, *, noisy: bool = False, setup: float = 0.0, seed: int = 0) -> Ran:
    rng, c = np.random.default_rng(seed), DepthController(MOST)
    seconds, tokens, depths = 0.0, 0, []
    for r in range(ROUNDS):
        d, a = c.depth(), 0
        while a < d and rng.random() < stands(a, r):
            a += 1
        took = cost(d, r)
        if noisy:
            took *= np.exp(0.2 * rng.standard_normal() - 0.02) * (5 if rng.random() < 0.02 else 1)
        first = setup > 0 and d not in depths
        seconds, tokens = seconds + took, tokens + a + 1
        c.observe(d, a, took + setup * first, setup=first)
        depths.append(d)
    best = min(_fixed(d, cost, stands) for d in range(MOST + 1)) * (1.08 if noisy else 1)
    return Ran(seconds / tokens / best - 1, depths)


def _fixed(d: int, cost: Cost, stands: Stands) -> float:
    """Time a token at one depth, in expectation."""
    seconds = tokens = 0.0
    for r in range(0, ROUNDS, 20):
        chances = np.cumprod([1.0, *(stands(i, r) for i in range(d))])
        seconds, tokens = seconds + cost(d, r), tokens + float(chances.sum())
    return seconds / tokens


def linear(each: float, fixed: float = 0.0) -> Cost:
    return lambda d, r: 1 + each * d + (fixed if d else 0)


def constant(p: float) -> Stands:
    return lambda i, r: p


def turning(before: float, after: float) -> Stands:
    return lambda i, r: before if r < ROUNDS // 2 else after


PLACES: dict[str, tuple[Cost, Stands]] = {
    "all stand": (linear(0.05), constant(1.0)),
    "most stand": (linear(0.15), constant(0.8)),
    "some stand": (linear(0.15), constant(0.3)),
    "none stand": (linear(0.05), constant(0.0)),
    "dear": (linear(0.6), constant(0.8)),
    "worthless": (linear(0.6, 0.5), constant(0.0)),
    "never pays": (linear(1.2, 0.5), constant(1.0)),
    "one token does not pay, eight do": (linear(0.05, 1.2), constant(0.8)),
    "falling along the draft": (linear(0.1), lambda i, r: 0.9 * 0.8**i),
    "becomes good": (linear(0.15), turning(0.0, 0.9)),
    "becomes bad": (linear(0.15), turning(0.9, 0.0)),
    "waves": (linear(0.15), lambda i, r: 0.9 if r // 200 % 2 else 0.1),
    "a step of four rows is dear": (lambda d, r: 1 + 0.05 * d + (d >= 4), constant(0.85)),
    "drafting becomes dear": (lambda d, r: 1 + 0.1 * d * (1 if r < 1000 else 8), constant(0.7)),
    "drafting becomes cheap": (lambda d, r: 1 + 0.1 * d * (8 if r < 1000 else 1), constant(0.7)),
    "the context grows": (lambda d, r: (1 + 0.15 * d) * (1 + r / 1000), constant(0.7)),
}


@pytest.mark.parametrize("place", PLACES)
def test_regret(place: str) -> None:
    """At most 7 % over 2,000 rounds, 10 % with noise in the mean of three runs."""
    cost, stands = PLACES[place]
    assert simulate(cost, stands).regret < 0.07
    assert np.mean([simulate(cost, stands, noisy=True, seed=s).regret for s in range(3)]) < 0.10


@pytest.mark.parametrize("place", ["most stand", "worthless", "becomes good", "one token does not pay, eight do"])
def test_regret_where_each_new_depth_takes_twenty_steps_first(place: str) -> None:
    """Plans that are compiled: their time is not in the regret, waiting for it is."""
    assert simulate(*PLACES[place], setup=20.0).regret < 0.12


@pytest.mark.parametrize("place", ["none stand", "worthless", "never pays"])
def test_no_drafting_for_long_where_it_does_not_pay(place: str) -> None:
    depths = simulate(*PLACES[place]).depths
    assert sum(d > 0 for d in depths) < 0.15 * ROUNDS
    assert max(_runs(depths[50:])) <= 8


def test_what_cannot_pay_is_not_tried_again() -> None:
    """Even with all accepted: then there is nothing to find out."""
    depths = simulate(*PLACES["never pays"]).depths
    assert sum(d > 0 for d in depths) <= 15 and not any(depths[100:])


def _runs(depths: list[int]) -> list[int]:
    """Lengths of the stretches in which something was drafted."""
    out = [0]
    for d in depths:
        out = [*out[:-1], out[-1] + 1] if d else [*out, 0]
    return out


def test_a_short_run_does_not_wait_for_plans_that_it_cannot_pay_back() -> None:
    """24 rounds where a new depth takes 100 steps: at most one depth is begun."""
    c = DepthController(MOST)
    for r in range(24):
        d = c.depth()
        c.observe(d, d, 1 + 0.2 * d + (100 if r == 0 else 0), setup=r == 0)
        assert d == 0


def test_a_limit_is_a_limit_and_begins_nothing() -> None:
    """At the end of a text fewer tokens are wanted: a depth that is known is taken, none is begun for it."""
    c = DepthController(MOST)
    for _ in range(40):
        d = c.depth()
        c.observe(d, d, 1 + 0.01 * d)
    known = {d for d in range(MOST + 1) if d in c._costs}
    assert c.depth() == MOST and known >= {0, 1, 2, 4, 8}
    for limit in range(MOST):
        assert c.depth(limit) <= limit and c.depth(limit) in known
    assert c.depth(-3) == 0


def test_a_drafter_that_has_nothing_to_propose_is_not_asked_for_ever_for_the_same() -> None:
    """Depth 1 stays unknown, since nothing is drafted; the rest goes on."""
    c = DepthController(MOST)
    asked = []
    for _ in range(200):
        asked.append(c.depth())
        c.observe(0, 0, 1.0)
    assert asked.count(1) <= 12


def test_times_that_are_not_known_are_not_counted() -> None:
    c = DepthController(2)
    for _ in range(10):
        c.observe(1, 1, None)
    assert c.cost(1) == 0 and c.committed(1) > 1.9
    with pytest.raises(ValueError, match="at least 1 token"):
        DepthController(0)


# -- which way back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dear", ["snapshots", "replay"])
@pytest.mark.parametrize("compiled", [0, 5])
def test_the_way_back_that_takes_less(dear: str, compiled: int) -> None:
    """2,000 rounds with 20 % noise; replay's first rounds compile plans. At most 5 % are lost, and replay is left alone in
    short runs."""
    rng, c, took, ways = np.random.default_rng(0), Choice(), 0.0, []
    for _ in range(2000):
        way = c.way(5)
        seconds = (1.5 if way == dear else 1.0) * np.exp(0.2 * rng.standard_normal() - 0.02)
        ways.append(way)
        took += seconds
        if way == "snapshots" or ways.count("replay") > compiled:
            c.took(way, 5, seconds)
    assert took / 2000 < 1.05
    assert set(ways[:30]) == {"snapshots"} and set(ways) == set(WAYS)


def test_the_way_back_follows_a_change() -> None:
    """Also where the better way now is better than it ever was: what was measured of it before is forgotten."""
    c, ways = Choice(), []
    before, after = {"snapshots": 1.3, "replay": 1.0}, {"snapshots": 1.0, "replay": 1.1}
    for r in range(1200):
        ways.append(c.way(3))
        c.took(ways[-1], 3, (before if r < 600 else after)[ways[-1]])
    assert ways[300:550].count("replay") > 240 and ways[950:].count("snapshots") > 240


def test_a_way_that_is_asked_for_is_taken() -> None:
    c = Choice("replay")
    assert {c.way(n) for n in range(2, 100)} == {"replay"}
    with pytest.raises(ValueError, match="rollback must be"):
        Choice("hope")  # type: ignore[arg-type]
