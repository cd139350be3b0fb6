"""Gates: what a user runs before trusting speculation on a model and a backend of their own.

Decodes with drafts, round by round, then teacher-forces the committed tokens through plain decoding on the same backend.
Judges only what was committed; reports how fast it was. Imports the runtime.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trueup.runtime import Engine
    from trueup.runtime.speculation import Speculator

EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Upper edges of the histogram of gaps; a last bin has what is larger."""


@dataclass
class PromptGate:
    """What one prompt showed.

    `gaps[token]`: by how much plain decoding's largest logit is above that of the committed token. `ties`: tokens that
    share the largest logit with another. `states`: for each state the largest relative difference, after any round, from
    plain decoding of the same tokens. Times are in seconds, of the tokens after the prompt.
    """

    tokens: list[int]
    gaps: list[float]
    ties: int
    states: dict[str, float]
    spec_seconds: float
    plain_seconds: float
    same: bool


@dataclass
class Gate:
    """What all prompts showed, and whether it is good: no gap above `tolerance`, no state further off than that."""

    depth: int | str
    tolerance: float
    prompts: list[PromptGate] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return max((g for p in self.prompts for g in p.gaps), default=0.0)

    @property
    def worst_state(self) -> tuple[str, float]:
        """The state that was furthest off, and by how much."""
        return max(((n, d) for p in self.prompts for n, d in p.states.items()), key=lambda x: x[1], default=("", 0.0))

    @property
    def passed(self) -> bool:
        return bool(self.prompts) and self.worst <= self.tolerance and self.worst_state[1] <= self.tolerance

    def histogram(self) -> list[int]:
        """Gaps counted by EDGES, and those above the last."""
        gaps = [g for p in self.prompts for g in p.gaps]
        places = np.searchsorted(EDGES, gaps, side="left")
        return np.bincount(places, minlength=len(EDGES) + 1).tolist() if gaps else [0] * (len(EDGES) + 1)

    def speedup(self) -> float:
        """Seconds of plain decoding over seconds of speculation, both for the same number of tokens."""
        spec, plain = (sum(getattr(p, f"{w}_seconds") for p in self.prompts) for w in ("spec", "plain"))
        return plain / spec if spec else 0.0

    def about(self) -> dict[str, Any]:
        """All of it for a program."""
        tokens = sum(len(p.tokens) for p in self.prompts)
        spec, plain = (sum(getattr(p, f"{w}_seconds") for p in self.prompts) for w in ("spec", "plain"))
        return {
            "passed": self.passed, "depth": self.depth, "tolerance": self.tolerance, "prompts": len(self.prompts),
            "tokens": tokens, "worst_gap": self.worst, "gap_edges": list(EDGES), "gap_counts": self.histogram(),
            "ties": sum(p.ties for p in self.prompts), "same_text": sum(p.same for p in self.prompts),
            "states": {
                n: max(p.states[n] for p in self.prompts) for n in (self.prompts[0].states if self.prompts else ())
            },
            "drafted": self.drafted, "accepted": self.accepted,
            "speculative_tokens_per_s": tokens / spec if spec else None,
            "plain_tokens_per_s": tokens / plain if plain else None, "speedup": self.speedup(),
        }  # fmt: skip


def spec(
    engine: Engine, prompts: Sequence[Sequence[int]], *, tokens: int, tolerance: float | None = None
) -> Iterator[Gate]:
    """Gate an engine that was loaded with `draft`, and with room for two sequences; yields after each prompt.

    `tolerance` is absolute for logits and relative for states: by default 0 where the backend declares that its results do
    not depend on the batch, else 1e-3.
    """
    speculator = engine.speculator
    if speculator is None:
        raise ValueError("the engine was loaded without draft: there is nothing to gate")
    if tolerance is None:
        tolerance = 0.0 if engine.target.capabilities.batch_invariant else 1e-3
    for speculate in (True, False) if prompts else ():  # plans are compiled before anything is timed
        _decode(engine, list(prompts[0]), tokens, speculate=speculate)
    speculator.tally = type(speculator.tally)()
    gate = Gate(speculator.depth, tolerance)
    for prompt in prompts:
        gate.prompts.append(_prompt(engine, speculator, list(prompt), tokens))
        gate.drafted, gate.accepted = list(speculator.tally.drafted), list(speculator.tally.accepted)
        yield gate


def _prompt(engine: Engine, speculator: Speculator, prompt: list[int], tokens: int) -> PromptGate:
    committed, spec_seconds = _decode(engine, prompt, tokens, speculate=True)
    plain, plain_seconds = _decode(engine, prompt, tokens, speculate=False)
    rows = _forced(engine, prompt, committed)
    gaps = [float(row.max() - row[t]) for row, t in zip(rows, committed, strict=True)]
    ties = sum(int((row == row[t]).sum() > 1) for row, t in zip(rows, committed, strict=True))
    states = _states(engine, speculator, prompt, committed)
    return PromptGate(committed, gaps, ties, states, spec_seconds, plain_seconds, committed == plain)


def _decode(engine: Engine, prompt: list[int], tokens: int, *, speculate: bool) -> tuple[list[int], float]:
    """Greedy tokens, and the seconds from the first of them to the last."""
    out: list[int] = []
    start = time.perf_counter()
    for i, piece in enumerate(engine.generate(prompt, max_tokens=tokens, ignore_eos=True, speculate=speculate)):
        if not i:
            start = time.perf_counter()
        out += piece.tokens
    return out, time.perf_counter() - start


def _forced(engine: Engine, prompt: list[int], committed: list[int]) -> list[NDArray[np.float32]]:
    """Plain decoding's logits at each committed token: one token a step, as it decodes."""
    with engine.session() as s:
        rows = [s.feed(prompt)]
        for t in committed[:-1]:
            rows.append(s.feed([t]))
        return rows[: len(committed)]


def _states(engine: Engine, speculator: Speculator, prompt: list[int], committed: list[int]) -> dict[str, float]:
    """Rounds once more, their states after each round beside those of plain decoding of the same tokens."""
    from trueup.runtime.sampling import Sampler
    from trueup.runtime.speculation import Job

    worst: dict[str, float] = {}
    with engine.session() as s, engine.session() as plain:
        for session in (s, plain):
            session.feed(prompt, logits=None)
        done = 0
        while done < len(committed) - 1:
            most = len(committed) - done - 2
            (turn,) = speculator.round([Job(s, committed[done], Sampler(), most=most)])
            speculator.commit([turn], [turn.accepted + 1])
            for t in committed[done : done + turn.accepted + 1]:
                plain.feed([t], logits=None)
            done += turn.accepted + 1
            theirs = engine.bundle.export(plain.sequence)
            for name, array in engine.bundle.export(s.sequence).items():
                worst[name] = max(worst.get(name, 0.0), _difference(array, theirs[name]))
            if s.tokens != plain.tokens:
                worst["tokens"] = float("inf")
    return worst


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest difference, relative to the largest entry; infinite where one is not a number and the other is."""
    if a.shape != b.shape:
        return float("inf")
    if np.array_equal(a, b, equal_nan=a.dtype.kind == "f") or not a.size:
        return 0.0
    wide = np.abs(a.astype(np.float64) - b.astype(np.float64)).max() / max(
        float(np.abs(b.astype(np.float64)).max()), 1e-30
    )
    return float(wide) if np.isfinite(wide) else float("inf")
