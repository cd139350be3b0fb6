"""Every op takes axes of no entries, one at a time and all at once, or refuses them by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueup.core import ops
from trueup.core.errors import ArgumentError
from trueup.core.op import Op

pytestmark = pytest.mark.filterwarnings("error")

OPS = {name: o for name in ops.__all__ if isinstance(o := getattr(ops, name), Op)}
NONE = {"slots": -1, "block_table": -1, "experts": -1, "at": -1, "selected": -1, "keep": -1, "sizes": 1}
"""What index arguments hold where nothing is meant; all others are zeros."""
ATTRIBUTES = {
    **{"eps": 1e-6, "scale": 1.0, "tiled": True, "activation": "silu"},
    **{"every": 1, "by": 1, "eos": 0, "heads": 2, "start": 0, "size": 0, "streams": 2, "k": 0, "chunk": 2},
}
REFUSED = {
    *(("argmax", "candidates"), ("embed", "vocab"), ("rope", "components"), ("rope", "d")),
    *(("causal_conv", "taps"), ("ngram_rows", "n")),
}
"""Axes that can't be empty: nothing to choose, to look up, to turn by, to turn, and tails of -1 rows."""


def axes(op: Op) -> list[str]:
    return sorted({n for p in op.params for a in p.axes if not a.dots for n in a.names} - set(op.attributes))


def call(op: Op, sizes: dict[str, int]) -> list[Any]:
    attrs = {k: ATTRIBUTES.get(k, p.default) for k, p in op.attributes.items()}
    known = sizes | {k: v for k, v in attrs.items() if type(v) is int}
    args = []
    for p in op.params:
        shape = [n for a in p.axes for n in ([2] if a.dots else [max(0, a.value(known))])]
        kind = {"i32": np.int32, "i64": np.int64}.get(p.dtype or "", np.float32)
        made = np.full(shape, NONE.get(p.name, 0), kind)
        args.append([made] if p.variadic else made)
    out = op(*args, **attrs)
    return list(out) if isinstance(out, tuple) else [] if out is None else [out]


CASES = [(n, a) for n, o in OPS.items() for a in axes(o)]


@pytest.mark.fault("B78")
@pytest.mark.parametrize(("name", "empty"), CASES)
def test_b78_an_axis_of_no_entries(name: str, empty: str) -> None:
    op = OPS[name]
    sizes = {a: 0 if a == empty else 2 for a in axes(op)} | ({"d": 4} if name == "rope" and empty != "d" else {})
    if (name, empty) in REFUSED:
        with pytest.raises((ValueError, ArgumentError), match=name):
            call(op, sizes)
        return
    for r in call(op, sizes):  # whose shapes the op itself checks against the signature
        assert not np.isnan(np.asarray(r)).any()


@pytest.mark.fault("B78")
@pytest.mark.parametrize("name", [n for n in OPS if n not in ("argmax", "embed")])
def test_b78_all_axes_of_no_entries(name: str) -> None:
    for r in call(OPS[name], {a: int(a in ("taps", "n") and (name, a) in REFUSED) for a in axes(OPS[name])}):
        assert not np.isnan(np.asarray(r)).any()


def test_every_op_is_tried() -> None:
    assert len(OPS) >= 40 and {n for n, _ in CASES} | {n for n in OPS if not axes(OPS[n])} == set(OPS)
