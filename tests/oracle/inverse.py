"""A Qwen4-Exp GGUF mapped back to Hugging Face names and values, from the specification and not from the rules table.

It reads through gguf-py alone and imports nothing of trueup, so that it can contradict the converter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

Array = NDArray[Any]


class Gguf:
    """A GGUF file's metadata by key, and its tensors as float32 by name."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {t.name: t for t in reader.tensors}

    def key(self, name: str) -> Any:
        """The value of `qwen4exp.name`."""
        return self.meta[f"qwen4exp.{name}"]

    def __getitem__(self, name: str) -> Array:
        t = self.tensors[name]
        return np.array(dequantize(t.data, t.tensor_type), np.float32).reshape(t.shape[::-1])


def hugging_face(g: Gguf, shards: int | None = None) -> dict[str, Array]:
    """Every tensor of the checkpoint that `g` was made from, float32, the hash constants int64.

    `shards` cuts the n-gram table into that many equal parts; without it the table is one tensor, as in the module.
    """
    out: dict[str, Array] = {
        "model.embed_tokens.weight": g["token_embd.weight"],
        "lm_head.weight": g["output.weight"],
        **_mixer(g, "output_hc", "model.hyper_connection_mixer"),
    }
    recurrent, mtp = g.key("attention.recurrent_layers"), g.key("nextn_predict_layers")
    trunk = g.key("block_count") - mtp
    for i in range(trunk):
        out |= _block(g, f"blk.{i}.", f"model.layers.{i}.", recurrent[i])
    for i in g.key("ple.layers"):
        out |= _ple(g, f"blk.{i}.", f"model.layers.{i}.ple.", shards)
    if mtp:
        out |= _block(g, f"blk.{trunk}.", "mtp.layers.0.", False) | _mtp(g, f"blk.{trunk}.nextn.")
    return out


def _unfold(g: Gguf, name: str) -> Array:
    """w from the stored 1 + w."""
    return (g[name].astype(np.float64) - 1).astype(np.float32)


def _mixer(g: Gguf, b: str, h: str) -> dict[str, Array]:
    return {
        f"{h}.hc_norm.weight": _unfold(g, f"{b}_norm.weight"),
        f"{h}.input_mix_weight_down.weight": g[f"{b}_down.weight"],
        f"{h}.input_mix_weight_up.weight": g[f"{b}_up.weight"],
    }


def _block(g: Gguf, b: str, h: str, recurrent: bool) -> dict[str, Array]:
    out = _gdn(g, b, f"{h}linear_attn.") if recurrent else _qsa(g, b, f"{h}self_attn.")
    for half, full in (("hc_attn", "attn_hyper_connection"), ("hc_ffn", "mlp_hyper_connection")):
        out |= _mixer(g, b + half, h + full)
        out[f"{h}{full}.block_inject_weight.weight"] = g[f"{b}{half}_inject.weight"]
    gate_up = np.concatenate([g[f"{b}ffn_gate_exps.weight"], g[f"{b}ffn_up_exps.weight"]], axis=1)
    return out | {
        f"{h}mlp.gate.weight": g[f"{b}ffn_gate_inp.weight"],
        f"{h}mlp.experts.gate_up_proj": gate_up,
        f"{h}mlp.experts.down_proj": g[f"{b}ffn_down_exps.weight"],
        f"{h}mlp.shared_expert_gate.weight": g[f"{b}ffn_gate_inp_shexp.weight"],
        f"{h}mlp.shared_expert.gate_proj.weight": g[f"{b}ffn_gate_shexp.weight"],
        f"{h}mlp.shared_expert.up_proj.weight": g[f"{b}ffn_up_shexp.weight"],
        f"{h}mlp.shared_expert.down_proj.weight": g[f"{b}ffn_down_shexp.weight"],
    }


def _gdn(g: Gguf, b: str, h: str) -> dict[str, Array]:
    k_heads, v_heads, width = g.key("ssm.group_count"), g.key("ssm.time_step_rank"), g.key("ssm.state_size")
    rep = v_heads // k_heads
    # Hugging Face's V head v belongs to K head v // rep and is stored at place (v % rep) * k_heads + v // rep.
    place = [(v % rep) * k_heads + v // rep for v in range(v_heads)]
    rows = np.concatenate([np.arange(p * width, (p + 1) * width) for p in place])
    channels = np.concatenate([np.arange(2 * k_heads * width), 2 * k_heads * width + rows])
    return {
        f"{h}in_proj_qkv.weight": g[f"{b}attn_qkv.weight"][channels],
        f"{h}in_proj_z.weight": g[f"{b}attn_gate.weight"][rows],
        f"{h}in_proj_a.weight": g[f"{b}ssm_alpha.weight"][place],
        f"{h}in_proj_b.weight": g[f"{b}ssm_beta.weight"][place],
        f"{h}conv1d.weight": g[f"{b}ssm_conv1d.weight"][channels][:, None, :],
        f"{h}dt_bias": g[f"{b}ssm_dt.bias"][place],
        f"{h}A_log": np.log(-g[f"{b}ssm_a"][place].astype(np.float64)).astype(np.float32),
        f"{h}norm.weight": g[f"{b}ssm_norm.weight"],
        f"{h}out_proj.weight": g[f"{b}ssm_out.weight"][:, rows],
    }


def _qsa(g: Gguf, b: str, h: str) -> dict[str, Array]:
    index = np.concatenate([g[f"{b}indexer.q_proj.weight"], g[f"{b}indexer.k_proj.weight"]])
    return {
        f"{h}q_proj.weight": g[f"{b}attn_q.weight"],
        f"{h}k_proj.weight": g[f"{b}attn_k.weight"],
        f"{h}v_proj.weight": g[f"{b}attn_v.weight"],
        f"{h}o_proj.weight": g[f"{b}attn_output.weight"],
        f"{h}q_norm.weight": _unfold(g, f"{b}attn_q_norm.weight"),
        f"{h}k_norm.weight": _unfold(g, f"{b}attn_k_norm.weight"),
        f"{h}indexer.index_qk_proj.weight": index,
        f"{h}indexer.q_layernorm.weight": _unfold(g, f"{b}indexer.q_norm.weight"),
        f"{h}indexer.k_layernorm.weight": _unfold(g, f"{b}indexer.k_norm.weight"),
    }


def _ple(g: Gguf, b: str, h: str, shards: int | None) -> dict[str, Array]:
    table, e = g["per_layer_token_embd.weight"], f"{h}ple_embedding."
    parts = {f"{e}ngram_embedding.weight": table}
    if shards is not None:
        parts = {f"{e}ngram_embedding.shard_{i}.weight": x for i, x in enumerate(np.split(table, shards))}
    return parts | {
        f"{e}layer_multipliers": np.array(g.key("ple.layer_multipliers"), np.int64),
        f"{e}ngram_heads_offsets": np.array(g.key("ple.head_offsets"), np.int64),
        f"{e}ngram_heads_vocab_sizes": np.array(g.key("ple.head_vocab_sizes"), np.int64),
        f"{h}key_proj.weight": g[f"{b}ple_key.weight"],
        f"{h}value_proj.weight": g[f"{b}ple_value.weight"],
        f"{h}norm_key.weight": _unfold(g, f"{b}ple_norm_key.weight"),
        f"{h}norm_query.weight": _unfold(g, f"{b}ple_norm_query.weight"),
        f"{h}norm_conv.weight": _unfold(g, f"{b}ple_norm_conv.weight"),
        f"{h}conv1d.weight": g[f"{b}ple_conv1d.weight"][:, None, :],
    }


def _mtp(g: Gguf, b: str) -> dict[str, Array]:
    embedding, hidden = np.split(g[f"{b}eh_proj.weight"], 2, axis=1)
    return {
        "mtp.fc_embedding.weight": embedding,
        "mtp.fc_hidden.weight": hidden,
        "mtp.pre_fc_norm_embedding.weight": _unfold(g, f"{b}enorm.weight"),
        "mtp.pre_fc_norm_hidden.weight": _unfold(g, f"{b}hnorm.weight"),
        **_mixer(g, f"{b}hc_head", "mtp.hyper_connection_mixer"),
    }
