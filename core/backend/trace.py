"""Looking on while a compiled plan runs: what its nodes are given and give, as arrays. Knows memory and graphs; judges
nothing.

An `Executable` that can be looked into runs its own calls on its own storage, and stops before and after the nodes that
a watch wants; what lies between them runs as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from trueup.core.graph import Node, State, Value
from trueup.core.plan import Plan

from .contract import Executable, Memory, Target
from .host import stored


class Watch(Protocol):
    """Who looks on at one step. What it raises ends the step, as a kernel's error does."""

    def wants(self, node: Node) -> bool:
        """Whether to stop at this node; asked of every node that is neither a view nor the prologue's, as its turn comes."""

    def before(self, node: Node, look: Look) -> None:
        """All that the node takes is there."""

    def after(self, node: Node, look: Look) -> None:
        """All that the node gives is there, and what it was given still is."""

    def end(self) -> None:
        """The last node has run."""


class Look:
    """Reads a plan's storage at a stop. Only what the node at hand takes and gives is sure to be there: room is reused."""

    def __init__(self, memory: Memory, handle: Callable[[Value], Any]) -> None:
        """`handle`: where a value, or a whole state, lies in `memory`."""
        self._memory, self._handle = memory, handle

    def read(self, value: Value) -> Any:
        """A copy of a value, or of the region of a state; a weight or a constant as the host holds it."""
        if isinstance(value, State):
            return value.slice(self._memory.download(self._handle(value.root)))
        if value.data is not None:
            return stored(value)
        return self._memory.download(self._handle(value))


def follow(watch: Watch, look: Look, steps: Iterable[tuple[Node, Callable[[], object]]]) -> None:
    """Run the steps of a plan in their order, with `watch` looking on."""
    for node, step in steps:
        if watch.wants(node):
            watch.before(node, look)
            step()
            watch.after(node, look)
        else:
            step()
    watch.end()


Watcher = Callable[[Target, Plan], Watch | None]
"""Asked before each step of a plan who looks on at it; None: nobody, and the plan runs as ever."""


class Both:
    """Two who look on at one step, each where it wants."""

    def __init__(self, *watches: Watch) -> None:
        self.watches, self.here = watches, list[Watch]()

    def wants(self, node: Node) -> bool:
        self.here = [w for w in self.watches if w.wants(node)]
        return bool(self.here)

    def before(self, node: Node, look: Look) -> None:
        for w in self.here:
            w.before(node, look)

    def after(self, node: Node, look: Look) -> None:
        for w in self.here:
            w.after(node, look)

    def end(self) -> None:
        for w in self.watches:
            w.end()


class Observed(Executable):
    """An executable whose steps a watcher may look on at."""

    def __init__(self, inner: Executable, target: Target, watcher: Watcher) -> None:
        self.inner, self.target, self.watcher, self.plan = inner, target, watcher, inner.plan

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        watch = self.watcher(self.target, self.plan)
        return self.inner.run(inputs) if watch is None else self.inner.trace(inputs, watch)

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        own = self.watcher(self.target, self.plan)
        return self.inner.trace(inputs, watch if own is None else Both(own, watch))

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def observe(target: Target, watcher: Watcher) -> None:
    """Let `watcher` decide for every step of every plan that the target compiles from now on; beside those before it."""
    compile = target.compile
    target.compile = lambda plan, storage: Observed(  # type: ignore[method-assign]
        compile(plan, storage), target, watcher
    )
