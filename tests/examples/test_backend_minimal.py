"""The smallest backend: a distribution of its own that installs, is found, is honest about the rest and passes the kit."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., "subprocess.CompletedProcess[str]"]
SOURCE = Path(__file__).parents[2] / "examples" / "backend-minimal" / "trueup_minimal.py"


@pytest.fixture(scope="module")
def minimal(installed: Callable[[str], Command]) -> Command:
    return installed("backend-minimal")


def test_it_is_found_by_its_entry_point(minimal: Command) -> None:
    (found,) = (p for p in json.loads(minimal("plugins", "--json").stdout) if p["name"] == "minimal")
    assert (found["dist"], found["version"], found["status"]) == ("trueup-backend-minimal", "0.1.0", "ok")
    assert found["provides"] == {"backends": ["minimal"]}


def test_it_passes_the_kit(minimal: Command) -> None:
    done = minimal("check", "--backend", "minimal", "--level", "ops", "--examples", 0, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {r["name"]: r for r in json.loads(done.stdout)["results"]}
    assert found["linear"]["where"].keys() == {"device"}
    assert set(found["top_k"]["refusals"]) == {"no kernel for top_k"}


def test_a_model_runs_only_where_the_rest_may_fall_back(minimal: Command) -> None:
    refused = minimal("run", "--backend", "minimal", "-n", 2)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "no kernel for embed; --allow-fallback runs such nodes on the reference" in refused.stderr
    done = minimal("run", "--backend", "minimal", "-n", 2, "--allow-fallback")
    assert done.returncode == 0 and done.stdout == minimal("run", "--backend", "reference", "-n", 2).stdout


def test_it_needs_numpy_alone_and_fits_a_page() -> None:
    text = SOURCE.read_text()
    names = [
        n for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for n in (a.name for a in node.names)
    ]
    froms = [node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert {n.partition(".")[0] for n in (*names, *froms) if n} == {"__future__", "typing", "numpy", "trueup"}
    assert len(text.splitlines()) <= 60
