"""The house rules that a reader relies on: imports point one way, and only the installed names are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "backends", "models", "runtime", "convert", "conformance", "serve", "cli")
MAY_IMPORT = {
    "core": {"core"},
    "backends": {"backends", "core"},
    "models": {"models", "core"},
    "convert": {"convert", "models", "core"},
    "runtime": {"runtime", "models", "core"},
    "conformance": {"conformance", "runtime", "models", "core"},
    "serve": {"serve", "runtime", "models", "core"},
    "cli": set(FOLDERS),
}


def sources() -> list[Path]:
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for line, name in imports(path):
        first, *rest = name.split(".")
        assert first not in FOLDERS, f"{path}:{line} imports {name}, not trueup.{name}"
        if first == "trueup" and rest:
            assert rest[0] in MAY_IMPORT[folder], f"{path}:{line}: {folder} may not import trueup.{rest[0]}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
