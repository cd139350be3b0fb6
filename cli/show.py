"""How commands show things: tables, sizes, JSON, text of unknown origin. Knows nothing of models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Standard output; as wide as need be where it is no terminal, so that nothing is cut for those who read lines."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else 10_000, markup=False, emoji=False, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> None:
    """Print rows under column names; the columns in `right` are numbers. A column without any entry is left out."""
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(str(c)) for c in row] for row in rows]
    shown = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i in shown:
        made.add_column(columns[i], justify="right" if columns[i] in right else "left", overflow="fold")
    for row in cells:
        made.add_row(*(Text(row[i]) for i in shown))
    with_lines(made)


def with_lines(thing: Any) -> None:
    """Print a rich object, without the spaces that rich pads lines with where it writes to no terminal."""
    out = console()
    if out.is_terminal:
        out.print(thing)
        return
    with out.capture() as captured:
        out.print(thing)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def dump(value: Any) -> None:
    """Print JSON, for programs; NaN is none."""
    json.dump(value, sys.stdout, indent=1, allow_nan=False, default=str)
    print()


def size(n: int | float | None) -> str:
    """Bytes for people: 999 B, 12.3 KiB, 4.0 GiB."""
    if n is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def printable(text: str) -> str:
    """Text of unknown origin with its control characters spelled out, so that it can do nothing to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def clip(text: str, most: int) -> str:
    """The beginning of a text, with a mark where something is left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def lines(facts: Sequence[tuple[str, str]], *, indent: int = 2) -> None:
    """Print names and values, values one below the other; what is long goes on below itself."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    named = any(name for name, _ in facts)
    for _ in range(1 + named):
        made.add_column(overflow="fold")
    for name, value in facts:
        made.add_row(*([Text(name)] if named else []), Text(printable(value)))
    with_lines(Padding(made, (0, 0, 0, indent), expand=False))
