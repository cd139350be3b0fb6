"""Files of random weights: they load, run, say something, and hold what a file of their type holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from typer.testing import CliRunner

import trueup
from trueup.cli.app import app
from trueup.convert import SYNTH_TYPES, ConvertError, synth
from trueup.convert.blocks import BLOCKS


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("deviation", [0.03, 1.0])
def test_drawn_blocks_have_the_deviation_asked_for(kind: GGMLQuantizationType, deviation: float) -> None:
    drawn = BLOCKS[kind](np.random.default_rng(1), 400, deviation)
    values = dequantize(drawn.reshape(1, -1), kind).astype(np.float64)
    assert values.size == 400 * 256
    assert abs(values.std() / deviation - 1) < 0.01 and abs(values.mean()) < 0.03 * deviation


@pytest.mark.parametrize("type", SYNTH_TYPES)
def test_a_file_of_each_type_runs(type: str, tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    made = synth("qwen4exp", path, type=type, settings={"hidden_size": 256, "moe_intermediate_size": 256})
    reader = GGUFReader(path)
    assert made.tensors == len(reader.tensors)
    stored = {t.name: t.tensor_type.name.lower() for t in reader.tensors}
    assert stored["blk.0.ffn_gate_exps.weight"] == stored["blk.3.attn_q.weight"] == type
    assert stored["blk.0.ffn_gate_inp.weight"] == stored["output_hc_norm.weight"] == "f32"
    engine = trueup.load(path, context=64, backend="cpu")
    logits = engine.logits([1, 2, 3, 4])
    engine.close()
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10
    assert len(set(logits.argmax(-1).tolist())) > 1


def test_the_head_is_there_and_drafts(tmp_path: Path) -> None:
    synth("qwen4exp", tmp_path / "m.gguf")
    engine = trueup.load(tmp_path / "m.gguf", context=64, backend="cpu", draft=2)
    plain = [t for p in engine.generate([5, 6], max_tokens=6, ignore_eos=True, speculate=False) for t in p.tokens]
    assert plain == [t for p in engine.generate([5, 6], max_tokens=6, ignore_eos=True) for t in p.tokens]
    engine.close()


def test_text_goes_through_its_tokenizer(tmp_path: Path) -> None:
    synth("qwen4exp", tmp_path / "m.gguf", settings={"vocab_size": 258})
    engine = trueup.load(tmp_path / "m.gguf", context=64, backend="cpu")
    tokenizer = engine.model.tokenizer
    ids = tokenizer.encode("the ü\n")
    assert tokenizer.decode(ids) == "the ü\n" and len(ids) == 6, "th is one token, ü two"
    engine.close()


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.gguf" for i in range(3)]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        synth("qwen4exp", path, seed=seed, type="q4_k")
    one, two, other = (p.read_bytes() for p in paths)
    assert one == two != other


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"preset": "huge"}, "unknown preset 'huge'; qwen4exp has tiny, 1b, wide"),
        ({"type": "q3_x"}, "unknown type 'q3_x'"),
        ({"settings": {"num_expert": 2}}, "unknown setting 'num_expert'"),
        ({"settings": {"num_attention_heads": 3, "num_key_value_heads": 2}}, "does not divide"),
        ({"settings": {"vocab_size": 20}}, "vocab_size is 20, expected at least the 256 bytes"),
        ({"settings": {"hidden_size": "many"}}, "hidden_size is 'many', expected a positive integer"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_and_leaves_no_file(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=says):
        synth("qwen4exp", tmp_path / "m.gguf", **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConvertError, match="unknown architecture 'llama'"):
        synth("llama", tmp_path / "m.gguf")


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    args = ["synth", "qwen4exp", "-o", str(out), "--layers", "8", "--set", "num_experts_per_tok=2", "--type", "f16"]
    run = CliRunner().invoke(app, args)
    assert run.exit_code == 0, run.output
    said = CliRunner().invoke(app, ["inspect", str(out)])
    assert "6 gdn, 2 qsa, 1 mtp" in said.output
    run = CliRunner().invoke(app, ["synth", "qwen4exp", "-o", str(out), "--set", "num_experts=x"])
    assert run.exit_code == 2 and "is no KEY=VALUE" in run.output
