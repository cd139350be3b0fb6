"""A compiled plan: the native kernels of a plan as one recorded program, cut only where a NumPy body or the reference runs.

Each kernel is called once, when the plan is compiled, while a program records: what its native functions would do becomes steps with
addresses in the arena, the states and the weights. A step of the model then is one call for each stretch between nodes that Python
runs, without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from trueup.core.backend.addressed import AddressedExecutable, AddressedTarget, Context
from trueup.core.backend.contract import Storage
from trueup.core.backend.host import resolve
from trueup.core.graph import Node
from trueup.core.plan import Plan

from . import _native as native


class CpuExecutable(AddressedExecutable):
    """Stretches of a recorded program, and calls of Python between them."""

    def __init__(self, plan: Plan, target: AddressedTarget, storage: Storage) -> None:
        self.program = native.Program()
        self._recorded: dict[Callable[[], None], tuple[int, int]] = {}
        super().__init__(plan, target, storage)
        self.stretches = self._joined()
        """What a step calls, in order."""

    def _step(self, node: Node) -> Callable[[], None]:
        kernel = self.plan.kernels.get(node)
        if kernel is None or kernel.reference:
            return super()._step(node)
        args = [resolve(g, self.handle) for g in node.inputs]
        outs = tuple(self.handle(o) for o in node.outputs)
        context = Context(outs, tuple(o.type for o in node.outputs), self.target)
        first = len(self.program)
        self.program.record(partial(kernel.run, context, *args, **node.attrs))
        last, target, run = len(self.program), self.target, self.program.run

        def step() -> None:
            if target.poison:
                for o in outs:
                    target.fill(o)
            run(first, last)

        self._recorded[step] = first, last
        return step

    def _joined(self) -> list[Callable[[], None]]:
        """The steps, with recorded ones that follow each other as one."""
        stretches: list[Callable[[], None]] = []
        begin: int | None = None
        for step in [*self.steps, None]:
            span = self._recorded.get(step) if step is not None else None
            if span is not None:
                begin = span[0] if begin is None else begin
                end = span[1]
                continue
            if begin is not None:
                stretches.append(partial(self.program.run, begin, end))
                begin = None
            if step is not None:
                stretches.append(step)
        return stretches

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._feed(inputs)
        for step in self.steps if self.target.poison else self.stretches:
            step()
        return self._collect()
