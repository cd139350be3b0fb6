"""The exceptions of the core. Each message says where, what was found and what was expected."""

from __future__ import annotations


class SignatureError(ValueError):
    """An op's definition contradicts itself, or its signature can't be read; raised when the op is defined."""


class ArgumentError(TypeError):
    """A call of an op does not fit its signature; raised at the call, on arrays and on graph values alike."""


class ContractError(ArgumentError, ValueError):
    """A call of an op that its contract excludes, though shapes and types fit; raised at the call, as ArgumentError is."""


class GraphError(ValueError):
    """A graph breaks a rule: a foreign value, an unordered or dropped effect, a cycle, an unused state."""


class StrictError(GraphError):
    """A graph, or a step of it, does something that is allowed and is almost surely a mistake; `faults` lists all."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class PlanError(RuntimeError):
    """A pass produced a plan that is not a plan of its graph. This is a fault in trueup or in a backend."""


class Refused(RuntimeError):
    """The chosen backend refuses a node and nothing else may run it; says which node and why."""


class Unavailable(RuntimeError):
    """A backend, plugin or device can't be used here; the message is the reason."""
