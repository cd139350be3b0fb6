"""`trueup new-backend`: the example under another name, whole or not at all, right as it is written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.cli.new_backend import FILES, skeleton

Run = Callable[..., Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "backend-minimal"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_it_is_the_example_under_another_name(trueup: Run, here: Path) -> None:
    done = trueup("new-backend", "minimal_2", "--output", "made")
    assert done.code == 0 and done.err == ""
    assert done.out.endswith("next: pip install -e made && trueup check --backend minimal_2 --level ops\n")
    found = {p.name.replace("minimal_2", "minimal"): p.read_text() for p in (here / "made").iterdir()}
    plain = {k: t.replace("minimal_2", "minimal").replace("Minimal2", "Minimal") for k, t in found.items()}
    assert plain == {f: (EXAMPLE / f).read_text() for f in FILES}
    assert [p.name for p in here.iterdir()] == ["made"]


def test_the_skeleton_passes_the_kit_as_it_is(trueup: Run, here: Path) -> None:
    assert trueup("new-backend", "acme_one").code == 0
    code = "import sys; sys.argv[0] = 'trueup'; from trueup.cli import main; main()"
    given = ("check", "--plugin", "trueup_acme_one", "--backend", "acme_one", "--level", "ops", "--examples", "0")
    path = os.pathsep.join(filter(None, (str(here / "backend-acme_one"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("all right")
    assert "device" in next(line for line in done.stdout.splitlines() if " linear " in line)


@given(st.from_regex("[a-z][a-z0-9]*(_[a-z0-9]+)*", fullmatch=True) | st.sampled_from(["device", "any", "context"]))
def test_whatever_the_name_the_files_fit_together(name: str) -> None:
    files = skeleton(name)
    project = tomllib.loads(files["pyproject.toml"])
    module = f"trueup_{name}"
    assert set(files) == {"README.md", "pyproject.toml", f"{module}.py"}
    assert project["project"]["entry-points"]["trueup"] == {name: module}
    assert project["tool"]["setuptools"]["py-modules"] == [module]
    tree = ast.parse(files[f"{module}.py"])
    (made,) = (n for n in tree.body if isinstance(n, ast.ClassDef))
    imported = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert made.name not in imported


@pytest.mark.parametrize(
    "name", ["", "Acme", "a-b", "2d", "_a", "a_", "a__b", "a.b", "../x", "a b", "größe", "class", "acme\n"]
)
def test_a_name_that_is_none(trueup: Run, here: Path, name: str) -> None:
    assert "is no name for a backend: lower-case letters" in trueup("new-backend", "--", name).refused()
    assert list(here.iterdir()) == []


def test_a_name_that_is_taken(trueup: Run, here: Path, acme: None, plugin: Callable[[str, str], None]) -> None:
    """By a plugin, a backend of another plugin, a broken plugin, a module."""
    plugin("sad", "raise ImportError")
    plugin(
        "cards",
        """
        from trueup.core.backend import Backend
        from trueup.core.plugins import hookimpl
        class Ace(Backend):
            name, API = "ace", (1, 0)
            def devices(self): return []
            def open(self, device): ...
        @hookimpl
        def trueup_backends(): return [Ace]
        """,
    )
    for name, owner in (("cpu", "cpu"), ("acme", "acme"), ("sad", "sad"), ("ace", "cards"), ("qwen4exp", "qwen4exp")):
        assert f"the name '{name}' is taken by plugin {owner} (" in trueup("new-backend", name).refused()
    (here / "trueup_mine.py").write_text("")
    sys.path.insert(0, str(here))
    try:
        assert "there is a module trueup_mine already" in trueup("new-backend", "mine").refused()
    finally:
        sys.path.remove(str(here))
    assert [p.name for p in here.iterdir()] == ["trueup_mine.py"]


def test_nothing_is_overwritten(trueup: Run, here: Path) -> None:
    (here / "backend-acme").mkdir()
    (here / "file").write_text("mine")
    (here / "nowhere").symlink_to(here / "gone")
    for to in ((), ("--output", "file"), ("--output", "nowhere"), ("--output", ".")):
        assert "is there already; nothing was written" in trueup("new-backend", "acme", *to).refused()
    assert "is no folder" in trueup("new-backend", "acme", "--output", "a/b").refused()
    assert {p.name for p in here.iterdir()} == {"backend-acme", "file", "nowhere"}
    assert (here / "file").read_text() == "mine" and list((here / "backend-acme").iterdir()) == []


def test_nothing_half_written_stays(trueup: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    real = Path.write_text

    def full(self: Path, text: str, **more: Any) -> int:
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(self))
        written.append(self)
        return real(self, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device" in trueup("new-backend", "acme").refused()
    assert len(written) == 2 and list(here.iterdir()) == []
