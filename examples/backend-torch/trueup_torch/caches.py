"""Paged caches, tails of sequences, n-grams. A state is cloned, written in the order of the sequences, and returned."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.core import ops
from trueup.core.backend import KernelTable

from .numbers import narrow, wide
from .sequences import length, placed, places, shift, spans

kernels = KernelTable()


@kernels.implements(ops.paged_append)
def paged_append(
    rows: Tensor, cu_seqlens: Tensor, past: Tensor, block_table: Tensor, cache: Tensor, *, every: int
) -> Tensor:
    if rows.dtype != cache.dtype:
        raise ValueError(f"paged_append: cache must be of the rows' type, {rows.dtype}, got {cache.dtype}")
    after = cache.clone()
    for s, a, b in spans(cu_seqlens, len(rows)):
        end = length(past, s, b - a)
        position = torch.arange(end - (b - a), end, device=rows.device)
        ends = (position + 1) % every == 0
        after[places(cache, block_table, s, position[ends] // every)] = rows[a:b][ends]
    return after


@kernels.implements(ops.causal_conv)
def causal_conv(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    tail: Tensor,
    keep: Tensor | None,
    *,
    dilation: int,
) -> tuple[Tensor, Tensor]:
    """A window of rows that ends at each row, of which every `dilation`-th is a tap."""
    out, after = torch.zeros_like(x, memory_format=torch.contiguous_format), tail.clone()
    for slot, a, b in placed(cu_seqlens, slots, tail, len(x)):
        history = torch.cat([after[slot], x[a:b]])
        windows = wide(history).unfold(0, tail.shape[1] + 1, 1)[..., ::dilation]  # [rows, channels, taps]
        out[a:b] = narrow((windows * wide(weight)).sum(-1))
        shift(after, slot, history, a, b, keep)
    return out, after


@kernels.implements(ops.trailing_mean)
def trailing_mean(
    x: Tensor, cu_seqlens: Tensor, slots: Tensor, tail: Tensor, keep: Tensor | None, *, every: int
) -> tuple[Tensor, Tensor]:
    out, after = torch.zeros_like(x, memory_format=torch.contiguous_format), tail.clone()
    for slot, a, b in placed(cu_seqlens, slots, tail, len(x)):
        history = torch.cat([after[slot], x[a:b]])
        out[a:b] = narrow(wide(history).unfold(0, every, 1).sum(-1) / every)
        shift(after, slot, history, a, b, keep)
    return out, after


@kernels.implements(ops.delay)
def delay(
    x: Tensor, cu_seqlens: Tensor, slots: Tensor, tail: Tensor, keep: Tensor | None, *, by: int
) -> tuple[Tensor, Tensor]:
    if x.dtype != tail.dtype:
        raise ValueError(f"delay: tail must be of x's type, {x.dtype}, got {tail.dtype}")
    out, after = torch.zeros_like(x, memory_format=torch.contiguous_format), tail.clone()
    for slot, a, b in placed(cu_seqlens, slots, tail, len(x)):
        history = torch.cat([after[slot], x[a:b]])
        out[a:b] = history[: b - a]
        shift(after, slot, history, a, b, keep)
    return out, after


@kernels.implements(ops.ngram_rows)
def ngram_rows(
    ids: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    multipliers: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    context: Tensor,
    keep: Tensor | None,
    *,
    eos: int,
) -> tuple[Tensor, Tensor]:
    """All lengths at once: from the token back, what an eos cuts off reads as eos; the hashes are running xors."""
    n, heads = len(multipliers), len(sizes)
    if bool(((sizes < 1) | (offsets < 0) | (offsets + sizes > 2**31)).any()):
        raise ValueError(
            f"ngram_rows: sizes {sizes.tolist()} at offsets {offsets.tolist()} must be rows of an int32 table"
        )
    out = torch.zeros((len(ids), heads), dtype=torch.int32, device=ids.device)
    after = context.clone()
    for slot, a, b in placed(cu_seqlens, slots, context, len(ids)):
        history = torch.cat([after[slot], ids[a:b]])
        back = history.unfold(0, n, 1).flip(1).long()  # [rows, n]: the token, then those before it
        cut = (back == eos) & (torch.arange(n, device=ids.device) > 0)
        mixed = torch.where(cut.cumsum(1) > 0, eos, back) * multipliers
        hashed = mixed[:, :1]
        for m in range(1, n):
            hashed = hashed ^ mixed[:, m : m + 1]
            at = slice((m - 1) * (heads // (n - 1)), m * (heads // (n - 1)))
            out[a:b, at] = (torch.remainder(hashed, sizes[at]) + offsets[at]).int()
        shift(after, slot, history, a, b, keep)
    return out, after
