"""How the backends of this package are made: an honest table of NumPy bodies, with one kernel put in front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trueup.core.ops  # noqa: F401  # registers the ops
from trueup.core.backend import AddressedTarget, Backend, Capabilities, Device, KernelTable
from trueup.core.op import OPS, Op

MADE: dict[str, type[Backend]] = {}

HONEST = Capabilities(deterministic=True, batch_invariant=True)


def bodies() -> KernelTable:
    """Every op's body as its kernel."""
    table = KernelTable()
    for op in OPS.values():
        if not op.view:
            table.body(op)
    return table


def backend(
    name: str,
    table: KernelTable,
    target: type[Any] = AddressedTarget,
    capabilities: Capabilities = HONEST,
    doc: str = "",
) -> type[Backend]:
    """Register a backend of this name."""

    def devices(self: Backend) -> list[Device]:
        return [Device("NumPy", "cpu")]

    def open_(self: Backend, device: Device) -> Any:
        made = target(name, device, table)
        made.capabilities = capabilities
        return made

    members = {"name": name, "API": (1, 0), "driver": False, "devices": devices, "open": open_, "__doc__": doc}
    MADE[name] = made = type(name, (Backend,), members)
    return made


def wrong(op: Op, *, when: Any = None, capabilities: Capabilities = HONEST) -> Callable[[Any], Any]:
    """A backend that is honest but for this kernel of one op, named as the function."""

    def add(run: Any) -> Any:
        table = KernelTable()
        table.implements(op, when=when)(run)
        for other in OPS.values():
            if not other.view and (other is not op or when is not None):
                table.body(other)
        backend(run.__name__, table, capabilities=capabilities, doc=run.__doc__)
        return run

    return add
