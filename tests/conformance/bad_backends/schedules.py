"""Targets that run a plan otherwise than it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trueup.core.backend import AddressedTarget
from trueup.core.backend.addressed import AddressedExecutable
from trueup.core.ops import clamp

from .make import backend, bodies


def _sinks(plan: Any) -> list[Any]:
    return [n for n in plan.order if not n.outputs]


class Dropping(AddressedTarget):
    """B37: of several sinks only the last is kept, as dead-code removal does that knows no effects."""

    def compile(self, plan: Any, storage: Any) -> Any:
        dead = _sinks(plan)[:-1]
        return super().compile(replace(plan, order=[n for n in plan.order if n not in dead]), storage)


class Deferring(AddressedTarget):
    """B37: sinks float to the end of the step."""

    def compile(self, plan: Any, storage: Any) -> Any:
        late = _sinks(plan)
        return super().compile(replace(plan, order=[n for n in plan.order if n not in late] + late), storage)


class Swapping(AddressedTarget):
    """Two writes of one state change places, where their regions overlap."""

    def compile(self, plan: Any, storage: Any) -> Any:
        order, sinks = list(plan.order), _sinks(plan)
        for a, b in zip(sinks, sinks[1:], strict=False):
            i, j = order.index(a), order.index(b)
            if all(order[k] in sinks for k in range(i, j)):
                order[i], order[j] = order[j], order[i]
                break
        return super().compile(replace(plan, order=order), storage)


backend("dropped_sink", bodies(), Dropping)
backend("deferred_sinks", bodies(), Deferring)
backend("swapped_sinks", bodies(), Swapping)


class Stale(AddressedTarget):
    """B40: a recorded step replays the inputs that it was recorded with."""

    def compile(self, plan: Any, storage: Any) -> Any:
        exe = super().compile(plan, storage)
        run, first = exe.run, {}

        def replay(inputs: Any) -> Any:
            first.update({k: v.copy() for k, v in inputs.items() if k not in first})
            return run({k: first[k] for k in inputs})

        exe.run = replay
        return exe


backend("stale_graph", bodies(), Stale)


class Keyed(AddressedTarget):
    """B40: recorded steps are kept by ops and shapes, and attributes forgotten."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[str, dict[str, Any]] = {}

    def compile(self, plan: Any, storage: Any) -> AddressedExecutable:
        for n in plan.order:
            if n.op is clamp:
                attrs = self.kept.setdefault(str(n.types), dict(n.attrs))
                n.attrs.update(attrs)
        return super().compile(plan, storage)  # type: ignore[return-value]


backend("keyed_by_shape", bodies(), Keyed)
