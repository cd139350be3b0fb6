"""A backend's table of kernels: which function runs which op, and the condition under which it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueup.core.op import Op, Operation, body_arguments, check_results
from trueup.core.passes.fuse import Pattern

from .contract import YES, Support

Condition = Callable[..., Any]
"""Called with the arguments' types and the attributes; True, or a sentence that says why not (False says only "no")."""


@dataclass(frozen=True)
class Kernel:
    """A function `run(ctx, *arguments, **attributes)` for one op or one fusion.

    `reference` marks the op's own body standing in for a kernel on the host; plans name it and the kit counts it.
    """

    name: str
    run: Callable[..., Any]
    when: Condition | None = None
    reference: bool = False

    def holds(self, types: Sequence[Any], attrs: Mapping[str, Any]) -> Support:
        if self.when is None:
            return YES
        answer = self.when(*types, **attrs)
        if isinstance(answer, bool | np.bool_) and answer:
            return YES
        return Support.no(answer if isinstance(answer, str) else f"{self.name}: condition not met")


def say_where(e: Exception, node: Any, kernel: Kernel, target: str) -> None:
    """Note on what a kernel raised which kernel it was and what it ran; the exception stays what it is."""
    e.add_note(f"in kernel {kernel.name} of {target}, {node.describe()}")


@dataclass
class KernelTable:
    """Kernels by op, tried in the order of registration, and fusions."""

    kernels: dict[Any, list[Kernel]] = field(default_factory=dict)
    fusions: list[Pattern] = field(default_factory=list)

    def implements(self, op: Op, *, when: Condition | None = None, name: str = "") -> Callable[[Any], Any]:
        """Register a kernel for an op; `when` is called with types and attributes and returns True or a sentence."""

        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            label = name or (op.name if run.__name__ == "_" else run.__name__)
            self.kernels.setdefault(op, []).append(Kernel(label, run, when))
            return run

        return add

    def fuses(self, meaning: Callable[..., Any], *, when: Condition | None = None) -> Callable[[Any], Any]:
        """Register a kernel for a pattern of ops, written as a function of values and keyword-only attributes."""

        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            pattern = Pattern(meaning, name=run.__name__)
            self.fusions.append(pattern)
            self.kernels[pattern] = [Kernel(pattern.name, run, when)]
            return run

        return add

    def body(self, op: Op) -> None:
        """Let the op's NumPy body be its kernel, for backends whose memory is the host's."""
        self.kernels.setdefault(op, []).append(Kernel(f"{op.name} (NumPy body)", body_kernel(op), reference=True))

    def find(self, op: Operation, types: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Kernel | None, Support]:
        """The first kernel that holds, or the reasons of all that don't."""
        reasons = []
        for kernel in self.kernels.get(op, ()):
            answer = kernel.holds(types, attrs)
            if answer:
                return kernel, YES
            reasons.append(answer.reason)
        return None, Support.no("; ".join(dict.fromkeys(reasons)) or f"no kernel for {op.name}")


def body_kernel(op: Operation) -> Callable[..., None]:
    """The op's body as a kernel that writes into `ctx.outs`."""

    def run(ctx: Any, *args: Any, **attrs: Any) -> None:
        results = check_results(op, ctx.types, op.body(*body_arguments(op, args), **attrs))
        for out, r in zip(ctx.outs, results, strict=True):
            out[...] = r

    return run
