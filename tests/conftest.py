"""Hypothesis profiles, and one command for every failing case.

`pytest` uses the profile `default`: the same cases at every run. `pytest --profile full` draws more, anew each time.
`--require-backend NAME` turns skips that concern a backend into failures, for machines that must be able to run it.
`--fault B12` selects the tests of a public fault (docs/faults.md), `-m fault` those of all.
A failing property prints the command that replays its case, `pytest '<test>' --replay <version>:<case>`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, reproduce_failure, settings

settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "full", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# a replayed case is the one asked for: nothing else is generated, nothing is shrunk
settings.register_profile("replay", phases=[Phase.reuse, Phase.explain], database=None, deadline=None)

BLOB = re.compile(r"@reproduce_failure\('([^']+)', b'([^']*)'\)")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trueup")
    group.addoption("--profile", choices=["default", "full"], default="default", help="how many cases hypothesis draws")
    group.addoption(
        "--require-backend", action="append", default=[], metavar="NAME",
        help="a skipped test with this name in its path or parameters is a failure",
    )  # fmt: skip
    group.addoption(
        "--fault", action="append", default=[], metavar="ID", help="only tests of this fault; may be given again"
    )
    group.addoption("--replay", metavar="VERSION:CASE", help="replay one failing case of the one selected property")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("replay" if config.getoption("--replay") else config.getoption("--profile"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select_faults(config, items)
    if not (replay := config.getoption("--replay")):
        return
    properties = [i for i in items if getattr(getattr(i, "obj", None), "is_hypothesis_test", False)]
    if len(properties) != 1:
        raise pytest.UsageError(f"--replay needs one selected property, found {len(properties)}")
    version, _, case = replay.partition(":")
    function = properties[0].obj  # type: ignore[attr-defined]
    reproduce_failure(version, case.encode())(getattr(function, "__func__", function))


def _select_faults(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is marked with a fault asked for by `--fault`."""
    if not (wanted := {w.upper() for w in config.getoption("--fault")}):
        return
    of = {i: {f for mark in i.iter_markers("fault") for f in mark.args} for i in items}
    if lost := wanted.difference(*of.values()):
        raise pytest.UsageError(f"no collected test is of fault {', '.join(sorted(lost))}; see tests/test_faults.py")
    config.hook.pytest_deselected(items=[i for i in items if not wanted & of[i]])
    items[:] = [i for i in items if wanted & of[i]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    report = yield
    _require(item.config, report)
    if report.failed and call.excinfo is not None and (found := BLOB.search(_notes(call.excinfo.value))):
        report.sections.append(
            ("replay", f"python -m pytest {shlex.quote(item.nodeid)} --replay {found[1]}:{found[2]}")
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    report = yield
    _require(collector.config, report)
    return report


def _require(config: pytest.Config, report: Any) -> None:
    """A backend that must not skip fails instead, with the reason of the skip."""
    named = [n for n in config.getoption("--require-backend") if n in report.nodeid]
    if report.outcome == "skipped" and named and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"backend {named[0]} is required here, but this was skipped: {report.longrepr[-1]}"


def _notes(error: BaseException) -> str:
    """What hypothesis notes on an error, and on those inside it where a property fails in several ways."""
    parts = list(getattr(error, "__notes__", []))
    if isinstance(error, BaseExceptionGroup):
        parts += [_notes(e) for e in error.exceptions]
    return "\n".join(parts)
