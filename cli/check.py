"""`trueup check`: judge a backend with the conformance kit."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli.options import Activations, AsJson, target_options
from trueup.cli.show import dump, printable, table

if TYPE_CHECKING:
    from trueup.conformance.results import Result, Run
    from trueup.conformance.xfails import Judged

PropertyMarks = {"failed": "FAILED", "measured": "measured", "passed": "held", "n/a": "n/a"}


def check(
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME[:DEVICE]", help="The backend to judge.", show_default=False)
    ],
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level",
            metavar="LEVEL",
            show_default=False,
            help="ops, effects, graph, model or speculative; may be given several times. By default all of them.",
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", min=0, help="Random cases for each op, besides those always met.")
    ] = 100,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="NAME", show_default=False, help="Only this op; may be given several times."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="DIR", show_default=False, help="Write report.json, junit.xml and index.html here."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="What random cases follow from.")] = 0,
    replay: Annotated[
        str | None,
        typer.Option("--replay", metavar="CASE", show_default=False, help="Run one case, as a failure prints it."),
    ] = None,
    xfails: Annotated[
        Path | None,
        typer.Option(
            "--xfails",
            metavar="FILE",
            show_default=False,
            help="Failures that are expected: lines of level/op/property: reason.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where an expected failure passes, or matches nothing.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FILE", show_default=False, help="The GGUF of level model. By default the bundled one."
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin", metavar="MODULE", show_default=False, help="Load this module as a plugin, though not installed."
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            help="Longest that one case may take; one of a whole model ten times that.",
        ),
    ] = 30.0,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=0, help="Worker processes; 0 chooses by the kind of device.")
    ] = 0,
    activations: Activations = None,
    json: AsJson = False,
) -> None:
    """Judge a backend: every op against the reference, effects, fusions and a whole model.

    Exit code 0 if all is right. Each failure is made small and printed with the command that replays it.

    Examples:

    \b
        trueup check --backend cpu
        trueup check --backend cpu --level ops --op top_k --examples 500
        trueup check --backend cpu --report report/
    """
    scratch = tempfile.TemporaryDirectory()  # hypothesis keeps notes where it runs, unless told where
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch.name)
    try:
        from trueup.conformance import runner
        from trueup.conformance.harness import Spec
        from trueup.conformance.names import LEVELS
        from trueup.conformance.report import as_data, write
        from trueup.conformance.results import Options
        from trueup.conformance.xfails import Expected
    except ModuleNotFoundError as e:
        if e.name != "hypothesis":
            raise
        raise RuntimeError("trueup check needs hypothesis: pip install 'trueup[conformance]'") from None
    spec = Spec(backend, tuple(plugin or ()), target_options(backend, None, activations))
    if replay is not None:
        verdict = runner.replay(spec, replay, timeout)
        if json:
            dump(verdict.json())
        else:
            _show_case(verdict)
        raise typer.Exit(1 if verdict.failed else 0)
    expected = Expected.read(xfails) if xfails else Expected()
    options = Options(
        spec, levels=tuple(level or LEVELS), examples=examples, ops=tuple(op or ()), seed=seed, timeout=timeout, jobs=jobs,
        model=model, speed=report is not None,
    )  # fmt: skip
    done = runner.run(options, _progress)
    judged = expected.judge(done)
    if report is not None:
        write(report, done, judged)
    if json:
        dump(as_data(done, judged))
    else:
        _show_run(done, judged)
    raise typer.Exit(0 if judged.green(strict=strict) else 1)


def _progress(result: Result) -> None:
    if sys.stderr.isatty():
        failed = f", {', '.join(result.failed)} failed" if result.failed else ""
        print(f"{result.level}/{result.name}: {result.cases} cases{failed}", file=sys.stderr)


def _show_case(verdict: object) -> None:
    from trueup.conformance.properties import Verdict

    assert isinstance(verdict, Verdict)
    print(f"{verdict.case}: {verdict.outcome}" + (f": {verdict.reason}" if verdict.reason else ""))
    table(["property", "result", "detail"], [(n, p.status, p.detail) for n, p in verdict.properties.items()])
    if verdict.trace:
        print(f"\n{verdict.trace.rstrip()}")


def _show_run(run: Run, judged: Judged) -> None:
    from trueup.conformance.runner import replay_command

    table(
        ["level", "name", "runs as", "cases", "worst/bound", "properties", "refused"],
        [
            (
                r.level, r.name, ", ".join(r.where) or r.status, r.cases, f"{r.worst:.3g}" if r.worst else "",
                _properties(r, {key for key, _ in judged.expected}), _refused(r),
            )
            for r in run.results
        ],
        right=("cases", "worst/bound"),
    )  # fmt: skip
    for r in run.results:
        for f in r.failures:
            print()
            for name, detail in f.properties.items():
                print(f"{r.level}/{r.name}/{name}: {printable(detail)}")
            if f.case:
                print(f"  {replay_command(run.options.spec, f.case)}")
    print()
    for key, reason in judged.expected:
        print(f"expected failure: {'/'.join(key)}: {reason}")
    for key in judged.passing:
        print(f"expected to fail, but passes: {'/'.join(key)}")
    for key in judged.unmatched:
        print(f"expected to fail, but was not met: {'/'.join(key)}")
    for r in run.results:
        if r.skipped:
            print(f"{r.level}/{r.name}: {r.skipped} cases left out, its time was used up or too many had failed")
    cases, failed = sum(r.cases for r in run.results), sorted({"/".join(k) for k, _ in judged.failed})
    verdict = f"{len(failed)} failed: {', '.join(failed)}" if failed else "all right"
    print(f"{run.options.spec.name}: {cases} cases in {run.seconds:.0f} s, seed {run.options.seed}: {verdict}")


def _properties(r: Result, expected: set[tuple[str, str, str]]) -> str:
    """What failed, and what failed as expected; else how many held, and what was only measured."""
    if r.failed:
        known = [n for n in r.failed if (r.level, r.name, n) in expected]
        new = [n for n in r.failed if n not in known]
        kinds = (("FAILED", new), ("failed as expected:", known))
        return "; ".join(f"{word} {', '.join(names)}" for word, names in kinds if names)
    held = [n for n, c in r.properties.items() if c["passed"]]
    said = [f"{len(held)} held"] if held else []
    said += [f"{n}: {r.details[n]}" for n in r.details if r.details[n] != "held" and n != "errors"]
    return "; ".join(said)


def _refused(r: Result) -> str:
    return "; ".join(f"{n}× {why}" for why, n in r.refusals.most_common(3))
