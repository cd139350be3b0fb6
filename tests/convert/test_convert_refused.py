"""What is refused, that the refusal names the thing, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trueup.convert import ConvertError, convert

GDN = "model.layers.0.linear_attn."


def refused(checkpoint, tmp_path: Path, match: str, **options) -> None:
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    with pytest.raises(ConvertError, match=match):
        convert(checkpoint.write(tmp_path / "checkpoint"), out, **options)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("output_gate_type", "silu", "output_gate_type is 'silu'.*'sigmoid'"),
        ("output_gate_type", None, "output_gate_type is None.*'sigmoid'"),
        ("norm_topk_prob", False, "norm_topk_prob is False.*True"),
        ("attention_bias", True, "attention_bias is True"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("indexer_kv_heads", 2, "indexer_kv_heads is 2"),
        ("mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings is True"),
        ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers is 2, expected 0 or 1"),
        ("layer_types", ["linear_attention", "sliding_attention"], r"layer_types\[1\] is 'sliding_attention'"),
        ("layer_types", ["linear_attention"], "layer_types has 1 entries for 2 layers"),
        ("linear_value_head_dim", 4, "linear_value_head_dim 4 differs from linear_key_head_dim 8"),
        ("linear_num_value_heads", 5, "linear_num_key_heads 2 does not divide linear_num_value_heads 5"),
        ("indexer_compress_ratio", 3, "indexer_compress_ratio 3 does not divide indexer_budget 8"),
        ("ple_layer_ids", [2], r"ple_layer_ids is \[2\].*linear_attention"),
        ("ple_layer_ids", [1, 2], "expected one 1-based layer"),
        ("ple_embed_dim", 64, "ple_embed_dim 64 differs from hidden_size 32"),
        ("hc_count", None, "lacks hc_count"),
        ("num_experts", -1, "num_experts is -1, expected a positive integer"),
        ("rms_norm_eps", "tiny", "layer_norm_rms_epsilon: 'tiny' is no FLOAT32"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_type is 'yarn'"),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, r"mrope_section \[11, 11, 10\].*sum 4"),
        ("model_type", "llama", "model_type is 'llama'; known are qwen4_exp, qwen4_exp_text"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config: expected float weights"),
        ("split_ngram_parts", 13, r"shard_12.weight is missing, expected \[any, 8\]"),
        ("split_ngram_parts", 11, "shard_11.weight is known to no rule"),
        ("eos_token_id", 40, "eos_token_id is 40 in a vocabulary of 40"),
        ("bos_token_id", -1, "bos_token_id is -1 in a vocabulary of 40"),
    ],
)
def test_settings_that_gguf_cannot_say(checkpoint, tmp_path, key, value, match):
    checkpoint.config[key] = value
    checkpoint.tokenizer_config.pop("eos_token")
    refused(checkpoint, tmp_path, match)


def test_missing_unknown_and_misshapen_tensors_are_all_named(checkpoint, tmp_path):
    t = checkpoint.tensors
    del t[f"{GDN}A_log"]
    t["model.layers.0.input_layernorm.weight"] = np.zeros(32, np.float32)
    t[f"{GDN}conv1d.weight"] = t[f"{GDN}conv1d.weight"].transpose(0, 2, 1).copy()  # as MLX keeps it
    refused(
        checkpoint,
        tmp_path,
        r"conv1d.weight is \[80, 4, 1\], expected \[80, 1, 4\]; model.layers.0.linear_attn.A_log is missing, "
        r"expected \[6\]; model.layers.0.input_layernorm.weight is known to no rule",
    )


def test_an_mtp_block_without_its_tensors(checkpoint, tmp_path):
    checkpoint.tensors = {n: x for n, x in checkpoint.tensors.items() if not n.startswith("mtp.")}
    refused(checkpoint, tmp_path, "mtp.layers.0.self_attn.q_proj.weight is missing.*and [0-9]+ more")


def test_mtp_tensors_without_the_block(checkpoint, tmp_path):
    del checkpoint.config["mtp_num_hidden_layers"]
    refused(checkpoint, tmp_path, "mtp.fc_embedding.weight is known to no rule")


def test_hash_constants_that_point_outside_the_table(checkpoint, tmp_path):
    checkpoint.tensors["model.layers.0.ple.ple_embedding.ngram_heads_vocab_sizes"][3] = 26
    refused(checkpoint, tmp_path, "n-gram head 3 reads rows 23 to 49 of a table of 48 rows")


def test_negative_hash_constants(checkpoint, tmp_path):
    checkpoint.tensors["model.layers.0.ple.ple_embedding.layer_multipliers"][1] = -5
    refused(checkpoint, tmp_path, "ple.layer_multipliers: -5 is no UINT64")


def test_hash_constants_that_went_through_a_float(checkpoint, tmp_path):
    name = "model.layers.0.ple.ple_embedding.layer_multipliers"
    checkpoint.tensors[name] = checkpoint.tensors[name].astype(np.float32)
    refused(checkpoint, tmp_path, f"{name} in model.safetensors is F32, expected one of I64, I32")


@pytest.mark.fault("B68")
def test_weights_of_a_type_that_is_no_float(checkpoint, tmp_path):
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["lm_head.weight"].astype(np.int8)
    refused(checkpoint, tmp_path, "lm_head.weight in model.safetensors is I8, expected one of F32, F16, BF16")


@pytest.mark.fault("B71")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers(checkpoint, tmp_path, bad):
    checkpoint.tensors["mtp.fc_hidden.weight"][3, 5] = bad  # far into the file: much is written by then
    refused(checkpoint, tmp_path, r"blk.2.nextn.eh_proj.weight has NaN or infinity at \[3, 37\]")


@pytest.mark.parametrize(("type", "value"), [("f16", 65520.0), ("bf16", 3.4e38), ("q8_0", 9e6)])
def test_values_that_the_type_cannot_hold(checkpoint, tmp_path, type, value):
    checkpoint.tensors["lm_head.weight"][0, 0] = value
    refused(checkpoint, tmp_path, r"output.weight has values up to .*can't hold", type=type)


def test_an_unknown_type(checkpoint, tmp_path):
    refused(checkpoint, tmp_path, "unknown type 'q9'; known are f32, f16, bf16, q8_0", type="q9")


@pytest.mark.fault("B73")
def test_its_own_output_is_refused(checkpoint, tmp_path):
    """B73: a second fold would add one to the norms again."""
    out = tmp_path / "model.gguf"
    convert(checkpoint.write(tmp_path / "checkpoint"), out)
    with pytest.raises(ConvertError, match="model.gguf is a GGUF file: it is converted already"):
        convert(out, tmp_path / "again.gguf")
    (tmp_path / "folder").mkdir()
    out.rename(tmp_path / "folder" / "model.gguf")
    with pytest.raises(ConvertError, match=r"folder has no config.json"):
        convert(tmp_path / "folder", tmp_path / "again.gguf")
    assert not (tmp_path / "again.gguf").exists()


@pytest.mark.fault("B73")
def test_an_mlx_conversion_is_refused(checkpoint, tmp_path):
    """B73: eight of eleven such conversions had their norms folded already."""
    checkpoint.metadata = {"format": "mlx"}
    refused(checkpoint, tmp_path, "is an MLX conversion, whose norms may be folded already")


def test_a_failure_leaves_the_file_that_was_there(checkpoint, tmp_path):
    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    out.write_bytes(b"before")
    checkpoint.tensors["mtp.fc_hidden.weight"][0, 0] = np.nan
    with pytest.raises(ConvertError):
        convert(checkpoint.write(tmp_path / "checkpoint"), out)
    assert [f.name for f in out.parent.iterdir()] == ["model.gguf"]
    assert out.read_bytes() == b"before"


def test_an_interrupt_leaves_nothing(checkpoint, tmp_path):
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    out = tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint.write(tmp_path / "checkpoint"), out, progress=stop)
    assert list(out.parent.iterdir()) == []


def test_places_that_cannot_be_written(checkpoint, tmp_path):
    folder = checkpoint.write(tmp_path / "checkpoint")
    with pytest.raises(ConvertError, match="its folder does not exist"):
        convert(folder, tmp_path / "nowhere" / "model.gguf")
    with pytest.raises(ConvertError, match="it is a folder"):
        convert(folder, tmp_path)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ConvertError, match="does not exist"):
        convert(tmp_path / "none", tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match="neither model.safetensors nor model.safetensors.index.json"):
        convert(tmp_path, tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ConvertError, match="config.json is not JSON"):
        convert(tmp_path, tmp_path / "model.gguf")


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_weights_file(checkpoint, tmp_path, cut):
    file = checkpoint.write(tmp_path / "checkpoint") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ConvertError, match=r"model.safetensors is not a whole safetensors file"):
        convert(file.parent, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update({"lm_head.weight": "../model.safetensors"}), "expected a file of the same folder"),
        (lambda m: m.update({"lm_head.weight": "model-9.safetensors"}), "model-9.safetensors does not exist"),
        (lambda m: m.update({"more.weight": m["lm_head.weight"]}), "lists tensors that their files lack: more.weight"),
        (lambda m: m.pop("lm_head.weight"), "lm_head.weight is in .*index.json says None"),
    ],
)
def test_an_index_that_does_not_fit_its_files(checkpoint, tmp_path, change, match):
    folder = checkpoint.write(tmp_path / "checkpoint", files=2)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    change(data["weight_map"])
    index.write_text(json.dumps(data))
    with pytest.raises(ConvertError, match=match):
        convert(folder, tmp_path / "model.gguf")
