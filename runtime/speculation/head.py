"""Drafting by the model's own head: multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from trueup.models.architecture import DraftShape, StepShape

from .drafter import Draft, Drafter, DrafterRefused, Request

if TYPE_CHECKING:
    from trueup.models import Model
    from trueup.runtime.engine import Engine


class HeadDrafter(Drafter):
    """Drafts greedily with the head that the model file or its sidecar brings; all steps of a draft are one plan.

    A head drafts without chance also where sampling is not greedy: its token then stands as often as the model gives it.
    """

    name = "mtp"
    uses_draft_head = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def check(cls, model: Model, /, **options: Any) -> None:
        if options:
            raise DrafterRefused(f"drafter {cls.name} has no option {', '.join(sorted(options))}")
        if not model.architecture.has_draft_head:
            raise DrafterRefused(
                f"{model.file.path} has no draft head: it needs a file converted with --mtp, a sidecar (--mtp FILE), or "
                "another drafter (--drafter lookup)"
            )

    @classmethod
    def open(cls, engine: Engine, /, **options: Any) -> Self:
        """DrafterRefused where the graph of the head uses a state that a step of the model does not keep."""
        cls.check(engine.model, **options)
        arch, capacity = engine.model.architecture, engine.capacity
        kept = arch.build(StepShape(1, 1, 1, 1, "cache"), capacity).states
        used = arch.build_draft(DraftShape(1, 1, 1), capacity).states
        missing = sorted(used.keys() - kept.keys())
        if missing:
            raise DrafterRefused(
                f"the draft head of {arch.name} reads {', '.join(missing)}, which its steps do not keep"
            )
        return cls(engine)

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        depth = max(r.depth for r in requests)
        fits = [r for r in requests if len(r.session) + depth <= self.engine.context]
        rows = self.engine.draft([(r.session, r.token) for r in fits], depth=depth).tolist()
        drafts = {id(r.session): Draft(tuple(row[: r.depth])) for r, row in zip(fits, rows, strict=True)}
        return [drafts.get(id(r.session), Draft(())) for r in requests]
