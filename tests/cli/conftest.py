"""The command run in this process and in one of its own; plugins of third parties made for a test."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trueup.cli.app import app
from trueup.core.plugins import host
from trueup.models import bundled_path

MAIN = "from trueup.cli import main; main()"


class Outcome:
    """What a command wrote and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def refused(self, code: int = 1) -> str:
        """The one line of an error, which is all that was written to standard error."""
        assert self.code == code, self.err
        assert self.err.startswith("trueup: error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("trueup: error: ").strip()


@pytest.fixture
def trueup() -> Callable[..., Outcome]:
    """Runs the command in this process; `input` is standard input."""

    def run(*args: object, input: str | bytes = "") -> Outcome:
        done = CliRunner().invoke(app, [str(a) for a in args], input=input)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout_bytes.decode(), done.stderr_bytes.decode())

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command as a process of its own, with pipes."""
    started: list[subprocess.Popen[str]] = []

    def run(*args: object, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN, *map(str, args)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **(pipes | more)))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a plugin: the name of its entry point, which is also its module's, and its source.

    The distribution is called `acme`, version 1.2. Child processes see it, too.
    """
    folder = tmp_path / "site"
    about = folder / "acme-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    names: list[str] = []
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.delenv("TRUEUP_PLUGINS", raising=False)

    def install(name: str, source: str) -> None:
        names.append(name)
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        points = "".join(f"{n} = {n}\n" for n in names)
        (about / "entry_points.txt").write_text(f"[trueup]\n{points}")
        host.cache_clear()

    yield install
    host.cache_clear()
    for name in names:
        sys.modules.pop(name, None)


ACME = """
    import numpy as np

    from trueup.core.backend import Backend, Device, KernelTable, ManagedTarget
    from trueup.core.ops import linear, silu
    from trueup.core.plugins import hookimpl

    kernels = KernelTable()


    @kernels.implements(linear, when=lambda x, w: w.dtype != "q8_0" or "this card has no q8_0")
    def _(x, w):
        return x @ np.asarray(w).T


    @kernels.fuses(lambda x, w, *, scale: silu(linear(x, w), scale=scale), when=lambda x, w, *, scale: "rows too long")
    def silu_linear(x, w, *, scale):
        raise AssertionError


    @kernels.fuses(lambda x: silu(silu(x, scale=2.0), scale=1.0))
    def silu_twice(x):
        raise AssertionError


    class Acme(Backend):
        name = "acme"
        API = (1, 0)

        def devices(self):
            return [Device("Acme One", "gpu", memory=8 << 30), Device("Acme Two", "gpu")]

        def open(self, device):
            return ManagedTarget("acme", device, kernels)


    @hookimpl
    def trueup_backends():
        return [Acme]
"""


@pytest.fixture
def acme(plugin: Callable[[str, str], None]) -> None:
    """A backend that runs `linear` on float weights and refuses all else; it offers two fusions that are never used."""
    plugin("acme", ACME)


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the bundled model with the first `old` replaced by `new`, of the same length, after `behind`."""

    def alter(old: bytes, new: bytes, behind: bytes = b"") -> Path:
        data = bundled_path().read_bytes()
        assert len(old) == len(new)
        at = data.index(old, data.index(behind) + len(behind))
        path = tmp_path / "altered.gguf"
        path.write_bytes(data[:at] + new + data[at + len(new) :])
        return path

    return alter
