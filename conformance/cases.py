"""Which calls are tried: those that must be met, by construction, and those that hypothesis draws.

Everything is a recipe, and follows from the op, the backend's declared thresholds and a seed. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from trueup.core.op import Op

from .recipe import Recipe
from .spaces import (
    LARGE,
    LARGE_ATTRIBUTES,
    LARGE_DOTS,
    PLAIN_WEIGHTS,
    arguments,
    attribute_choices,
    axis_choices,
    axis_names,
    change,
    default,
    has_dots,
    legal,
    space,
)

GRID = (65_535, 65_536, 65_537)
"""Rows around the largest grid dimension of GPU APIs."""
DRIFT = 512
"""Steps over which a state's drift is measured."""
ROW_AXES = ("rows", "tokens", "outs")
BUDGET = 2048
"""Entries that sparse attention chooses; with an unfinished block it asks for a few more."""
ODD = (1, 2, 3, 31, 32, 33, 63, 64, 127, 1023, 1025, 2700, 4097)
"""Lengths of rows on both sides of whole lanes, workgroups and powers of two."""
LONG: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "top_k": ({"rows": 1, "candidates": GRID[-1] + 1}, {"scores": "sorted"}),
    "argmax": ({"rows": 1, "candidates": GRID[-1] + 1}, {"scores": "sorted"}),
    "linear": ({"n": 2, "m": GRID[-1]}, {}),
    "embed": ({"n": 2, "vocab": GRID[-1]}, {"ids": "ends"}),
    "index_scores": ({"tokens": 1, "d": 4, "heads": 1, "entries": 64, "blocks": 1025}, {"past": "full"}),
    "attention": ({"tokens": 1, "d": 4, "dv": 4, "kv": 1, "group": 1, "entries": 64, "blocks": 1025}, {"past": "full"}),
}
"""Sizes and fillings for more than a grid's largest dimension along an axis that is not the rows'."""
QUICK = ("paged_append", "delay", "trailing_mean", "causal_conv")
"""Ops of sequences whose bodies take many rows at once."""
BUSY: dict[str, dict[str, int]] = {
    "top_k": {"candidates": 3}, "argmax": {"candidates": 3}, "linear": {"n": 2, "m": 2}, "embed": {"n": 2, "vocab": 3},
}  # fmt: skip
"""Sizes for the cases of many rows where the smallest choices are no test."""


def explicit(op: Op, thresholds: Mapping[str, Sequence[int]], max_rows: int | None = None) -> list[Recipe]:
    """The cases that every run meets: each choice of each argument, axis and attribute; thresholds on both sides; many
    rows; wrong calls."""
    found = [
        default(op),
        default(op, absent=frozenset()),
        *_drift(op),
        *_company(op),
        *_long(op),
        *_large(op),
        *_selections(op),
        *_choices(op),
        *_lays(op),
        *_thresholds(op, thresholds),
    ]
    found += [default(op, parts=n) for n in (2, 3, 4) if any(p.variadic for p in op.params)]
    found += [default(op, absent=frozenset(), fault=f) for f in space(op).faults]
    found += [r for n in GRID if max_rows is None or n <= max_rows for r in _many_rows(op, n)]
    return [r.but(seed=i) for i, r in enumerate({str(r): r for r in found}.values())]


def _choices(op: Op) -> Iterator[Recipe]:
    """One thing changed at a time, every optional argument there; fillings on shapes that show them, too."""
    full = default(op, absent=frozenset())
    wide = {
        "axes": {n: axis_choices(op, n)[-1] for n in axis_names(op) if n in ("candidates", "rows", "tokens", "d", "dk")}
    }
    for a in arguments(op):
        for f in a.fills:
            yield legal(change(full, fills={a.name: f}))
            yield legal(change(change(full, **wide), fills={a.name: f}))
        for t in a.types:
            if len(a.types) > 1:
                yield legal(change(full, types={a.name: t}))
                yield legal(change(change(full, **wide), types={a.name: t}))
        if "mxfp4" in a.types:
            others = {b.name: "spread" for b in arguments(op) if "spread" in b.fills}
            yield legal(change(full, types={a.name: "mxfp4"}, fills={**others, a.name: "zeros"}))
        if a.optional:
            yield default(op, absent=frozenset({a.name}))
    for n in axis_names(op):
        for size in axis_choices(op, n):
            yield legal(change(full, axes={n: size}))
    for n in op.attributes:
        for value in attribute_choices(op, n):
            yield legal(change(full, attrs={n: value}))
            yield legal(change(change(full, **wide), attrs={n: value}))
    if has_dots(op):
        for dots in space(op).dots:
            yield full.but(dots=dots)


def _lays(op: Op) -> Iterator[Recipe]:
    """Each argument strided alone, then all together; one tensor for two arguments."""
    full = default(op, absent=frozenset())
    if has_dots(op):  # of one axis nothing is strided
        full = full.but(dots=(2, 3))
    others = {a.name: a.lays[1:] for a in arguments(op) if len(a.lays) > 1}
    for name, lays in others.items():
        for lay in lays:
            yield full.but(lays={name: lay})
    for i in range(max(map(len, others.values()), default=0)):
        yield full.but(lays={name: lays[min(i, len(lays) - 1)] for name, lays in others.items()})
    for first, second in _alike(op):
        yield full.but(lays={second: f"same:{first}"})


def _alike(op: Op) -> Iterator[tuple[str, str]]:
    """Pairs of arguments of one shape and type, neither a weight nor written nor an index."""
    plain = [p for p in op.params if not (p.mutates or p.variadic or p.optional or p.dtype is not None)]
    plain = [p for p in plain if p.axes[0].text not in ("pages", "slot")]
    for i, p in enumerate(plain):
        for q in plain[i + 1 :]:
            if p.axes_text == q.axes_text:
                yield p.name, q.name


def _thresholds(op: Op, thresholds: Mapping[str, Sequence[int]]) -> Iterator[Recipe]:
    """Both sides of every size at which a kernel changes its way, given by axis (or attribute), or by op.axis."""
    for key, sizes in thresholds.items():
        name = key.removeprefix(f"{op.name}.")
        for size in sorted({n for s in sizes for n in (s - 1, s, s + 1) if n >= 0}):
            if name in axis_names(op):
                yield legal(change(default(op, absent=frozenset()), axes={name: size}))
            elif op.attributes.get(name) is not None and op.attributes[name].annotation is int:
                wide = {"candidates": size + 1} if name == "k" else {}
                yield legal(change(default(op, absent=frozenset()), axes=wide, attrs={name: size}))


def _company(op: Op) -> Iterator[Recipe]:
    """Several sequences of unlike lengths, also as many rows of each as there are sequences; with each optional argument
    and without."""
    if "cu_seqlens" not in {p.name for p in op.params}:
        return
    optional = frozenset(p.name for p in op.params if p.optional)
    some = [frozenset[str](), optional, *(optional - {n} for n in sorted(optional))]
    for absent in dict.fromkeys(some):
        for seqs, tokens, how in ((3, 12, "ragged"), (2, 4, "ragged"), (3, 3, "ones"), (3, 7, "padded")):
            axes = {"seqs": seqs, "tokens": tokens, "blocks": 3, "slot": 6}
            yield _possible(op, axes, {"cu_seqlens": how, "past": "some"}, {"block": 2}, absent)


def _possible(
    op: Op, axes: dict[str, int], fills: dict[str, str], attrs: dict[str, Any], absent: frozenset[str]
) -> Recipe:
    """The simplest call with these sizes, fillings and attributes, as far as the op has them."""
    simple = default(op)
    return default(
        op,
        absent=absent,
        axes={k: v for k, v in axes.items() if k in simple.axes},
        fills={k: v for k, v in fills.items() if k in simple.fills},
        attrs={k: v for k, v in attrs.items() if k in simple.attrs},
    )


def _selections(op: Op) -> Iterator[Recipe]:
    """Rows sorted as a whole at odd lengths, with infinities; and as many chosen as sparse attention asks for."""
    if op.name != "top_k":
        return
    for n in ODD:
        for how in ("normal", "masked", "allmasked", "inf"):
            yield default(op, axes={"rows": 2, "candidates": n}, attrs={"k": n}, fills={"scores": how})
    for k in (1023, 1024, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 3, 3000):
        yield default(op, axes={"rows": 2, "candidates": 3000}, attrs={"k": k}, fills={"scores": "ties"})
    yield default(op, axes={"rows": 2, "candidates": BUDGET + 2}, attrs={"k": BUDGET + 2})


def _long(op: Op) -> Iterator[Recipe]:
    """More than a grid's largest dimension of columns, of entries, of rows of a table."""
    if op.name in LONG:
        axes, fills = LONG[op.name]
        yield default(op, axes=axes, fills=fills)


def _large(op: Op) -> Iterator[Recipe]:
    """One size at a time as large as models have it, and odd: what a kernel holds in a fixed room is less than that. Rows of
    each stored type as long, a few of them and many."""
    everything = default(op).absent
    for table, sizes in (("axes", LARGE), ("attrs", LARGE_ATTRIBUTES)):
        for name, (size, axes, fills) in sizes.items():
            if name in getattr(default(op), table):
                one = {"attrs": {name: size}} if table == "attrs" else {"axes": {name: size}}
                for absent in (
                    dict.fromkeys((frozenset[str](), everything)) if name in ("d", "blocks") else (frozenset(),)
                ):
                    r = _possible(op, axes, {"cu_seqlens": "ragged", **fills}, {}, absent)
                    yield legal(change(r, **one))
    for a in arguments(op):
        if not set(a.types) > set(PLAIN_WEIGHTS):
            continue
        long = next(p for p in op.params if p.name == a.name).axes[-1].text
        for t in a.types:
            for few in (2, 67):
                r = _possible(op, {"n": 5, "m": 5, "tokens": few, long: LARGE[long][0]}, {}, {}, frozenset())
                yield legal(change(r.but(dots=(few,) if has_dots(op) else ()), types={a.name: t}))
    if has_dots(op):
        for dots in LARGE_DOTS:
            yield default(op, absent=frozenset()).but(dots=dots)


def _many_rows(op: Op, n: int) -> Iterator[Recipe]:
    """Many rows, everything else narrow. In steps of sequences most rows are padding, so that the reference keeps up."""
    narrow = {a: min(s for s in axis_choices(op, a) if s > 0) for a in axis_names(op)} | BUSY.get(op.name, {})
    axis = next((p.axes[0].text for p in op.results if p.axes), "") or op.params[0].axes[0].text
    if op.view:
        return
    if axis == "...":
        yield legal(change(default(op), axes=narrow, dots=(n,)))
    elif "cu_seqlens" in {p.name for p in op.params}:
        one = narrow | {"tokens": n, "seqs": 1}
        yield legal(change(default(op), axes=one, fills={"cu_seqlens": "few"}))
        if op.name in QUICK and n == GRID[-1]:
            yield _possible(op, one | {"entries": 64}, {"past": "zero"}, {}, default(op).absent)
    elif axis in ROW_AXES:
        yield legal(change(default(op), axes=narrow | {axis: n}))


def _drift(op: Op) -> Iterator[Recipe]:
    """Many rows of one sequence, a step each, with decays that forget slowly, and with none."""
    if op.name == "gated_delta_rule":
        for decay, beta in (("slow", "chance"), ("zeros", "rarely")):
            fills = {"decay": decay, "cu_seqlens": "ragged", "beta": beta, "k": "unit"}
            axes = {"tokens": DRIFT, "seqs": 1, "dk": 16, "dv": 8, "kheads": 1, "rep": 2}
            yield default(op, axes=axes, fills=fills).but(steps=DRIFT)


@st.composite
def recipes(draw: st.DrawFn, op: Op) -> Recipe:
    """A legal call of an op, everything varied at once."""
    args = arguments(op)
    r = Recipe(
        op.name,
        axes={n: draw(st.sampled_from(list(axis_choices(op, n)))) for n in axis_names(op)},
        attrs={n: draw(st.sampled_from(list(attribute_choices(op, n)))) for n in op.attributes},
        dots=draw(st.sampled_from(list(space(op).dots))) if has_dots(op) else (),
        fills={a.name: draw(st.sampled_from(list(a.fills))) for a in args},
        lays={a.name: draw(st.sampled_from([*["row"] * 3, *a.lays])) for a in args},
        types={a.name: draw(st.sampled_from(list(a.types))) for a in args if len(a.types) > 1},
        absent=frozenset(a.name for a in args if a.optional and draw(st.booleans())),
        parts=draw(st.integers(1, 4)) if any(p.variadic for p in op.params) else 1,
        seed=draw(st.integers(0, 2**20)),
    )
    return legal(r)


def drawn(op: Op, count: int, start: int) -> list[Recipe]:
    """So many different recipes, or as many as there are, the same for the same seed."""
    found: dict[str, Recipe] = {}
    if count <= 0:
        return []

    @seed(start)
    @settings(
        max_examples=2 * count,  # some come twice
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(op))
    def collect(r: Recipe) -> None:
        found.setdefault(str(r), r)

    collect()
    return list(found.values())[:count]
