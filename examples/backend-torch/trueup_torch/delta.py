"""Gated DeltaNet: row by row, and in chunks by a triangular solve."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.core import ops
from trueup.core.backend import KernelTable

from .numbers import narrow, wide
from .sequences import kept, placed, spans

kernels = KernelTable()


@kernels.implements(ops.gdn_decay)
def gdn_decay(a: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    y = wide(a) + wide(bias)
    return narrow(wide(rate) * torch.logaddexp(y, torch.zeros_like(y)))


def _spread(x: Tensor, heads: int, tiled: bool) -> Tensor:
    """`x[tokens, kheads, d]`, of each value head the key head that it uses: `[heads, tokens, d]` in wide numbers."""
    rep = heads // max(x.shape[1], 1)
    spread = x.repeat(1, rep, 1) if tiled else x.repeat_interleave(rep, 1)
    return wide(spread).transpose(0, 1)


@kernels.implements(ops.gated_delta_rule)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    state: Tensor,
    keep: Tensor | None,
    *,
    scale: float,
    tiled: bool,
) -> tuple[Tensor, Tensor]:
    heads = v.shape[1]
    out, after = torch.zeros_like(v, memory_format=torch.contiguous_format), state.clone()
    query, key, value = _spread(q, heads, tiled), _spread(k, heads, tiled), wide(v).transpose(0, 1)
    fade, gain = wide(decay).exp(), wide(beta)
    for slot, a, b in placed(cu_seqlens, slots, state, len(v)):
        wanted, s = dict(kept(keep, a, b, state)), after[slot].clone()
        for t in range(a, b):
            faded = wide(s) * fade[t, :, None, None]
            missing = value[:, t] - torch.einsum("hkv,hk->hv", faded, key[:, t])
            s = narrow(faded + key[:, t, :, None] * (gain[t, :, None] * missing)[:, None, :])
            out[t] = narrow(scale * torch.einsum("hkv,hk->hv", wide(s), query[:, t]))
            if t in wanted:
                after[wanted[t]] = s
        after[slot] = s
    return out, after


def _fades(decay: Tensor) -> tuple[Tensor, Tensor]:
    """`decay[heads, n]`: e^(sum of rows 0 … t) `[heads, n]`, and e^(sum of rows i+1 … t) `[heads, n, n]`, 0 above the diagonal.

    Sums, not differences of sums: -inf is fine.
    """
    n = decay.shape[1]
    below = torch.ones((n, n), dtype=torch.bool, device=decay.device).tril(-1)
    each = decay[:, :, None].expand(-1, n, n).masked_fill(~below, 0)
    between = each.cumsum(1).masked_fill(~(below | below.new_ones(n).diag()), -torch.inf)
    return decay.cumsum(1).exp(), between.exp()


def _chunks(a: int, b: int, size: int) -> list[tuple[int, int]]:
    return [(i, min(i + size, b)) for i in range(a, b, size)]


@kernels.implements(ops.chunk_wy)
def chunk_wy(
    k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor, *, chunk: int, tiled: bool
) -> tuple[Tensor, Tensor]:
    """(1 + A) [w u] = beta [E k, v], A strictly lower: w and u of a chunk by one triangular solve."""
    heads, dk = v.shape[1], k.shape[2]
    w = torch.zeros((len(v), heads, dk), dtype=torch.float32, device=v.device)
    u = torch.zeros_like(v, memory_format=torch.contiguous_format)
    key, value = _spread(k, heads, tiled), wide(v).transpose(0, 1)
    for _, a, b in spans(cu_seqlens, len(v)):
        for i, j in _chunks(a, b, chunk):
            start, between = _fades(wide(decay[i:j]).T)
            kc, gain = key[:, i:j], wide(beta[i:j]).T.unsqueeze(-1)
            right = gain * torch.cat([start.unsqueeze(-1) * kc, value[:, i:j]], -1)
            lower = (gain * between * (kc @ kc.transpose(1, 2))).tril(-1)
            solved = _solve(lower, right)
            w[i:j] = narrow(solved[..., :dk].transpose(0, 1))
            u[i:j] = narrow(solved[..., dk:].transpose(0, 1))
    return w, u


def _solve(lower: Tensor, right: Tensor) -> Tensor:
    """(1 + lower)^-1 right. Where something is not finite, row by row, so that no row sees a later one."""
    if bool(lower.isfinite().all()) and bool(right.isfinite().all()):
        return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    out = right.clone()
    for t in range(1, right.shape[1]):
        out[:, t] = right[:, t] - (lower[:, t, :t].unsqueeze(1) @ out[:, :t]).squeeze(1)
    return out


@kernels.implements(ops.chunk_delta_scan)
def chunk_delta_scan(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    state: Tensor,
    keep: Tensor | None,
    *,
    chunk: int,
    scale: float,
    tiled: bool,
) -> tuple[Tensor, Tensor]:
    heads = u.shape[1]
    out, after = torch.zeros_like(u, memory_format=torch.contiguous_format), state.clone()
    query, key = _spread(q, heads, tiled), _spread(k, heads, tiled)
    for slot, a, b in placed(cu_seqlens, slots, state, len(u)):
        wanted, s = dict(kept(keep, a, b, state)), wide(after[slot])
        for i, j in _chunks(a, b, chunk):
            start, between = _fades(wide(decay[i:j]).T)
            qc, kc = query[:, i:j], key[:, i:j]
            d = wide(u[i:j]).transpose(0, 1) - wide(w[i:j]).transpose(0, 1) @ s
            now = start.unsqueeze(-1) * (qc @ s) + _causal(between * (qc @ kc.transpose(1, 2)), d)
            out[i:j] = narrow(scale * now.transpose(0, 1))
            for t in range(i, j):
                if t in wanted or t == j - 1:
                    r = t - i
                    fade = between[:, r, : r + 1, None] * kc[:, : r + 1]
                    later = narrow(start[:, r, None, None] * s + fade.transpose(1, 2) @ d[:, : r + 1])
                    if t in wanted:
                        after[wanted[t]] = later
            s = wide(later)
        after[slot] = narrow(s)
    return out, after


def _causal(p: Tensor, d: Tensor) -> Tensor:
    """Row t of p, up to t, times these rows of d."""
    if bool(d.isfinite().all()) and bool(p.isfinite().all()):
        return p.tril() @ d
    return torch.stack([(p[:, t : t + 1, : t + 1] @ d[:, : t + 1]).squeeze(1) for t in range(p.shape[1])], 1)
