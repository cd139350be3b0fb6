"""Norms over the last axis, by MLX's own kernel where there is one."""

from __future__ import annotations

import mlx.core as mx

from trueup.backends.metal.weights import Prepared, plain
from trueup.core import ops
from trueup.core.backend import KernelTable

from .elementwise import sigmoid_of

kernels = KernelTable()


def _rms(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps) if x.size else x


@kernels.implements(ops.rms_norm)
def rms_norm(x: mx.array, weight: Prepared | None, *, eps: float) -> mx.array:
    return _rms(x, None if weight is None else plain(weight), eps)


@kernels.implements(ops.group_rms_norm)
def group_rms_norm(x: mx.array, weight: Prepared, *, eps: float) -> mx.array:
    return _rms(x, None, eps) * plain(weight).reshape(x.shape[1:])


@kernels.implements(ops.gated_rms_norm)
def gated_rms_norm(x: mx.array, gate: mx.array, weight: Prepared, *, eps: float, activation: str) -> mx.array:
    opened = sigmoid_of(gate)
    return _rms(x, plain(weight), eps) * (opened if activation == "sigmoid" else gate * opened)


@kernels.implements(ops.l2_norm)
def l2_norm(x: mx.array, *, eps: float) -> mx.array:
    return x / mx.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)
