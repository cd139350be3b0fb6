"""What a drafter is: something that proposes tokens. It decides nothing; a wrong proposal costs time, never a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trueup.models import Model
    from trueup.runtime.engine import Engine
    from trueup.runtime.sampling import Sampler
    from trueup.runtime.session import Session


class DrafterRefused(RuntimeError):
    """A drafter that can't serve this model: says what it lacks, and what would serve."""


class SpeculationWarning(UserWarning):
    """Speculation goes on without effect, or was given up; the output is what it would be anyway."""


class Law(NamedTuple):
    """The distribution that a proposed token was sampled from: ids, ascending, int64 [n], and probabilities, float64 [n]."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, each with the law that it was really sampled from; None where there was no chance in it.

    Tokens and laws are one record, so that a cut cuts both. ValueError where their numbers differ, where a law is no
    distribution, or where it gives its token no probability: then it is not the law that the token came from.
    """

    tokens: tuple[int, ...]
    laws: tuple[Law | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.laws:
            object.__setattr__(self, "laws", (None,) * len(self.tokens))
        if len(self.laws) != len(self.tokens):
            raise ValueError(f"a draft of {len(self.tokens)} tokens comes with {len(self.laws)} laws")
        for token, law in zip(self.tokens, self.laws, strict=True):
            if law is not None:
                _check(token, law)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, n: int) -> Draft:
        """The first n of it."""
        return self if n >= len(self) else Draft(self.tokens[:n], self.laws[:n])


def _check(token: int, law: Law) -> None:
    ids, probs = law
    if ids.shape != probs.shape or ids.ndim != 1 or not np.all(np.diff(ids) > 0):
        raise ValueError("the law of a draft must be ascending ids and as many probabilities")
    if not (np.all(np.isfinite(probs)) and np.all(probs >= 0) and abs(float(probs.sum()) - 1) < 1e-6):
        raise ValueError(f"the law of a draft must sum to 1, got {float(probs.sum())}")
    at = int(np.searchsorted(ids, token))
    if at == len(ids) or ids[at] != token or not probs[at] > 0:
        raise ValueError(f"the drafted token {token} has no probability under the law that it is said to come from")


class Request(NamedTuple):
    """What is drafted for: a session, its next token, which is chosen but not fed, and how many are wanted at most.

    `sampler` is how the model's tokens are chosen, and `draw(i, "sample")` the random number in [0, 1) for the i-th after
    `token`: a drafter that samples by it agrees with the model where their laws nearly do, and needs to tell no law.
    """

    session: Session
    token: int
    depth: int
    sampler: Sampler
    draw: Callable[[int, str], float]


class Drafter(ABC):
    """A source of drafts for one engine. Subclasses register by the hook `trueup_drafters`, under their `name`."""

    name: ClassVar[str]
    uses_draft_head: ClassVar[bool] = False
    """Whether the engine has to keep the states of the model's own draft head."""

    @classmethod
    def check(cls, model: Model, /, **options: Any) -> None:
        """DrafterRefused where it can't draft for the model. Asked before an engine is made; by default it can."""
        return None

    @classmethod
    @abstractmethod
    def open(cls, engine: Engine, /, **options: Any) -> Self:
        """A drafter for the engine. Options are those of `trueup.load(drafter_options=…)`."""

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        """For each request a draft of at most its depth; an empty one where there is nothing to propose.

        Called with the engine's lock held. The sessions must be left as they are.
        """

    def close(self) -> None:
        """Give back what the drafter holds; by default nothing."""
        return None
