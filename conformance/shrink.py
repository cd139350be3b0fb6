"""Making a failing case small: one thing at a time becomes simpler, as long as the same property still fails.

Works on the lines that name cases and a judge; knows no backend. Bounded in tries and in time, since every try may
crash or hang.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from .effects import Program
from .recipe import Recipe
from .spaces import arguments, attribute_choices, axis_names, default, find, legal, read, text

TRIES = 120


def shrink(case: str, fails: Callable[[str], bool], *, seconds: float) -> str:
    """The simplest case found that still fails; `fails` judges one. Cases of whole models stay as they are."""
    end, tries, seen = time.monotonic() + seconds, 0, {case}
    while True:
        for simpler in simpler_cases(case):
            if simpler in seen:
                continue
            if tries >= TRIES or time.monotonic() > end:
                return case
            seen.add(simpler)
            tries += 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def simpler_cases(case: str) -> Iterator[str]:
    """Cases that are simpler in one thing, the boldest first."""
    level, _, rest = case.partition("/")
    if level == "ops":
        yield from (f"ops/{text(r)}" for r in _simpler(read(rest)))
    elif level == "effects":
        yield from map(str, Program.parse(rest).simpler())
    elif level == "graph":
        yield from (re.sub(r"tokens=\d+", f"tokens={n}", case) for n in (1, 2, 5))


def _simpler(r: Recipe) -> Iterator[Recipe]:
    """Recipes that are simpler in one thing, the boldest first."""
    op = find(r.op)
    base = default(op)
    if r.steps > 1:  # as many rows as steps, and nothing else about it is large
        for n in (2, 8, 32, 128):
            if n < r.steps:
                yield r.but(steps=n, axes={**r.axes, "tokens": n})
        return
    yield legal(r.but(lays={}))
    yield legal(r.but(lays={}, types=base.types, fills=base.fills))
    for name in r.lays:
        yield legal(r.but(lays={k: v for k, v in r.lays.items() if k != name}))
    for a in arguments(op):
        if a.optional and a.name not in r.absent:
            yield legal(r.but(absent=r.absent | {a.name}))
    for table in ("types", "fills"):
        for k, v in getattr(r, table).items():
            plain = getattr(base, table).get(k)
            if plain is not None and plain != v:
                yield legal(r.but(**{table: {**getattr(r, table), k: plain}}))
    for k in r.attrs:
        if r.attrs[k] != attribute_choices(op, k)[0]:
            yield legal(r.but(attrs={**r.attrs, k: attribute_choices(op, k)[0]}))
        if type(r.attrs[k]) is int and int(r.attrs[k]) > 1:
            for n in (1, int(r.attrs[k]) // 2, int(r.attrs[k]) - 1):
                yield legal(r.but(attrs={**r.attrs, k: n}))
    if r.parts > 1:
        yield r.but(parts=1)
    for i, n in enumerate(r.dots):
        for smaller in _smaller(n):
            yield r.but(dots=(*r.dots[:i], smaller, *r.dots[i + 1 :]))
    if len(r.dots) > 1:
        yield r.but(dots=r.dots[:1])
    for name in axis_names(op):
        for smaller in _smaller(r.axes[name]):
            yield legal(r.but(axes={**r.axes, name: smaller}))
    if r.seed:
        yield r.but(seed=0)


def _smaller(n: int) -> list[int]:
    return sorted({m for m in (1, 2, n // 4, n // 2, n - 1) if 0 < m < n})
