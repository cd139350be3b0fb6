"""Examples installed as anyone would install them, without a network, and the command run beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAIN = "import sys; sys.argv[0] = 'trueup'; from trueup.cli import main; main()"
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def needs_setuptools(wanted: tuple[int, int] = (70, 1)) -> None:
    """Skip where the examples' build backend is not there, or makes no wheels by itself."""
    try:
        found = tuple(int(n) for n in version("setuptools").split(".")[:2])
    except PackageNotFoundError:
        found = ()
    if found < wanted:
        pytest.skip(f"installing an example needs setuptools {wanted[0]}.{wanted[1]}, here is {found or 'none'}")


def install(source: Path, site: Path, work: Path) -> None:
    """`pip install` a copy of `source`, as building leaves files beside it, into the folder `site`."""
    needs_setuptools()
    copy = shutil.copytree(
        source, work / source.name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    )
    pip = ("pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-build-isolation", "--no-deps")
    subprocess.run([sys.executable, "-m", *pip, "--target", site, copy], check=True)


@pytest.fixture(scope="module")
def beside() -> Callable[[Path], Command]:
    """Runs `trueup` with a folder on the path."""

    def at(folder: Path) -> Command:
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        env = {k: v for k, v in os.environ.items() if k != "TRUEUP_PLUGINS"} | {"PYTHONPATH": path}

        def run(*args: object) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", MAIN, *map(str, args)]
            return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)

        return run

    return at


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, beside: Callable[[Path], Command]
) -> Callable[[str | Path], Command]:
    """Installs an example by name, or a distribution by its folder; then runs `trueup` with it."""

    def put(which: str | Path) -> Command:
        site = tmp_path_factory.mktemp("site")
        install(EXAMPLES / which, site, tmp_path_factory.mktemp("source"))
        return beside(site)

    return put
