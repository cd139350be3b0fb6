"""Rows chosen, repeated and looked up. Nothing is computed; values pass bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup.core.op import op

from ._arrays import F32, Array


@op("x[rows, n] -> out[rows, streams, n]")
def repeat_streams(x: F32, *, streams: int) -> F32:
    """Each row `streams` times: out[r, s] = x[r]. Hyper-connections start so (arXiv 2409.19606)."""
    return np.repeat(x[:, None], streams, axis=1)


@op("x[rows, ...]:any, at[outs]:i32 -> out[outs, ...]")
def take_rows(x: Array, at: Array) -> Array:
    """Rows by index: out[i] = x[at[i]]; a row of zeros where at[i] is -1.

    An index may repeat. ValueError for one below -1 or not below `rows`. No indices, no rows.
    """
    _in_range("take_rows", "index", at, -1, x.shape[0])
    out = np.zeros((len(at), *x.shape[1:]), np.asarray(x[:0]).dtype)
    out[at >= 0] = x[at[at >= 0]]
    return out


@take_rows.conditions
def _(x: Array, at: Array) -> None:
    _in_range("take_rows", "index", at, -1, x.shape[0])


@op("table[vocab, n]:weight, ids[...]:i32 -> out[..., n]:f32")
def embed(table: Any, ids: Array) -> F32:
    """Rows of a table by id, as float32: out[...] = table[ids[...]].

    Only these rows of a stored weight are read and dequantized. ValueError for an id below 0 or not below `vocab`.
    """
    _in_range("embed", "id", ids, 0, table.shape[0])
    return np.asarray(table[ids], np.float32)


@embed.conditions
def _(table: Array, ids: Array) -> None:
    _in_range("embed", "id", ids, 0, table.shape[0])


def _in_range(op: str, what: str, at: Array, low: int, high: int) -> None:
    wrong = (at < low) | (at >= high)
    if np.any(wrong):
        raise ValueError(f"{op}: the {what} {int(at[wrong].flat[0])} is not in {low}:{high}")
