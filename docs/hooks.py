"""Fills pages of the documentation from the code: the op reference from docstrings, the commands from their help."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page."""
    for marker, fill in (("<!-- ops -->", ops), ("<!-- commands -->", commands)):
        if marker in markdown:
            markdown = markdown.replace(marker, fill())
    return markdown


def ops() -> str:
    import trueup.core.ops  # noqa: F401  # defines them
    from trueup.core.op import OPS

    families: dict[str, list[Any]] = {}
    for op in OPS.values():
        families.setdefault(inspect.getmodule(inspect.unwrap(op.body)).__name__.rpartition(".")[2], []).append(op)
    out = []
    for family, members in families.items():
        about = inspect.getdoc(sys.modules[f"trueup.core.ops.{family}"]) or ""
        out.append(f"## {family}\n\n{about}\n")
        for op in members:
            attributes = ", ".join(
                f"{a.name}: {a.annotation.__name__}" + ("" if a.default is a.empty else f" = {a.default!r}")
                for a in op.attributes.values()
            )
            kind = " *(view)*" if op.view else ""
            signature = "\n".join(textwrap.wrap(op.signature.text, 100, subsequent_indent="    "))
            out.append(f"### {op.name}{kind}\n\n```text\n{signature}\n```\n")
            if attributes:
                out.append(f"Attributes: `{attributes}`\n")
            out.append(f"{inspect.getdoc(op.body)}\n")
            if op.decomposition is not None:
                out.append("*Has a decomposition.*\n")
    return "\n".join(out)


def leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The commands that run something, those of groups by both names: `gate spec`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def commands() -> str:
    import typer.main

    from trueup.cli.app import app

    root = typer.main.get_command(app)
    out = []
    for name, command in sorted(leaves(root)):
        rows = []
        for p in command.params:
            if getattr(p, "hidden", False):
                continue
            names = (
                ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
                if p.param_type_name == "option"
                else f"`{p.name.upper()}`"
            )
            rows.append(f"| {names} | {' '.join((getattr(p, 'help', None) or '').split())} |")
        help_text = inspect.cleandoc(command.help or "").replace("\b", "")
        out.append(f"## trueup {name}\n\n{help_text}\n")
        if rows:
            out.append("| | |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(out)
