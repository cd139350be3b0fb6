"""Products with weights: dense, by experts, and rows of a table. A plan names the type that had to be expanded, and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from trueup.backends.metal.checks import in_range
from trueup.backends.metal.weights import FORMATS, Prepared, expert_product, product, rows, why_expanded
from trueup.core import ops
from trueup.core.backend import KernelTable
from trueup.core.dtypes import DTYPES
from trueup.core.op import Op

kernels = KernelTable()


def by_type(op: Op, packed: str, expanded: str) -> Callable[[Callable[..., mx.array]], Callable[..., mx.array]]:
    """Register one function for an op under a name for each way that its weight lies in."""

    def holds(dtypes: frozenset[str], *types: Any, **attrs: Any) -> bool | str:
        weight = next(t for p, t in zip(op.signature.params, types, strict=True) if p.name in ("weight", "table"))
        return weight.dtype in dtypes or f"{weight.dtype} is another kernel's"

    def add(run: Callable[..., mx.array]) -> Callable[..., mx.array]:
        names = dict.fromkeys(FORMATS, packed)
        for t in DTYPES.values():
            why = why_expanded(t.name, t.block)
            names.setdefault(t.name, f"{expanded}, {why}" if why else expanded)
        for name in dict.fromkeys(names.values()):
            of = frozenset(t for t, n in names.items() if n == name)
            kernels.implements(op, when=partial(holds, of), name=name)(run)
        return run

    return add


@by_type(ops.linear, "quantized_matmul", "matmul")
def linear(x: mx.array, weight: Prepared) -> mx.array:
    out = *x.shape[:-1], weight.shape[0]
    if not x.size or not prod(out):
        return mx.zeros(out)
    return product(x.reshape(-1, x.shape[-1]), weight).reshape(out)


@by_type(ops.embed, "dequantize", "take")
def embed(table: Prepared, ids: mx.array) -> mx.array:
    in_range("embed", "id", ids, 0, table.shape[0])
    if not ids.size or not prod(table.shape):
        return mx.zeros((*ids.shape, table.shape[1]))
    return rows(table, mx.clip(ids, 0, table.shape[0] - 1))


def _through(op: str, x: mx.array, experts: mx.array, weight: Prepared) -> mx.array:
    """`x[tokens, k or 1, n]` through its experts: `[tokens, k, m]`, zeros where there is none."""
    count, m, n = weight.shape
    in_range(op, "expert", experts, -1, count)
    if not experts.size or not m or not n or not count:
        return mx.zeros((*experts.shape, m))
    out = expert_product(x, mx.clip(experts, 0, count - 1).astype(mx.uint32), weight)
    return mx.where((experts >= 0)[..., None], out, 0.0)


@by_type(ops.expert_linear, "gather_qmm", "gather_mm")
def expert_linear(x: mx.array, experts: mx.array, weight: Prepared) -> mx.array:
    return _through("expert_linear", x[:, None], experts, weight)


@by_type(ops.expert_combine, "gather_qmm", "gather_mm")
def expert_combine(h: mx.array, experts: mx.array, mix: mx.array, weight: Prepared) -> mx.array:
    each = _through("expert_combine", h, experts, weight)
    return mx.where((experts >= 0)[..., None], mix[..., None] * each, 0.0).sum(1)
