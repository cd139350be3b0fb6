"""Ops that look a fixed number of rows back in a sequence, with the rows before the step in a tail.

A tail is `&tail[slot, rows back, …]`, oldest row first; at the start of a sequence it holds what its state declares
(zeros). Any split of a sequence into steps gives the same bits. Rows of padding are not read and give zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.op import op
from trueup.core.types import TensorType

from ._arrays import F32, Array, narrow, wide
from ._sequences import check_slots, placed, push


@op(
    "x[tokens, channels], weight[channels, taps]:weight, cu_seqlens[seqs+1]:i32, slots[seqs]:i32, "
    "&tail[slot, (taps-1)*dilation, channels], keep?[tokens]:i32 -> out[tokens, channels]"
)
@np.errstate(all="ignore")
def causal_conv(
    x: F32, weight: Any, cu_seqlens: Array, slots: Array, tail: F32, keep: Array | None = None, *, dilation: int = 1
) -> F32:
    """Depthwise causal convolution: out[t, c] = sum_j weight[c, j] · x[t - (taps-1-j)·dilation, c].

    The last tap is the row itself; rows before the step come from the tail. Each channel sees itself alone. Summed
    over the taps in order, in float64, rounded once. The tail after the step is the last (taps-1)·dilation inputs;
    after row t it also goes to slot keep[t], unless that is -1.
    """
    w, out = wide(weight), np.zeros(x.shape, np.float32)
    for slot, rows in placed(cu_seqlens, slots, tail, len(x)):
        history = np.concatenate([tail[slot], x[rows]])
        n, total = rows.stop - rows.start, np.zeros((rows.stop - rows.start, x.shape[1]))
        for j in range(w.shape[1]):
            total += w[:, j] * history[j * dilation : j * dilation + n]
        out[rows] = narrow(total)
        push(tail, slot, history, rows, keep)
    return out


@causal_conv.requires
def _(
    x: TensorType, weight: TensorType, cu_seqlens: TensorType, slots: TensorType, tail: TensorType,
    keep: TensorType | None, *, dilation: int,
) -> bool | str:  # fmt: skip
    return dilation >= 1 or f"dilation must be at least 1, got {dilation}"


@causal_conv.conditions
def _(
    x: Array, weight: Array, cu_seqlens: Array, slots: Array, tail: Array, keep: Array | None, *, dilation: int
) -> None:
    check_slots(cu_seqlens, slots, tail, len(x), keep)


@op(
    "x[tokens, n], cu_seqlens[seqs+1]:i32, slots[seqs]:i32, &tail[slot, every-1, n], keep?[tokens]:i32 "
    "-> out[tokens, n]"
)
@np.errstate(all="ignore")
def trailing_mean(x: F32, cu_seqlens: Array, slots: Array, tail: F32, keep: Array | None = None, *, every: int) -> F32:
    """The mean of each row and the every-1 rows before it; at a row that ends a block of `every`, the block's mean.

    So the means of blocks need no alignment between blocks and steps: `paged_append(…, every=every)` stores those
    that end. Summed oldest first, in float64. Rows before the start of the sequence read as the tail's start, zeros.
    tail and keep are as in causal_conv.
    """
    out = np.zeros(x.shape, np.float32)
    for slot, rows in placed(cu_seqlens, slots, tail, len(x)):
        history = np.concatenate([tail[slot], x[rows]])
        n, total = rows.stop - rows.start, np.zeros((rows.stop - rows.start, x.shape[1]))
        for j in range(every):
            total += history[j : j + n]
        out[rows] = narrow(total / every)
        push(tail, slot, history, rows, keep)
    return out


@trailing_mean.conditions
def _(x: Array, cu_seqlens: Array, slots: Array, tail: Array, keep: Array | None, *, every: int) -> None:
    check_slots(cu_seqlens, slots, tail, len(x), keep)


@op(
    "x[tokens, ...]:any, cu_seqlens[seqs+1]:i32, slots[seqs]:i32, &tail[slot, by, ...]:any, keep?[tokens]:i32 "
    "-> out[tokens, ...]"
)
def delay(x: Array, cu_seqlens: Array, slots: Array, tail: Array, keep: Array | None = None, *, by: int) -> Array:
    """Each row becomes the one `by` rows before it in its sequence, from the tail where the step does not hold it.

    Values pass bit for bit; the tail must be of x's type, else ContractError. tail and keep are as in causal_conv.
    """
    out = np.zeros(x.shape, x.dtype)
    for slot, rows in placed(cu_seqlens, slots, tail, len(x)):
        history = np.concatenate([tail[slot], x[rows]])
        out[rows] = history[: rows.stop - rows.start]
        push(tail, slot, history, rows, keep)
    return out


@delay.requires
def _(
    x: TensorType, cu_seqlens: TensorType, slots: TensorType, tail: TensorType, keep: TensorType | None, *, by: int
) -> bool | str:
    return x.dtype == tail.dtype or f"tail must be of x's type, {x.dtype}, got {tail.dtype}"


@delay.conditions
def _(x: Array, cu_seqlens: Array, slots: Array, tail: Array, keep: Array | None, *, by: int) -> None:
    check_slots(cu_seqlens, slots, tail, len(x), keep)
