"""Writing to a paged cache."""

from __future__ import annotations

import numpy as np

from trueup.core.op import op
from trueup.core.types import TensorType

from ._arrays import Array
from ._sequences import check_pages, length, pages, spans


@op(
    "rows[tokens, ...]:any, cu_seqlens[seqs+1]:i32, past[seqs]:i32, block_table[seqs, blocks]:i32, "
    "&cache[pages, entries, ...]:any ->"
)
def paged_append(
    rows: Array, cu_seqlens: Array, past: Array, block_table: Array, cache: Array, *, every: int = 1
) -> None:
    """Store each row that ends an entry: the row of position p, where (p+1) mod every = 0, becomes entry p // every.

    The first row of sequence s has the position past[s]. Entry e lies in page block_table[s, e // entries] at place e
    mod entries. All other rows are dropped, and nothing else of the cache is touched. Values pass bit for bit; the
    cache must be of the rows' type, else ContractError. ValueError where the page table lacks a page that is needed.
    """
    for s, span in spans(cu_seqlens, len(rows)):
        position = np.arange(past[s], length(past, s, span))
        ends = (position + 1) % every == 0
        page, place = pages(block_table, s, position[ends] // every, cache)
        cache[page, place] = rows[span][ends]


@paged_append.requires
def _(
    rows: TensorType,
    cu_seqlens: TensorType,
    past: TensorType,
    block_table: TensorType,
    cache: TensorType,
    *,
    every: int,
) -> bool | str:
    if rows.dtype != cache.dtype:
        return f"cache must be of the rows' type, {rows.dtype}, got {cache.dtype}"
    return every >= 1 or f"every must be at least 1, got {every}"


@paged_append.conditions
def _(rows: Array, cu_seqlens: Array, past: Array, block_table: Array, cache: Array, *, every: int) -> None:
    check_pages(cu_seqlens, past, block_table, cache, len(rows), every=every, writes=True)
