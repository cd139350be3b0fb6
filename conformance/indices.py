"""Arguments that are indices: made valid by construction, in the ways that kernels confuse.

Each maker is found by the argument's name, since all ops name the same thing alike: `cu_seqlens`, `past`,
`block_table`,
`slots`, `keep`, `selected`, `experts`, … A maker knows the sizes, the attributes and the arguments made before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .recipe import Recipe

Array = NDArray[Any]


@dataclass
class Making:
    """What a maker may look at."""

    recipe: Recipe
    sizes: Mapping[str, Any]
    """Axes and attributes."""
    made: dict[str, Any]
    shape: tuple[int, ...]
    rng: np.random.Generator
    shared: bool
    """Whether pages may belong to several sequences."""

    @property
    def how(self) -> str:
        return self.recipe.fills.get(self._name, "any")

    _name: str = ""

    def spans(self) -> list[tuple[int, int]]:
        cu = self.made["cu_seqlens"]
        return [(int(cu[s]), int(cu[s + 1])) for s in range(len(cu) - 1)]

    @property
    def every(self) -> int:
        return int(self.sizes.get("every", 1))


Maker = Callable[[Making], Any]
MAKERS: dict[str, Maker] = {}


def maker(f: Maker) -> Maker:
    MAKERS[f.__name__] = f
    return f


def make(name: str, m: Making) -> Array | None:
    """The index argument of this name, or None where it is none that the kit knows."""
    if name not in MAKERS:
        return None
    m._name = name
    out: Array = np.asarray(MAKERS[name](m))
    return out


@maker
def cu_seqlens(m: Making) -> Any:
    """ "ragged": cuts anywhere, so that some sequences are empty; "padded": rows are left over; "ones": a row each;
    "none": padding alone; "few": at most 5 rows, the rest padding."""
    tokens, seqs = m.sizes["tokens"], m.shape[0] - 1
    total = tokens
    if m.how == "padded" and tokens:
        total = int(m.rng.integers(0, tokens))
    elif m.how in ("none", "few"):
        total = min(tokens, 5) if m.how == "few" else 0
    if m.how == "ones":
        return np.minimum(np.arange(seqs + 1), total)
    cuts = np.sort(m.rng.integers(0, total + 1, size=max(seqs - 1, 0)))
    return np.array([0, *cuts, total] if seqs else [0])


@maker
def past(m: Making) -> Any:
    """ "zero", "full" (the table's last place is used), or anywhere between."""
    held = m.sizes["blocks"] * m.sizes["entries"] * m.every + m.every - 1
    out = np.zeros(m.shape, np.int64)
    for s, (a, b) in enumerate(m.spans()):
        room = held - (b - a)
        if a < b and m.how != "zero":
            out[s] = room if m.how == "full" else m.rng.integers(0, room + 1)
    return out


@maker
def block_table(m: Making) -> Any:
    """Pages in no order, -1 where none is needed. Shared: every sequence reads the same pages, as forks do."""
    seqs, blocks = m.shape
    pages = m.rng.permutation(m.sizes["pages"])
    out = np.full(m.shape, -1)
    for s, (a, b) in enumerate(m.spans()):
        entries = (int(m.made["past"][s]) + b - a) // m.every if a < b else 0
        used = min(blocks, -(-entries // m.sizes["entries"]))
        first = 0 if m.shared and m.recipe.seed % 3 == 1 else s * blocks
        out[s, :used] = pages[first : first + used]
    return out


@maker
def slots(m: Making) -> Any:
    """Distinct, in no order; -1 where a sequence has no rows."""
    out = m.rng.permutation(m.sizes["slot"])[: m.shape[0]]
    return [-1 if a == b else s for s, (a, b) in zip(out, m.spans(), strict=True)]


@maker
def keep(m: Making) -> Any:
    """Slots that no sequence has, for some rows; -1 elsewhere, and in padding."""
    out = np.full(m.shape, -1)
    if m.how == "none":
        return out
    taken = set(m.made["slots"].tolist())
    free = [s for s in m.rng.permutation(m.sizes["slot"]).tolist() if s not in taken]
    rows = [t for a, b in m.spans() for t in range(a, b)]
    chosen = m.rng.permutation(len(rows))[: len(free)].tolist()
    for t, s in zip(chosen, free, strict=False):
        out[rows[t]] = s
    return out


@maker
def selected(m: Making) -> Any:
    """Blocks that are whole for their row: "some" and -1, "all" that fit, "repeated", or "none"."""
    block = int(m.sizes.get("block", 1))
    out = np.full(m.shape, -1)
    for s, (a, b) in enumerate(m.spans()):
        for t in range(a, b):
            whole = (int(m.made["past"][s]) + t - a + 1) // m.every // block
            if m.how == "none" or not whole or not m.shape[1]:
                continue
            picks = m.rng.permutation(whole)[: m.shape[1]]
            if m.how == "repeated":
                picks = np.repeat(picks[:1], m.shape[1])
            elif m.how == "some":
                picks = picks[: int(m.rng.integers(0, len(picks) + 1))]
            out[t, : len(picks)] = picks
            out[t] = m.rng.permutation(out[t])
    return out


@maker
def experts(m: Making) -> Any:
    """ "distinct" in a row, "repeated", all rows to "one", or "none" for some."""
    e, (tokens, k) = m.sizes["e"], m.shape
    if not e:
        return np.full(m.shape, -1)
    if m.how == "one":
        return np.full(m.shape, m.rng.integers(e))
    if m.how == "repeated":
        return m.rng.integers(0, e, size=m.shape)
    out = np.full(m.shape, -1)
    for t in range(tokens):
        picks = m.rng.permutation(e)[:k]
        out[t, : len(picks)] = picks
    if m.how == "none":
        out[m.rng.random(m.shape) < 0.5] = -1
    return out


@maker
def at(m: Making) -> Any:
    """Rows, or -1 for none."""
    rows = m.sizes["rows"]
    if m.how == "none":
        return np.full(m.shape, -1)
    if m.how == "ends":
        return np.array([rows - 1, 0 if rows else -1, -1])[m.rng.integers(0, 3, size=m.shape)]
    return m.rng.integers(-1, rows, size=m.shape)


@maker
def ids(m: Making) -> Any:
    """Rows of a table; or tokens, of which "eos" is one in two."""
    vocab = m.sizes.get("vocab", 1000)
    if m.how == "ends":
        return np.array([0, vocab - 1])[m.rng.integers(0, 2, size=m.shape)]
    out = m.rng.integers(0, vocab, size=m.shape)
    return np.where(m.rng.random(m.shape) < 0.5, m.sizes["eos"], out) if m.how == "eos" else out


@maker
def context(m: Making) -> Any:
    return np.where(m.rng.random(m.shape) < 0.3, m.sizes["eos"], m.rng.integers(0, 1000, size=m.shape))


@maker
def positions(m: Making) -> Any:
    return m.rng.integers(0, {"zero": 1, "small": 64}.get(m.how, 262144), size=m.shape)


@maker
def component(m: Making) -> Any:
    return np.arange(m.shape[0]) % m.sizes["components"]


@maker
def multipliers(m: Making) -> Any:
    return m.rng.integers(1, 1 << 62, size=m.shape)


@maker
def offsets(m: Making) -> Any:
    return m.rng.integers(0, 1 << 20, size=m.shape)


@maker
def sizes(m: Making) -> Any:
    return m.rng.integers(1, 1 << 20, size=m.shape)
