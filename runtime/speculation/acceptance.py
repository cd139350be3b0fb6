"""Which of the drafted tokens stand. Pure functions of the model's own logits; each row of them belongs to one position.

A token proposed without chance stands where it is the one that plain sampling takes, by the random number that plain
sampling uses at that position: so the text is the one that plain decoding writes with this seed, whatever was drafted. That
is a maximal coupling too: the chance to stand is the target's probability of the token. A token sampled from a law of its
own stands by the rule of speculative sampling (arXiv 2211.17192, 2302.01318), which leaves the target's distribution as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trueup.runtime.sampling import NonFiniteLogits, Sampled, Sampler, distribution, logprob, sample

from .drafter import Draft, Law

Draw = Callable[[int, str], float]
"""The random number in [0, 1) for a row and a purpose."""


class Verdict(NamedTuple):
    """`chosen`: tokens in order, the first `accepted` of which are the draft's; each with its log-probability."""

    chosen: tuple[Sampled, ...]
    accepted: int


def verify(logits: NDArray[np.float32], draft: Draft, settings: Sampler, draw: Draw) -> Verdict:
    """Go through `logits` [rows, vocab]: row i is what the model says after the draft's first i tokens.

    Ends after the first token that is not the draft's, or with the one that follows the whole draft. ValueError where there
    is not one row for each token of the draft and one more. NonFiniteLogits where no token can be chosen at the first row;
    at a later one the tokens before it stand, and the next round meets it first.
    """
    if len(logits) != len(draft) + 1:
        raise ValueError(
            f"a draft of {len(draft)} tokens is verified by {len(draft) + 1} rows of logits, got {len(logits)}"
        )
    chosen: list[Sampled] = []
    number = (lambda i: 0.0) if settings.greedy else lambda i: draw(i, "sample")  # greedy sampling needs none
    for i, row in enumerate(logits):
        try:
            if i == len(draft):
                chosen.append(sample(row, settings, draw=number(i)))
                break
            token, law = draft.tokens[i], draft.laws[i]
            if law is None or settings.greedy:
                took = sample(row, settings, draw=number(i))
            else:
                took = _coupled(row, settings, token, law, draw(i, "accept"), draw(i, "residual"))
        except NonFiniteLogits:
            if not i:
                raise
            break
        chosen.append(took)
        if took.token != token:
            break
    accepted = sum(s.token == t for s, t in zip(chosen, draft.tokens, strict=False))
    return Verdict(tuple(chosen), min(accepted, len(chosen) - 1))


def _coupled(
    row: NDArray[np.float32], settings: Sampler, token: int, law: Law, accept: float, residual: float
) -> Sampled:
    took = couple(Law(*distribution(row, settings)), token, law, accept=accept, residual=residual)
    return Sampled(took, logprob(row, took))


def couple(target: Law, token: int, law: Law, *, accept: float, residual: float) -> int:
    """A token distributed as `target`, and equal to `token`, which came from `law`, as often as any rule can make it.

    `token` stands with probability min(1, target / law); otherwise one is drawn from what the target has above the law.
    """
    p, q = _at(target, token), _at(law, token)
    if accept * q < p:
        return token
    above = np.maximum(target.probs - _at_all(law, target.ids), 0.0)
    below = np.cumsum(above)
    if not below[-1] > 0:  # equal laws up to rounding: nothing is left to draw from
        return token
    return int(target.ids[min(int(np.searchsorted(below, residual * below[-1], side="right")), len(above) - 1)])


def _at(law: Law, token: int) -> float:
    return float(_at_all(law, np.array([token]))[0])


def _at_all(law: Law, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The law's probabilities of these ids."""
    at = np.minimum(np.searchsorted(law.ids, ids), len(law.ids) - 1)
    out: NDArray[np.float64] = np.where(law.ids[at] == ids, law.probs[at], 0.0)
    return out
