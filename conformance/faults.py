"""Calls that break an op's contract, so that a kernel's refusal is seen, and what it leaves behind.

Each fault changes a legal call in one place. What the reference answers is a ValueError. Knows ops; knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .build import Call

FAULTS: dict[str, Callable[[Call], Call]] = {}


def fault(f: Callable[[Call], Call]) -> Callable[[Call], Call]:
    FAULTS[f.__name__] = f
    return f


@fault
def k_above(c: Call) -> Call:
    """More of the largest than there are."""
    c.attrs["k"] = c.args["scores"].shape[1] + 1
    return c


@fault
def empty_rows(c: Call) -> Call:
    """Rows in which there is nothing to choose."""
    c.args["scores"] = c.args["scores"][:, :0].copy()
    return c


def _last(c: Call, name: str, value: int) -> Call:
    a = c.args[name]
    if a.size:
        a.reshape(-1)[-1] = value
    return c


@fault
def experts(c: Call) -> Call:
    """An expert that is none."""
    return _last(c, "experts", c.args["weight"].shape[0])


@fault
def ids(c: Call) -> Call:
    """A row past the end of the table."""
    return _last(c, "ids", c.args["table"].shape[0])


@fault
def at(c: Call) -> Call:
    """A row past the end."""
    return _last(c, "at", c.args["x"].shape[0])


@fault
def component(c: Call) -> Call:
    """A component that positions lack."""
    return _last(c, "component", c.args["positions"].shape[1])


@fault
def pages(c: Call) -> Call:
    """A page past the end of the cache, where one is needed."""
    table = c.args["block_table"]
    table[table >= 0] = np.int32(next(len(a) for p, a in c.states() if p.axes[0].text == "pages"))
    return c


@fault
def selected(c: Call) -> Call:
    """A block that no row sees whole."""
    if c.args["selected"] is not None:
        c.args["selected"][...] = 1000
    return c


@fault
def slots(c: Call) -> Call:
    """A slot past the end."""
    c.args["slots"][...] = next(len(a) for p, a in c.states() if p.axes[0].text == "slot")
    return c
