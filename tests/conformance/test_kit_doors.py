"""The two doors: `trueup check`, and the pytest plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)


def command(*args: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
    )


def check(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from trueup.cli import main; sys.argv[0] = 'trueup'; sys.exit(main())"
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code, "check", *args], capture_output=True, text=True, cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


QUICK = ("--level", "ops", "--examples", "2")


def test_a_right_backend_ends_with_0(tmp_path: Path) -> None:
    done = check("--backend", "cpu", *QUICK, "--op", "take_rows", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "take_rows" in done.stdout and done.stdout.rstrip().endswith("all right")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_backend_ends_with_1_and_says_how_to_replay(tmp_path: Path) -> None:
    given = ("--plugin", "bad_backends", "--backend", "wrong_tie")
    done = check(*given, *QUICK, "--op", "top_k", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = (s for s in done.stdout.splitlines() if "--replay" in s)
    case = line.split("--replay '")[1].rstrip("'")
    again = check(*given, "--replay", case, cwd=tmp_path)
    assert again.returncode == 1 and "ties" in again.stdout
    data = check(*given, "--replay", case, "--json", cwd=tmp_path)
    assert json.loads(data.stdout)["properties"]["ties"]["status"] == "failed"


def test_a_replay_shows_where_the_backend_raised(tmp_path: Path) -> None:
    given = (
        "--plugin",
        "bad_backends",
        "--backend",
        "lying_supports",
        "--replay",
        "ops/linear?type.weight=q4_0&axis.n=32",
    )
    done = check(*given, cwd=tmp_path)
    assert done.returncode == 1 and "claims.py" in done.stdout
    raised, where = done.stdout.rstrip().splitlines()[-2:]
    assert raised == "NotImplementedError: weights of q4_0"
    assert where.startswith("in kernel lying_supports of lying_supports, #0 linear(x: f32[3, 32], weight: q4_0")


def test_json_and_reports(tmp_path: Path) -> None:
    given = ("--backend", "cpu", *QUICK, "--op", "argmax", "--json", "--report", "out")
    done = check(*given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "out/report.json").read_text())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.json", "junit.xml", "index.html"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--backend", "nowhere"), "there is no backend 'nowhere'"),
        (("--backend", "cpu", "--op", "nothing"), "there is no op 'nothing'"),
        (("--backend", "cpu", "--level", "all"), "there is no level 'all'"),
        (("--backend", "cpu", "--replay", "ops/add?x"), "can't read 'x'"),
        (
            (
                "--backend",
                "cpu:9",
            ),
            "no device '9'",
        ),
    ],
)
def test_wrong_requests_are_one_line(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    done = check(*args, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("trueup: error: ") and said in line


def pytest_on(
    backend: str, *args: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    kit = ("--pyargs", "trueup.conformance", "-p", "no:cacheprovider", "-q")
    return command(
        "pytest",
        *kit,
        "--trueup-backend",
        backend,
        "--trueup-level",
        "ops",
        "--trueup-examples",
        "0",
        *args,
        cwd=cwd,
        env=env,
    )


def test_the_plugin_passes_fails_and_expects(tmp_path: Path) -> None:
    bad = ("--trueup-plugin", "bad_backends", "--trueup-op", "top_k", "--trueup-op", "add")
    done = pytest_on("wrong_tie", *bad, cwd=tmp_path)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout
    assert "ops/top_k/ties" in done.stdout and "--replay" in done.stdout
    (tmp_path / "known").write_text("ops/top_k/ties: not stable\nops/mul/values: gone\n")
    done = pytest_on("wrong_tie", *bad, "--xfails", "known", cwd=tmp_path)
    assert done.returncode == 0 and "1 passed, 1 xfailed" in done.stdout
    assert "was not met: ops/mul/values" in done.stdout
    strict = pytest_on("wrong_tie", *bad, "--xfails", "known", "--xfails-strict", cwd=tmp_path)
    assert strict.returncode == 1


def test_the_plugin_needs_a_backend_and_something_to_judge(tmp_path: Path) -> None:
    done = pytest_on("nowhere", cwd=tmp_path)
    assert done.returncode != 0 and "there is no backend 'nowhere'" in done.stdout
    refused = pytest_on("only_linear", "--trueup-plugin", "bad_backends", "--trueup-op", "add", cwd=tmp_path)
    assert refused.returncode == 1 and "1 skipped" in refused.stdout


def test_the_plugin_may_be_named_and_is_of_use_without_entry_points(tmp_path: Path) -> None:
    named = ("-p", "trueup.conformance.plugin")
    for env in ({}, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}):
        done = pytest_on("reference", *named, "--trueup-op", "add", cwd=tmp_path, env=env)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_other_runs_of_pytest_load_no_kit(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test(): assert not {'trueup.conformance.runner', 'hypothesis', 'numpy'} & {*sys.modules}\n"
    )
    done = command(
        "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist", ".", cwd=tmp_path
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
