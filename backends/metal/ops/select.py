"""Choosing rows and entries. Values pass bit for bit, and the order of scores is decided by integers alone.

A score and its place become one 64-bit key, score first: no two keys of a row are equal, so that any way to sort them gives
the same order. As the bits are looked at as integers, no mode of a compiler and no flushed denormal can change it.
"""

from __future__ import annotations

import mlx.core as mx

from trueup.backends.metal.checks import in_range
from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()

SIGN, INFINITE, LAST = 0x80000000, 0x7F800000, 0xFFFFFFFF


def _keys(scores: mx.array, *, nan: int, nothing: int | None) -> mx.array:
    """uint64 `[rows, candidates]`, rising as scores fall, ties by place; NaN ranks as `nan` does, -inf as `nothing`."""
    bits = scores.view(mx.uint32)
    size = bits & mx.array(SIGN - 1, mx.uint32)
    negative = (bits >= SIGN) & (size > 0)  # -0 is 0
    rank = mx.where(negative, bits, mx.array(SIGN - 1, mx.uint32) - size)
    if nothing is not None:
        rank = mx.where(bits == (SIGN | INFINITE), mx.array(nothing, mx.uint32), rank)
    rank = mx.where(size > INFINITE, mx.array(nan, mx.uint32), rank)
    place = mx.arange(scores.shape[1], dtype=mx.uint64)
    return mx.left_shift(rank.astype(mx.uint64), mx.array(32, mx.uint64)) | place


def _places(keys: mx.array) -> mx.array:
    return (keys & mx.array(LAST, mx.uint64)).astype(mx.int32)


@kernels.implements(ops.top_k)
def top_k(scores: mx.array, *, k: int) -> tuple[mx.array, mx.array]:
    rows, n = scores.shape
    if not rows or not k:
        return mx.zeros((rows, k)), mx.zeros((rows, k), mx.int32)
    scores = mx.contiguous(scores)
    keys = _keys(scores, nan=LAST - 1, nothing=LAST)
    if k < n:
        keys = mx.partition(keys, k - 1, axis=1)[:, :k]
    order = _places(mx.sort(keys, axis=1))
    values = mx.take_along_axis(scores, order, axis=1)
    return values, mx.where(values == -mx.inf, -1, order)


@kernels.implements(ops.argmax)
def argmax(scores: mx.array) -> mx.array:
    if not scores.shape[0]:
        return mx.zeros((0,), mx.int32)
    return _places(_keys(mx.contiguous(scores), nan=0, nothing=None).min(axis=1))


@kernels.implements(ops.take_rows)
def take_rows(x: mx.array, at: mx.array) -> mx.array:
    in_range("take_rows", "index", at, -1, x.shape[0])
    if not at.size or not x.size:
        return mx.zeros((at.shape[0], *x.shape[1:]), x.dtype)
    there = (at >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return mx.where(there, x[mx.clip(at, 0, x.shape[0] - 1)], mx.array(0, x.dtype))
