"""A Qwen4-Exp checkpoint of a few kilobytes, and a GGUF file as gguf-py reads it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

V, H, HC, R, E, F, FS = 40, 32, 2, 8, 2, 64, 32
KH, VH, DK, TAPS = 2, 6, 8, 4  # three V heads to a K head: tiling is then not its own inverse
NH, NKV, HD, IH, ID = 2, 1, 16, 2, 16
W, QKV = HC * H, 2 * KH * DK + VH * DK
SHARDS, ROW, TABLE = 12, 8, 48  # above ten, so that the order of names is not the order of numbers

QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CONFIG = {
    "model_type": "qwen4_exp_text",
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": NH,
    "num_key_value_heads": NKV,
    "head_dim": HD,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": TAPS,
    "linear_key_head_dim": DK,
    "linear_value_head_dim": DK,
    "linear_num_key_heads": KH,
    "linear_num_value_heads": VH,
    "output_gate_type": "sigmoid",
    "moe_intermediate_size": F,
    "shared_expert_intermediate_size": FS,
    "num_experts": E,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "hc_count": HC,
    "hc_lowrank": R,
    "ple_layer_ids": [1],
    "ple_embed_dim": H,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "split_ngram_parts": SHARDS,
    "indexer_n_heads": IH,
    "indexer_kv_heads": 1,
    "indexer_head_dim": ID,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 0,
}

_MIXER = {"hc_norm": (W,), "input_mix_weight_down": (R, W), "input_mix_weight_up": (W, R)}
_BLOCK = {
    **{f"{half}_hyper_connection.{n}.weight": s for half in ("attn", "mlp") for n, s in _MIXER.items()},
    **{f"{half}_hyper_connection.block_inject_weight.weight": (HC, W) for half in ("attn", "mlp")},
    "mlp.gate.weight": (E, H),
    "mlp.experts.gate_up_proj": (E, 2 * F, H),
    "mlp.experts.down_proj": (E, H, F),
    "mlp.shared_expert_gate.weight": (1, H),
    "mlp.shared_expert.gate_proj.weight": (FS, H),
    "mlp.shared_expert.up_proj.weight": (FS, H),
    "mlp.shared_expert.down_proj.weight": (H, FS),
}
_GDN = {
    "linear_attn.in_proj_qkv.weight": (QKV, H),
    "linear_attn.in_proj_z.weight": (VH * DK, H),
    "linear_attn.in_proj_a.weight": (VH, H),
    "linear_attn.in_proj_b.weight": (VH, H),
    "linear_attn.conv1d.weight": (QKV, 1, TAPS),
    "linear_attn.dt_bias": (VH,),
    "linear_attn.A_log": (VH,),
    "linear_attn.norm.weight": (DK,),
    "linear_attn.out_proj.weight": (H, VH * DK),
}
_QSA = {
    "self_attn.q_proj.weight": (2 * NH * HD, H),
    "self_attn.k_proj.weight": (NKV * HD, H),
    "self_attn.v_proj.weight": (NKV * HD, H),
    "self_attn.o_proj.weight": (H, NH * HD),
    "self_attn.q_norm.weight": (HD,),
    "self_attn.k_norm.weight": (HD,),
    "self_attn.indexer.index_qk_proj.weight": (IH * ID + ID, H),
    "self_attn.indexer.q_layernorm.weight": (ID,),
    "self_attn.indexer.k_layernorm.weight": (ID,),
}
_PLE = {
    "ple.key_proj.weight": (W, H),
    "ple.value_proj.weight": (H, H),
    "ple.norm_key.weight": (W,),
    "ple.norm_query.weight": (W,),
    "ple.norm_conv.weight": (W,),
    "ple.conv1d.weight": (W, 1, 4),
    **{f"ple.ple_embedding.ngram_embedding.shard_{i}.weight": (TABLE // SHARDS, ROW) for i in range(SHARDS)},
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (V, H),
    "lm_head.weight": (V, H),
    **{f"model.hyper_connection_mixer.{n}.weight": s for n, s in _MIXER.items()},
    **{f"model.layers.0.{n}": s for n, s in (_GDN | _BLOCK | _PLE).items()},
    **{f"model.layers.1.{n}": s for n, s in (_QSA | _BLOCK).items()},
    **{f"mtp.layers.0.{n}": s for n, s in (_QSA | _BLOCK).items()},
    **{f"mtp.hyper_connection_mixer.{n}.weight": s for n, s in _MIXER.items()},
    "mtp.fc_embedding.weight": (H, H),
    "mtp.fc_hidden.weight": (H, H),
    "mtp.pre_fc_norm_embedding.weight": (H,),
    "mtp.pre_fc_norm_hidden.weight": (W,),
}
CONSTANTS = {
    "layer_multipliers": [2**53 + 1, 2**62 + 3, 5],
    "ngram_heads_offsets": [0, 5, 12, 23],
    "ngram_heads_vocab_sizes": [5, 7, 11, 13],
}


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/64 below 2: exact in every float type."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.integers(-127, 128, shape) / 64).astype(np.float32)


def _tokenizer() -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = ["<|endoftext|>", "<|im_start|>"]
    return {
        "added_tokens": [{"id": i, "content": t, **plain} for i, t in enumerate(special)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN35}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "Ġa", "abc"])},
            "merges": [["a", "b"], ["Ġ", "a"], ["ab", "c"]],
        },
    }


@dataclass
class Synthetic:
    """A checkpoint to change before it is written: `tensors`, `config`, `tokenizer`, `tokenizer_config`."""

    tensors: dict[str, np.ndarray]
    config: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(CONFIG)))
    tokenizer: dict[str, Any] = field(default_factory=_tokenizer)
    tokenizer_config: dict[str, Any] = field(
        default_factory=lambda: {
            "eos_token": "<|endoftext|>",
            "add_bos_token": False,
            "chat_template": "{{ messages }}",
        }
    )
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})

    def write(self, folder: Path, files: int = 1) -> Path:
        """The checkpoint in `folder`; with more than one file, the tensors dealt out in turn and an index."""
        folder.mkdir(exist_ok=True)
        for name in ("config", "tokenizer", "tokenizer_config"):
            (folder / f"{name}.json").write_text(json.dumps(getattr(self, name)))
        if files == 1:
            save_file(self.tensors, folder / "model.safetensors", self.metadata)
            return folder
        where = {n: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, n in enumerate(self.tensors)}
        for file in set(where.values()):
            save_file({n: t for n, t in self.tensors.items() if where[n] == file}, folder / file, self.metadata)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return folder


class Gguf:
    """A file by gguf-py: `meta`, `types` by key, and tensors as float32 by name, outermost axis first."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.meta = {f.name: f.contents() for f in reader.fields.values()}
        self.kinds = {f.name: tuple(t.name for t in f.types[:2]) for f in reader.fields.values()}
        self.order = [t.name for t in reader.tensors]
        self.tensors = {t.name: t for t in reader.tensors}

    def type(self, name: str) -> str:
        return self.tensors[name].tensor_type.name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in self.tensors[name].shape[::-1])

    def __getitem__(self, name: str) -> np.ndarray:
        t = self.tensors[name]
        return np.array(dequantize(t.data, t.tensor_type), np.float32).reshape(self.shape(name))


@pytest.fixture
def checkpoint() -> Synthetic:
    tensors = {name: _tensor(name, shape) for name, shape in SHAPES.items()}
    for name, values in CONSTANTS.items():
        tensors[f"model.layers.0.ple.ple_embedding.{name}"] = np.array(values, np.int64)
    return Synthetic(tensors)


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., Gguf]:
    """Writes a checkpoint, converts it (to f32 unless told) and reads the result."""
    from trueup.convert import convert

    def run(checkpoint: Synthetic, *, type: str = "f32", files: int = 1, **options: Any) -> Gguf:
        out = tmp_path / f"{type}.gguf"
        convert(checkpoint.write(tmp_path / "checkpoint", files), out, type=type, **options)
        return Gguf(out)

    return run


@pytest.fixture
def read() -> Callable[[Path], Gguf]:
    return Gguf
