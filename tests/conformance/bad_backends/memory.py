"""Kernels and targets that go wrong with memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.backend import AddressedTarget
from trueup.core.ops import concat, delay, linear, repeat_streams, scale_rows, silu, top_k

from .make import backend, bodies, wrong


@wrong(repeat_streams)
def uninitialized(ctx: Any, x: Any, *, streams: int) -> None:
    """The last entry of each row is never written."""
    ctx.out[..., : max(x.shape[-1] - 1, 0)] = x[:, None, : max(x.shape[-1] - 1, 0)]


@wrong(top_k)
def fillers_left(ctx: Any, scores: Any, *, k: int) -> None:
    """Indices of fillers are left as they were: right by chance where the buffer held -1."""
    values, at = top_k.body(scores, k=k)
    ctx.outs[0][...] = values
    ctx.outs[1][at >= 0] = at[at >= 0]


@wrong(concat)
def past_the_end(ctx: Any, a: Any, b: Any) -> None:
    """Writes rows of four, whatever their length."""
    ctx.out[...] = concat.body(a, b)
    n = ctx.out.size
    if n % 4:
        longer = np.lib.stride_tricks.as_strided(ctx.out.reshape(-1), (n + 4 - n % 4,), (4,))
        longer[n:] = 0


@wrong(silu)
def in_place(ctx: Any, x: Any, *, scale: float) -> None:
    """Scales its input where it lies."""
    with np.errstate(all="ignore"):
        x *= np.float32(0.5)
        x *= np.float32(2)
        x += np.float32(1e-3)
        ctx.out[...] = silu.body(x - np.float32(1e-3), scale=scale)


@wrong(delay)
def neighbour_slot(ctx: Any, x: Any, cu: Any, slots: Any, tail: Any, keep: Any = None, *, by: int) -> None:
    """Writes the tail of the slot after the last one, too."""
    ctx.out[...] = delay.body(x, cu, slots, tail, keep, by=by)
    used = slots[slots >= 0]
    if len(used):
        tail[(int(used.max()) + 1) % len(tail)] = 0


class Keeping(AddressedTarget):
    """Keeps a tensor for every run of a kernel."""

    def compile(self, plan: Any, storage: Any) -> Any:
        exe = super().compile(plan, storage)
        for v in plan.graph.outputs.values():
            self.memory.allocate(v.type)
        return exe


backend("leaking", bodies(), Keeping, doc="Allocates and forgets.")


@wrong(scale_rows)
def reads_wide(ctx: Any, x: Any, scale: Any) -> None:
    """Ignores the strides of its argument: reads on where the row ends."""
    flat = np.lib.stride_tricks.as_strided(x, x.shape, (x.shape[1] * 4, 4)) if x.size else x
    ctx.out[...] = scale_rows.body(np.array(flat), scale)


@wrong(linear)
def weight_scribbled(ctx: Any, x: Any, weight: Any) -> None:
    """Writes into the weight's stored bytes."""
    ctx.out[...] = linear.body(x, np.asarray(weight))
    data = weight.data
    if data.size and data.flags.writeable:
        data.reshape(-1)[0] ^= 1
