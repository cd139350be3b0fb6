"""How tensors may lie for kernels to read them: conditions for the table, and rows as kernels' arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from trueup.core.op import Op
from trueup.core.types import TensorType

from .tensor import DeviceTensor


@dataclass(frozen=True)
class Rows:
    """A tensor as kernels take rows of its last axes: row r at (r // inner) * outer + (r % inner) * step, in elements."""

    tensor: DeviceTensor
    inner: int = 1
    outer: int = 0
    step: int = 0


ANYHOW = 99
"""A layout: any."""
Axes = list[tuple[int, int]]
"""Sizes and strides of axes of more than one entry, neighbours that lie as one joined."""

STATES = frozenset({"keys", "values"})
"""Arguments that are states which an op only reads: any strides of the leading axes will do."""


def strides(type: TensorType) -> tuple[int, ...]:
    """Elements from one entry of each axis to the next."""
    return type.strides or type.row_major()


def joined(type: TensorType, first: int, last: int) -> Axes:
    """The axes `first … last-1` as few as they can be."""
    out: Axes = []
    for n, s in list(zip(type.shape, strides(type), strict=True))[first:last]:
        if n == 1:
            continue
        if out and out[-1][1] == n * s:
            out[-1] = (out[-1][0] * n, s)
        else:
            out.append((n, s))
    return out


def side_by_side(type: TensorType, lead: int) -> bool:
    """Whether what stands behind the first `lead` axes lies in one piece."""
    inner = joined(type, lead, len(type.shape))
    return type.size == 0 or not inner or (len(inner) == 1 and inner[0][1] == 1)


def readable_rows(type: TensorType, lead: int) -> bool:
    """Whether it is rows as a kernel reads them: the rest in one piece, the first `lead` axes two at most."""
    return side_by_side(type, lead) and len(joined(type, 0, lead)) <= 2


def rows(tensor: DeviceTensor, lead: int | None = None, *, words: int = 0) -> Rows:
    """Rows over the first `lead` axes, by default all but the last. `words`: sizes count words of so many bytes."""
    type = tensor.type
    lead = len(type.shape) - 1 if lead is None else lead
    axes = joined(type, 0, lead) if type.size else []
    (outer, inner) = ((1, 0), (1, 0)) if not axes else ((1, 0), axes[0]) if len(axes) == 1 else axes
    count = max(inner[0], 1) if len(axes) > 1 or not axes else prod(type.shape[:lead])
    by = tensor.itemsize // words if words else 1
    at = DeviceTensor(tensor.buffer, tensor.offset * by, type)
    return Rows(at, count, outer[1] * by, inner[1] * by)


def pieces(type: TensorType, lead: int) -> list[tuple[int, int, int]]:
    """An entry behind the first `lead` axes as runs that lie side by side: where each begins, in the entry as it lies and
    in the row of its elements, and how many they are."""
    if not type.size:
        return [(0, 0, prod(type.shape[lead:]))]
    axes = joined(type, lead, len(type.shape))
    n = axes.pop()[0] if axes and axes[-1][1] == 1 else 1
    starts = [0]
    for size, step in axes:
        starts = [s + i * step for s in starts for i in range(size)]
    return [(s, i * n, n) for i, s in enumerate(starts)]


def typed(raw: DeviceTensor, type: TensorType) -> DeviceTensor:
    """Bytes of scratch as a tensor."""
    return DeviceTensor(raw.buffer, raw.offset // type.element.block_bytes, type)


def lies(op: Op, **layouts: int) -> Callable[..., bool | str]:
    """A condition: the named arguments are rows over so many leading axes (negative: of all but so many), states have
    their last axes in one piece from that axis on (with ANYHOW they may lie in any strides), everything else is
    contiguous."""

    def when(*types: Any, **attrs: Any) -> bool | str:
        for p, given in zip(op.params, types, strict=True):
            for t in given if isinstance(given, tuple) else (given,):
                if t is None or t.contiguous:
                    continue
                lead = layouts.get(p.name)
                if lead is None:
                    return f"{p.name} is {t}, which is not contiguous"
                if lead == ANYHOW:
                    continue
                lead = lead if lead >= 0 else len(t.shape) + lead
                state = p.mutates or p.name in STATES
                if not (side_by_side(t, lead) if state else readable_rows(t, lead)):
                    return f"{p.name} is {t}, which does not lie in rows"
        return True

    return when


def first_no(*answers: bool | str) -> bool | str:
    """True, or the first of the answers that is not."""
    return next((a for a in answers if a is not True), True)
