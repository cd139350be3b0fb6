"""Backends that are wrong at one place of a model, and right everywhere else; and one that is wrong only unwatched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trueup.core.backend import AddressedTarget, Executable, HostMemory, KernelTable, ManagedTarget, Target
from trueup.core.backend.kernels import Kernel
from trueup.core.op import OPS
from trueup.core.ops import gated_delta_rule, linear, merge_heads, paged_append, silu

from .honest import managed, returning
from .make import backend, bodies, wrong

DEEP_WEIGHT, FUSED_WEIGHT = "blk.5.ssm_out.weight", "blk.6.ssm_out.weight"
DEEP_STATE, DEEP_DELTA = "blk.7.v", "blk.6.delta"


@wrong(linear)
def deep_linear(ctx: Any, x: Any, weight: Any) -> None:
    """One entry of the last row of one layer's projection is a little off."""
    ctx.out[...] = linear.body(x, weight)
    if weight.name == DEEP_WEIGHT:
        ctx.out[-1, 7] += np.float32(1e-3)


fused = bodies()


@fused.fuses(lambda x, w: linear(merge_heads(x), w))
def heads_out(ctx: Any, x: Any, w: Any) -> None:
    """A fusion that is wrong in one layer."""
    ctx.out[...] = linear.body(np.ascontiguousarray(x).reshape(*x.shape[:-2], -1), w)
    if w.name == FUSED_WEIGHT:
        ctx.out[0, 3] = -ctx.out[0, 3]


backend("deep_fusion", fused)


class DeepState(AddressedTarget):
    """One of the model's caches is written a place too far."""

    def compile(self, plan: Any, storage: Any) -> Any:
        kernels = dict(plan.kernels)
        for n in plan.order:
            if n.op is paged_append and n.effects[0][0].root.name == DEEP_STATE:
                kernels[n] = Kernel("one too far", _shifted)
        return super().compile(replace(plan, kernels=kernels), storage)


def _shifted(ctx: Any, rows: Any, cu: Any, past: Any, table: Any, cache: Any, *, every: int) -> None:
    if past[0]:  # right at first
        past = past - every
    paged_append.body(rows, cu, past, table, cache, every=every)


backend("deep_state", bodies(), DeepState)


class Late(HostMemory):
    """Results of `silu` arrive when the kernel after the next has begun, or when the host asks for anything."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Any, Any]] = []
        self.kernels = 0

    def arrive(self, before: int) -> None:
        for _, out, value in [w for w in self.waiting if w[0] <= before]:
            out[...] = value
        self.waiting = [w for w in self.waiting if w[0] > before]

    def download(self, handle: Any) -> Any:
        self.arrive(self.kernels)
        return super().download(handle)


class Unwaiting(AddressedTarget):
    """A kernel does not wait for the one before it, unless the plan is stopped between them."""

    def __init__(self, name: str, device: Any, kernels: Any) -> None:
        super().__init__(name, device, kernels, Late())

    def compile(self, plan: Any, storage: Any) -> Any:
        exe, memory = super().compile(plan, storage), self.memory

        def counted(step: Any) -> Any:
            def run() -> None:
                memory.kernels += 1
                memory.arrive(memory.kernels - 2)
                step()

            return run

        exe.steps = [counted(s) for s in exe.steps]
        return exe


late = KernelTable()


@late.implements(silu)
def late_silu(ctx: Any, x: Any, *, scale: float) -> None:
    memory = ctx.target.memory
    memory.waiting.append((memory.kernels, ctx.out, silu.body(x, scale=scale)))


for _op in OPS.values():
    if not _op.view and _op is not silu:
        late.body(_op)
backend("unwaiting", late, Unwaiting)


class Sealed(Target):
    """A target of another kind than the kit's base classes: its executables only run."""

    def __init__(self, name: str, device: Any, kernels: Any) -> None:
        self.inner = AddressedTarget(name, device, kernels)
        self.name, self.device, self.memory = name, device, self.inner.memory

    def supports(self, node: Any) -> Any:
        return self.inner.supports(node)

    def kernel(self, node: Any) -> Any:
        return self.inner.kernel(node)

    def compile(self, plan: Any, storage: Any) -> Executable:
        exe = self.inner.compile(plan, storage)

        class Only(Executable):
            def run(self, inputs: Any) -> Any:
                return exe.run(inputs)

            def close(self) -> None:
                exe.close()

        only = Only()
        only.plan = plan
        return only


backend("sealed", bodies(), Sealed)
sealed_wrong = KernelTable()
sealed_wrong.implements(linear)(deep_linear)
for _op in OPS.values():
    if not _op.view and _op is not linear:
        sealed_wrong.body(_op)
backend("sealed_wrong", sealed_wrong, Sealed)


class DeepManaged(ManagedTarget):
    """Over immutable arrays: the state of one layer's delta rule is rounded."""

    def compile(self, plan: Any, storage: Any) -> Any:
        kernels = dict(plan.kernels)
        for n in plan.order:
            if any(s.root.name == DEEP_DELTA for s, _ in n.effects):
                kernels[n] = Kernel("rounded", _rounded)
        return super().compile(replace(plan, kernels=kernels), storage)


def _rounded(*args: Any, **attrs: Any) -> tuple[Any, ...]:
    out, state = returning(gated_delta_rule)(*args, **attrs)
    return out, np.round(state, 3)


backend("deep_managed", managed, DeepManaged)
