"""Projections, norms, activations, hyper-connections, rotary embedding: each row by itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trueup.core import ops
from trueup.core.backend import KernelTable

from .numbers import narrow, wide

kernels = KernelTable()


@kernels.implements(ops.linear)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return narrow(functional.linear(wide(x), wide(weight)))


# -- entry by entry


@kernels.implements(ops.contiguous)
def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


@kernels.implements(ops.add)
def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@kernels.implements(ops.mul)
def mul(a: Tensor, b: Tensor) -> Tensor:
    return a * b


@kernels.implements(ops.scale_rows)
def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


@kernels.implements(ops.concat)
def concat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], -1)


@kernels.implements(ops.clamp)
def clamp(x: Tensor, *, low: float, high: float) -> Tensor:
    return narrow(wide(x).clamp(low, high))


@kernels.implements(ops.sigmoid)
def sigmoid(x: Tensor) -> Tensor:
    return narrow(torch.sigmoid(wide(x)))


@kernels.implements(ops.silu)
def silu(x: Tensor, *, scale: float) -> Tensor:
    y = wide(x) * scale
    return narrow(y * torch.sigmoid(y))


@kernels.implements(ops.softplus)
def softplus(x: Tensor) -> Tensor:
    y = wide(x)
    return narrow(torch.logaddexp(y, torch.zeros_like(y)))


@kernels.implements(ops.swiglu)
def swiglu(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    g = wide(gate).clamp(max=limit)
    return narrow(g * torch.sigmoid(g) * wide(up).clamp(-limit, limit))


# -- over the last axis


@kernels.implements(ops.softmax)
def softmax(x: Tensor) -> Tensor:
    if not x.numel():
        return x
    nothing = (x == -torch.inf).all(-1, keepdim=True)
    return narrow(torch.softmax(wide(x), -1).masked_fill(nothing, 0))


@kernels.implements(ops.normalize)
def normalize(x: Tensor, *, floor: float) -> Tensor:
    y = wide(x)
    divisor = y.sum(-1, keepdim=True).clamp(min=floor)
    return narrow((y / divisor).masked_fill(divisor == 0, 0))


def _rms(x: Tensor, eps: float) -> Tensor:
    y = wide(x)
    return y / (y.square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps).sqrt()


@kernels.implements(ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    return narrow(_rms(x, eps) if weight is None else _rms(x, eps) * wide(weight))


@kernels.implements(ops.group_rms_norm)
def group_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return narrow(_rms(x, eps) * wide(weight).view(x.shape[1:]))


@kernels.implements(ops.gated_rms_norm)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str) -> Tensor:
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rms_norm: activation must be 'silu' or 'sigmoid', got {activation!r}")
    g = wide(gate)
    opened = torch.sigmoid(g) if activation == "sigmoid" else g * torch.sigmoid(g)
    return narrow(_rms(x, eps) * wide(weight) * opened)


@kernels.implements(ops.l2_norm)
def l2_norm(x: Tensor, *, eps: float) -> Tensor:
    y = wide(x)
    return narrow(y / (y.square().sum(-1, keepdim=True) + eps).sqrt())


# -- streams


@kernels.implements(ops.repeat_streams)
def repeat_streams(x: Tensor, *, streams: int) -> Tensor:
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous()


@kernels.implements(ops.hc_read)
def hc_read(normed: Tensor, gate: Tensor) -> Tensor:
    opened = wide(normed) * torch.sigmoid(wide(gate)).view(normed.shape)
    return narrow(opened.sum(1) / max(normed.shape[1], 1))


@kernels.implements(ops.hc_write)
def hc_write(residual: Tensor, y: Tensor, inject: Tensor) -> Tensor:
    gain = 2 * torch.sigmoid(wide(inject) / max(inject.shape[1], 1))
    return narrow(torch.addcmul(wide(residual), gain.unsqueeze(-1), wide(y).unsqueeze(1)))


@kernels.implements(ops.ple_gate)
def ple_gate(key: Tensor, query: Tensor, value: Tensor) -> Tensor:
    u = (wide(key) * wide(query)).sum(-1) / max(key.shape[-1], 1) ** 0.5
    gate = torch.sigmoid(torch.sign(u) * u.abs().clamp(min=1e-6).sqrt())
    return narrow(gate.unsqueeze(-1) * wide(value).unsqueeze(1))


# -- rotary embedding


@kernels.implements(ops.rope)
def rope(
    x: Tensor, positions: Tensor, freqs: Tensor, component: Tensor, *, start: int, interleaved: bool, inverse: bool
) -> Tensor:
    half = len(freqs)
    if start < 0 or start + 2 * half > x.shape[2]:
        raise ValueError(f"rope: {half} pairs from dim {start} on leave a head of {x.shape[2]}")
    if bool(((component < 0) | (component >= positions.shape[1])).any()):
        raise ValueError(f"rope: component {component.tolist()} of {positions.shape[1]} components of a position")
    angle = wide(positions[:, component.long()]) * wide(freqs)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1) * (-1 if inverse else 1)
    dims = torch.arange(start, start + 2 * half, device=x.device)
    first, second = (dims[0::2], dims[1::2]) if interleaved else (dims[:half], dims[half:])
    a, b = wide(x[..., first]), wide(x[..., second])
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., first] = narrow(a * cos - b * sin)
    out[..., second] = narrow(b * cos + a * sin)
    return out
