"""The reference: every op's own NumPy body, in the plan's order. It supports every op by definition; it is what others
are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.backend import Backend, Capabilities, Device, Executable, HostMemory, Storage, Target
from trueup.core.backend.contract import YES, Support
from trueup.core.backend.host import Prologue, run_body
from trueup.core.backend.kernels import Kernel
from trueup.core.backend.trace import Look, Watch, follow
from trueup.core.graph import Node, State, Value
from trueup.core.plan import Plan
from trueup.core.plugins import hookimpl
from trueup.core.weight import Weight


class Reference(Backend):
    """NumPy on the host."""

    name = "reference"
    driver = False

    def devices(self) -> list[Device]:
        return [Device("NumPy", "cpu", versions={"numpy": np.__version__}, hardware="host")]

    def open(self, device: Device) -> ReferenceTarget:
        return ReferenceTarget(device)


class ReferenceTarget(Target):
    """Runs bodies; weights are dequantized to float32 once."""

    name = "reference"
    capabilities = Capabilities(deterministic=True, batch_invariant=True)

    def __init__(self, device: Device) -> None:
        self.device, self.memory = device, HostMemory()

    def supports(self, node: Node) -> Support:
        return YES

    def kernel(self, node: Node) -> Kernel:
        return Kernel(node.op.name, node.op.body)

    def prepare_weight(self, weight: Weight) -> NDArray[Any]:
        return np.asarray(weight)

    def prepare_constant(self, array: NDArray[Any]) -> NDArray[Any]:
        """The graph's own array: bodies read it, and there is nothing to give back."""
        return array

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return ReferenceExecutable(plan, self, storage)


class ReferenceExecutable(Executable):
    """Evaluates a plan; each node's results are checked against the inferred types."""

    def __init__(self, plan: Plan, target: ReferenceTarget, storage: Storage) -> None:
        self.plan, self.states = plan, storage.states
        self.prologue = Prologue(plan, storage.host_states)
        self.leaves: dict[Value, Any] = {}
        for n in plan.order:
            for v in n.values:
                if isinstance(v, State):
                    self.leaves[v] = v.slice(storage.states[v.root.name])
                elif v.data is not None:
                    self.leaves[v] = storage.leaf(v, target)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        env = self._begin(inputs)
        for n in self.plan.order:
            self._call(n, env)
        return self._collect(env)

    def trace(self, inputs: Mapping[str, NDArray[Any]], watch: Watch) -> dict[str, NDArray[Any]]:
        env = self._begin(inputs)

        def handle(v: Value) -> Any:
            return self.states[v.name] if isinstance(v, State) else env[v]

        def steps() -> Iterator[tuple[Node, Callable[[], None]]]:
            for n in self.plan.order:
                if n.op.view:
                    self._call(n, env)
                else:
                    yield n, partial(self._call, n, env)

        follow(watch, Look(HostMemory(), handle), steps())
        return self._collect(env)

    def _begin(self, inputs: Mapping[str, NDArray[Any]]) -> dict[Value, Any]:
        env = dict(self.leaves)
        env.update((v, inputs[name]) for name, v in self.plan.graph.inputs.items())
        env.update(self.prologue.run(inputs))
        return env

    @staticmethod
    def _call(n: Node, env: dict[Value, Any]) -> None:
        env.update(zip(n.outputs, run_body(n, env.__getitem__), strict=True))

    def _collect(self, env: Mapping[Value, Any]) -> dict[str, NDArray[Any]]:
        return {name: np.array(env[v]) for name, v in self.plan.graph.outputs.items()}


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return [Reference]
