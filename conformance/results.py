"""What a run was asked for and what it found, as data. Runs nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .harness import Spec
from .names import LEVELS
from .properties import FAILED, Verdict


@dataclass(frozen=True)
class Options:
    """What to run."""

    spec: Spec
    levels: tuple[str, ...] = LEVELS
    examples: int = 100
    """Random cases for each op, besides those that are always met."""
    ops: tuple[str, ...] = ()
    """Only these; empty: all."""
    seed: int = 0
    timeout: float = 30.0
    budget: float = 120.0
    """Seconds for one op, after which no more random cases are begun."""
    jobs: int = 0
    """Worker processes; 0: as many as the kind of device bears."""
    model: str | None = None
    speed: bool = False


@dataclass
class Failure:
    """A failing case: as it was found, as small as it could be made, and what failed."""

    case: str
    found: str
    properties: dict[str, str]

    @property
    def primary(self) -> str:
        return next(iter(self.properties))


@dataclass
class Result:
    """What became of one op (or scenario) of one level."""

    level: str
    name: str
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    where: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    worst_case: str = ""
    bound: str = ""
    properties: dict[str, Counter[str]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    """By property, an example of what was measured."""
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    skipped: int = 0
    """Cases left out because the time for this op was used up, or because too many had failed."""
    seconds: float = 0.0
    speed: dict[str, float] | None = None

    @property
    def ran(self) -> int:
        """Cases that were judged: not those that were refused, nor those that ended in a typed error."""
        return self.outcomes["passed"] + self.outcomes["failed"]

    @property
    def status(self) -> str:
        if self.failed:
            return "failed"
        return "passed" if self.ran else "refused"

    @property
    def failed(self) -> list[str]:
        return [n for n, c in self.properties.items() if c[FAILED]]

    def add(self, v: Verdict) -> None:
        self.cases += 1
        self.outcomes[v.outcome] += 1
        if v.where:
            self.where[v.where] += 1
        if v.worst > self.worst:
            self.worst, self.worst_case = v.worst, v.case
        if v.outcome in ("refused", "limit"):
            self.refusals[v.reason] += 1
        for name, p in v.properties.items():
            self.properties.setdefault(name, Counter())[p.status] += 1
            if p.status == "measured" and (p.detail != "held" or name not in self.details):
                self.details[name] = p.detail
        self.seconds += v.seconds

    def fail(self, name: str, detail: str) -> None:
        """A failure of the whole, not of one case."""
        self.properties.setdefault(name, Counter())[FAILED] += 1
        self.failures.append(Failure("", "", {name: detail}))


@dataclass
class Run:
    """All results of a run, and whom they judge."""

    options: Options
    about: dict[str, Any]
    results: list[Result]
    seconds: float = 0.0
    copy_bandwidth: float | None = None
    """Bytes a second that the device reads and writes when it copies, where speed was asked for."""
