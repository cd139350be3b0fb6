"""Ops in which no entry looks further than its row: activations, sums, streams, copies."""

from __future__ import annotations

import mlx.core as mx

from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()


def sigmoid_of(x: mx.array) -> mx.array:
    """1 / (1 + e^-x): 0 at -inf, 1 at inf."""
    return 1.0 / (1.0 + mx.exp(-x))


def softplus_of(x: mx.array) -> mx.array:
    """ln(1 + e^x), without overflow."""
    return mx.logaddexp(x, mx.array(0.0))


@kernels.implements(ops.contiguous)
def contiguous(x: mx.array) -> mx.array:
    return mx.contiguous(x)


@kernels.implements(ops.add)
def add(a: mx.array, b: mx.array) -> mx.array:
    return a + b


@kernels.implements(ops.mul)
def mul(a: mx.array, b: mx.array) -> mx.array:
    return a * b


@kernels.implements(ops.scale_rows)
def scale_rows(x: mx.array, scale: mx.array) -> mx.array:
    return x * scale


@kernels.implements(ops.concat)
def concat(a: mx.array, b: mx.array) -> mx.array:
    return mx.concatenate([a, b], axis=-1)


@kernels.implements(ops.clamp)
def clamp(x: mx.array, *, low: float, high: float) -> mx.array:
    return mx.minimum(mx.maximum(x, low), high)


@kernels.implements(ops.sigmoid)
def sigmoid(x: mx.array) -> mx.array:
    return sigmoid_of(x)


@kernels.implements(ops.silu)
def silu(x: mx.array, *, scale: float) -> mx.array:
    y = x * scale
    return y * sigmoid_of(y)


@kernels.implements(ops.softplus)
def softplus(x: mx.array) -> mx.array:
    return softplus_of(x)


@kernels.implements(ops.swiglu)
def swiglu(gate: mx.array, up: mx.array, *, limit: float) -> mx.array:
    g = mx.minimum(gate, limit)
    return g * sigmoid_of(g) * mx.minimum(mx.maximum(up, -limit), limit)


@kernels.implements(ops.softmax)
def softmax(x: mx.array) -> mx.array:
    """A row of -inf alone has no largest number to be taken off, and gives zeros."""
    if not x.size:
        return x
    top = x.max(axis=-1, keepdims=True)
    nothing = top == -mx.inf
    e = mx.exp(x - mx.where(nothing, 0.0, top))
    return mx.where(nothing, 0.0, e / e.sum(axis=-1, keepdims=True))


@kernels.implements(ops.normalize)
def normalize(x: mx.array, *, floor: float) -> mx.array:
    if not x.size:  # in MLX 0.32 the maximum of a number and a sum of nothing may never end
        return x
    divisor = mx.maximum(x.sum(axis=-1, keepdims=True), floor)
    return mx.where(divisor == 0, 0.0, x / divisor)


# -- streams


@kernels.implements(ops.repeat_streams)
def repeat_streams(x: mx.array, *, streams: int) -> mx.array:
    return mx.contiguous(mx.broadcast_to(x[:, None], (x.shape[0], streams, x.shape[1])))


@kernels.implements(ops.hc_read)
def hc_read(normed: mx.array, gate: mx.array) -> mx.array:
    opened = normed * sigmoid_of(gate.reshape(normed.shape))
    return opened.sum(axis=1) / max(normed.shape[1], 1)


@kernels.implements(ops.hc_write)
def hc_write(residual: mx.array, y: mx.array, inject: mx.array) -> mx.array:
    gain = 2.0 * sigmoid_of(inject / max(inject.shape[1], 1))
    return residual + gain[..., None] * y[:, None]


@kernels.implements(ops.ple_gate)
def ple_gate(key: mx.array, query: mx.array, value: mx.array) -> mx.array:
    u = (key * query).sum(axis=-1) / max(key.shape[-1], 1) ** 0.5
    gate = sigmoid_of(mx.sign(u) * mx.sqrt(mx.maximum(mx.abs(u), 1e-6)))
    return gate[..., None] * value[:, None]
