"""Choosing rows and entries. Values pass bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()


@kernels.implements(ops.top_k)
def top_k(scores: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Stably sorted twice: by value, falling, -0 made 0; then by kind, numbers before NaN before -inf."""
    if k > scores.shape[1]:
        raise ValueError(f"top_k: k is {k}, which exceeds the {scores.shape[1]} candidates")
    plain = torch.where(scores.isnan(), torch.zeros_like(scores), scores) + 0.0
    order = plain.sort(dim=1, descending=True, stable=True).indices
    kind = scores.isnan().int() + 2 * (scores == -torch.inf).int()
    order = order.gather(1, kind.gather(1, order).sort(dim=1, stable=True).indices)[:, :k]
    values = scores.gather(1, order)
    return values, order.masked_fill(values == -torch.inf, -1).int()


@kernels.implements(ops.argmax)
def argmax(scores: Tensor) -> Tensor:
    """The lowest index of those that are the largest, or NaN where there is one."""
    rows, n = scores.shape
    if n == 0:
        raise ValueError(f"argmax: {rows} rows of 0 candidates")
    if rows == 0:
        return torch.zeros(0, dtype=torch.int32, device=scores.device)
    nan = scores.isnan()
    top = scores == scores.amax(1, keepdim=True)
    wanted = torch.where(nan.any(1, keepdim=True), nan, top)
    index = torch.arange(n, device=scores.device).expand(rows, n)
    return index.masked_fill(~wanted, n).amin(1).int()


def _check(op: str, what: str, at: Tensor, low: int, high: int) -> None:
    if at.numel() and not (low <= int(at.min()) and int(at.max()) < high):
        raise ValueError(f"{op}: {what} from {int(at.min())} to {int(at.max())} where {low}:{high} are allowed")


@kernels.implements(ops.take_rows)
def take_rows(x: Tensor, at: Tensor) -> Tensor:
    _check("take_rows", "indices", at, -1, len(x))
    out = torch.zeros((len(at), *x.shape[1:]), dtype=x.dtype, device=x.device)
    there = at >= 0
    out[there] = x[at[there].long()]
    return out


@kernels.implements(ops.embed)
def embed(table: Tensor, ids: Tensor) -> Tensor:
    _check("embed", "ids", ids, 0, len(table))
    return table[ids.long()].float()
