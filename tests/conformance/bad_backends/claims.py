"""Backends whose answers are not true."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.backend import AddressedTarget, KernelTable
from trueup.core.backend.contract import YES, Support
from trueup.core.errors import Refused
from trueup.core.op import OPS
from trueup.core.ops import embed, expert_combine, linear, silu, softmax, take_rows, top_k

from .make import HONEST, backend, bodies, wrong


@wrong(linear)
def lying_supports(ctx: Any, x: Any, weight: Any) -> None:
    """B84: says yes to every type of weight, and has a kernel for float32."""
    if weight.type.dtype != "f32":
        raise NotImplementedError(f"weights of {weight.type.dtype}")
    ctx.out[...] = linear.body(x, np.asarray(weight))


@wrong(embed)
def lying_quietly(ctx: Any, table: Any, ids: Any) -> None:
    """B84: says yes to every type, and gives zeros for those that it does not know."""
    ctx.out[...] = embed.body(table, ids) if table.type.element.plain else 0


only_linear = KernelTable()
only_linear.body(linear)
backend("only_linear", only_linear, doc="Honest: one op, refuses the others with a reason.")

only_top_k = KernelTable()
only_top_k.body(top_k)
backend("only_top_k", only_top_k, doc="Honest: one op, which most graphs have not.")


class Silent(AddressedTarget):
    """Refuses without a reason."""

    def supports(self, node: Any) -> Support:
        return Support(False) if node.op is linear else super().supports(node)


backend("no_reason", bodies(), Silent)


class Wavering(AddressedTarget):
    """Says yes and no in turn."""

    def supports(self, node: Any) -> Support:
        self.asked = getattr(self, "asked", 0) + 1
        return YES if node.op is not linear or self.asked % 2 else Support.no("not now")


backend("wavering", bodies(), Wavering)

nothing = KernelTable()
for _op in OPS.values():
    if not _op.view:
        nothing.implements(_op, when=lambda *types, **attrs: "not on this device")(lambda ctx, *a, **k: None)
backend("claims_nothing", nothing, doc="0 of 0: kernels for every op, each of which refuses every call.")


@wrong(expert_combine, capabilities=HONEST)
def broken_after_errors(ctx: Any, h: Any, experts: Any, mix: Any, weight: Any) -> None:
    """B76: a wrong call leaves the device unusable."""
    if np.any(experts >= weight.shape[0]):
        broken_after_errors.broken = True
        raise ValueError("an expert that is none")
    out = expert_combine.body(h, experts, mix, weight)
    ctx.out[...] = out * 0 if getattr(broken_after_errors, "broken", False) else out


@wrong(silu)
def never_room(ctx: Any, x: Any, *, scale: float) -> None:
    """Says yes, and has no room for any call: a typed error each time, and nothing computed."""
    raise MemoryError("no room")


@wrong(take_rows)
def not_now(ctx: Any, x: Any, at: Any) -> None:
    """Says yes, and refuses each call when it runs; the wrong ones, too."""
    raise Refused("not now")


@wrong(silu)
def room_for_one_run(ctx: Any, x: Any, *, scale: float) -> None:
    """Each second run of a step finds no room: what it needs is not given back."""
    room_for_one_run.runs = getattr(room_for_one_run, "runs", 0) + 1
    if room_for_one_run.runs % 2 == 0:
        raise MemoryError("no room")
    ctx.out[...] = silu.body(x, scale=scale)


@wrong(softmax)
def wrong_and_then_no_room(ctx: Any, x: Any) -> None:
    """Wrong values, and then an error that may be one: it must not hide them."""
    wrong_and_then_no_room.runs = getattr(wrong_and_then_no_room, "runs", 0) + 1
    if wrong_and_then_no_room.runs % 2 == 0:
        raise MemoryError("no room")
    ctx.out[...] = softmax.body(x) * np.float32(1.5)
