"""Graphs of a few ops each, such as models are made of: experts, sparse attention, a delta net, streams, n-grams.

Their weights are random and of several stored types; their inputs are those of a step (`cu_seqlens`, `slots`, `past`,
…),
made valid like those of ops. Needs the core alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from trueup.core.graph import Graph, Value
from trueup.core.ops import (
    add,
    attention,
    causal_conv,
    columns,
    delay,
    embed,
    expert_combine,
    expert_linear,
    gated_delta_rule,
    gated_rms_norm,
    gdn_decay,
    group_rms_norm,
    hc_read,
    hc_write,
    index_scores,
    l2_norm,
    linear,
    merge_attention,
    merge_heads,
    mul,
    ngram_rows,
    normalize,
    paged_append,
    ple_gate,
    repeat_streams,
    rms_norm,
    rope,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    split_heads,
    swiglu,
    take_rows,
    top_k,
    trailing_mean,
)
from trueup.core.ops.rope import rope_frequencies
from trueup.core.state import Capacity, PerSequence, PerToken

from .adversarial import values
from .weights import weight

SEQS, SLOTS, PAGE, BLOCKS, WIDTH = 3, 7, 8, 4, 32
BLOCK_FUNCTIONS: dict[str, Callable[[Block], Any]] = {}


def block(f: Callable[[Block], Any]) -> Callable[[Block], Any]:
    BLOCK_FUNCTIONS[f.__name__] = f
    return f


class Block:
    """A graph being written: its inputs, and weights made by name."""

    def __init__(self, tokens: int, dtype: str) -> None:
        self.tokens, self.dtype = tokens, dtype
        self.g = g = Graph(Capacity(SLOTS, SEQS * BLOCKS + 1, PAGE))

        def i32(name: str, *shape: int) -> Value:
            return g.input(name, *shape, dtype="i32")

        self.x = g.input("x", tokens, WIDTH)
        self.cu, self.slots, self.keep = i32("cu_seqlens", SEQS + 1), i32("slots", SEQS), i32("keep", tokens)
        self.past, self.table = i32("past", SEQS), i32("block_table", SEQS, BLOCKS)
        self.positions, self.ids = i32("positions", tokens, 1), i32("ids", tokens)

    @property
    def pages(self) -> tuple[Value, Value, Value]:
        return self.cu, self.past, self.table

    def w(self, name: str, *shape: int, fill: str = "normal", size: float | None = None) -> Value:
        """A weight: matrices of the block's stored type, scaled so that rows keep their size; vectors float32."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        array = values(fill, shape, rng)
        if len(shape) > 1:
            array = array * np.float32(shape[-1] ** -0.5 if size is None else size)
        dtype = self.dtype if len(shape) > 1 and shape[-1] % 32 == 0 else "f32"
        return self.g.weight(weight(name, shape, dtype, array.astype(np.float32), rng))


@block
def experts(b: Block) -> Any:
    """A norm, a router, four of eight experts, and a gated shared expert."""
    x = rms_norm(b.x, b.w("norm", WIDTH, fill="chance"), eps=1e-6)
    share, chosen = top_k(softmax(linear(x, b.w("router", 8, WIDTH))), k=4)
    gate, up = (expert_linear(x, chosen, b.w(n, 8, WIDTH, WIDTH)) for n in ("gate", "up"))
    routed = expert_combine(swiglu(gate, up), chosen, normalize(share, floor=6.1e-5), b.w("down", 8, WIDTH, WIDTH))
    gate, up = linear(x, b.w("shared_gate", WIDTH, WIDTH)), linear(x, b.w("shared_up", WIDTH, WIDTH))
    shared = linear(swiglu(gate, up), b.w("shared_down", WIDTH, WIDTH))
    return add(routed, scale_rows(shared, sigmoid(linear(x, b.w("opening", 1, WIDTH)))))


@block
def dense(b: Block) -> Any:
    """A norm, a gated feed-forward layer, and the residual."""
    x = rms_norm(b.x, b.w("norm", WIDTH, fill="chance"), eps=1e-6)
    h = swiglu(linear(x, b.w("gate", 2 * WIDTH, WIDTH)), linear(x, b.w("up", 2 * WIDTH, WIDTH)))
    return add(b.x, linear(h, b.w("down", WIDTH, 2 * WIDTH)))


@block
def delta(b: Block) -> Any:
    """A short convolution, the gated delta rule, a gated norm."""
    d, heads, kheads = 8, 4, 2
    tail = b.g.state("conv", PerSequence((3, (2 * kheads + heads) * d)))
    state = b.g.state("delta", PerSequence((heads, d, d)))
    n = (2 * kheads + heads) * d
    qkv = silu(causal_conv(linear(b.x, b.w("qkv", n, WIDTH)), b.w("taps", n, 4), b.cu, b.slots, tail, b.keep))

    def part(first: int, count: int) -> Any:
        return split_heads(columns(qkv, start=first * d, size=count * d), heads=count)

    q, k = (l2_norm(part(i * kheads, kheads), eps=1e-6) for i in (0, 1))
    decay = gdn_decay(linear(b.x, b.w("alpha", heads, WIDTH)), b.w("bias", heads), b.w("rate", heads, fill="rates"))
    beta = sigmoid(linear(b.x, b.w("beta", heads, WIDTH)))
    v = part(2 * kheads, heads)
    o = gated_delta_rule(q, k, v, decay, beta, b.cu, b.slots, state, b.keep, scale=d**-0.5, tiled=True)
    z = split_heads(linear(b.x, b.w("z", heads * d, WIDTH)), heads=heads)
    o = gated_rms_norm(o, z, b.w("norm", d, fill="chance"), eps=1e-6, activation="silu")
    return linear(merge_heads(o), b.w("out", WIDTH, heads * d))


@block
def sparse(b: Block) -> Any:
    """Attention over the blocks of two tokens that an indexer scores highest, its cache written in the same step."""
    heads, kv, d, m = 4, 2, 8, 2
    freqs = b.g.constant("freqs", rope_frequencies(dims=8, base=1e4))
    component = b.g.constant("component", np.zeros(4, np.int32))
    keys, vals = (b.g.state(n, PerToken((kv, d))) for n in ("keys", "values"))
    index = b.g.state("index", PerToken((d,), every=m))
    raw = b.g.state("index_tail", PerSequence((m - 1, d)))
    begun = b.g.state("positions", PerSequence((m - 1, 1), dtype="i32"))
    qg = split_heads(linear(b.x, b.w("q", 2 * heads * d, WIDTH)), heads=heads)
    q, gate = columns(qg, start=0, size=d), columns(qg, start=d, size=d)
    q = rope(rms_norm(q, b.w("q_norm", d, fill="chance"), eps=1e-6), b.positions, freqs, component)
    k = split_heads(linear(b.x, b.w("k", kv * d, WIDTH)), heads=kv)
    paged_append(rope(k, b.positions, freqs, component), *b.pages, keys)
    paged_append(split_heads(linear(b.x, b.w("v", kv * d, WIDTH)), heads=kv), *b.pages, vals)
    mean = trailing_mean(linear(b.x, b.w("index_k", d, WIDTH)), b.cu, b.slots, raw, b.keep, every=m)
    starts = delay(b.positions, b.cu, b.slots, begun, b.keep, by=m - 1)
    key = rope(split_heads(mean, heads=1), starts, freqs, component)
    paged_append(merge_heads(key), *b.pages, index, every=m)
    scores = index_scores(
        split_heads(linear(b.x, b.w("index_q", 2 * d, WIDTH)), heads=2), index, *b.pages, every=m, scale=d**-0.5
    )
    _, chosen = top_k(scores, k=3)
    o, lse = attention(q, keys, vals, *b.pages, chosen, scale=d**-0.5, block=m)
    o, _ = merge_attention([o], [lse], b.w("sinks", heads))
    return linear(merge_heads(mul(o, sigmoid(gate))), b.w("out", WIDTH, heads * d))


@block
def streams(b: Block) -> Any:
    """Two residual streams, read through gates and written back."""
    R = repeat_streams(b.x, streams=2)
    normed = group_rms_norm(R, b.w("norm", 2 * WIDTH, fill="chance"), eps=1e-6)
    flat = merge_heads(normed)
    low = silu(linear(flat, b.w("down", 8, 2 * WIDTH)), scale=0.5)
    x = hc_read(normed, linear(low, b.w("up", 2 * WIDTH, 8)))
    R = hc_write(R, linear(x, b.w("mixer", WIDTH, WIDTH)), linear(flat, b.w("inject", 2, 2 * WIDTH)))
    return merge_heads(R)


@block
def ngrams(b: Block) -> Any:
    """Rows of an n-gram table, looked up before the step, gated into the streams, convolved in time."""
    context = b.g.state("context", PerSequence((2,), dtype="i32", fill=0))
    tail = b.g.state("tail", PerSequence((9, 2 * WIDTH)))
    sizes, offsets = np.array([13, 17, 19, 23]), np.array([0, 13, 30, 49])
    with b.g.prologue():
        consts = [
            b.g.constant(n, np.asarray(a, np.int64))
            for n, a in (("multipliers", [3, 5, 7]), ("offsets", offsets), ("sizes", sizes))
        ]
        rows = ngram_rows(b.ids, b.cu, b.slots, *consts, context, b.keep, eos=0)
        e = merge_heads(embed(b.w("table", 72, 8, size=1.0), rows))
    R = repeat_streams(b.x, streams=2)
    key = split_heads(linear(e, b.w("key", 2 * WIDTH, WIDTH)), heads=2)
    gated = ple_gate(key, R, linear(e, b.w("value", WIDTH, WIDTH)))
    c = causal_conv(merge_heads(gated), b.w("taps", 2 * WIDTH, 4), b.cu, b.slots, tail, b.keep, dilation=3)
    return merge_heads(add(R, add(gated, split_heads(silu(c), heads=2))))


@block
def head(b: Block) -> Any:
    """Rows picked, a norm, logits."""
    x = rms_norm(take_rows(b.x, b.g.input("out_rows", 4, dtype="i32")), b.w("norm", WIDTH, fill="chance"), eps=1e-6)
    return linear(x, b.w("vocabulary", 65, WIDTH))


def graph_of(name: str, tokens: int, dtype: str) -> Graph:
    """The block's graph; its result is the output "out"."""
    b = Block(tokens, dtype)
    b.g.output("out", BLOCK_FUNCTIONS[name](b))
    return b.g
