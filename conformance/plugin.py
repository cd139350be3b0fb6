"""The kit as a pytest plugin: `pytest --pyargs trueup.conformance --trueup-backend NAME`.

Each op and scenario is a test, run in a worker process of its own; a failure prints what failed and the command that replays
it. Options are those of `trueup check`.
"""

from __future__ import annotations

import pytest

from trueup.core.errors import Unavailable

from .errors import KitError
from .harness import Spec
from .names import LEVELS
from .pytest_options import add_options
from .results import Options
from .runner import Session
from .tasks import Task
from .xfails import Expected

_key = pytest.StashKey[Session]()
_expected = pytest.StashKey[Expected]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("trueup"):  # the entry point has added them; loading plugins may be off
        add_options(parser)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance_task" not in metafunc.fixturenames:
        return
    config = metafunc.config
    name = config.getoption("--trueup-backend")
    if name is None:
        raise pytest.UsageError("the conformance kit needs --trueup-backend NAME")
    if _key not in config.stash:
        try:
            _open(config, name)
        except (Unavailable, KitError) as e:
            raise pytest.UsageError(str(e)) from None
    tasks = [t for group in config.stash[_key].groups for t in group]
    metafunc.parametrize("conformance_task", tasks, ids=[f"{t.level}-{t.name.replace(' ', '-')}" for t in tasks])


def _open(config: pytest.Config, name: str) -> None:
    given = config.getoption
    path = given("--xfails")
    config.stash[_expected] = Expected.read(path) if path else Expected()
    options = Options(
        Spec(name, tuple(given("--trueup-plugin") or ())),
        levels=tuple(given("--trueup-level") or LEVELS),
        examples=given("--trueup-examples"),
        ops=tuple(given("--trueup-op") or ()),
        seed=given("--trueup-seed"),
        timeout=given("--trueup-timeout"),
        model=given("--trueup-model"),
    )
    config.stash[_key] = Session(options)


def judge(config: pytest.Config, task: Task) -> None:
    """Run a task; fail, or xfail where all that failed was expected."""
    session, expected = config.stash[_key], config.stash[_expected]
    result = session.work(task)
    judged = expected.sort([result])
    lines = [
        f"{result.level}/{result.name}/{name}: {detail}\n  {session.replay(f.case)}"
        for f in result.failures
        for name, detail in f.properties.items()
        if (result.level, result.name, name) in {key for key, _ in judged.failed}
    ]
    if judged.failed:
        pytest.fail("\n".join(lines) or ", ".join("/".join(k) for k, _ in judged.failed), pytrace=False)
    if config.getoption("--xfails-strict") and judged.passing:
        pytest.fail(f"expected to fail, but passes: {', '.join('/'.join(k) for k in judged.passing)}", pytrace=False)
    if judged.expected:
        pytest.xfail("; ".join(f"{'/'.join(k)}: {why}" for k, why in judged.expected))
    if result.status == "refused":
        pytest.skip("refused: " + "; ".join(result.refusals))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Lines of the xfail file that are out of date."""
    if _key not in config.stash:
        return
    judged = config.stash[_expected].sort(config.stash[_key].results)
    for key in judged.passing:
        terminalreporter.line(f"expected to fail, but passes: {'/'.join(key)}", yellow=True)
    for key in judged.unmatched:
        terminalreporter.line(f"expected to fail, but was not met: {'/'.join(key)}", yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _key in session.config.stash:
        kit = session.config.stash[_key]
        judged = session.config.stash[_expected].sort(kit.results)
        if session.config.getoption("--xfails-strict") and judged.unmatched and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if kit.results and not any(r.ran for r in kit.results) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was tested
        kit.close()
