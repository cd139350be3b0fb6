"""Backends that are right: bodies over addressed memory, bodies over immutable arrays, and one with fusions."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.backend import Capabilities, KernelTable, ManagedTarget
from trueup.core.op import OPS, Op
from trueup.core.ops import linear, merge_heads, paged_append, rms_norm, rope, swiglu

from .make import HONEST, backend, bodies

backend("numpy_addressed", bodies())


def returning(op: Op) -> Any:
    """The op's body as a managed kernel: states are copied, mutated and returned as their next versions."""
    mutated = [i for i, p in enumerate(op.params) if p.mutates]

    def run(*args: Any, **attrs: Any) -> tuple[Any, ...]:
        given = list(args)
        for i in mutated:
            given[i] = np.array(args[i])
        out = op.body(*given, **attrs)
        results = () if out is None else out if isinstance(out, tuple) else (out,)
        return (*results, *(given[i] for i in mutated))

    return run


managed = KernelTable()
for _op in OPS.values():
    if not _op.view:
        managed.implements(_op)(returning(_op))
backend("numpy_managed", managed, ManagedTarget)

fused = bodies()


@fused.fuses(
    lambda x, w, gate, up, *, eps, limit: swiglu(
        linear(rms_norm(x, w, eps=eps), gate), linear(rms_norm(x, w, eps=eps), up), limit=limit
    )
)
def norm_gate_up(ctx: Any, x: Any, w: Any, gate: Any, up: Any, *, eps: float, limit: float) -> None:
    n = rms_norm(x, np.asarray(w), eps=eps)
    g, u = (n.astype(np.float64) @ np.asarray(m, np.float64).T for m in (gate, up))
    g = np.minimum(g, limit)
    ctx.out[...] = g / (1 + np.exp(-g)) * np.clip(u, -limit, limit)


@fused.fuses(
    lambda x, positions, freqs, component, cu, past, table, cache, *, start, interleaved, inverse, every: paged_append(
        rope(x, positions, freqs, component, start=start, interleaved=interleaved, inverse=inverse),
        cu,
        past,
        table,
        cache,
        every=every,
    )
)
def rope_append(
    ctx: Any,
    x: Any,
    positions: Any,
    freqs: Any,
    component: Any,
    cu: Any,
    past: Any,
    table: Any,
    cache: Any,
    *,
    start: int,
    interleaved: bool,
    inverse: bool,
    every: int,
) -> None:
    args = (np.asarray(a) for a in (positions, freqs, component))
    turned = rope(x, *args, start=start, interleaved=interleaved, inverse=inverse)
    paged_append(turned, cu, past, table, cache, every=every)


backend("numpy_fused", fused)

careless = bodies()


@careless.fuses(lambda x, w: linear(merge_heads(x), w))
def heads_out(ctx: Any, x: Any, w: Any) -> None:
    """Folds the wrong axis: entries come out by dim and head instead of head and dim."""
    folded = x.swapaxes(-1, -2).reshape(*x.shape[:-2], -1)
    ctx.out[...] = linear(np.ascontiguousarray(folded), np.asarray(w))


backend("wrong_axis_folded", careless, doc="A fusion that merges heads in the wrong order.")

backend("undeclared", bodies(), capabilities=Capabilities(), doc="Honest, and claims nothing.")
__all__ = ["HONEST"]
