"""Choosing the next token from logits, and the random numbers for it.

Knows one row of logits at a time, in float64. A choice depends on that row, the settings and one draw alone, and a draw
on seed, sequence, position and purpose alone: never on batching, on restarts, or on what was drawn before.
"""

from __future__ import annotations

import operator
import secrets
import sys
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NonFiniteLogits", "Sampled", "Sampler", "SamplerError", "distribution", "logprob", "sample", "uniform"]

_WORD = 2**64 - 1
# Of each setting the largest value, and the range in words; the smallest is 0.
_NUMBERS = {
    "temperature": (sys.float_info.max, "a finite number of at least 0"),
    "top_p": (1, "a number from 0 to 1"),
    "min_p": (1, "a number from 0 to 1"),
}
_INTEGERS = {
    "top_k": (_WORD, "an integer of at least 0 (0: all tokens)"),
    "seed": (_WORD, "an integer from 0 to 2**64-1"),
}


class SamplerError(ValueError):
    """A setting out of its range; `field` names it."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        super().__init__(f"{field}: found {found!r}, expected {expected}")
        self.field = field


class NonFiniteLogits(ValueError):
    """Logits that give no distribution: NaN anywhere, or -inf everywhere. `position` is the token id of the first."""

    def __init__(self, text: str, position: int) -> None:
        super().__init__(text)
        self.position = position


@dataclass(frozen=True)
class Sampler:
    """Settings of sampling; the defaults are greedy. Raises SamplerError naming the field.

    temperature  0 (always the largest logit) or a finite positive number
    top_k        keep the k largest logits; 0: all
    top_p        keep the fewest of the most probable tokens that together reach top_p; 1: all, 0: one
    min_p        keep tokens at least min_p times as probable as the most probable one; 0: all
    seed         0 ... 2**64-1, or None: `seeded()` picks one
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, field, _number(field, getattr(self, field)))
        object.__setattr__(self, "top_k", _integer("top_k", self.top_k))
        if self.seed is not None:
            object.__setattr__(self, "seed", _integer("seed", self.seed))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def seeded(self) -> Sampler:
        """These settings with a seed: the own one, or a fresh one that can be reported and used again."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


class Sampled(NamedTuple):
    """A chosen token, and the logarithm of its probability under the plain softmax of the logits (no temperature, no
    filter), which is what APIs report and perplexity means."""

    token: int
    logprob: float


def sample(logits: NDArray[Any], settings: Sampler, *, draw: float) -> Sampled:
    """Choose a token from `logits` [vocab] by `draw` in [0, 1); greedy settings leave the draw unused.

    Greedy is the largest logit, the lowest id among equals. Else the token is where the running sum of `distribution`
    (ids ascending) passes `draw`. Raises NonFiniteLogits, or ValueError on a wrong shape, type or draw.
    """
    if not 0 <= draw < 1:
        raise ValueError(f"draw: found {draw!r}, expected a number of at least 0 and below 1")
    row = _row(logits)
    if settings.greedy:
        token = int(np.argmax(row))
    else:
        ids, probs = _distribution(row, settings)
        below = np.cumsum(probs)
        # The product may round up to the sum itself, hence the last id as the limit.
        at = min(int(np.searchsorted(below, draw * below[-1], side="right")), len(ids) - 1)
        token = int(ids[at])
    return Sampled(token, logprob(row, token))


def distribution(logits: NDArray[Any], settings: Sampler) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The distribution that `sample` draws from: ids (ascending, int64) and their probabilities (all above 0, sum 1).

    First the temperature, then top_k, top_p, min_p in this order, each on what the one before left, renormalized; the
    order of Hugging Face. Among equal logits the lower id counts as the more probable. A logit of +inf takes all
    probability (shared evenly between several). Raises NonFiniteLogits.
    """
    return _distribution(_row(logits), settings)


def uniform(seed: int, sequence: int, position: int, purpose: str) -> float:
    """A random number in [0, 1), 53 bits, that these four alone determine (Philox 4x64-10 as a hash).

    `sequence` is the index of the choice (of `n`), `position` that of the token in it, `purpose` what the number is for
    ("sample", "accept", …): different ones are independent, and a choice never consumes another's numbers.
    """
    for name, value in (("seed", seed), ("sequence", sequence), ("position", position)):
        if not 0 <= operator.index(value) <= _WORD:
            raise ValueError(f"{name}: found {value}, expected an integer from 0 to 2**64-1")
    use = int.from_bytes(blake2b(purpose.encode(), digest_size=8).digest(), "little")
    # As uint64: NumPy would read a list that holds words of 2**63 and more as floats.
    counter, key = np.array([0, position, sequence, 0], np.uint64), np.array([seed, use], np.uint64)
    philox = np.random.Philox(counter=counter, key=key)
    return float(int(philox.random_raw()) >> 11) * 2.0**-53


def _row(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Logits as float64 [vocab], checked."""
    row = np.asarray(logits)
    if row.ndim != 1 or not row.size or row.dtype.kind != "f":
        raise ValueError(
            f"logits: found {row.dtype} of shape {list(row.shape)}, expected floats [vocab], vocab above 0"
        )
    row = row.astype(np.float64)
    bad = np.isnan(row)
    if bad.any():
        at = int(np.argmax(bad))
        raise NonFiniteLogits(
            f"logits[{at}] is NaN ({int(bad.sum())} of {row.size} are), so no token can be chosen", position=at
        )
    if row.max() == -np.inf:
        raise NonFiniteLogits(f"all {row.size} logits are -inf, so no token is possible", position=0)
    return row


def _distribution(row: NDArray[np.float64], settings: Sampler) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if settings.greedy:
        return np.array([np.argmax(row)], np.int64), np.ones(1)
    ids = np.arange(row.size)
    if 0 < settings.top_k < row.size:
        ids = _largest(row, settings.top_k)
        row = row[ids]
    probs = _softmax(row, settings.temperature)
    if settings.top_p < 1:
        kept = _largest(row, _nucleus(probs, settings.top_p))
        ids, probs = ids[kept], probs[kept]
    least = max(settings.min_p * probs.max(), sys.float_info.min * sys.float_info.epsilon)
    if probs.min() < least:  # at min_p = 0 this drops what has no probability
        kept = np.flatnonzero(probs >= least)
        ids, probs = ids[kept], probs[kept]
    return ids, probs / probs.sum()


def _largest(row: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Ids of the k largest logits, ascending; of those equal to the smallest kept one, the lowest ids."""
    if k == row.size:
        return np.arange(k)
    least = np.partition(row, row.size - k)[row.size - k]
    above = np.flatnonzero(row > least)
    equal = np.flatnonzero(row == least)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def _softmax(row: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Probabilities of logits / temperature. A difference too large for float64 is a probability of 0."""
    with np.errstate(over="ignore"):
        weights: NDArray[np.float64] = np.exp(_below_top(row) / temperature)
    weights /= weights.sum()
    return weights


def _below_top(row: NDArray[np.float64]) -> NDArray[np.float64]:
    """row - max(row), where +inf counts as equal to itself and infinitely above all else."""
    top = float(row.max())
    return np.where(row == np.inf, 0.0, -np.inf) if top == np.inf else row - top


def _nucleus(probs: NDArray[np.float64], top_p: float) -> int:
    """How many of the most probable tokens together reach `top_p`; at least one."""
    # Tokens this improbable sum to less than half of what may be left out: they needn't be sorted.
    likely = np.sort(probs[probs >= (1 - top_p) / (2 * probs.size)])[::-1]
    before = np.concatenate([[0.0], np.cumsum(likely)[:-1]])
    return max(1, int(np.searchsorted(before, top_p, side="left")))


def logprob(row: NDArray[Any], token: int) -> float:
    """The logarithm of a token's probability under the plain softmax of the logits [vocab]."""
    row = np.asarray(row, np.float64)
    below = _below_top(row)
    return float(below[token] - np.log(np.exp(below).sum()))


def _number(field: str, value: object) -> float:
    """The setting as a float, or SamplerError."""
    most, expected = _NUMBERS[field]
    # Integers above every float compare, too, where converting them would overflow.
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool) and 0 <= value <= most:
        return float(value)
    raise SamplerError(field, value, expected)


def _integer(field: str, value: object) -> int:
    """The setting as an int, or SamplerError."""
    most, expected = _INTEGERS[field]
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value <= most:
        return int(value)
    raise SamplerError(field, value, expected)
