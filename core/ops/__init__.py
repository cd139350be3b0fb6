"""Every op of trueup: `from trueup.core.ops import linear, rms_norm`. One file a family."""

from .attention import attention, merge_attention
from .cache import paged_append
from .conv import causal_conv, delay, trailing_mean
from .elementwise import (
    add,
    clamp,
    concat,
    mul,
    normalize,
    scale_rows,
    sigmoid,
    silu,
    softmax,
    softplus,
    swiglu,
)
from .gdn import chunk_delta_scan, chunk_wy, gated_delta_rule, gdn_decay
from .hyper import hc_read, hc_write
from .linear import linear
from .moe import expert_combine, expert_linear
from .ngram import ngram_rows, ple_gate
from .norm import gated_rms_norm, group_rms_norm, l2_norm, rms_norm
from .qsa import index_scores
from .rope import mrope_components, rope, rope_frequencies
from .rows import embed, repeat_streams, take_rows
from .topk import argmax, top_k
from .views import columns, contiguous, merge_heads, split_heads

__all__ = [
    "add",
    "argmax",
    "attention",
    "causal_conv",
    "chunk_delta_scan",
    "chunk_wy",
    "clamp",
    "columns",
    "concat",
    "contiguous",
    "delay",
    "embed",
    "expert_combine",
    "expert_linear",
    "gated_delta_rule",
    "gated_rms_norm",
    "gdn_decay",
    "group_rms_norm",
    "hc_read",
    "hc_write",
    "index_scores",
    "l2_norm",
    "linear",
    "merge_attention",
    "merge_heads",
    "mrope_components",
    "mul",
    "ngram_rows",
    "normalize",
    "paged_append",
    "ple_gate",
    "repeat_streams",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "scale_rows",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "split_heads",
    "swiglu",
    "take_rows",
    "top_k",
    "trailing_mean",
]
