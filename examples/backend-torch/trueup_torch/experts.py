"""Mixture of experts: the rows of each expert through it at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from trueup.core import ops
from trueup.core.backend import KernelTable

from .numbers import narrow, wide

kernels = KernelTable()


def _chosen(op: str, experts: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert that was chosen, and by which rows at which place."""
    named = experts.unique().tolist()
    if named and not (-1 <= named[0] and named[-1] < count):
        raise ValueError(f"{op}: experts from {named[0]} to {named[-1]}, of {count}")
    return ((e, *(experts == e).nonzero(as_tuple=True)) for e in named if e >= 0)


@kernels.implements(ops.expert_linear)
def expert_linear(x: Tensor, experts: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros((*experts.shape, weight.shape[1]), dtype=torch.float32, device=x.device)
    for e, t, j in _chosen("expert_linear", experts, len(weight)):
        out[t, j] = narrow(functional.linear(wide(x[t]), wide(weight[e])))
    return out


@kernels.implements(ops.expert_combine)
def expert_combine(h: Tensor, experts: Tensor, mix: Tensor, weight: Tensor) -> Tensor:
    each = wide(torch.zeros((*experts.shape, weight.shape[1]), dtype=torch.float32, device=h.device))
    for e, t, j in _chosen("expert_combine", experts, len(weight)):
        each[t, j] = functional.linear(wide(h[t, j]), wide(weight[e])) * wide(mix[t, j]).unsqueeze(-1)
    return narrow(each.sum(1))
