"""`trueup new-backend`: writes the skeleton of a backend, the files of `examples/backend-minimal` under another name."""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

FILES = ("README.md", "pyproject.toml", "trueup_minimal.py")
NAME = "minimal"


def new_backend(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The backend's name: lower-case letters, digits, single underscores.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            show_default=False,
            help="The folder to make, which must not be there yet. By default backend-NAME.",
        ),
    ] = None,
) -> None:
    """Write the skeleton of a backend.

    A Python distribution of one page of code in NumPy, which passes the conformance kit's level ops as it is. The guide
    "Write a backend" goes on from there.

    Examples:

    \b
        trueup new-backend acme
        trueup new-backend acme --output ~/src/trueup-acme
    """
    check_name(name)
    folder = output if output is not None else Path(f"backend-{name}")
    write(folder, skeleton(name))
    print(f"{folder}: {', '.join(f.replace(NAME, name) for f in FILES)}")
    print(f"next: pip install -e {folder} && trueup check --backend {name} --level ops")


def check_name(name: str) -> None:
    """ValueError for a name that is none, or that a plugin, a backend or a module has already."""
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} is no name for a backend: lower-case letters, digits and single underscores, beginning with a letter"
        )
    from trueup.core.plugins import host

    for plugin in host().load().plugins:
        if name in (plugin.name, *plugin.provides.get("backends", ())):
            raise ValueError(f"the name '{name}' is taken by plugin {plugin.origin}; choose another")
    if find_spec(f"trueup_{name}") is not None:
        raise ValueError(f"the name '{name}' is taken: there is a module trueup_{name} already; choose another")


def skeleton(name: str) -> dict[str, str]:
    """The text of each file by its name, made out for this backend."""
    source = {file: (_folder() / file).read_text(encoding="utf-8") for file in FILES}
    kind = "".join(part.capitalize() for part in name.split("_"))
    if kind in set(_names(source)):  # a class `Device` would hide the one that it uses
        kind += "Backend"

    def made_out(text: str) -> str:
        return text.replace(NAME, name).replace(NAME.capitalize(), kind)

    return {made_out(file): made_out(text) for file, text in source.items()}


def _names(source: dict[str, str]) -> Iterator[str]:
    return (n for text in source.values() for n in re.findall(r"\b[A-Z]\w*", text))


def _folder() -> Path:
    """Where the example lies: beside this module, where the package is installed; in a working copy among the examples."""
    here = Path(__file__).resolve().parent
    installed = here / f"backend-{NAME}"
    return installed if installed.is_dir() else here.parent / "examples" / f"backend-{NAME}"


def write(folder: Path, files: dict[str, str]) -> None:
    """Make the folder with these files, whole or not at all. ValueError where something of that name is there."""
    folder = folder.expanduser()
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} is there already; nothing was written")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder.parent}, where {folder.name} should be made, is no folder")
    half = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in files.items():
            (half / name).write_text(text, encoding="utf-8")
        half.chmod(0o755)
        half.rename(folder)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
