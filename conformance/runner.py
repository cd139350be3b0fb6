"""A run of the kit: cases of every level, each in a worker process, gathered into results. Prints nothing."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trueup.core.op import OPS

from .bounds import reason
from .harness import Spec
from .levels import LEVELS, check_level
from .process import Worker
from .properties import FAILED, Verdict
from .shrink import shrink
from .spaces import find
from .tasks import Task, groups

MINIMUM = 5
"""Cases that must have run for an op that the backend claims."""
KEPT = 5
"""Failing cases kept and shrunk for each name."""
GIVE_UP = 25
"""Failing cases of one name after which it is left; 3 where each takes a process with it."""


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
        return self.outcomes["passed"] + self.outcomes["failed"] + self.outcomes["limit"]

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


FIRST = ("crash", "hang", "refusal", "canaries", "written", "inputs", "repeat")
"""Properties that name the cause where several fail; others come in the order in which they were judged."""


def failing(v: Verdict) -> dict[str, str]:
    """The failed properties with their details, the cause first."""
    return {
        n: v.properties[n].detail for n in sorted(v.failed, key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
    }


def run(options: Options, progress: Callable[[Result], None] = lambda r: None) -> Run:
    """Run what is asked for. Unavailable where the backend can't be opened, KitError for a wrong request."""
    for level in options.levels:
        check_level(level)
    for name in options.ops:
        find(name)
    start = time.monotonic()
    with Worker(options.spec, options.timeout) as first:
        about = first.about
        o = options
        work_groups = groups(o.levels, o.ops, o.examples, o.seed, o.model, about)
        jobs = options.jobs or (1 if about["device"]["kind"] != "cpu" else 2)
        spare = [first, *(Worker(options.spec, options.timeout) for _ in range(min(jobs, len(work_groups)) - 1))]
        try:
            with ThreadPoolExecutor(len(spare)) as pool:

                def work(group: list[Task]) -> list[Result]:
                    worker, done = spare.pop(), []
                    try:
                        for task in group:
                            done.append(_work(worker, task, options))
                            progress(done[-1])
                    finally:
                        spare.append(worker)
                    return done

                results = [r for done in pool.map(work, work_groups) for r in done]
        finally:
            for worker in spare:
                worker.stop()
    results.sort(key=lambda r: LEVELS.index(r.level))
    _nothing(results, options)
    return Run(options, about, results, time.monotonic() - start)


def _work(worker: Worker, task: Task, options: Options) -> Result:
    result = Result(task.level, task.name, bound=reason(task.name) if task.level == "ops" else "")
    start, lost = time.monotonic(), 0
    cases = [(c, True) for c in task.must] + [(c, False) for c in task.more]
    for i, (case, must) in enumerate(cases):
        spent = time.monotonic() - start
        if (
            (spent > options.budget and not must)
            or spent > 4 * options.budget
            or lost >= 3
            or result.outcomes["failed"] >= GIVE_UP
        ):
            result.skipped = len(cases) - i
            break
        verdict = worker.judge(case, 10 * options.timeout if task.level == "model" else None)
        result.add(verdict)
        if verdict.outcome == FAILED:
            lost += bool({"crash", "hang"} & set(verdict.failed))
            _keep(result, verdict, worker, options)
    if task.claimed and not result.skipped and result.ran < min(MINIMUM if task.level == "ops" else 1, len(cases)):
        result.fail("cases", f"{result.ran} of {result.cases} cases ran of an op that the backend claims")
    if options.speed and task.level == "ops" and result.status == "passed":
        result.speed = worker.ask({"speed": task.name}).get("speed")
    return result


def _keep(result: Result, v: Verdict, worker: Worker, options: Options) -> None:
    """Shrink a failing case and keep it, unless enough of its kind are kept."""
    properties = failing(v)
    primary = next(iter(properties))
    alike = [f for f in result.failures if f.primary == primary]
    if alike or len(result.failures) >= KEPT:
        return
    last = {"properties": properties}

    def fails(case: str) -> bool:
        again = worker.judge(case)
        if primary in again.failed:
            last["properties"] = failing(again)
        return primary in again.failed

    patience = 10.0 if primary != "hang" else 3 * options.timeout
    case = shrink(v.case, fails, seconds=patience)
    properties = last["properties"]
    worker.stop()  # what fails must fail alone, or the command that replays it says nothing
    alone = next((c for c in (case, v.case) if primary in worker.judge(c).failed), "")
    if not alone:
        properties[primary] += " (not when it runs alone: what ran before it matters)"
    case = alone or v.case
    result.failures.append(Failure(case, v.case, properties))


def _nothing(results: list[Result], options: Options) -> None:
    """A run in which nothing was tested is no pass."""
    asked = set(options.levels) - {"ops"} if options.levels != LEVELS else set()
    for level in sorted(asked):
        mine = [r for r in results if r.level == level]
        if mine and not any(r.ran for r in mine):
            mine[0].fail("cases", f"the backend ran nothing of level {level}: " + "; ".join(mine[0].refusals))
    ops = [r for r in results if r.level == "ops"]
    for r in ops:
        if r.name in options.ops and not r.ran and not r.failed:
            r.fail("cases", f"0 of {r.cases} cases ran: " + ("; ".join(r.refusals) or "nothing was tried"))
    if ops and not options.ops and not any(r.ran for r in ops if not OPS[r.name].view):
        ops[0].fail("cases", "the backend ran no case of any op")


def replay_command(spec: Spec, case: str) -> str:
    """The command that runs one case."""
    plugins = "".join(f"--plugin {m} " for m in spec.plugins)
    return f"trueup check {plugins}--backend {spec.name} --replay {shlex.quote(case)}" if case else ""


def replay(spec: Spec, case: str, timeout: float) -> Verdict:
    """One case by its line."""
    with Worker(spec, timeout) as worker:
        return worker.judge(case)
