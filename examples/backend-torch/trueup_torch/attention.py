"""Attention over a paged cache, the joining of several, and the indexer's scores."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.core import ops
from trueup.core.backend import KernelTable

from .numbers import narrow, wide
from .sequences import entries, length, spans

kernels = KernelTable()

ROWS = 64
"""Queries that meet all entries at once."""
ELEMENTS = 1 << 22
"""Products that exist at once in `index_scores`."""


def _seen(counts: Tensor, total: int, picks: Tensor | None, block: int, window: int) -> Tensor:
    """Which of `total` entries each query sees, of which `counts` are complete: bool `[rows, total]`."""
    at = torch.arange(total, device=counts.device)
    n = counts[:, None]
    seen = (at < n) & (at >= n - window if window else at >= 0)
    if picks is None:
        return seen
    whole = n // block
    if bool(((picks < -1) | (picks >= whole)).any()):
        raise ValueError(f"attention: selections {picks.tolist()} where {whole[:, 0].tolist()} whole blocks are seen")
    named = torch.zeros((len(picks), total // block + 2), dtype=torch.bool, device=counts.device)
    named.scatter_(1, picks.long() + 1, True)  # column 0 is where the picks of none go
    return seen & (named[:, 1 + at // block] | (at >= whole * block))


def _weigh(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """`p[kv, group, rows, n]` of `v[kv, n, dv]`; where v is not finite, 0 times it would not be 0, so row by row."""
    if bool(v.isfinite().all()):
        return p @ v.unsqueeze(1)
    rows = [p[:, :, r, s] @ v[:, s] for r, s in enumerate(seen)]
    return torch.stack(rows, 2)


@kernels.implements(ops.attention)
def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    past: Tensor,
    block_table: Tensor,
    selected: Tensor | None,
    *,
    scale: float,
    every: int,
    block: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    kv, dv = keys.shape[2], values.shape[3]
    out = torch.zeros((tokens, heads, dv), dtype=torch.float32, device=q.device)
    lse = torch.zeros((tokens, heads), dtype=torch.float32, device=q.device)
    if not heads:
        return out, lse
    for s, a, b in spans(cu_seqlens, tokens):
        end = length(past, s, b - a)
        k = wide(entries(keys, block_table, s, end // every)).transpose(0, 1)  # [kv, n, d]
        v = wide(entries(values, block_table, s, end // every)).transpose(0, 1)
        for first in range(a, b, ROWS):
            last = min(first + ROWS, b)
            counts = torch.arange(end - b + first + 1, end - b + last + 1, device=q.device) // every
            picks = None if selected is None else selected[first:last]
            seen = _seen(counts, k.shape[1], picks, block, window)
            query = wide(q[first:last]).unflatten(1, (kv, -1)).permute(1, 2, 0, 3)  # [kv, group, rows, d]
            x = (scale * (query @ k.transpose(1, 2).unsqueeze(1))).masked_fill(~seen, -torch.inf)
            top = x.amax(-1, keepdim=True) if k.shape[1] else torch.full_like(query[..., :1], -torch.inf)
            nothing = top == -torch.inf
            p = torch.exp(x - top.masked_fill(nothing, 0))
            total = p.sum(-1, keepdim=True)
            o = (_weigh(p, v, seen) / total).masked_fill(nothing, 0)
            z = (top + total.log()).masked_fill(nothing, -torch.inf)
            out[first:last] = narrow(o.permute(2, 0, 1, 3).flatten(1, 2))
            lse[first:last] = narrow(z.squeeze(-1).permute(2, 0, 1).flatten(1))
    return out, lse


@kernels.implements(ops.merge_attention)
def merge_attention(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = wide(torch.stack(lses))
    all_parts = parts if sinks is None else torch.cat([parts, wide(sinks).expand(parts[:1].shape)])
    top = all_parts.amax(0)
    nothing = top == -torch.inf
    lse = (top + torch.exp(all_parts - top.masked_fill(nothing, 0)).sum(0).log()).masked_fill(nothing, -torch.inf)
    weights = torch.exp(parts - lse).unsqueeze(-1)
    unseen = (parts == -torch.inf).unsqueeze(-1)
    out = (weights * wide(torch.stack(outs))).masked_fill(unseen, 0).sum(0)
    return narrow(out), narrow(lse)


@kernels.implements(ops.index_scores)
def index_scores(
    q: Tensor,
    keys: Tensor,
    cu_seqlens: Tensor,
    past: Tensor,
    block_table: Tensor,
    weights: Tensor | None,
    *,
    every: int,
    scale: float,
) -> Tensor:
    """Sums of products, not a matrix product: that may round entries of equal keys differently."""
    tokens, heads, d = q.shape
    out = torch.full((tokens, block_table.shape[1] * keys.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    for s, a, b in spans(cu_seqlens, tokens):
        end = length(past, s, b - a)
        n = end // every
        k = wide(entries(keys, block_table, s, n))
        step = max(1, ELEMENTS // max(1, n * d))
        for first in range(a, b, step):
            last = min(first + step, b)
            total = torch.zeros((last - first, n), dtype=k.dtype, device=q.device)
            for h in range(heads):
                score = (wide(q[first:last, h]).unsqueeze(1) * k).sum(-1).relu()
                total += score if weights is None else score * wide(weights[first:last, h]).unsqueeze(-1)
            counts = torch.arange(end - b + first + 1, end - b + last + 1, device=q.device) // every
            seen = torch.arange(n, device=q.device) < counts[:, None]
            out[first:last, :n] = narrow(scale * total).masked_fill(~seen, -torch.inf)
    return out
