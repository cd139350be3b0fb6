"""Paged caches, tails of sequences, n-grams: what looks back in a sequence, or is written for those who will."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from trueup.backends.metal.steps import Ints, flat, host, kept, length, placed, places, spans
from trueup.backends.metal.weights import Prepared, plain
from trueup.core import ops
from trueup.core.backend import KernelTable

kernels = KernelTable()


@kernels.implements(ops.paged_append)
def paged_append(
    rows: mx.array, cu_seqlens: mx.array, past: mx.array, block_table: mx.array, cache: mx.array, *, every: int
) -> mx.array:
    """One scatter for all sequences; where to is known on the host."""
    source, to = [], []
    for s, a, b in spans(cu_seqlens, rows.shape[0]):
        end = length(past, s, b - a)
        position = np.arange(end - (b - a), end)
        ends = (position + 1) % every == 0
        source.append(np.arange(a, b)[ends])
        to.append(places(cache, block_table, s, position[ends] // every))
    if not source or not sum(map(len, source)) or not rows.size:
        return cache
    page, place = np.divmod(np.concatenate(to), cache.shape[1])
    after = copy(cache)
    after[mx.array(page), mx.array(place)] = rows[mx.array(np.concatenate(source))]
    return after


@dataclass(frozen=True)
class Histories:
    """The sequences of a step, each with the tail before it: what a row looks back on, and what becomes the next tail.

    `source[tails and rows, ...]`: the tails of the sequences one after another, then the step's rows. `row[tokens]` is
    where each row lies there, were its tail before it, and `real[tokens]` whether it is one, not padding.
    """

    source: mx.array
    tail: mx.array
    spans: list[tuple[int, int, int]]
    keep: dict[int, int]

    @classmethod
    def of(cls, x: mx.array, cu_seqlens: mx.array, slots: mx.array, tail: mx.array, keep: mx.array | None) -> Histories:
        found = placed(cu_seqlens, slots, tail, x.shape[0])
        wanted = kept(keep, tail, found[-1][2] if found else 0)
        before = flat(tail[mx.array(np.array([slot for slot, _, _ in found], np.int32))])
        return cls(mx.concatenate([before, x]), tail, found, wanted)

    def _at(self, i: int, history: Ints) -> Ints:
        """Where entries of the history of the i-th sequence, its tail and then its rows, lie in `source`."""
        size, (_, a, _) = self.tail.shape[1], self.spans[i]
        return np.where(history < size, i * size + history, len(self.spans) * size + a + history - size)

    def back(self, by: int, tokens: int) -> mx.array:
        """For each row the one `by` rows before it, `[tokens, ...]`; zeros for padding."""
        at, size = np.zeros(tokens, np.int64), self.tail.shape[1]
        for i, (_, a, b) in enumerate(self.spans):
            at[a:b] = self._at(i, size - by + np.arange(b - a))
        end = self.spans[-1][2] if self.spans else 0
        if not self.source.size:
            return mx.zeros((tokens, *self.source.shape[1:]), self.source.dtype)
        real = mx.array((np.arange(tokens) < end).reshape(-1, *[1] * (self.source.ndim - 1)))
        return mx.where(real, self.source[mx.array(at)], mx.array(0, self.source.dtype))

    def after(self) -> mx.array:
        """The next version of the tails: of each sequence, and of the rows to be kept."""
        size, rows = self.tail.shape[1], np.arange(self.tail.shape[1])
        to: dict[int, Ints] = {}
        for i, (slot, a, b) in enumerate(self.spans):
            to.update((self.keep[t], self._at(i, t - a + 1 + rows)) for t in range(a, b) if t in self.keep)
            to[slot] = self._at(i, b - a + rows)
        if not to or not size or not self.source.size:
            return self.tail
        out = copy(self.tail)
        out[mx.array(np.array(list(to), np.int32))] = self.source[mx.array(np.stack(list(to.values())))]
        return out


@kernels.implements(ops.causal_conv)
def causal_conv(
    x: mx.array,
    weight: Prepared,
    cu_seqlens: mx.array,
    slots: mx.array,
    tail: mx.array,
    keep: mx.array | None,
    *,
    dilation: int,
) -> tuple[mx.array, mx.array]:
    past, w = Histories.of(x, cu_seqlens, slots, tail, keep), plain(weight)
    out, taps = mx.zeros(x.shape), w.shape[1]
    for j in range(taps):
        out = out + w[:, j] * past.back((taps - 1 - j) * dilation, x.shape[0])
    return _without_padding(out, past), past.after()


@kernels.implements(ops.trailing_mean)
def trailing_mean(
    x: mx.array, cu_seqlens: mx.array, slots: mx.array, tail: mx.array, keep: mx.array | None, *, every: int
) -> tuple[mx.array, mx.array]:
    past = Histories.of(x, cu_seqlens, slots, tail, keep)
    out = mx.zeros(x.shape)
    for j in range(every):
        out = out + past.back(every - 1 - j, x.shape[0])
    return out / every, past.after()


@kernels.implements(ops.delay)
def delay(
    x: mx.array, cu_seqlens: mx.array, slots: mx.array, tail: mx.array, keep: mx.array | None, *, by: int
) -> tuple[mx.array, mx.array]:
    past = Histories.of(x, cu_seqlens, slots, tail, keep)
    return past.back(by, x.shape[0]), past.after()


@kernels.implements(ops.ngram_rows)
def ngram_rows(
    ids: mx.array,
    cu_seqlens: mx.array,
    slots: mx.array,
    multipliers: mx.array,
    offsets: mx.array,
    sizes: mx.array,
    context: mx.array,
    keep: mx.array | None,
    *,
    eos: int,
) -> tuple[mx.array, mx.array]:
    """In int64, which wraps. Of each length at once: what an eos cuts off reads as eos, and the mix grows by an xor."""
    n, heads, tokens = multipliers.shape[0], sizes.shape[0], ids.shape[0]
    low, many = host(offsets), host(sizes)
    if np.any((many < 1) | (low < 0) | (low + many > 2**31)):
        raise ValueError(f"ngram_rows: sizes {many.tolist()} at offsets {low.tolist()} must be rows of an int32 table")
    past = Histories.of(ids, cu_seqlens, slots, context, keep)
    mix = past.back(0, tokens).astype(mx.int64) * multipliers[0] if n else mx.zeros((tokens,), mx.int64)
    cut, out, per = mx.zeros((tokens,), mx.bool_), [], heads // max(n - 1, 1)
    for m in range(1, n):
        token = past.back(m, tokens)
        cut = cut | (token == eos)
        mix = mix ^ (mx.where(cut, mx.array(eos, mx.int32), token).astype(mx.int64) * multipliers[m])
        at = slice((m - 1) * per, m * per)
        out.append((mx.remainder(mix[:, None], sizes[at]) + offsets[at]).astype(mx.int32))
    found = mx.concatenate(out, axis=1) if out else mx.zeros((tokens, heads), mx.int32)
    return _without_padding(found, past), past.after()


def _without_padding(out: mx.array, past: Histories) -> mx.array:
    """Zeros in the rows of no sequence: there a weight of infinity, or a hash of zeros, has made something."""
    end = past.spans[-1][2] if past.spans else 0
    if end == out.shape[0]:
        return out
    return mx.where(mx.arange(out.shape[0])[:, None] < end, out, mx.array(0, out.dtype))
