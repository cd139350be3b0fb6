"""What every target made of a table of kernels answers, wherever its arrays lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trueup.core.graph import Node
from trueup.core.passes.fuse import Pattern

from .contract import YES, Device, Support, Target
from .kernels import Kernel, KernelTable


class TableTarget(Target):
    """A target whose kernels and fusions stand in a table, with the condition under which each holds."""

    kernels: KernelTable

    def __init__(self, name: str, device: Device, kernels: KernelTable) -> None:
        self.name, self.device, self.kernels = name, device, kernels

    @property
    def patterns(self) -> Sequence[Pattern]:
        return self.kernels.fusions

    def supports(self, node: Node) -> Support:
        return YES if node.op.view else self.kernels.find(node.op, node.types, node.attrs)[1]

    def accepts(self, pattern: Pattern, types: Sequence[Any], attrs: Mapping[str, Any]) -> Support:
        return self.kernels.find(pattern, types, attrs)[1]

    def kernel(self, node: Node) -> Kernel:
        kernel, answer = self.kernels.find(node.op, node.types, node.attrs)
        if kernel is None:
            raise LookupError(f"{self.name}: {node.describe()}: {answer.reason}")
        return kernel
