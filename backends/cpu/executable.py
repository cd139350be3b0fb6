"""A compiled plan: the native kernels of a plan as one recorded program, cut only where a NumPy body or the reference runs.

Each kernel is called once, when the plan is compiled, while a program records: what its native functions would do becomes
steps with addresses in the arena, the states and the weights. A step of the model then is one call for each stretch between
nodes that Python runs, without the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from trueup.core.backend.addressed import AddressedExecutable, AddressedTarget, Context
from trueup.core.backend.contract import Storage
from trueup.core.backend.host import check_inputs, resolve, run_body, stored
from trueup.core.backend.kernels import Kernel
from trueup.core.graph import Node, State, Value
from trueup.core.plan import Plan

from . import _native as native


class CpuExecutable(AddressedExecutable):
    """Stretches of a recorded program, and calls of Python between them. The prologue's nodes are its first: here the host is
    the device, and what they hand over is written where the step reads it."""

    def __init__(self, plan: Plan, target: AddressedTarget, storage: Storage) -> None:
        self.program = native.Program()
        self._recorded: dict[Callable[[], None], tuple[int, int]] = {}
        self._kept: list[Any] = []  # what recorded steps hold addresses of
        super().__init__(plan, target, storage)
        self._first = self._joined([self._host_step(n) for n in plan.prologue if not n.op.view])
        self.stretches = self._joined(self.steps)
        """What a step calls after its prologue, in order."""

    def _step(self, node: Node) -> Callable[[], None]:
        kernel = self.plan.kernels.get(node)
        if kernel is None or kernel.reference:
            return super()._step(node)
        return self._record(node, kernel, self.handle)

    def _host_step(self, node: Node) -> Callable[[], None]:
        """A node of the prologue, natively where a kernel holds. Its weights stay as the file holds them."""

        def handle(v: Value) -> Any:
            if isinstance(v, State):
                return v.slice(self.storage.host_states[v.root.name])
            if v.leaf == "weight":
                return self.target.prepare_weight(v.data)  # type: ignore[arg-type]
            return stored(v) if v.data is not None else self.handle(v)

        kernel, _ = self.target.kernels.find(node.op, node.types, node.attrs)
        if kernel is not None and not kernel.reference:
            return self._record(node, kernel, handle)

        def run() -> None:
            results = run_body(node, lambda v: stored(v) if v.data is not None else handle(v))
            for o, r in zip(node.outputs, results, strict=True):
                self.handle(o)[...] = r

        return run

    def _record(self, node: Node, kernel: Kernel, handle: Callable[[Value], Any]) -> Callable[[], None]:
        args = [resolve(g, handle) for g in node.inputs]
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
        self._kept.append(args)
        return step

    def _joined(self, steps: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """These, with recorded ones that follow each other as one."""
        stretches: list[Callable[[], None]] = []
        begin: int | None = None
        for step in [*steps, None]:
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

    def _feed(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        check_inputs(self.plan.graph.inputs, inputs)
        for name, handle in self.inputs.items():
            handle[...] = inputs[name]
        for step in self._first:
            step()

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._feed(inputs)
        for step in self.steps if self.target.poison else self.stretches:
            step()
        return self._collect()
