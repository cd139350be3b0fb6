"""The contract between trueup and a backend. Everything here is versioned by `API`; nothing here runs anything.

A backend lists its devices without side effects and opens one as a target. A target has memory, says of each node
whether it can run it and if not why, and compiles a plan into an executable that is replayed for every step of the same
shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from trueup.core.errors import Unavailable
from trueup.core.types import TensorType
from trueup.core.weight import Weight

if TYPE_CHECKING:
    from trueup.core.graph import Node, Value
    from trueup.core.passes.fuse import Pattern
    from trueup.core.plan import Plan

    from .kernels import Kernel
    from .trace import Watch

API = (1, 0)
"""Version of the contract. A plugin of another major version is refused; one of a newer minor version too."""


@dataclass(frozen=True)
class Support:
    """An answer about a node: yes, or no with a sentence."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def no(cls, reason: str) -> Support:
        return cls(False, reason)


YES = Support(True)


@dataclass(frozen=True)
class Device:
    """A device as data.

    `kind` is "cpu", "gpu" or "accelerator"; `memory` its bytes, None where unknown; `limits` integers that kernels'
    conditions read; the feature "unified_memory" says that its memory is the host's; `hardware` names the piece of
    hardware (a PCI address) so that one card offered by two backends is taken once; `versions` of driver, compiler and
    the like.
    """

    name: str
    kind: str
    memory: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a target claims of its results; the conformance kit verifies each claim.

    `deterministic`: two runs give the same bits. `batch_invariant`: a row's results do not depend on the other rows or
    on their number. `max_rows`: the most rows of a step, None for no limit. `thresholds`: sizes by axis name at which a
    kernel changes its way, so that tests lie on both sides. `activations`: to what they may be rounded before products
    with weights: "f32" (they are not), "f16", "bf16", or "q8", int8 in blocks of 32 with one scale.
    """

    deterministic: bool = False
    batch_invariant: bool = False
    max_rows: int | None = None
    thresholds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    activations: str = "f32"


class Memory(Protocol):
    """Storage on a device. A handle stands for an allocated tensor; rows are entries along its first axis."""

    def allocate(self, type: TensorType) -> Any:
        """A tensor of undefined contents; MemoryError where there is no room."""

    def free(self, handle: Any) -> None:
        """Give the storage back; the handle is dead."""

    def upload(self, handle: Any, array: NDArray[Any]) -> None: ...

    def download(self, handle: Any) -> NDArray[Any]: ...

    def read_rows(self, handle: Any, rows: Sequence[int]) -> NDArray[Any]: ...

    def write_rows(self, handle: Any, rows: Sequence[int], array: NDArray[Any]) -> None: ...

    def copy_rows(self, handle: Any, to: Sequence[int], source: Sequence[int]) -> None:
        """Rows `source[i]` become rows `to[i]`; the two lists do not overlap."""

    def fill_rows(self, handle: Any, rows: Sequence[int], value: float) -> None: ...


@dataclass
class Storage:
    """What outlives a plan: states by name, and weights as the target prepared them, each when it is first needed.

    The states of prologue nodes lie on the host, as arrays.
    """

    states: Mapping[str, Any] = field(default_factory=dict)
    host_states: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    prepared: dict[int, tuple[Weight, Any]] = field(default_factory=dict)

    def leaf(self, leaf: Value, target: Target) -> Any:
        """The prepared form of a weight, made once, or of a constant, which belongs to its plan."""
        stored = leaf.data
        if stored is None:
            raise ValueError(f"{leaf!r} is neither a weight nor a constant")
        if leaf.leaf == "constant":
            return target.prepare_constant(np.asarray(stored))
        if id(stored) not in self.prepared:
            self.prepared[id(stored)] = (stored, target.prepare_weight(stored))
        return self.prepared[id(stored)][1]


class Executable(ABC):
    """A compiled plan, bound to its storage."""

    plan: Plan

    @abstractmethod
    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One step: the graph's inputs by name to its outputs by name. Writes the states."""

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        """The same step with `watch` looking on: the same calls in the same order on the same storage, stopped where it
        wants. Unavailable where the executable can't be looked into."""
        raise Unavailable(f"{type(self).__name__} can't be stopped between nodes (it has no `trace`)")

    def close(self) -> None:
        """Give back what the executable holds besides its storage."""
        return None


class Target(ABC):
    """An open device. Subclass `AddressedTarget` or `ManagedTarget`, which need only a table of kernels."""

    name: str
    device: Device
    memory: Memory
    capabilities: Capabilities = Capabilities()
    overlaps: bool = False
    """Whether kernels of a step may run at the same time; then the arena is planned without reuse."""

    @property
    def patterns(self) -> Sequence[Pattern]:
        """Fusions on offer, in the order in which they are tried after sorting by size."""
        return ()

    @abstractmethod
    def supports(self, node: Node) -> Support:
        """Whether this node runs here; asked with its dtypes, shapes, strides and attributes."""

    @abstractmethod
    def kernel(self, node: Node) -> Kernel:
        """The kernel that runs a node which `supports` accepted."""

    def accepts(self, pattern: Pattern, types: Sequence[Any], attrs: Mapping[str, Any]) -> Support:
        """Whether the fused kernel of a pattern holds for these arguments."""
        return Support.no("no fused kernels")

    def prepare_weight(self, weight: Weight) -> Any:
        """A weight as the kernels want it; called once for each weight."""
        return weight

    def prepare_constant(self, array: NDArray[Any]) -> Any:
        """A constant of a graph as the kernels want it: by default a tensor in the target's memory. It is its plan's, and
        freed with it where that is an `AddressedExecutable`."""
        handle = self.memory.allocate(TensorType.of(array))
        self.memory.upload(handle, array)
        return handle

    @abstractmethod
    def compile(self, plan: Plan, storage: Storage) -> Executable: ...

    def close(self) -> None:
        """Give the device back."""
        return None


class Backend(ABC):
    """A way to run graphs. Making the object, and the import of its module, must touch no driver."""

    name: ClassVar[str]
    API: ClassVar[tuple[int, int]] = API
    """The version of the contract that it was written against. A third party's backend writes its own, as numbers: with this
    one inherited it would seem to fit every trueup."""
    driver: ClassVar[bool] = True
    """Whether asking for devices may load a driver; if so a table of backends asks in a child process."""

    @abstractmethod
    def devices(self) -> list[Device]:
        """What can be opened; raises Unavailable with the reason where nothing can."""

    @abstractmethod
    def open(self, device: Device, **options: Any) -> Target:
        """Open a device. Options that the backend does not know are a TypeError."""


def row_array(rows: Sequence[int]) -> NDArray[np.intp]:
    """Row numbers as an index array."""
    return np.asarray(rows, np.intp)
