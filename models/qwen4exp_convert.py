"""Qwen4-Exp from a Hugging Face checkpoint to GGUF: configuration to keys, tensors to tensors, read as a specification.

Axes are written outermost first, as NumPy has them; GGUF lists them the other way round. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .convert_rules import (
    Array,
    Constant,
    Conversion,
    ConvertError,
    Dims,
    Key,
    Mtp,
    Plan,
    Scope,
    minus_exp,
    one_plus,
    rule,
    side_by_side,
    squeeze_middle,
)
from .qwen4exp_synth import PROPORTIONS

# GGUF has no word for these: (key, what transformers assumes when it is absent, the one value that can be converted).
FIXED: tuple[tuple[str, Any, Any], ...] = (
    ("output_gate_type", None, "sigmoid"),
    ("norm_topk_prob", True, True),
    ("hidden_act", "silu", "silu"),
    ("attn_output_gate", True, True),
    ("attention_bias", False, False),
    ("indexer_kv_heads", None, 1),
    ("mtp_use_dedicated_embeddings", False, False),
)

# (GGUF key, type, config key)
KEYS = (
    ("context_length", "u32", "max_position_embeddings"),
    ("embedding_length", "u32", "hidden_size"),
    ("attention.head_count", "u32", "num_attention_heads"),
    ("attention.head_count_kv", "u32", "num_key_value_heads"),
    ("attention.key_length", "u32", "head_dim"),
    ("attention.value_length", "u32", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "f32", "rms_norm_eps"),
    ("expert_count", "u32", "num_experts"),
    ("expert_used_count", "u32", "num_experts_per_tok"),
    ("expert_feed_forward_length", "u32", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "u32", "shared_expert_intermediate_size"),
    ("ssm.conv_kernel", "u32", "linear_conv_kernel_dim"),
    ("ssm.state_size", "u32", "linear_key_head_dim"),
    ("ssm.group_count", "u32", "linear_num_key_heads"),
    ("ssm.time_step_rank", "u32", "linear_num_value_heads"),
    ("hyper_connection.count", "u32", "hc_count"),
    ("hyper_connection.low_rank", "u32", "hc_lowrank"),
    ("attention.indexer.head_count", "u32", "indexer_n_heads"),
    ("attention.indexer.key_length", "u32", "indexer_head_dim"),
    ("attention.indexer.top_k", "u32", "indexer_budget"),
)
PLE_KEYS = (
    ("ple.ngram_size", "u32", "ngram_size"),
    ("ple.heads_per_ngram", "u32", "heads_per_ngram"),
    ("ple.conv_kernel", "u32", "ple_conv_kernel_size"),
)


def tile_heads(d: Dims, x: Array) -> tuple[Array, ...]:
    """V heads, rows or scalars, from grouped to tiled: head g*rep+j (K head g) goes to place j*Kh+g."""
    by_group = x.reshape(d["Kh"], d["Vh"] // d["Kh"], -1, *x.shape[1:])
    return (by_group.swapaxes(0, 1).reshape(x.shape),)


def tile_qkv(d: Dims, x: Array) -> tuple[Array, ...]:
    """The same for the V rows of q | k | v."""
    qk = 2 * d["Kh"] * d["dk"]
    return (np.concatenate([x[:qk], *tile_heads(d, x[qk:])]),)


def tile_qkv_taps(d: Dims, x: Array) -> tuple[Array, ...]:
    """The same for the channels of the convolution over q | k | v, whose weight has a middle axis of 1."""
    return tile_qkv(d, *squeeze_middle(d, x))


def tile_columns(d: Dims, x: Array) -> tuple[Array, ...]:
    """The same for the columns of the matrix that reads the heads' outputs."""
    return (tile_heads(d, x.T)[0].T,)


def tile_decay(d: Dims, log: Array) -> tuple[Array, ...]:
    """The same for A_log, which is stored as the decay's factor -exp(A_log)."""
    return tile_heads(d, *minus_exp(d, log))


def split_index_qk(d: Dims, x: Array) -> tuple[Array, ...]:
    """The indexer's rows: query heads, then the one key."""
    return x[: d["ih"] * d["id"]], x[d["ih"] * d["id"] :]


def split_gate_up(d: Dims, x: Array) -> tuple[Array, ...]:
    """Each expert's rows: gate, then up."""
    return x[:, : d["F"]], x[:, d["F"] :]


def _mixer(source: str, target: str) -> tuple[Any, ...]:
    return (
        rule(f"{source}.hc_norm.weight[W] -> {target}_norm.weight[W]", one_plus),
        rule(f"{source}.input_mix_weight_down.weight[r, W] -> {target}_down.weight[r, W]"),
        rule(f"{source}.input_mix_weight_up.weight[W, r] -> {target}_up.weight[W, r]"),
    )


def _half(source: str, target: str) -> tuple[Any, ...]:
    inject = rule(f"{source}.block_inject_weight.weight[hc, W] -> {target}_inject.weight[hc, W]")
    return (*_mixer(source, target), inject)


MODEL = (
    rule("model.embed_tokens.weight[V, H] -> token_embd.weight[V, H]"),
    *_mixer("model.hyper_connection_mixer", "output_hc"),
)
HEAD = (rule("lm_head.weight[V, H] -> output.weight[V, H]"),)

BLOCK = (
    *_half("attn_hyper_connection", "hc_attn"),
    *_half("mlp_hyper_connection", "hc_ffn"),
    rule("mlp.gate.weight[E, H] -> ffn_gate_inp.weight[E, H]"),
    rule(
        "mlp.experts.gate_up_proj[E, 2*F, H] -> ffn_gate_exps.weight[E, F, H], ffn_up_exps.weight[E, F, H]",
        split_gate_up,
    ),
    rule("mlp.experts.down_proj[E, H, F] -> ffn_down_exps.weight[E, H, F]"),
    rule("mlp.shared_expert_gate.weight[1, H] -> ffn_gate_inp_shexp.weight[1, H]"),
    rule("mlp.shared_expert.gate_proj.weight[Fs, H] -> ffn_gate_shexp.weight[Fs, H]"),
    rule("mlp.shared_expert.up_proj.weight[Fs, H] -> ffn_up_shexp.weight[Fs, H]"),
    rule("mlp.shared_expert.down_proj.weight[H, Fs] -> ffn_down_shexp.weight[H, Fs]"),
)

GDN = (
    rule("linear_attn.in_proj_qkv.weight[2*Kh*dk+Vh*dk, H] -> attn_qkv.weight[2*Kh*dk+Vh*dk, H]", tile_qkv),
    rule("linear_attn.in_proj_z.weight[Vh*dk, H] -> attn_gate.weight[Vh*dk, H]", tile_heads),
    rule("linear_attn.in_proj_a.weight[Vh, H] -> ssm_alpha.weight[Vh, H]", tile_heads),
    rule("linear_attn.in_proj_b.weight[Vh, H] -> ssm_beta.weight[Vh, H]", tile_heads),
    rule("linear_attn.conv1d.weight[2*Kh*dk+Vh*dk, 1, taps] -> ssm_conv1d.weight[2*Kh*dk+Vh*dk, taps]", tile_qkv_taps),
    rule("linear_attn.dt_bias[Vh] -> ssm_dt.bias[Vh]", tile_heads),
    rule("linear_attn.A_log[Vh] -> ssm_a[Vh]", tile_decay),
    # The gated norm is the one norm whose weight is a plain multiplier in the checkpoint.
    rule("linear_attn.norm.weight[dk] -> ssm_norm.weight[dk]"),
    rule("linear_attn.out_proj.weight[H, Vh*dk] -> ssm_out.weight[H, Vh*dk]", tile_columns),
)

QSA = (
    rule("self_attn.q_proj.weight[2*nh*hd, H] -> attn_q.weight[2*nh*hd, H]"),
    rule("self_attn.k_proj.weight[nkv*hd, H] -> attn_k.weight[nkv*hd, H]"),
    rule("self_attn.v_proj.weight[nkv*hd, H] -> attn_v.weight[nkv*hd, H]"),
    rule("self_attn.o_proj.weight[H, nh*hd] -> attn_output.weight[H, nh*hd]"),
    rule("self_attn.q_norm.weight[hd] -> attn_q_norm.weight[hd]", one_plus),
    rule("self_attn.k_norm.weight[hd] -> attn_k_norm.weight[hd]", one_plus),
    rule(
        "self_attn.indexer.index_qk_proj.weight[ih*id+id, H] -> "
        "indexer.q_proj.weight[ih*id, H], indexer.k_proj.weight[id, H]",
        split_index_qk,
    ),
    rule("self_attn.indexer.q_layernorm.weight[id] -> indexer.q_norm.weight[id]", one_plus),
    rule("self_attn.indexer.k_layernorm.weight[id] -> indexer.k_norm.weight[id]", one_plus),
)

PLE = (
    rule("ple.key_proj.weight[W, H] -> ple_key.weight[W, H]"),
    rule("ple.value_proj.weight[H, H] -> ple_value.weight[H, H]"),
    rule("ple.norm_key.weight[W] -> ple_norm_key.weight[W]", one_plus),
    rule("ple.norm_query.weight[W] -> ple_norm_query.weight[W]", one_plus),
    rule("ple.norm_conv.weight[W] -> ple_norm_conv.weight[W]", one_plus),
    rule("ple.conv1d.weight[W, 1, ple_taps] -> ple_conv1d.weight[W, ple_taps]", squeeze_middle),
)
NGRAM_TABLE = (
    rule(
        "*ple.ple_embedding.ngram_embedding.shard_{}.weight[shards: ..., row] -> per_layer_token_embd.weight[..., row]"
    ),
)
NGRAM_CONSTANTS = (
    Constant.of("ple.ple_embedding.layer_multipliers[ngram] -> ple.layer_multipliers"),
    Constant.of("ple.ple_embedding.ngram_heads_offsets[ngram_heads] -> ple.head_offsets"),
    Constant.of("ple.ple_embedding.ngram_heads_vocab_sizes[ngram_heads] -> ple.head_vocab_sizes"),
)

# The MTP block is one more QSA block, whose `mtp.layers.0` has the names of any other.
MTP = (
    rule("fc_embedding.weight[H, H], fc_hidden.weight[H, H] -> nextn.eh_proj.weight[H, 2*H]", side_by_side),
    rule("pre_fc_norm_embedding.weight[H] -> nextn.enorm.weight[H]", one_plus),
    rule("pre_fc_norm_hidden.weight[W] -> nextn.hnorm.weight[W]", one_plus),
    *_mixer("hyper_connection_mixer", "nextn.hc_head"),
)

F32 = (r"\.ffn_gate_inp\.", r"\.ffn_gate_inp_shexp\.", r"\.ssm_conv1d\.")
"""Small, and sensitive to rounding: the routers and the convolution of the delta net."""


def canonical(name: str) -> str:
    """Multimodal checkpoints keep the language model one level further down."""
    return "model." + name.removeprefix("model.language_model.") if name.startswith("model.language_model.") else name


def plan(config: Mapping[str, Any], mtp: Mtp) -> Plan:
    """The plan of a checkpoint's config.json; `mtp=False` leaves the MTP block out, `mtp="only"` all but that.

    Raises ConvertError where a needed key is missing or a value has no form in GGUF.
    """
    c = config.get("text_config", config)
    _check_fixed(c)
    layers = _layers(c)
    trunk, blocks = len(layers), len(layers) + (1 if mtp and _mtp_blocks(c) else 0)
    d = _dims(c)
    qsa_ratio, interval = _int(c, "indexer_compress_ratio"), int(c.get("full_attention_interval") or 4)
    _divides(qsa_ratio, "indexer_compress_ratio", _int(c, "indexer_budget"), "indexer_budget")

    keys = [Key("block_count", "u32", blocks)]
    if blocks > trunk:
        keys.append(Key("nextn_predict_layers", "u32", 1))
    keys += [Key(name, kind, _need(c, source)) for name, kind, source in KEYS]
    keys += [
        Key("ssm.inner_size", "u32", d["Vh"] * d["dk"]),
        Key("full_attention_interval", "u32", interval),
        Key("attention.recurrent_layers", "bool[]", [*layers, *[False] * (blocks - trunk)]),
        Key(
            "attention.compress_ratios",
            "i32[]",
            [*(0 if x else qsa_ratio for x in layers), *[qsa_ratio] * (blocks - trunk)],
        ),
        *_rope(c),
    ]

    if mtp == "only":
        if blocks == trunk:
            raise ConvertError(
                "config.json: mtp_num_hidden_layers is 0: the checkpoint has no MTP block to convert alone"
            )
        left_out = dict.fromkeys(("model.", "lm_head."), "the MTP block alone was asked for")
        return Plan(d, keys, _mtp_scopes(trunk), d["V"], left_out, _check_table)

    scopes = [Scope("", "", MODEL)]
    if not c.get("tie_word_embeddings", config.get("tie_word_embeddings", False)):
        scopes.append(Scope("", "", HEAD))
    ple = _ple_layer(c, layers)
    for i, recurrent in enumerate(layers):
        rules = (*(GDN if recurrent else QSA), *BLOCK, *(PLE if i == ple else ()))
        scopes.append(Scope(f"model.layers.{i}.", f"blk.{i}.", rules))
    if ple is not None:
        scopes.append(Scope(f"model.layers.{ple}.", "", NGRAM_TABLE, NGRAM_CONSTANTS))
        keys += [Key("ple.layers", "i32[]", [ple]), *(Key(n, k, _need(c, s)) for n, k, s in PLE_KEYS)]
        keys += [Key("ple.eos_token_id", "u32", _hash_eos(c)), Key("embedding_length_per_layer_input", "u32", d["row"])]
        if "image_token_id" in config:
            keys.append(Key("ple.image_token_id", "u32", config["image_token_id"]))
    left_out = {"model.visual.": "the vision tower is not part of the language model"}
    if blocks > trunk:
        scopes += _mtp_scopes(trunk)
    elif not mtp:
        left_out["mtp."] = "the MTP block was not asked for"
    return Plan(d, keys, scopes, d["V"], left_out, _check_table)


QWEN4EXP = Conversion("qwen4exp", frozenset({"qwen4_exp", "qwen4_exp_text"}), F32, canonical, plan, PROPORTIONS)


def _mtp_scopes(trunk: int) -> list[Scope]:
    return [Scope("mtp.layers.0.", f"blk.{trunk}.", (*QSA, *BLOCK)), Scope("mtp.", f"blk.{trunk}.", MTP)]


def _need(c: Mapping[str, Any], key: str) -> Any:
    value = c.get(key)
    if value is None:
        raise ConvertError(f"config.json lacks {key}")
    return value


def _int(c: Mapping[str, Any], key: str) -> int:
    value = _need(c, key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ConvertError(f"config.json: {key} is {value!r}, expected a positive integer")
    return value


def _divides(small: int, small_name: str, large: int, large_name: str) -> None:
    if large % small:
        raise ConvertError(f"config.json: {small_name} {small} does not divide {large_name} {large}")


def _check_fixed(c: Mapping[str, Any]) -> None:
    for key, absent, want in FIXED:
        found = absent if c.get(key) is None else c[key]
        if found != want:
            raise ConvertError(
                f"config.json: {key} is {found!r}; GGUF's qwen4exp means {want!r} and can't say otherwise"
            )


def _layers(c: Mapping[str, Any]) -> list[bool]:
    """For each trunk layer, whether it is a GDN layer; both names of the other kind mean attention with QSA."""
    n = _int(c, "num_hidden_layers")
    types = c.get("layer_types")
    if types is None:
        interval = int(c.get("full_attention_interval") or 4)
        return [(i + 1) % interval != 0 for i in range(n)]
    if len(types) != n:
        raise ConvertError(f"config.json: layer_types has {len(types)} entries for {n} layers")
    for i, kind in enumerate(types):
        if kind not in ("linear_attention", "full_attention", "indexed_attention"):
            raise ConvertError(f"config.json: layer_types[{i}] is {kind!r}")
    return [kind == "linear_attention" for kind in types]


def _mtp_blocks(c: Mapping[str, Any]) -> int:
    n = c.get("mtp_num_hidden_layers") or 0
    if n not in (0, 1):
        raise ConvertError(f"config.json: mtp_num_hidden_layers is {n!r}, expected 0 or 1")
    return int(n)


def _dims(c: Mapping[str, Any]) -> dict[str, int]:
    names = {
        "V": "vocab_size",
        "H": "hidden_size",
        "hc": "hc_count",
        "r": "hc_lowrank",
        "E": "num_experts",
        "F": "moe_intermediate_size",
        "Fs": "shared_expert_intermediate_size",
        "Kh": "linear_num_key_heads",
        "Vh": "linear_num_value_heads",
        "dk": "linear_key_head_dim",
        "taps": "linear_conv_kernel_dim",
        "nh": "num_attention_heads",
        "nkv": "num_key_value_heads",
        "hd": "head_dim",
        "ih": "indexer_n_heads",
        "id": "indexer_head_dim",
    }
    d = {axis: _int(c, key) for axis, key in names.items()}
    d["W"] = d["hc"] * d["H"]
    if (dv := _int(c, "linear_value_head_dim")) != d["dk"]:
        raise ConvertError(f"config.json: linear_value_head_dim {dv} differs from linear_key_head_dim {d['dk']}")
    _divides(d["Kh"], "linear_num_key_heads", d["Vh"], "linear_num_value_heads")
    _divides(d["nkv"], "num_key_value_heads", d["nh"], "num_attention_heads")
    if c.get("ple_layer_ids"):
        d["ngram"], d["ple_taps"], d["shards"] = (
            _int(c, key) for key in ("ngram_size", "ple_conv_kernel_size", "split_ngram_parts")
        )
        d["ngram_heads"] = (d["ngram"] - 1) * _int(c, "heads_per_ngram")
        width = c.get("ple_embed_dim") or d["H"]
        if width != d["H"]:
            raise ConvertError(f"config.json: ple_embed_dim {width} differs from hidden_size {d['H']}")
        _divides(d["ngram_heads"], "the number of n-gram heads", d["H"], "ple_embed_dim")
        d["row"] = d["H"] // d["ngram_heads"]
    return d


def _rope(c: Mapping[str, Any]) -> list[Key]:
    rope = {**c, **(c.get("rope_parameters") or {})}
    if rope.get("rope_type", "default") != "default":
        raise ConvertError(f"config.json: rope_type is {rope['rope_type']!r}, expected 'default'")
    rotated = int(_int(c, "head_dim") * rope.get("partial_rotary_factor", 1.0))
    sections = [*rope.get("mrope_section", [11, 11, 10]), 0]
    if len(sections) != 4 or sum(sections) != rotated // 2:
        raise ConvertError(
            f"config.json: mrope_section {sections[:-1]} must be three numbers with the sum {rotated // 2}, "
            "half the rotated dimensions"
        )
    return [
        Key("rope.dimension_sections", "i32[]", sections),
        Key("rope.freq_base", "f32", _need(rope, "rope_theta")),
        Key("rope.dimension_count", "u32", rotated),
    ]


def _ple_layer(c: Mapping[str, Any], layers: list[bool]) -> int | None:
    ids = c.get("ple_layer_ids") or []
    if not ids:
        return None
    if len(ids) != 1 or not 1 <= ids[0] <= len(layers) or not layers[ids[0] - 1]:
        raise ConvertError(
            f"config.json: ple_layer_ids is {ids}, expected one 1-based layer of kind linear_attention in {len(layers)}"
        )
    return int(ids[0]) - 1


def _hash_eos(c: Mapping[str, Any]) -> int:
    """The id at which the n-gram context ends: of a list, transformers takes the first."""
    eos = _need(c, "eos_token_id")
    return int(eos[0] if isinstance(eos, list) else eos)


def _check_table(constants: Mapping[str, list[int]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if "ple.head_offsets" not in constants:
        return
    rows = shapes["per_layer_token_embd.weight"][0]
    for head, (offset, size) in enumerate(
        zip(constants["ple.head_offsets"], constants["ple.head_vocab_sizes"], strict=True)
    ):
        if offset < 0 or size < 1 or offset + size > rows:
            raise ConvertError(
                f"n-gram head {head} reads rows {offset} to {offset + size} of a table of {rows} rows in all shards"
            )
