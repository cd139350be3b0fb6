"""The guides' Python blocks run as written, the op reference has an entry for every op, and "Write a backend" is followed to
the letter: its files made, its commands run, their output compared with what the page shows."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trueup.core.ops  # noqa: F401  # all are defined before a guide defines more
from trueup.cli.new_backend import skeleton
from trueup.core.op import OPS

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)


@pytest.fixture
def undefine():
    """Ops that a guide defines are forgotten again."""
    before = set(OPS)
    yield
    for name in set(OPS) - before:
        del OPS[name]


@pytest.mark.parametrize("page", ["add-an-op", "add-a-model"])
def test_the_guides_code_runs(page: str, undefine: None, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), namespace)
    for claimed in re.findall(r"print\(.*\)  # (.*)", "".join(blocks)):
        assert claimed in capsys.readouterr().out


def test_every_op_is_in_the_reference() -> None:
    text = runpy.run_path(str(DOCS / "hooks.py"))["ops"]()
    missing = [name for name in OPS if f"### {name}" not in text]
    assert not missing


# -- write a backend ---------------------------------------------------------------------------------------------------


class Reader:
    """Follows the page in an empty folder, with `trueup` and `python` as a reader has them.

    `pip install` needs a network and a build backend. Here it does what an editable install comes to: the folder and the
    metadata of the distribution are put on the path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder / "work", folder / "work" / "backend-acme" / "trueup_acme.py"
        self.site, commands = folder / "site", folder / "bin"
        for made in (self.folder, self.site, commands):
            made.mkdir()
        main = "import sys; sys.argv[0] = 'trueup'; from trueup.cli import main; main()"
        for name, runs in (("trueup", f'-c "{main}"'), ("python", "")):
            (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {runs} "$@"\n')
            (commands / name).chmod(0o755)
        path = [str(self.site), str(self.file.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {k: v for k, v in os.environ.items() if k != "TRUEUP_PLUGINS"}
        self.env |= {
            "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",  # files change within the resolution of their times
        }

    def sh(self, commands: str) -> tuple[str, bool]:
        """What the commands wrote, and whether all of them ended well."""
        said, well = "", True
        for command in commands.strip().splitlines():
            if command.startswith("python -m pip install"):
                if command.split()[-2] == "-e":
                    self.install(self.folder / command.split()[-1])
                continue
            done = subprocess.run(
                ["bash", "-c", command], env=self.env, cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            said, well = said + done.stdout, well and done.returncode == 0
        return said, well

    def install(self, source: Path) -> None:
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        info = self.site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        points = "".join(f"{name} = {module}\n" for name, module in project["entry-points"]["trueup"].items())
        (info / "entry_points.txt").write_text(f"[trueup]\n{points}")

    def write(self, block: str) -> None:
        """Put a block into the file: what is there by its name is replaced, imports go to the top, the rest to the end."""
        top: list[str] = []
        end: list[str] = []
        text = self.file.read_text()
        for node in ast.parse(block).body:
            piece = source(block, node)
            name = getattr(node, "name", None)
            old = next(
                (n for n in ast.parse(text).body if name and name != "_" and getattr(n, "name", "") == name), None
            )
            if old is not None:
                text = text.replace(source(text, old), piece)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                top.append(piece)
            else:
                end.append(piece)
        first = "from __future__ import annotations\n"
        assert text.count(first) == 1
        self.file.write_text(text.replace(first, first + "\n".join(top) + "\n") + "\n\n" + "\n\n\n".join(end) + "\n")


def source(text: str, node: ast.stmt) -> str:
    """The lines of a statement, decorators and the comment behind it included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def missing(shown: str, said: str) -> list[str]:
    """Lines that a page shows and a command did not say: the words of each must stand in one line, in this order."""
    lines = said.splitlines()
    patterns = [(line, re.compile(".*".join(map(re.escape, line.split())))) for line in shown.splitlines()]
    return [line for line, pattern in patterns if not any(map(pattern.search, lines))]


@pytest.mark.timeout(600)
def test_write_a_backend_can_be_followed_to_the_letter(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("the page's commands are bash's")
    reader, said, well, run = Reader(tmp_path), "", True, ""
    blocks = BLOCK.findall((DOCS / "write-a-backend.md").read_text())
    assert {kind for kind, _ in blocks} == {"python", "sh", "text", "toml"}
    for kind, block in blocks:
        if kind == "text":
            assert missing(block, said) == [], f"{run}\n{said}"
            well = well or "failed" in block
            continue
        assert well, f"{run}\n{said}"
        if kind == "toml":
            assert block in (reader.file.parent / "pyproject.toml").read_text()
        elif kind == "python" and block.startswith('"""'):
            assert block == skeleton("acme")["trueup_acme.py"] == reader.file.read_text()
        elif kind == "python":
            reader.write(block)
        else:
            run, (said, well) = block, reader.sh(block)
    assert well, f"{run}\n{said}"
