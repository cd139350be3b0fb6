"""Drafting by repetition: what followed the last tokens when they last stood in the text (prompt lookup; arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .drafter import Draft, Drafter, DrafterRefused, Request

if TYPE_CHECKING:
    from trueup.models import Model
    from trueup.runtime.engine import Engine


class LookupDrafter(Drafter):
    """Proposes the continuation of the latest earlier occurrence of the longest suffix, of `longest` to `shortest` tokens."""

    name = "lookup"

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise DrafterRefused(f"lookup needs 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    @classmethod
    def check(cls, model: Model, /, **options: Any) -> None:
        unknown = options.keys() - {"longest", "shortest"}
        if unknown:
            raise DrafterRefused(f"drafter {cls.name} has no option {', '.join(sorted(unknown))}")
        cls(**options)

    @classmethod
    def open(cls, engine: Engine, /, **options: Any) -> Self:
        cls.check(engine.model, **options)
        return cls(**options)

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [Draft(self.continuation([*r.session.tokens, r.token], r.depth)) for r in requests]

    def continuation(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        """At most `depth` tokens; none where no suffix stood in the text before."""
        text = np.asarray(tokens, np.int64)
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            found = np.flatnonzero((windows == text[-n:]).all(axis=1))
            if found.size:
                start = int(found[-1]) + n
                return tuple(text[start : start + depth].tolist())
        return ()
