"""Qwen4-Exp without a checkpoint: proportions to choose from, and how random weights of each kind are drawn.

Read beside `qwen4exp_convert.py`, whose plan turns such a configuration into keys and shapes.
"""

from __future__ import annotations

import numpy as np

from .convert_rules import Draw, Drawn, Proportions

TINY = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "output_gate_type": "sigmoid",
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 32,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 128,
    "indexer_compress_ratio": 16,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 0,
}


def _ones(rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
    return (1 + 0.1 * rng.standard_normal(shape, np.float32)).astype(np.float32)


def _decay(rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
    """-exp(A_log), A_log as it is initialized: the logarithm of a number from 1 to 16."""
    return -rng.uniform(1, 16, shape).astype(np.float32)


def _steps(rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
    """The inverse softplus of a time step from 0.001 to 0.1, evenly by its logarithm."""
    step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
    return (step + np.log(-np.expm1(-step))).astype(np.float32)


def _normal(deviation: float) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Drawn:
        return rng.standard_normal(shape, np.float32) * np.float32(deviation)

    return draw


DRAWS: tuple[tuple[str, Draw], ...] = (
    (r"ssm_a$", _decay),
    (r"ssm_dt\.bias$", _steps),
    (r"norm|nextn\.hc_head_norm", _ones),
    (r"token_embd\.", _normal(1)),
    (r"conv1d\.", _normal(0.5)),
)
"""By name, how weights are drawn; all others are matrices, drawn so that they keep the size of what they multiply."""

PROPORTIONS = Proportions(
    {
        "tiny": TINY,
        # Some 1.0 B parameters: what a processor decodes at tens of tokens per second.
        "1b": TINY
        | {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 65_536,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]},
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "hc_lowrank": 128,
            "indexer_head_dim": 128,
            "indexer_n_heads": 4,
            "indexer_budget": 1024,
            "indexer_compress_ratio": 32,
            "mtp_num_hidden_layers": 0,
        },
        # The real model's proportions in 8 layers: for GPUs.
        "wide": TINY
        | {
            "vocab_size": 248_320,
            "hidden_size": 2560,
            "num_hidden_layers": 8,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 65_536,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "hc_lowrank": 320,
            "indexer_head_dim": 128,
            "indexer_n_heads": 4,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 32,
            "mtp_num_hidden_layers": 0,
        },
    },
    DRAWS,
    layers="num_hidden_layers",
    experts="num_experts",
    vocab="vocab_size",
    context="max_position_embeddings",
    more=frozenset({"layer_types", "tie_word_embeddings"}),
)
