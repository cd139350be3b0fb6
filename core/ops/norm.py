"""Norms over the last axis: the mean of squares in float64, the result rounded once.

A row of zeros gives zeros unless eps is 0, when 0/0 gives NaN. A NaN makes its row NaN; an infinity makes itself NaN
and the row's finite entries 0. An axis of no entries stays empty. Weights are final multipliers: "1 + w" of
zero-centred norms is resolved when a model is converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.op import op
from trueup.core.types import TensorType

from ._arrays import F32, F64, narrow, wide
from .elementwise import mul, sigmoid, silu


@op("x[..., n], weight?[n]:weight -> out[..., n]")
@np.errstate(all="ignore")
def rms_norm(x: F32, weight: Any = None, *, eps: float) -> F32:
    """x / sqrt(mean(x²) + eps), times `weight` if given, over the last axis (Zhang & Sennrich, arXiv 1910.07467)."""
    y = _rms(wide(x), eps)
    return narrow(y if weight is None else y * wide(weight))


@op("x[rows, groups, n], weight[groups*n]:weight -> out[rows, groups, n]")
@np.errstate(all="ignore")
def group_rms_norm(x: F32, weight: Any, *, eps: float) -> F32:
    """rms_norm of each group by itself, with its own part of the weight: weight[g*n + i] multiplies out[:, g, i]."""
    return narrow(_rms(wide(x), eps) * wide(weight).reshape(x.shape[1:]))


@op("x[..., d], gate[..., d], weight[d]:weight -> out[..., d]")
@np.errstate(all="ignore")
def gated_rms_norm(x: F32, gate: F32, weight: Any, *, eps: float, activation: str) -> F32:
    """activation(gate) · rms_norm(x, weight): normed first, gated after, as at the output of a Gated DeltaNet layer.

    `activation` is "silu" (Qwen3-Next, Qwen3.5) or "sigmoid" (Qwen4-Exp); another is a ValueError.
    """
    g = wide(gate)
    opened = 1 / (1 + np.exp(-g))
    return narrow(_rms(wide(x), eps) * wide(weight) * (opened if activation == "sigmoid" else g * opened))


@gated_rms_norm.requires
def _(x: TensorType, gate: TensorType, weight: TensorType, *, eps: float, activation: str) -> bool | str:
    return activation in ("silu", "sigmoid") or f"activation must be 'silu' or 'sigmoid', got {activation!r}"


@gated_rms_norm.decompose
def _(x: Any, gate: Any, weight: Any, *, eps: float, activation: str) -> Any:
    return mul(rms_norm(x, weight, eps=eps), sigmoid(gate) if activation == "sigmoid" else silu(gate))


@op("x[..., n] -> out[..., n]")
@np.errstate(all="ignore")
def l2_norm(x: F32, *, eps: float) -> F32:
    """x / sqrt(sum(x²) + eps) over the last axis: eps inside the root, as Qwen3-Next normalizes queries and keys."""
    y = wide(x)
    return narrow(y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + eps))


def _rms(x: F64, eps: float) -> F64:
    y: F64 = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) / max(x.shape[-1], 1) + eps)
    return y
