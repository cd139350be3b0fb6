"""What was asked of speculation, checked against a model before an engine is made for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trueup.core.plugins import host

from .drafter import Drafter, DrafterRefused
from .rollback import WAYS, Way
from .rounds import Speculator

if TYPE_CHECKING:
    from trueup.models import Model
    from trueup.runtime.engine import Engine

MOST = 8
"""Tokens that are drafted in a round at most where "auto" chooses."""


@dataclass(frozen=True)
class Speculation:
    """`depth` tokens by `drafter`, whose options were found good."""

    drafter: type[Drafter]
    options: dict[str, Any]
    depth: int | Literal["auto"]
    rollback: Way | Literal["auto"]

    @classmethod
    def of(
        cls,
        model: Model,
        depth: int | Literal["auto"],
        drafter: str,
        options: dict[str, Any],
        rollback: Way | Literal["auto"],
    ) -> Speculation:
        """ValueError where a setting is out of range, DrafterRefused where the drafter can't draft for the model, Unavailable
        where there is none of this name."""
        if depth != "auto" and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise ValueError(f"draft must be 'auto' or a number of tokens of at least 1, got {depth!r}")
        if rollback != "auto" and rollback not in WAYS:
            raise ValueError(f"rollback must be 'auto', {' or '.join(map(repr, WAYS))}, got {rollback!r}")
        made = host().drafter(drafter)
        if not (isinstance(made, type) and issubclass(made, Drafter)):
            raise DrafterRefused(f"plugin drafter {drafter} is no class derived from Drafter")
        made.check(model, **options)
        return cls(made, options, depth, rollback)

    @property
    def most(self) -> int:
        return MOST if self.depth == "auto" else self.depth

    @property
    def slots(self) -> int:
        """Rows of per-sequence state that each sequence needs besides its own: snapshots or a checkpoint, and the drafter's."""
        return 1 + (1 if self.rollback == "replay" else self.most)

    def open(self, engine: Engine) -> Speculator:
        drafter = self.drafter.open(engine, **self.options)
        return Speculator(engine, drafter, depth=self.depth, most=self.most, rollback=self.rollback)
