"""`trueup inspect`: its numbers are those that the gguf package reads, and hand-made ones; no file harms it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from trueup.models import bundled_path

Run = Callable[..., Any]


def test_numbers_are_those_of_the_gguf_package(trueup: Run) -> None:
    said = json.loads(trueup("inspect", "--json", "--tensors").out)
    theirs = gguf.GGUFReader(bundled_path())
    assert said["tensors"]["count"] == len(theirs.tensors)
    assert said["tensors"]["bytes"] == sum(t.n_bytes for t in theirs.tensors) == said["memory"]["weights"]
    assert said["tensors"]["parameters"] == sum(t.n_elements for t in theirs.tensors)
    assert {k: v["count"] for k, v in said["tensors"]["types"].items()} == dict(
        Counter(t.tensor_type.name.lower() for t in theirs.tensors)
    )
    assert [(t["name"], t["type"], t["shape"], t["bytes"]) for t in said["tensor_list"]] == [
        (t.name, t.tensor_type.name.lower(), t.shape.tolist()[::-1], t.n_bytes) for t in theirs.tensors
    ]
    assert list(said["metadata"]) == [k for k in theirs.fields if not k.startswith("GGUF.")]
    assert said["tokenizer"]["tokens"] == len(theirs.fields["tokenizer.ggml.tokens"].data)


def test_the_bundled_model(trueup: Run) -> None:
    said = json.loads(trueup("inspect", "--json", "--ctx", 1000).out)
    assert said["architecture"] == "qwen4exp" and said["runnable"] and said["reason"] == ""
    assert said["layers"] == ["gdn", "gdn+ngram", "gdn", "qsa", "gdn", "gdn", "gdn", "qsa", "mtp"]
    assert said["hyperparameters"]["hidden"] == 256
    assert said["tokenizer"]["special"] == {"bos": 0, "eos": 0, "padding": 0}
    assert said["tokenizer"]["ends"] == ["<|endoftext|>", "<|im_end|>"]
    assert said["tokenizer"]["chat_template"] and said["tokenizer"]["readable"]
    # two QSA layers: keys and values of 2 heads of 64, and an index key of 32 for every 4 tokens, float32
    per_token = 2 * (2 * 2 * 64 * 4 + 32 * 4 // 4)
    # six delta nets: 4 heads of 64 x 64, and 3 rows of 512 channels; two index tails of 3 x 32; 3 positions of 3;
    # the n-gram context of 2; its convolution's (4 - 1) * 3 rows of 4 streams of 256
    per_sequence = 6 * (4 * 64 * 64 + 3 * 512) * 4 + 2 * 3 * 32 * 4 + 3 * 3 * 4 + 2 * 4 + 9 * 1024 * 4
    assert said["memory"]["state_per_token"] == per_token
    assert said["memory"]["state_per_sequence"] == per_sequence
    assert said["memory"]["state"] == 1000 * per_token + per_sequence
    assert said["memory"]["host_weights"] == 24320 * 34, "n-gram rows of 32 in Q8_0"


def test_a_person_sees_the_layers_as_a_list(trueup: Run) -> None:
    done = trueup("inspect", "--metadata", "--tensors")
    assert done.code == 0 and done.err == ""
    assert "0 gdn, 1 gdn+ngram, 2 gdn, 3 qsa, 4 gdn, 5 gdn, 6 gdn, 7 qsa, 8 mtp" in done.out
    for shown in ("architecture", "licence", "apache-2.0", "hyper-parameters", "q8_0", "4096 tokens, 3837 merges",
                  "state for each token", "2.1 KiB", "tokenizer.chat_template", "blk.3.attn_k.weight"):  # fmt: skip
        assert shown in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_an_unknown_architecture_is_shown_and_not_run(trueup: Run, altered: Callable[..., Path]) -> None:
    path = altered(b"qwen4exp", b"qwen9exp", behind=b"general.architecture")
    done = trueup("inspect", path)
    assert done.code == 0
    assert "the architecture 'qwen9exp' is unknown; known are qwen4exp" in done.out
    assert "qwen4exp.block_count" in done.out, "the metadata is shown"
    said = json.loads(trueup("inspect", path, "--json").out)
    assert not said["runnable"] and said["layers"] == [] and said["tensors"]["count"] == 246
    line = trueup("run", path, "-p", "x").refused()
    assert "general.architecture" in line and "qwen9exp" in line


def test_a_model_that_lacks_something_says_what(trueup: Run, altered: Callable[..., Path]) -> None:
    path = altered(b"qwen4exp.expert_count", b"qwen4exp.expert_Count")
    said = json.loads(trueup("inspect", path, "--json").out)
    assert not said["runnable"] and "qwen4exp.expert_count" in said["reason"] and "missing" in said["reason"]


def test_a_tokenizer_that_cannot_be_used_says_why(trueup: Run, altered: Callable[..., Path]) -> None:
    said = json.loads(trueup("inspect", altered(b"qwen35", b"qwen99"), "--json").out)
    assert said["runnable"], "logits of token ids need none"
    assert not said["tokenizer"]["readable"] and "'qwen99'" in said["tokenizer"]["reason"]


def test_control_characters_of_a_file_reach_no_terminal(trueup: Run, altered: Callable[..., Path]) -> None:
    done = trueup("inspect", altered(b"apache-2.0", b"\x1b[31mred\r\n"), "--metadata")
    assert "\x1b" not in done.out and "\r" not in done.out
    assert r"\x1b[31mred\r\n" in done.out


def test_all_files_of_a_split_set_are_named(trueup: Run, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "toy", split_max_tensors=1)
    for name in ("a", "b", "c"):
        writer.add_tensor(name, np.ones((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    said = json.loads(trueup("inspect", files[1], "--json").out)
    assert said["files"] == [str(f) for f in files]
    assert said["bytes"] == sum(f.stat().st_size for f in files)
    assert said["tensors"]["types"] == {"f32": {"count": 3, "parameters": 24, "bytes": 96}}
    assert said["tokenizer"] == {}
    shown = trueup("inspect", files[1]).out
    assert "in 3 files" in shown and all(f.name in shown for f in files)


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "file is empty"), (b"GGUX" + bytes(60), "not a GGUF file"), (b"GGUF\x03", "")]
)
def test_garbage_is_one_line(trueup: Run, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    line = trueup("inspect", path).refused()
    assert line.startswith(str(path)) and said in line
