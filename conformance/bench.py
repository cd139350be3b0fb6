"""How fast a model runs on a backend: prompts and single tokens at chosen depths, each beside the kit's verdict.

The conventions are llama.cpp's `llama-bench`: `pp512` feeds a prompt of 512 tokens, `tg128` feeds 128 tokens one by one,
`@ d4096` begins behind 4,096 others; ids are random, nothing is sampled, and a run before the timed ones is not counted. A
repetition goes back to a checkpoint, so that depth is paid for once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trueup.core.backend import Target, Watch
from trueup.core.plan import Plan
from trueup.runtime import Engine, Session

from .verify import Verifier

CHECKED = 16
"""Rows of the prompt whose nodes are judged before anything is timed."""


@dataclass(frozen=True)
class Speed:
    """A line: what ran (`pp` or `tg`, how many tokens, behind how many), and the seconds of each repetition."""

    kind: str
    tokens: int
    depth: int
    seconds: tuple[float, ...]

    @property
    def test(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.tokens / s for s in self.seconds]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        """Standard deviation of the rates; 0 of a single one."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


class Judge:
    """A watcher for `trueup.load` that judges steps only while it is asked to, so that it costs the timed ones nothing."""

    def __init__(self) -> None:
        self.verifier = Verifier()
        self.on = False

    def __call__(self, target: Target, plan: Plan) -> Watch | None:
        return self.verifier(target, plan) if self.on else None

    def check(self, engine: Engine) -> None:
        """Judge every node of a short prompt and of one token behind it. Raises Mismatch at the first wrong one."""
        self.on = True
        try:
            with engine.session() as session:
                ids = _ids(engine, min(CHECKED, engine.batch, engine.context - 1))
                session.feed(ids)
                session.feed(ids[:1])
        finally:
            self.on = False


def measure(
    engine: Engine,
    *,
    prompts: Sequence[int],
    outputs: Sequence[int],
    depths: Sequence[int] = (0,),
    repetitions: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Speed]:
    """A `Speed` for each depth and each number of tokens, in this order. The engine needs a checkpoint to spare.

    Raises ValueError for numbers below 1 (depths: 0), or where depth and tokens exceed the context.
    """
    for name, least, numbers in (("prompts", 1, prompts), ("outputs", 1, outputs), ("depths", 0, depths)):
        if any(n < least for n in numbers):
            raise ValueError(f"{name} must be at least {least}, got {min(numbers)}")
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    longest = max((*prompts, *outputs), default=0) + max(depths, default=0)
    if longest > engine.context:
        raise ValueError(f"{longest} tokens, depth included, exceed the context of {engine.context}")
    for depth in depths:
        with engine.session() as session:
            if depth:
                session.feed(_ids(engine, depth), logits=None)
            for kind, sizes in (("pp", prompts), ("tg", outputs)):
                for tokens in sizes:
                    yield Speed(kind, tokens, depth, _times(engine, session, kind, tokens, repetitions, clock))


def _times(
    engine: Engine, session: Session, kind: str, tokens: int, repetitions: int, clock: Callable[[], float]
) -> tuple[float, ...]:
    ids = _ids(engine, tokens)
    start = session.checkpoint()
    seconds = []
    try:
        for _ in range(1 + repetitions):
            begin = clock()
            if kind == "pp":
                session.feed(ids)
            else:
                for i in range(tokens):
                    session.feed(ids[i : i + 1])
            seconds.append(clock() - begin)
            session.restore(start)
    finally:
        session.drop(start)
    return tuple(seconds[1:])


def _ids(engine: Engine, count: int) -> list[int]:
    """The same random tokens each time; ends of text are tokens as any."""
    found: list[int] = np.random.default_rng(0).integers(0, engine.vocab_size, count).tolist()
    return found
