"""Drafting by a small model of the same vocabulary, on an engine of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trueup.models import load_model
from trueup.runtime.sampling import NonFiniteLogits, sample

from .drafter import Draft, Drafter, DrafterRefused, Request

if TYPE_CHECKING:
    from trueup.models import Model
    from trueup.runtime.engine import Engine
    from trueup.runtime.session import Session
    from trueup.runtime.state import Checkpoint


class _Mirror:
    """The small model's session for a session of the large one, with a checkpoint where the drafting began."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.checkpoint: Checkpoint | None = None

    def follow(self, tokens: list[int]) -> list[int]:
        """Go back to where both texts are the same; what is missing from there on."""
        if self.checkpoint is not None:
            self.session.restore(self.checkpoint)
            self.session.drop(self.checkpoint)
            self.checkpoint = None
        if self.session.tokens != tokens[: len(self.session)] or len(self.session) >= len(tokens):
            self.session.reset()
        return tokens[len(self.session) :]


class ModelDrafter(Drafter):
    """Samples from a small model by the random numbers that the large one will use, greedily where it is greedy."""

    name = "model"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._mirrors: weakref.WeakKeyDictionary[Session, _Mirror] = weakref.WeakKeyDictionary()

    @classmethod
    def check(cls, model: Model, /, **options: Any) -> None:
        unknown = options.keys() - {"model", "backend"}
        if unknown or "model" not in options:
            raise DrafterRefused(f"drafter {cls.name} takes a draft model (--draft-model FILE), got {sorted(options)}")
        small = load_model(options["model"])
        ours, theirs = (list(m.file.metadata.get("tokenizer.ggml.tokens", ())) for m in (model, small))
        if ours != theirs:
            raise DrafterRefused(
                f"{options['model']} can't draft for {model.file.path}: its vocabulary of {len(theirs)} tokens is not the "
                f"model's of {len(ours)}"
            )

    @classmethod
    def open(cls, engine: Engine, /, *, model: str | Path = "", backend: str = "", **options: Any) -> Self:
        """`backend`: where the small model runs, by default the first device of the large one's backend."""
        from trueup.runtime.engine import load

        cls.check(engine.model, model=model, **options)
        n = engine.sequences
        return cls(
            load(model, backend=backend or engine.target.name, context=engine.context, sequences=n, checkpoints=n)
        )

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [self._draft(r) for r in requests]

    def _draft(self, r: Request) -> Draft:
        mirror = self._mirrors.get(r.session)
        if mirror is None:
            mirror = self._mirrors[r.session] = _Mirror(self.engine.session())
            weakref.finalize(r.session, mirror.session.close)
        logits = mirror.session.feed(mirror.follow([*r.session.tokens, r.token]))
        mirror.checkpoint = mirror.session.checkpoint()
        drafted: list[int] = []
        while True:
            try:
                drafted.append(_choose(logits, r, len(drafted)))
            except NonFiniteLogits:
                break
            if len(drafted) >= r.depth or len(mirror.session) == self.engine.context:
                break
            logits = mirror.session.feed(drafted[-1:])
        return Draft(tuple(drafted))

    def close(self) -> None:
        self._mirrors.clear()
        self.engine.close()


def _choose(logits: Any, r: Request, i: int) -> int:
    return sample(logits, r.sampler, draw=0.0 if r.sampler.greedy else r.draw(i, "sample")).token
