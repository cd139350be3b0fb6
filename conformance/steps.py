"""Inputs of consecutive steps of a graph that names them as models do: sequences keep slots and pages, and grow.

`cu_seqlens`, `slots`, `past`, `block_table`, `keep`, `positions`, `ids` and `out_rows` are made valid; all other
inputs are
numbers of a filling. Knows graphs; runs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Graph

from .adversarial import values
from .indices import Making, make
from .recipe import Recipe

Array = NDArray[Any]


def steps_for(graph: Graph, seed: int, count: int, *, fill: str = "normal", vocab: int = 64) -> list[dict[str, Array]]:
    """The inputs of `count` steps, each with rows cut, padded or missing in another way."""
    rng = np.random.default_rng([seed, 2])
    shapes = {n: v.type.shape for n, v in graph.inputs.items()}
    capacity = graph.capacity
    assert capacity is not None
    tokens = next(shapes[n][0] for n in ("ids", "x", "x4", "x8", "q4", "q8", "keep", "positions") if n in shapes)
    seqs = shapes["cu_seqlens"][0] - 1 if "cu_seqlens" in shapes else 1
    blocks = shapes["block_table"][1] if "block_table" in shapes else 1
    slots = rng.permutation(capacity.slots)[:seqs]
    pages = rng.permutation(capacity.pages)[: seqs * blocks].reshape(seqs, blocks)
    past, out = np.zeros(seqs, np.int64), []
    room = blocks * capacity.page
    for _ in range(count):
        how = ("ragged", "padded", "ones")[int(rng.integers(3))]
        sizes = {"tokens": tokens, "slot": capacity.slots, "rows": tokens, "vocab": vocab, "eos": 0}
        m = Making(Recipe("step", fills={"cu_seqlens": how, "keep": "some"}, seed=seed), sizes, {}, (), rng, False)
        m.shape = (seqs + 1,)
        cu = m.made["cu_seqlens"] = np.asarray(make("cu_seqlens", m), np.int32)
        if np.any(past + np.diff(cu) > room):
            break
        busy = np.diff(cu) > 0
        used = -(-(past + np.diff(cu)) // capacity.page)
        m.made["slots"] = slots  # a sequence without rows keeps its slot: nobody may write it
        made: dict[str, Any] = {
            "cu_seqlens": cu,
            "slots": np.where(busy, slots, -1),
            "past": np.where(busy, past, 0),
            "block_table": np.where(busy[:, None] & (np.arange(blocks) < used[:, None]), pages, -1),
        }
        for name in shapes:
            if name not in made:
                made[name] = _input(name, shapes[name], m, past, fill)
        past = past + np.diff(cu)
        out.append({n: np.ascontiguousarray(made[n], graph.inputs[n].type.element.numpy) for n in shapes})
    return out


def _input(name: str, shape: tuple[int, ...], m: Making, past: Array, fill: str) -> Array:
    if name == "positions":
        out = np.zeros(shape, np.int32)
        for s, (a, b) in enumerate(m.spans()):
            out[a:b] = (past[s] + np.arange(b - a)).reshape(-1, *[1] * (len(shape) - 1))
        return out
    m.shape = shape
    found = make("at" if name == "out_rows" else name, m)
    return values(fill, shape, m.rng) if found is None else found
