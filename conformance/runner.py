"""A run of the kit: cases of every level, each in a worker process, gathered into results. Prints nothing."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trueup.core.op import OPS

from .bounds import reason
from .harness import Spec
from .levels import check_level
from .names import LEVELS
from .process import Died, Worker
from .properties import FAILED, Verdict
from .results import Failure, Options, Result, Run
from .shrink import shrink
from .spaces import find
from .tasks import Task, groups
from .whole import ELSEWHERE

MINIMUM = 5
"""Cases that must have run for an op that the backend claims."""
KEPT = 5
"""Failing cases kept and shrunk for each name."""
GIVE_UP = 25
"""Failing cases of one name after which it is left; 3 where each takes a process with it."""


FIRST = ("crash", "hang", "refusal", "canaries", "written", "inputs", "repeat")
"""Properties that name the cause where several fail; others come in the order in which they were judged."""


def failing(v: Verdict) -> dict[str, str]:
    """The failed properties with their details, the cause first."""
    return {
        n: v.properties[n].detail for n in sorted(v.failed, key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
    }


class Session:
    """A worker for what is asked, and the tasks that this comes to. `close` ends the worker."""

    def __init__(self, options: Options) -> None:
        """Unavailable where the backend can't be opened, KitError for a wrong request."""
        for level in options.levels:
            check_level(level)
        for name in options.ops:
            find(name)
        self.options, self.results = options, list[Result]()
        self.worker = Worker(options.spec, options.timeout)
        self.worker.start()
        self.about = self.worker.about
        o = options
        self.groups = groups(o.levels, o.ops, o.examples, o.seed, o.model, self.about)

    def work(self, task: Task, worker: Worker | None = None) -> Result:
        """Run a task's cases, on the session's worker or another."""
        result = _work(worker or self.worker, task, self.options)
        self.results.append(result)
        return result

    def replay(self, case: str) -> str:
        return replay_command(self.options.spec, case)

    def close(self) -> None:
        self.worker.stop()


def run(options: Options, progress: Callable[[Result], None] = lambda r: None) -> Run:
    """Run what is asked for. Unavailable where the backend can't be opened, KitError for a wrong request."""
    start, session = time.monotonic(), Session(options)
    jobs = options.jobs or (1 if session.about["device"]["kind"] != "cpu" else 2)
    more = range(min(jobs, len(session.groups)) - 1)
    spare = [session.worker, *(Worker(options.spec, options.timeout) for _ in more)]
    try:
        with ThreadPoolExecutor(len(spare)) as pool:

            def work(group: list[Task]) -> list[Result]:
                worker, done = spare.pop(), []
                try:
                    for task in group:
                        done.append(session.work(task, worker))
                        progress(done[-1])
                finally:
                    spare.append(worker)
                return done

            results = [r for done in pool.map(work, session.groups) for r in done]
        if options.speed:  # with nothing else running
            _speed(session.worker, results)
    finally:
        for worker in spare:
            worker.stop()
        session.close()
    results.sort(key=lambda r: LEVELS.index(r.level))
    _nothing(results, options)
    copied = max((r.speed["copy"] for r in results if r.speed), default=None)
    return Run(options, session.about, results, time.monotonic() - start, copied)


def _speed(worker: Worker, results: list[Result]) -> None:
    """Measure the ops that passed; one that does not end in time is left out."""
    for r in results:
        if r.level == "ops" and r.status == "passed" and not OPS[r.name].view:
            with contextlib.suppress(Died):
                r.speed = worker.ask({"speed": r.name}, 60.0).get("speed")


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
        verdict = worker.judge(case)
        result.add(verdict)
        if verdict.outcome == FAILED:
            lost += bool({"crash", "hang"} & set(verdict.failed))
            _keep(result, verdict, worker, options)
    least = min(MINIMUM if task.level == "ops" else 1, len(cases))
    elsewhere = result.refusals[ELSEWHERE] == result.cases
    if task.claimed and not result.skipped and result.ran < least and not elsewhere:
        what = "an op that the backend claims" if task.level == "ops" else f"{task.level}/{task.name}"
        why = "; ".join(r for r, _ in result.refusals.most_common(3))
        result.fail("cases", f"{result.ran} of {result.cases} cases ran of {what}" + (f": {why}" if why else ""))
    return result


def _keep(result: Result, v: Verdict, worker: Worker, options: Options) -> None:
    """Shrink a failing case and keep it, unless enough of its kind are kept."""
    properties = failing(v)
    primary = next(iter(properties))
    alike = [f for f in result.failures if f.primary == primary]
    if alike or len(result.failures) >= KEPT:
        return
    own = not v.instead

    def fails(case: str) -> bool:
        """Whether a case fails alike: by its own call, once one that does is known."""
        again = worker.judge(case)
        return primary in again.failed and not (own and again.instead)

    start = v.case
    if v.instead:
        other = worker.judge(v.instead)
        if own := primary in other.failed and not other.instead:
            start = v.instead
    patience = 10.0 if primary != "hang" else 3 * options.timeout
    small = shrink(start, fails, seconds=patience)
    for case in dict.fromkeys((small, start, v.case)):
        worker.stop()  # what fails must fail alone, or the command that replays it says nothing
        alone = worker.judge(case)
        if primary in alone.failed:
            properties = failing(alone)
            break
    else:
        properties[primary] += " (not when it runs alone: what ran before it matters)"
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
    options = "".join(f"--{k} {v} " for k, v in spec.options.items() if k == "activations")
    return f"trueup check {plugins}--backend {spec.name} {options}--replay {shlex.quote(case)}" if case else ""


def replay(spec: Spec, case: str, timeout: float) -> Verdict:
    """One case by its line."""
    with Worker(spec, timeout) as worker:
        return worker.judge(case)
