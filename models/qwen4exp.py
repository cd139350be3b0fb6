"""Qwen4-Exp ("Qwen3.8-Flash"): hybrid of Gated DeltaNet and QSA layers on several residual streams, with a mixture of
experts and n-gram embeddings.

Reads the GGUF (`general.architecture = qwen4exp`) and builds the graph of a step. The mathematics follows transformers'
`qwen4_exp` and was checked against it; norms hold final multipliers and V heads are tiled, as converters write them.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from trueup.core.graph import Graph, Value
from trueup.core.ops import (
    add,
    argmax,
    attention,
    causal_conv,
    columns,
    concat,
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
from trueup.core.ops.rope import mrope_components, rope_frequencies
from trueup.core.plugins import hookimpl
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.core.weight import Weight

from .architecture import Architecture, DraftInputs, DraftShape, Place, StepInputs, StepShape, Summary, as_i64
from .gguf import DraftHeadAlone, Keys, RowTable, Tensors

ROUTER_FLOOR = 6.103515625e-5  # the smallest normal float16: what the sum of the chosen probabilities is clamped at


@dataclass(frozen=True)
class NGramParameters:
    """The hashed n-gram embedding of one layer (PLE)."""

    layer: int
    size: int
    heads: int
    taps: int
    eos: int
    width: int
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """Hyper-parameters, named as the field does. `layers` lists the trunk's kinds: "gdn" or "qsa"."""

    layers: tuple[str, ...]
    draft_layers: int
    vocab_size: int
    context_length: int
    hidden: int
    streams: int
    stream_rank: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope_dims: int
    rope_base: float
    rope_sections: tuple[int, ...]
    conv_taps: int
    delta_dim: int
    key_heads: int
    value_heads: int
    experts: int
    experts_used: int
    expert_width: int
    shared_width: int
    index_heads: int
    index_dim: int
    index_budget: int
    index_block: int
    ngram: NGramParameters | None

    @classmethod
    def read(cls, keys: Keys, tensors: Tensors, *, vocab: int | None = None) -> Parameters:
        """`vocab`: of a file that may leave its embedding out, the size of the vocabulary that it must have."""

        def number(name: str, minimum: int = 1) -> int:
            return keys.required(f"qwen4exp.{name}", int, minimum=minimum, maximum=2**31 - 1)

        blocks = number("block_count")
        draft = keys.optional("qwen4exp.nextn_predict_layers", int, 0, minimum=0, maximum=1)
        if draft >= blocks:
            raise keys.error(
                "qwen4exp.nextn_predict_layers", "leaves no trunk", found=draft, expected=f"below {blocks}"
            )
        hidden, head_dim = number("embedding_length"), number("attention.key_length")
        if number("attention.value_length") != head_dim:
            raise keys.error("qwen4exp.attention.value_length", "differs from key_length", expected=head_dim)
        delta_dim, value_heads = number("ssm.state_size"), number("ssm.time_step_rank")
        if number("ssm.inner_size") != delta_dim * value_heads:
            raise keys.error(
                "qwen4exp.ssm.inner_size", "is not state_size times time_step_rank", expected=delta_dim * value_heads
            )
        key_heads = number("ssm.group_count")
        if value_heads % key_heads:
            raise keys.error(
                "qwen4exp.ssm.group_count", "does not divide time_step_rank", found=key_heads, expected=value_heads
            )
        heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
        if heads % kv_heads:
            raise keys.error(
                "qwen4exp.attention.head_count_kv", "does not divide head_count", found=kv_heads, expected=heads
            )
        rope_dims = number("rope.dimension_count", 2)
        if rope_dims % 2 or rope_dims > min(head_dim, number("attention.indexer.key_length")):
            raise keys.error("qwen4exp.rope.dimension_count", "must be even and fit the heads", found=rope_dims)
        sections = keys.array("qwen4exp.rope.dimension_sections", int, length=4, minimum=0)
        if int(sections.sum()) != rope_dims // 2:
            raise keys.error(
                "qwen4exp.rope.dimension_sections",
                "must sum to half of dimension_count",
                found=int(sections.sum()),
                expected=rope_dims // 2,
            )
        recurrent, block = cls._layer_kinds(keys, blocks, draft)
        budget = number("attention.indexer.top_k")
        if block and budget % block:
            raise keys.error(
                "qwen4exp.attention.indexer.top_k", "is no multiple of the block size", found=budget, expected=block
            )
        experts, used = number("expert_count"), number("expert_used_count")
        if used > experts:
            raise keys.error(
                "qwen4exp.expert_used_count", "exceeds expert_count", found=used, expected=f"at most {experts}"
            )
        if vocab is None or tensors.has("token_embd.weight"):
            vocab = tensors.take("token_embd.weight", shape=(None, hidden)).shape[0]
        return cls(
            layers=tuple("gdn" if r else "qsa" for r in recurrent),
            draft_layers=draft,
            vocab_size=vocab,
            context_length=number("context_length"),
            hidden=hidden,
            streams=number("hyper_connection.count"),
            stream_rank=number("hyper_connection.low_rank"),
            eps=keys.required("qwen4exp.attention.layer_norm_rms_epsilon", float, minimum=0.0),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dims=rope_dims,
            rope_base=keys.required("qwen4exp.rope.freq_base", float, minimum=1.0),
            rope_sections=tuple(int(s) for s in sections),
            conv_taps=number("ssm.conv_kernel", 2),
            delta_dim=delta_dim,
            key_heads=key_heads,
            value_heads=value_heads,
            experts=experts,
            experts_used=used,
            expert_width=number("expert_feed_forward_length"),
            shared_width=number("expert_shared_feed_forward_length"),
            index_heads=number("attention.indexer.head_count"),
            index_dim=number("attention.indexer.key_length"),
            index_budget=budget,
            index_block=block,
            ngram=cls._ngram(keys, tensors, recurrent, hidden, vocab),
        )

    @staticmethod
    def _layer_kinds(keys: Keys, blocks: int, draft: int) -> tuple[list[bool], int]:
        """Per trunk layer whether it is recurrent, and the block size of the QSA layers (0 where there is none)."""
        trunk = blocks - draft
        every = keys.optional("qwen4exp.full_attention_interval", int, 4, minimum=1)
        name = "qwen4exp.attention.recurrent_layers"
        if keys.has(name):
            recurrent = [bool(b) for b in keys.array(name, bool, length=blocks)]
        else:
            recurrent = [i < trunk and (i + 1) % every != 0 for i in range(blocks)]
        if any(recurrent[trunk:]):
            raise keys.error(name, "a draft block can't be recurrent", found=recurrent[trunk:], expected=False)
        name = "qwen4exp.attention.compress_ratios"
        ratios = [int(r) for r in keys.array(name, int, length=blocks, minimum=0)]
        for i, (r, ratio) in enumerate(zip(recurrent, ratios, strict=True)):
            if r != (ratio == 0):
                raise keys.error(
                    name, f"entry {i} contradicts the layer's kind", found=ratio, expected="0" if r else "above 1"
                )
        sizes = {r for r in ratios if r}
        if len(sizes) > 1 or 1 in sizes:
            raise keys.error(name, "non-zero entries must be equal and above 1", found=sorted(sizes))
        return recurrent[:trunk], sizes.pop() if sizes else 0

    @staticmethod
    def _ngram(keys: Keys, tensors: Tensors, recurrent: list[bool], hidden: int, vocab: int) -> NGramParameters | None:
        if not keys.has("qwen4exp.ple.layers"):
            return None
        (layer,) = (
            int(i) for i in keys.array("qwen4exp.ple.layers", int, length=1, minimum=0, maximum=len(recurrent) - 1)
        )
        if not recurrent[layer]:
            raise keys.error("qwen4exp.ple.layers", "names a layer that is not recurrent", found=layer)

        def number(name: str, minimum: int = 1) -> int:
            return keys.required(f"qwen4exp.{name}", int, minimum=minimum, maximum=2**31 - 1)

        size, per = number("ple.ngram_size", 2), number("ple.heads_per_ngram")
        heads = (size - 1) * per
        width = number("embedding_length_per_layer_input")
        if width * heads != hidden:
            raise keys.error(
                "qwen4exp.embedding_length_per_layer_input",
                f"times {heads} heads is not embedding_length",
                found=width,
                expected=hidden // heads,
            )
        top = 2**63 - 1
        multipliers = keys.array(
            "qwen4exp.ple.layer_multipliers", int, length=size, minimum=1, maximum=top // max(1, vocab)
        )
        offsets = keys.array("qwen4exp.ple.head_offsets", int, length=heads, minimum=0, maximum=2**31 - 1)
        sizes = keys.array("qwen4exp.ple.head_vocab_sizes", int, length=heads, minimum=1, maximum=2**31 - 1)
        rows = tensors.take("per_layer_token_embd.weight", shape=(None, width)).shape[0]
        ends = as_i64(offsets) + as_i64(sizes)
        if int(ends.max()) > rows:
            raise keys.error(
                "qwen4exp.ple.head_offsets",
                "with head_vocab_sizes reach past the table",
                found=int(ends.max()),
                expected=f"at most {rows}",
            )
        eos = keys.token_id("qwen4exp.ple.eos_token_id", vocab)
        if eos is None:
            raise keys.error("qwen4exp.ple.eos_token_id", "key is missing")
        keys.token_id("qwen4exp.ple.image_token_id", vocab)
        return NGramParameters(
            layer, size, heads, number("ple.conv_kernel", 2), eos, width,
            *(tuple(int(v) for v in a) for a in (multipliers, offsets, sizes)),
        )  # fmt: skip


class Qwen4Exp(Architecture):
    """A Qwen4-Exp model: `build` is the forward pass, top to bottom."""

    name = "qwen4exp"

    def __init__(self, parameters: Parameters, weights: dict[str, Weight]) -> None:
        self.p, self.weights = parameters, weights
        self.vocab_size, self.context_length = parameters.vocab_size, parameters.context_length
        self.position_components = 3
        self.page_multiple = parameters.index_block or 1
        self.has_draft_head = parameters.draft_layers > 0

    @classmethod
    def read(cls, keys: Keys, tensors: Tensors) -> Self:
        draft = keys.optional("qwen4exp.nextn_predict_layers", int, 0, minimum=0, maximum=1)
        if draft and not any(name.startswith("blk.0.") for name in tensors.file.tensors):
            raise DraftHeadAlone(
                "this is a draft head (MTP) without its model; give it as --mtp beside that",
                path=keys.file.path,
                key="qwen4exp.nextn_predict_layers",
            )
        p = Parameters.read(keys, tensors)
        weights = {name: _take(tensors, name, shape) for name, shape in tensor_shapes(p).items()}
        output = tensors.take_optional("output.weight", shape=(p.vocab_size, p.hidden))
        weights["output.weight"] = output if output is not None else weights["token_embd.weight"]
        tensors.finish()
        if p.ngram is not None:
            weights["per_layer_token_embd.weight"] = RowTable(weights["per_layer_token_embd.weight"])
        return cls(p, weights)

    def with_draft_head(self, keys: Keys, tensors: Tensors) -> Qwen4Exp:
        """The MTP block of a sidecar beside this trunk; embedding and output are the trunk's own."""
        theirs = Parameters.read(keys, tensors, vocab=self.p.vocab_size)
        if not theirs.draft_layers:
            raise keys.error("qwen4exp.nextn_predict_layers", "the file has no draft head", found=0, expected=1)
        ours = replace(self.p, draft_layers=1)
        for field in fields(Parameters):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            if a != b and field.name not in ("ngram", "context_length"):
                raise keys.error(
                    "general.architecture", f"the draft head is of another model: {field.name}", found=b, expected=a
                )
        block = self.draft_block
        weights = {
            name: _take(tensors, name, shape) for name, shape in tensor_shapes(ours).items() if name.startswith(block)
        }
        return Qwen4Exp(ours, self.weights | weights)

    def summary(self) -> Summary:
        shown = {k: v for k, v in asdict(self.p).items() if k not in ("layers", "ngram")}
        if self.p.ngram is not None:
            shown |= {f"ngram_{k}": v for k, v in asdict(self.p.ngram).items() if not isinstance(v, tuple)}
        names = [f"{k}+ngram" if self.p.ngram and self.p.ngram.layer == i else k for i, k in enumerate(self.p.layers)]
        return Summary(shown, (*names, *["mtp"] * self.p.draft_layers))

    def fingerprint(self) -> str:
        h = hashlib.sha256(repr(self.p).encode())
        for name, w in sorted(self.weights.items()):
            sample = w.data.reshape(-1)[:: max(1, w.data.size // 64)]
            h.update(f"{name}:{w.type}".encode() + np.ascontiguousarray(sample).tobytes())
        return h.hexdigest()

    # -- the step ------------------------------------------------------------------------------------------------------

    def build(self, shape: StepShape, capacity: Capacity) -> Graph:
        """A step of the trunk. With `shape.draft` the MTP block meets the same rows: row p is (x_p, R_{p-1})."""
        graph = Graph(capacity)
        inputs = StepInputs(graph, shape, components=self.position_components)
        step = _Rows(self, graph, inputs.place)
        R = step.trunk(inputs.ids)
        graph.output("logits", step.logits(take_rows(R, inputs.out_rows), "output_hc_"))
        if shape.draft:
            x = step.draft_input(inputs.ids, step.previous(R))
            if shape.draft == "logits":
                x = take_rows(step.layer(x, "qsa", self.draft_block), inputs.out_rows)
                graph.output("draft_logits", step.logits(x, self.draft_block + "nextn.hc_head_"))
            else:
                step.remember(x, self.draft_block)
        return graph

    def build_draft(self, shape: DraftShape, capacity: Capacity) -> Graph:
        """The MTP block as its own successor: each step takes the token that the one before chose, and its residual."""
        graph = Graph(capacity)
        inputs = DraftInputs(graph, shape, components=self.position_components)
        ids, b = inputs.ids, self.draft_block
        steps = [_Rows(self, graph, place) for place in inputs.places]
        R = merge_heads(take_rows(steps[0].last_residual(), inputs.places[0].slots))
        for i, step in enumerate(steps):
            R = step.layer(step.draft_input(ids, R), "qsa", b)
            ids = argmax(step.logits(R, b + "nextn.hc_head_"))
            graph.output(f"draft.{i}", ids)
            R = merge_heads(R)
        return graph

    @property
    def draft_block(self) -> str:
        """The prefix of the MTP block, which follows the trunk's."""
        return f"blk.{len(self.p.layers)}."


class _Rows:
    """Records what a model does with some rows. Methods are the paper's blocks; `R` is the residual [rows, streams, hidden],
    `x` [rows, hidden]."""

    def __init__(self, model: Qwen4Exp, graph: Graph, at: Place) -> None:
        self.p, self.weights, self.g, self.at = model.p, model.weights, graph, at
        self.components = model.position_components

    def trunk(self, ids: Value) -> Value:
        """All layers but the MTP block."""
        p = self.p
        rows = None if p.ngram is None else self.ngram_embedding(ids, p.ngram)
        R = repeat_streams(embed(self.w("token_embd.weight"), ids), streams=p.streams)
        for i, kind in enumerate(p.layers):
            if p.ngram is not None and p.ngram.layer == i:
                R = self.inject_ngrams(R, rows, p.ngram, f"blk.{i}.")
            R = self.layer(R, kind, f"blk.{i}.")
        return R

    def logits(self, R: Value, mixer: str) -> Value:
        x, _ = self.mix(R, mixer, inject=False)
        return linear(x, self.w("output.weight"))

    def layer(self, R: Value, kind: str, b: str) -> Value:
        """Token mixer, then experts; each reads the streams through a mix and writes back to all of them."""
        x, inject = self.mix(R, b + "hc_attn_")
        R = hc_write(R, self.delta_net(x, b) if kind == "gdn" else self.sparse_attention(x, b), inject)
        x, inject = self.mix(R, b + "hc_ffn_")
        return hc_write(R, self.experts(x, b), inject)

    def w(self, name: str) -> Value:
        return self.g.weight(self.weights[name])

    def mix(self, R: Value, b: str, *, inject: bool = True) -> tuple[Value, Value | None]:
        """Hyper-connections: a gated mean of the normed streams, and the gates by which the result is written back."""
        normed = group_rms_norm(R, self.w(b + "norm.weight"), eps=self.p.eps)
        flat = merge_heads(normed)
        low = silu(linear(flat, self.w(b + "down.weight")), scale=1 / self.p.streams)
        x = hc_read(normed, linear(low, self.w(b + "up.weight")))
        return x, linear(flat, self.w(b + "inject.weight")) if inject else None

    def delta_net(self, x: Value, b: str) -> Value:
        """Gated DeltaNet: short convolution, normalized keys and queries, the gated delta rule, a gated norm."""
        p, d = self.p, self.p.delta_dim
        channels = (2 * p.key_heads + p.value_heads) * d
        tail = self.g.state(b + "conv", PerSequence((p.conv_taps - 1, channels)))
        state = self.g.state(b + "delta", PerSequence((p.value_heads, d, d)))
        qkv = causal_conv(
            linear(x, self.w(b + "attn_qkv.weight")), self.w(b + "ssm_conv1d.weight"), *self.at.rows, tail, self.at.keep
        )
        qkv = silu(qkv)

        def heads(first: int, count: int) -> Value:
            return split_heads(columns(qkv, start=first * d, size=count * d), heads=count)

        q = l2_norm(heads(0, p.key_heads), eps=p.eps)
        k = l2_norm(heads(p.key_heads, p.key_heads), eps=p.eps)
        v = heads(2 * p.key_heads, p.value_heads)
        decay = gdn_decay(linear(x, self.w(b + "ssm_alpha.weight")), self.w(b + "ssm_dt.bias"), self.w(b + "ssm_a"))
        beta = sigmoid(linear(x, self.w(b + "ssm_beta.weight")))
        o = gated_delta_rule(q, k, v, decay, beta, *self.at.rows, state, self.at.keep, scale=d**-0.5, tiled=True)
        z = split_heads(linear(x, self.w(b + "attn_gate.weight")), heads=p.value_heads)
        o = gated_rms_norm(o, z, self.w(b + "ssm_norm.weight"), eps=p.eps, activation="sigmoid")
        return linear(merge_heads(o), self.w(b + "ssm_out.weight"))

    def sparse_attention(self, x: Value, b: str) -> Value:
        """Gated attention over the blocks of tokens that the indexer scores highest (QSA), and the unfinished block."""
        p, at = self.p, self.at
        K, V = self.append_keys(x, b)
        qg = split_heads(linear(x, self.w(b + "attn_q.weight")), heads=p.heads)
        q, gate = columns(qg, start=0, size=p.head_dim), columns(qg, start=p.head_dim, size=p.head_dim)
        q = self.turn(rms_norm(q, self.w(b + "attn_q_norm.weight"), eps=p.eps), at.positions)
        chosen = self.choose_blocks(x, b)
        o, _ = attention(q, K, V, *at.pages, chosen, scale=p.head_dim**-0.5, block=p.index_block)
        return linear(merge_heads(mul(o, sigmoid(gate))), self.w(b + "attn_output.weight"))

    def append_keys(self, x: Value, b: str) -> tuple[Value, Value]:
        """The rows' keys and values, appended to the layer's caches; returns these."""
        p, at = self.p, self.at
        K, V = (self.g.state(b + name, PerToken((p.kv_heads, p.head_dim))) for name in ("k", "v"))
        k = split_heads(linear(x, self.w(b + "attn_k.weight")), heads=p.kv_heads)
        k = self.turn(rms_norm(k, self.w(b + "attn_k_norm.weight"), eps=p.eps), at.positions)
        paged_append(k, *at.pages, K)
        paged_append(split_heads(linear(x, self.w(b + "attn_v.weight")), heads=p.kv_heads), *at.pages, V)
        return K, V

    def append_block_keys(self, x: Value, b: str) -> Value:
        """The indexer's key of each block that ends at one of the rows, appended to its cache; returns that."""
        p, at, m = self.p, self.at, self.p.index_block
        index = self.g.state(b + "index", PerToken((p.index_dim,), every=m))
        raw = self.g.state(b + "index_tail", PerSequence((m - 1, p.index_dim)))
        mean = trailing_mean(linear(x, self.w(b + "indexer.k_proj.weight")), *at.rows, raw, at.keep, every=m)
        key = rms_norm(split_heads(mean, heads=1), self.w(b + "indexer.k_norm.weight"), eps=p.eps)
        paged_append(merge_heads(self.turn(key, self.block_starts)), *at.pages, index, every=m)
        return index

    def choose_blocks(self, x: Value, b: str) -> Value:
        """The indexer: for each query the blocks of the highest scores."""
        p, at, m = self.p, self.at, self.p.index_block
        index = self.append_block_keys(x, b)
        q = split_heads(linear(x, self.w(b + "indexer.q_proj.weight")), heads=p.index_heads)
        q = self.turn(rms_norm(q, self.w(b + "indexer.q_norm.weight"), eps=p.eps), at.positions)
        scores = index_scores(q, index, *at.pages, every=m, scale=p.index_dim**-0.5)
        _, chosen = top_k(scores, k=min(p.index_budget // m, scores.type.shape[1]))
        return chosen

    @cached_property
    def block_starts(self) -> Value:
        """For each row the position of the one `index_block - 1` before it: where a block that ends here began."""
        back = self.p.index_block - 1
        tail = self.g.state("positions", PerSequence((back, self.components), dtype="i32"))
        return delay(self.at.positions, *self.at.rows, tail, self.at.keep, by=back)

    def turn(self, x: Value, positions: Value) -> Value:
        """Rotary embedding of the first dims; for M-RoPE each frequency follows one position component."""
        half = self.p.rope_dims // 2
        freqs = self.g.constant("rope.freqs", rope_frequencies(dims=self.p.rope_dims, base=self.p.rope_base))
        component = self.g.constant("rope.component", mrope_components(self.p.rope_sections, half))
        return rope(x, positions, freqs, component)

    def experts(self, x: Value, b: str) -> Value:
        """Routed experts, weighted by their renormalized probabilities, and a gated shared expert."""
        p = self.p
        share, chosen = top_k(softmax(linear(x, self.w(b + "ffn_gate_inp.weight"))), k=p.experts_used)
        gate = expert_linear(x, chosen, self.w(b + "ffn_gate_exps.weight"))
        up = expert_linear(x, chosen, self.w(b + "ffn_up_exps.weight"))
        share = normalize(share, floor=ROUTER_FLOOR)
        routed = expert_combine(swiglu(gate, up), chosen, share, self.w(b + "ffn_down_exps.weight"))
        gate, up = linear(x, self.w(b + "ffn_gate_shexp.weight")), linear(x, self.w(b + "ffn_up_shexp.weight"))
        shared = linear(swiglu(gate, up), self.w(b + "ffn_down_shexp.weight"))
        return add(routed, scale_rows(shared, sigmoid(linear(x, self.w(b + "ffn_gate_inp_shexp.weight")))))

    def draft_input(self, ids: Value, previous: Value) -> Value:
        """What the MTP block starts from: in every stream, a token's embedding joined with the residual before it."""
        p, b = self.p, f"blk.{len(self.p.layers)}.nextn."
        e = rms_norm(embed(self.w("token_embd.weight"), ids), self.w(b + "enorm.weight"), eps=p.eps)
        h = group_rms_norm(split_heads(previous, heads=p.streams), self.w(b + "hnorm.weight"), eps=p.eps)
        return linear(concat(repeat_streams(e, streams=p.streams), h), self.w(b + "eh_proj.weight"))

    def last_residual(self) -> Value:
        """State: the trunk's residual at the last token of each sequence, zeros before the first."""
        return self.g.state("residual", PerSequence((1, self.p.streams * self.p.hidden)))

    def previous(self, R: Value) -> Value:
        """Of each row the residual of the row before it in its sequence."""
        return delay(merge_heads(R), *self.at.rows, self.last_residual(), self.at.keep, by=1)

    def remember(self, R: Value, b: str) -> None:
        """What a QSA layer keeps of its rows, without its output, which nothing asks for."""
        x, _ = self.mix(R, b + "hc_attn_", inject=False)
        self.append_keys(x, b)
        self.append_block_keys(x, b)

    def ngram_embedding(self, ids: Value, n: NGramParameters) -> Value:
        """Rows of the n-gram table at each token [tokens, hidden], gathered on the host: they depend on token ids alone."""

        def i64(name: str, values: tuple[int, ...]) -> Value:
            return self.g.constant(f"ngram.{name}", np.array(values, np.int64))

        context = self.g.state("ngram", PerSequence((n.size - 1,), dtype="i32", fill=n.eos))
        with self.g.prologue():
            hashes = i64("multipliers", n.multipliers), i64("offsets", n.offsets), i64("sizes", n.sizes)
            rows = ngram_rows(ids, *self.at.rows, *hashes, context, self.at.keep, eos=n.eos)
            return merge_heads(embed(self.w("per_layer_token_embd.weight"), rows))

    def inject_ngrams(self, R: Value, e: Value, n: NGramParameters, b: str) -> Value:
        """R plus the n-gram value, gated per stream by how well its key meets the stream, and its convolution in time."""
        p = self.p
        tail = self.g.state(b + "ple", PerSequence(((n.taps - 1) * n.size, p.streams * p.hidden)))

        def norm(x: Value, which: str) -> Value:
            return group_rms_norm(x, self.w(f"{b}ple_norm_{which}.weight"), eps=p.eps)

        key = split_heads(linear(e, self.w(b + "ple_key.weight")), heads=p.streams)
        value = linear(e, self.w(b + "ple_value.weight"))
        gated = ple_gate(norm(key, "key"), norm(R, "query"), value)
        c = causal_conv(
            merge_heads(norm(gated, "conv")),
            self.w(b + "ple_conv1d.weight"),
            *self.at.rows,
            tail,
            self.at.keep,
            dilation=n.size,
        )
        return add(R, add(gated, split_heads(silu(c), heads=p.streams)))


def _take(tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> Weight:
    """A tensor of this shape; converters also store a matrix of one row as a vector."""
    if shape[0] == 1 and tensors.has(name) and tensors.file.tensors[name].shape == shape[1:]:
        vector = tensors.take(name)
        return Weight(name, TensorType((1, *vector.shape), vector.type.dtype), vector.data.reshape(1, -1))
    return tensors.take(name, shape=shape)


def tensor_shapes(p: Parameters) -> dict[str, tuple[int | None, ...]]:
    """Every tensor of a file with these hyper-parameters, in NumPy's order of axes: [out, in]."""
    H, W, r, d = p.hidden, p.streams * p.hidden, p.stream_rank, p.delta_dim
    mixed = {"norm": (W,), "down": (r, W), "up": (W, r)}
    shapes: dict[str, tuple[int | None, ...]] = {"token_embd.weight": (p.vocab_size, H)}
    shapes |= {f"output_hc_{k}.weight": s for k, s in mixed.items()}
    for i, kind in enumerate((*p.layers, *["qsa"] * p.draft_layers)):
        b = f"blk.{i}."
        for half in ("attn", "ffn"):
            shapes |= {f"{b}hc_{half}_{k}.weight": s for k, s in (mixed | {"inject": (p.streams, W)}).items()}
        shapes |= {
            b + "ffn_gate_inp.weight": (p.experts, H),
            b + "ffn_gate_exps.weight": (p.experts, p.expert_width, H),
            b + "ffn_up_exps.weight": (p.experts, p.expert_width, H),
            b + "ffn_down_exps.weight": (p.experts, H, p.expert_width),
            b + "ffn_gate_inp_shexp.weight": (1, H),
            b + "ffn_gate_shexp.weight": (p.shared_width, H),
            b + "ffn_up_shexp.weight": (p.shared_width, H),
            b + "ffn_down_shexp.weight": (H, p.shared_width),
        }
        if kind == "gdn":
            channels, values = (2 * p.key_heads + p.value_heads) * d, p.value_heads * d
            shapes |= {
                b + "attn_qkv.weight": (channels, H),
                b + "attn_gate.weight": (values, H),
                b + "ssm_alpha.weight": (p.value_heads, H),
                b + "ssm_beta.weight": (p.value_heads, H),
                b + "ssm_conv1d.weight": (channels, p.conv_taps),
                b + "ssm_dt.bias": (p.value_heads,),
                b + "ssm_a": (p.value_heads,),
                b + "ssm_norm.weight": (d,),
                b + "ssm_out.weight": (H, values),
            }
        else:
            shapes |= {
                b + "attn_q.weight": (2 * p.heads * p.head_dim, H),
                b + "attn_k.weight": (p.kv_heads * p.head_dim, H),
                b + "attn_v.weight": (p.kv_heads * p.head_dim, H),
                b + "attn_output.weight": (H, p.heads * p.head_dim),
                b + "attn_q_norm.weight": (p.head_dim,),
                b + "attn_k_norm.weight": (p.head_dim,),
                b + "indexer.q_proj.weight": (p.index_heads * p.index_dim, H),
                b + "indexer.k_proj.weight": (p.index_dim, H),
                b + "indexer.q_norm.weight": (p.index_dim,),
                b + "indexer.k_norm.weight": (p.index_dim,),
            }
    if p.ngram is not None:
        b = f"blk.{p.ngram.layer}."
        shapes |= {
            b + "ple_key.weight": (W, H),
            b + "ple_value.weight": (H, H),
            b + "ple_conv1d.weight": (W, p.ngram.taps),
        }
        shapes |= {f"{b}ple_norm_{k}.weight": (W,) for k in ("key", "query", "conv")}
        shapes["per_layer_token_embd.weight"] = (None, p.ngram.width)
    for i in range(len(p.layers), len(p.layers) + p.draft_layers):
        b = f"blk.{i}.nextn."
        shapes |= {b + "eh_proj.weight": (H, 2 * H), b + "enorm.weight": (H,), b + "hnorm.weight": (W,)}
        shapes |= {f"{b}hc_head_{k}.weight": s for k, s in mixed.items()}
    return shapes


@hookimpl
def trueup_architectures() -> list[type[Architecture]]:
    return [Qwen4Exp]
