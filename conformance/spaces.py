"""The space of legal calls of each op: sizes, attributes, fillings and types worth trying, the simplest first.

What is not said here follows from the op's signature. Knows signatures; makes no array and knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from trueup.core.dtypes import DTYPES
from trueup.core.op import OPS, Op

from .adversarial import INFINITE, NAN, PLAIN, SELECTION
from .errors import KitError
from .recipe import Recipe
from .weights import BLOCKS
from .weights import PLAIN as PLAIN_WEIGHTS

Choices = Sequence[Any]

SIZES = (4, 1, 0, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 63, 64, 65)
AXES: dict[str, Choices] = {
    "rows": (3, 1, 0, 2, 5, 7, 16, 33), "tokens": (3, 1, 0, 2, 5, 7, 12, 17), "outs": (3, 1, 0, 5),
    "seqs": (1, 2, 3, 0, 5), "slot": (1, 2, 6), "pages": (1, 2, 5), "blocks": (1, 2, 3), "entries": (4, 1, 2, 3, 8),
    "heads": (2, 1, 3, 4, 5), "kv": (1, 2, 3), "group": (2, 1, 3), "kheads": (1, 2, 3), "rep": (1, 2, 3),
    "d": (8, 4, 6, 16, 31, 64, 128), "dv": (4, 8, 1, 5, 16, 33, 128), "dk": (4, 8, 1, 5, 16, 33, 128),
    "streams": (2, 1, 3, 4), "groups": (2, 1, 3, 4), "half": (2, 1, 0, 4, 16), "components": (1, 3),
    "candidates": (8, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 257, 1025), "vocab": (5, 1, 2, 33), "e": (4, 1, 2, 8, 33),
    "k": (2, 1, 3, 8), "taps": (4, 2, 1, 3), "channels": (4, 1, 3, 17, 33), "picks": (2, 1, 0, 4), "per": (2, 1, 3),
}  # fmt: skip
"""Sizes of axes by name; others are of SIZES."""

FEW = 5
"""Rows that are not padding where `cu_seqlens` is filled so."""
NUMBERS = (*PLAIN, *NAN, *INFINITE, "denormal")
LENGTHS: dict[str, Choices] = {
    "cu_seqlens": ("ragged", "padded", "ones", "none"), "past": ("some", "zero", "full"),
    "block_table": ("distinct",), "slots": ("distinct",), "keep": ("some", "none", "all"),
}  # fmt: skip
"""How the arguments that describe sequences are made; see `indices`."""

ATTRIBUTES: dict[str, Choices] = {
    "eps": (1e-6, 1e-5, 0.0), "scale": (1.0, 0.125, 0.7071067811865476), "every": (1, 4, 2, 3), "block": (1, 4, 2),
    "window": (0, 3, 1, 8), "chunk": (4, 1, 3, 16, 64), "tiled": (False, True), "dilation": (1, 3, 2), "by": (1, 3, 2, 0),
    "heads": (2, 1, 3, 4), "streams": (2, 1, 4, 0), "start": (0, 1, 3), "size": (4, 1, 0, 7), "interleaved": (False, True),
    "inverse": (False, True), "eos": (0, 7), "activation": ("silu", "sigmoid"), "limit": (inf, 1.0, 7.0),
    "low": (-inf, -1.0), "high": (inf, 0.5), "floor": (0.0, 6.103515625e-5),
}  # fmt: skip
"""Attributes by name."""


FULL = {"past": "full"}
LARGE: dict[str, tuple[int, dict[str, int], dict[str, str]]] = {
    "rows": (131, {}, {}), "tokens": (131, {"seqs": 3}, {}), "outs": (131, {}, {}), "seqs": (131, {"tokens": 300}, {}),
    "n": (4099, {}, {}), "m": (4099, {}, {}), "d": (259, {}, {}), "dk": (259, {}, {}), "dv": (259, {}, {}),
    "channels": (4099, {}, {}), "taps": (67, {"tokens": 131}, {}), "vocab": (4099, {}, {"ids": "ends"}),
    "heads": (129, {}, {}), "kv": (129, {}, {}), "group": (129, {}, {}), "kheads": (65, {}, {}), "rep": (65, {}, {}),
    "groups": (129, {}, {}), "streams": (17, {}, {}), "half": (259, {}, {}), "components": (5, {}, {}), "per": (131, {}, {}),
    "slot": (4097, {}, {}), "pages": (1027, {}, {}), "blocks": (1027, {}, FULL), "entries": (259, {}, FULL),
    "picks": (2051, {"blocks": 130, "entries": 17}, FULL | {"selected": "all"}),
    "e": (513, {"tokens": 67}, {}), "k": (131, {"e": 137}, {}), "candidates": (40_099, {}, {}),
}  # fmt: skip
"""Of each axis a size as models have them, and odd; with the other sizes and fillings without which it shows nothing."""
LARGE_ATTRIBUTES: dict[str, tuple[int, dict[str, int], dict[str, str]]] = {
    "window": (129, {"blocks": 80}, FULL), "block": (67, {"blocks": 80}, FULL), "every": (67, {}, FULL),
    "chunk": (67, {"tokens": 200}, {}), "by": (131, {"tokens": 300}, {}), "dilation": (67, {"tokens": 300}, {}),
    "streams": (17, {}, {}), "heads": (129, {}, {}), "start": (131, {}, {}), "size": (4099, {}, {}),
}  # fmt: skip
"""The same of attributes that are sizes."""
LARGE_DOTS = ((4099,), (131, 67))


@dataclass(frozen=True)
class Space:
    """What of an op's space differs from the tables above."""

    axes: Mapping[str, Choices] = field(default_factory=dict)
    attrs: Mapping[str, Choices] = field(default_factory=dict)
    fills: Mapping[str, Choices] = field(default_factory=dict)
    types: Mapping[str, Choices] = field(default_factory=dict)
    dots: Choices = ((3,), (1,), (0,), (2, 3), (33,), (2, 1, 3))
    faults: Choices = ()
    """Names of `faults` that apply: calls that break the contract."""
    reads_shared: bool = False
    """Whether pages may belong to several sequences, as they do between forks: true of what only reads them."""


WEIGHT = (*PLAIN_WEIGHTS, *BLOCKS)
FINITE = (*PLAIN, "denormal")
DELTA: dict[str, Choices] = {
    "q": ("unit", "normal", "zeros", "nan"), "k": ("unit", "zeros", "onehot", "nan"), "v": ("normal", "zeros", "nan", "spread"),
    "decay": ("decay", "forget", "zeros", "nan"), "beta": ("chance", "binary", "zeros"), "state": ("normal", "zeros"),
}  # fmt: skip
TAIL: dict[str, Choices] = {"tail": ("normal", "zeros", "nan")}
ROWS = {"any": ("f32", "i32", "f16")}

SPACES: dict[str, Space] = {
    "top_k": Space(fills={"scores": (*PLAIN, *NAN, *INFINITE, *SELECTION, "denormal")},
                   attrs={"k": (1, 2, 0, 3, 8, 33, 64, 1025)}, faults=("k_above",)),
    "argmax": Space(fills={"scores": (*PLAIN, *NAN, *INFINITE, *SELECTION, "denormal")},
                    axes={"candidates": (8, 1, 2, 3, 31, 33, 64, 65, 257, 1025)}, faults=("empty_rows",)),
    "linear": Space(types={"weight": WEIGHT}, axes={"m": (4, 1, 0, 3, 17, 33), "n": (8, 1, 0, 5, 31, 33, 64, 257)}),
    "expert_linear": Space(types={"weight": WEIGHT}, axes={"m": (4, 1, 0, 3, 17), "n": (8, 1, 0, 5, 33)},
                           fills={"experts": ("distinct", "repeated", "one", "none")}, faults=("experts",)),
    "expert_combine": Space(types={"weight": WEIGHT}, axes={"m": (4, 1, 0, 3, 33), "n": (8, 1, 0, 5, 17)},
                            fills={"experts": ("distinct", "repeated", "one", "none"), "mix": ("chance", "zeros", "normal")},
                            faults=("experts",)),
    "embed": Space(types={"table": WEIGHT}, axes={"n": (8, 1, 0, 33)}, fills={"ids": ("any", "ends")}, faults=("ids",)),
    "take_rows": Space(types={"x": ROWS["any"]}, fills={"at": ("any", "ends", "none")}, faults=("at",)),
    "rope": Space(fills={"positions": ("small", "long", "zero"), "component": ("cycle",), "freqs": ("freqs",),
                         "x": NUMBERS}, attrs={"start": (0, 2)}, faults=("component",)),
    "attention": Space(fills=LENGTHS | {"q": (*PLAIN, *NAN), "keys": (*PLAIN, *NAN), "values": (*PLAIN, *NAN),
                                        "selected": ("some", "all", "none", "repeated")},
                       reads_shared=True, faults=("pages", "selected")),
    "index_scores": Space(fills=LENGTHS | {"q": (*PLAIN, *NAN), "keys": (*PLAIN, *NAN), "weights": PLAIN},
                          reads_shared=True, faults=("pages",)),
    "merge_attention": Space(fills={"outs": (*PLAIN, *NAN), "lses": ("lse", "normal", "allmasked", "nan"),
                                    "sinks": ("normal", "zeros")}),
    "paged_append": Space(fills=LENGTHS | {"rows": NUMBERS}, types={"rows": ROWS["any"]}, faults=("pages",)),
    "causal_conv": Space(fills=LENGTHS | TAIL, types={"weight": PLAIN_WEIGHTS}, faults=("slots",)),
    "trailing_mean": Space(fills=LENGTHS | TAIL, faults=("slots",)),
    "delay": Space(fills=LENGTHS | TAIL, types={"x": ROWS["any"]}, faults=("slots",)),
    "gated_delta_rule": Space(fills=LENGTHS | DELTA, faults=("slots",)),
    "gdn_decay": Space(fills={"rate": ("rates",), "a": (*PLAIN, *NAN, *INFINITE)}),
    "chunk_wy": Space(fills=LENGTHS | {k: DELTA[k] for k in ("k", "v", "decay", "beta")}),
    "chunk_delta_scan": Space(fills=LENGTHS | {k: DELTA[k] for k in ("q", "k", "decay", "state")}
                              | {"w": ("unit", "zeros"), "u": ("normal", "zeros")}, faults=("slots",)),
    "ngram_rows": Space(axes={"n": (3, 2, 1)}, fills=LENGTHS | {"ids": ("any", "eos"), "context": ("ids",)},
                        faults=("slots",)),
    "normalize": Space(fills={"x": ("chance", *PLAIN, *NAN)}),
    "softmax": Space(fills={"x": (*NUMBERS, "masked", "allmasked", "limits", "onehot")}),
    "concat": Space(fills={"a": (*NUMBERS, "special"), "b": (*NUMBERS, "special")}),
    "contiguous": Space(types={"x": ROWS["any"]}, fills={"x": (*NUMBERS, "special")}),
    "split_heads": Space(types={"x": ROWS["any"]}),
    "merge_heads": Space(types={"x": ROWS["any"]}),
    "columns": Space(types={"x": ROWS["any"]}),
    "repeat_streams": Space(fills={"x": (*NUMBERS, "special")}),
    "hc_read": Space(axes={"n": (8, 1, 0, 17)}), "hc_write": Space(axes={"n": (8, 1, 0, 17)}),
    "add": Space(fills={"a": (*NUMBERS, "special"), "b": (*NUMBERS, "special")}),
    "clamp": Space(fills={"x": (*NUMBERS, "special", "limits")}),
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One argument's choices."""

    name: str
    fills: Choices
    types: Choices
    lays: Choices
    optional: bool


def find(name: str) -> Op:
    """The op of a name; KitError where there is none."""
    if name not in OPS:
        raise KitError(f"there is no op '{name}'; known are {', '.join(sorted(OPS))}")
    return OPS[name]


def space(op: Op) -> Space:
    return SPACES.get(op.name, Space())


def axis_names(op: Op) -> list[str]:
    """The names of an op's signature that are sizes, not attributes, in order."""
    seen: dict[str, None] = {}
    for p in op.params:
        for a in p.axes:
            seen.update(dict.fromkeys(sorted(n for n in a.names if n not in op.attributes)))
    return list(seen)


def has_dots(op: Op) -> bool:
    return any(a.dots for p in op.params for a in p.axes)


def axis_choices(op: Op, name: str) -> Choices:
    return space(op).axes.get(name) or AXES.get(name, SIZES)


def attribute_choices(op: Op, name: str) -> Choices:
    given = space(op).attrs.get(name) or ATTRIBUTES.get(name)
    if given is not None:
        return given
    kind = op.attributes[name].annotation
    default: dict[Any, Choices] = {int: (1, 2), float: (1.0, 0.5), bool: (False, True), str: ("",)}
    return default[kind]


def arguments(op: Op) -> list[Argument]:
    """Every argument with the fillings, types and layouts worth trying."""
    out, s = [], space(op)
    for p in op.params:
        index = p.dtype in ("i32", "i64")
        fills = s.fills.get(p.name) or (("any",) if index else NUMBERS)
        types = s.types.get(p.name) or (("f32", "f16", "bf16") if p.dtype == "weight" else (p.dtype or "f32",))
        types = ("f32",) if types == ("any",) else types
        lays: Choices = ("row",)
        first = p.axes[0].text if p.axes else ""
        if p.mutates or first in ("slot", "pages"):
            lays = ("row", "region") if len(p.axes) > 2 else ("row",)
        elif p.dtype != "weight" and not index and not p.variadic and (len(p.axes) > 1 or has_dots(op)):
            lays = ("row", "columns", "heads") if len(p.axes) > 2 else ("row", "columns")
        out.append(Argument(p.name, fills, types, lays, p.optional))
    return out


def default(op: Op, **changes: Any) -> Recipe:
    """The simplest legal call of an op, changed as told, and made legal again."""
    r = Recipe(
        op.name,
        axes={n: axis_choices(op, n)[0] for n in axis_names(op)},
        attrs={n: attribute_choices(op, n)[0] for n in op.attributes},
        dots=space(op).dots[0] if has_dots(op) else (),
        fills={a.name: a.fills[0] for a in arguments(op)},
        types={a.name: a.types[0] for a in arguments(op) if len(a.types) > 1},
        absent=frozenset(a.name for a in arguments(op) if a.optional),
    )
    return legal(change(r, **changes))


def text(r: Recipe) -> str:
    """The line that replays a recipe: `top_k?axis.rows=3&seed=7`, what it does not say being the op's simplest call."""
    return r.line(default(find(r.op)))


def read(line: str) -> Recipe:
    """The recipe of such a line; KitError where it can't be read, or names what the op has not."""
    op = find(line.partition("?")[0])
    r = Recipe.parse(line, default(op))
    names = [a.name for a in arguments(op)]
    for word, found, known in (
        ("axis", r.axes, axis_names(op)),
        ("attr", r.attrs, list(op.attributes)),
        ("fill", r.fills, names),
        ("lay", r.lays, names),
        ("type", r.types, names),
        ("absent", r.absent, names),
    ):
        for name in found:
            if name not in known:
                raise KitError(
                    f"case {line!r}: {op.name} has no {name!r} for '{word}', only {', '.join(known) or 'none'}"
                )
    return r


def change(r: Recipe, **changes: Any) -> Recipe:
    """A recipe with entries of its tables replaced: `axes={"rows": 2}` leaves other axes."""
    merged = {
        k: {**getattr(r, k), **v} if k in ("axes", "attrs", "fills", "lays", "types") else v for k, v in changes.items()
    }
    return r.but(**merged)


LEGAL: dict[str, Callable[[dict[str, int], dict[str, Any]], None]] = {}
"""By op, what makes sizes and attributes agree."""


def _legal(*ops: str) -> Callable[[Callable[[dict[str, int], dict[str, Any]], None]], None]:
    def add(f: Callable[[dict[str, int], dict[str, Any]], None]) -> None:
        LEGAL.update(dict.fromkeys(ops, f))

    return add


def legal(r: Recipe) -> Recipe:
    """The nearest legal recipe: sizes that must agree do, tables are wide enough, indices have something to name."""
    op = find(r.op)
    a: dict[str, int] = dict(r.axes)
    t: dict[str, Any] = dict(r.attrs)
    names = {p.name for p in op.params}
    for name, dtype in r.types.items():
        block, last = DTYPES[dtype].block, next(p for p in op.params if p.name == name).axes[-1]
        if block > 1 and last.plain:
            a[last.text] = -(-a[last.text] // block) * block
    if r.op in LEGAL:
        LEGAL[r.op](a, t)
    if "block_table" in names:
        a["entries"] = max(1, a["entries"])
        held, rows = a["entries"] * t.get("every", 1), a["tokens"]
        rows = min(rows, FEW) if r.fills.get("cu_seqlens") == "few" else rows
        a["blocks"] = max(a["blocks"], -(-rows // held) if a["seqs"] else 0)
        a["pages"] = max(1, a["pages"], a["seqs"] * a["blocks"])
    if "slot" in a:
        a["slot"] = max(1, a["slot"], a["seqs"] + (0 if "keep" in r.absent else min(a["tokens"], 3)))
    if "heads" in t and op.view and r.op == "split_heads":
        t["heads"] = max(1, t["heads"])
    lays = {k: v for k, v in r.lays.items() if v != "row"}
    return r.but(axes=a, attrs=t, lays=lays)


@_legal("top_k")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    t["k"] = min(t["k"], a["candidates"])


@_legal("argmax")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["candidates"] = max(1, a["candidates"])


@_legal("columns")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["n"] = max(a["n"], t["start"] + t["size"])


@_legal("rope")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["d"], a["components"] = max(a["d"], t["start"] + 2 * a["half"]), max(1, a["components"])


@_legal("causal_conv")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["taps"], t["dilation"] = max(1, a["taps"]), max(1, t["dilation"])


@_legal("ngram_rows")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["n"] = max(1, a["n"])


@_legal("embed")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["vocab"] = max(1, a["vocab"])


@_legal("gated_delta_rule", "chunk_wy", "chunk_delta_scan")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["kheads"], a["rep"] = max(1, a["kheads"]), max(1, a["rep"])


@_legal("attention")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["kv"], a["group"] = max(1, a["kv"]), max(1, a["group"])


@_legal("merge_attention")
def _(a: dict[str, int], t: dict[str, Any]) -> None:
    a["heads"] = max(1, a["heads"])
