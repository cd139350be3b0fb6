"""A case as data: which op, which sizes, what its tensors hold and how they lie. Small, printable and exact.

A recipe says how arrays are made, not what they hold: the same recipe gives the same bits everywhere, so the line of
text
that it prints as is all that a replay needs. Knows no op, no array and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import KitError

Attribute = int | float | bool | str


@dataclass(frozen=True)
class Recipe:
    """An op call before its arrays are made.

    `axes`: sizes by the names in the op's signature. `dots`: the sizes of `...`. `fills`: by argument, what it holds (a
    name in `adversarial` or `indices`). `lays`: how an argument lies ("row", "columns", "heads", "same", "region").
    `types`: element types where not the usual one. `absent`: optional arguments left out. `parts`: length of lists. `steps`: above 1, the rows run as so many steps.
    `fault`: how the call breaks the op's contract, "" where it does not. `seed`: of the values.
    """

    op: str
    axes: Mapping[str, int] = field(default_factory=dict)
    attrs: Mapping[str, Attribute] = field(default_factory=dict)
    dots: tuple[int, ...] = ()
    fills: Mapping[str, str] = field(default_factory=dict)
    lays: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    parts: int = 1
    steps: int = 1
    fault: str = ""
    seed: int = 0

    def but(self, **changes: Any) -> Recipe:
        return replace(self, **changes)

    def __str__(self) -> str:
        return self.line()

    def line(self, base: Recipe | None = None) -> str:
        """One line of text; with `base`, of what differs from it."""
        known = dict(base.words()) if base else {}
        said = dict(self.words())
        gone = [f"{k}=" for k in known if k not in said]
        return f"{self.op}?" + "&".join([f"{k}={v}" for k, v in said.items() if known.get(k) != v] + gone)

    def words(self) -> Iterator[tuple[str, str]]:
        if self.dots:
            yield "dots", "x".join(map(str, self.dots))
        for prefix, table in TABLES.items():
            for k, v in getattr(self, table).items():
                yield f"{prefix}.{k}", repr(v) if isinstance(v, float) else str(v)
        if self.absent:
            yield "absent", ",".join(sorted(self.absent))
        if self.parts != 1:
            yield "parts", str(self.parts)
        if self.steps != 1:
            yield "steps", str(self.steps)
        if self.fault:
            yield "fault", self.fault
        yield "seed", str(self.seed)

    @classmethod
    def parse(cls, text: str, base: Recipe | None = None) -> Recipe:
        """The recipe of a line, as a change of `base`; KitError says which word can't be read."""
        name, _, rest = text.partition("?")
        base = base or cls(name)
        made: dict[str, Any] = {k: dict(getattr(base, k)) for k in TABLES.values()}
        for word in filter(None, rest.split("&")):
            key, equals, value = word.partition("=")
            prefix, _, member = key.partition(".")
            try:
                if not equals:
                    raise ValueError
                if prefix in TABLES and member and value:
                    made[TABLES[prefix]][member] = READ.get(prefix, str)(value)
                elif prefix in TABLES and member:
                    made[TABLES[prefix]].pop(member, None)
                elif key in ("seed", "parts", "steps"):
                    made[key] = int(value) if value or key == "seed" else 1
                elif key == "dots":
                    made[key] = tuple(map(int, value.split("x"))) if value else ()
                elif key == "absent":
                    made[key] = frozenset(filter(None, value.split(",")))
                elif key == "fault":
                    made[key] = value
                else:
                    raise ValueError
            except ValueError:
                raise KitError(f"case {text!r}: can't read '{word}'") from None
        return replace(base, **made)


TABLES = {"axis": "axes", "attr": "attrs", "fill": "fills", "lay": "lays", "type": "types"}
"""The tables of a recipe, by the word that stands for them in a line."""


def _attribute(text: str) -> Attribute:
    if text in ("True", "False"):
        return text == "True"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


READ: dict[str, Callable[[str], Attribute]] = {"axis": int, "attr": _attribute}
"""How the values of a table are read; others are text."""
