"""The tokenizer's keys. The vocabulary's other reader is the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from trueup.convert import ConvertError, convert

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(checkpoint) -> dict:
    return checkpoint.tokenizer["pre_tokenizer"]["pretokenizers"][0]


def refused(checkpoint, tmp_path: Path, match: str) -> None:
    with pytest.raises(ConvertError, match=match):
        convert(checkpoint.write(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_the_keys_of_a_byte_level_bpe(checkpoint, converted, tmp_path):
    m = converted(checkpoint).meta
    assert (m["tokenizer.ggml.model"], m["tokenizer.ggml.pre"]) == ("gpt2", "qwen35")
    other = Tokenizer.from_file(str(tmp_path / "checkpoint" / "tokenizer.json"))
    tokens = m["tokenizer.ggml.tokens"]
    assert tokens[: other.get_vocab_size()] == [other.id_to_token(i) for i in range(other.get_vocab_size())]
    assert m["tokenizer.ggml.merges"] == ["a b", "Ġ a", "ab c"]
    assert (m["tokenizer.ggml.eos_token_id"], m["tokenizer.ggml.add_bos_token"]) == (0, False)
    assert m["tokenizer.chat_template"] == "{{ messages }}"


def test_rows_of_the_embedding_without_a_token_are_unused(checkpoint, converted):
    m = converted(checkpoint).meta
    assert len(m["tokenizer.ggml.tokens"]) == len(m["tokenizer.ggml.token_type"]) == 40
    assert m["tokenizer.ggml.token_type"] == [3, 3] + [1] * 30 + [5] * 8
    assert m["tokenizer.ggml.tokens"][-1] == "[PAD39]"


def test_added_tokens_that_are_not_special_are_user_defined(checkpoint, converted):
    checkpoint.tokenizer["added_tokens"].append({"id": 32, "content": "<think>", "special": False})
    assert converted(checkpoint).meta["tokenizer.ggml.token_type"][32] == 4


def test_the_older_pre_tokenizer_is_told_from_the_newer(checkpoint, converted):
    split(checkpoint)["pattern"]["Regex"] = QWEN2
    assert converted(checkpoint).meta["tokenizer.ggml.pre"] == "qwen2"


def test_merges_as_strings_are_the_same(checkpoint, converted):
    checkpoint.tokenizer["model"]["merges"] = ["a b", "Ġ a", "ab c"]
    assert converted(checkpoint).meta["tokenizer.ggml.merges"] == ["a b", "Ġ a", "ab c"]


@pytest.mark.parametrize("token", ["<|im_start|>", {"content": "<|im_start|>", "special": True}])
def test_a_named_token_wins_over_the_configured_id(checkpoint, converted, token):
    checkpoint.tokenizer_config |= {"eos_token": token, "bos_token": None, "pad_token": None, "add_bos_token": True}
    checkpoint.config |= {"eos_token_id": 0, "bos_token_id": 5}
    m = converted(checkpoint).meta
    assert (m["tokenizer.ggml.eos_token_id"], m["tokenizer.ggml.bos_token_id"]) == (1, 5)
    assert "tokenizer.ggml.padding_token_id" not in m
    assert m["tokenizer.ggml.add_bos_token"] is True


def test_a_template_in_its_own_file(checkpoint, tmp_path, read):
    del checkpoint.tokenizer_config["chat_template"]
    folder = checkpoint.write(tmp_path / "checkpoint")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    assert read(convert(folder, tmp_path / "model.gguf").path).meta["tokenizer.chat_template"] == "{{ x }}"


def test_an_unknown_pre_tokenizer_is_refused(checkpoint, tmp_path):
    split(checkpoint)["pattern"]["Regex"] = QWEN2.replace("{L}+", "{L}{1,9}")
    refused(
        checkpoint, tmp_path, r"unknown pre-tokenizer \(Split \+ ByteLevel, pattern .*known are those of qwen2, qwen35"
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t["model"].update(type="Unigram"), "model.type is 'Unigram', expected 'BPE'"),
        (lambda t: t["model"].update(byte_fallback=True), "model.byte_fallback is True"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "normalizer is Lowercase"),
        (lambda t: t.update(post_processor={"type": "TemplateProcessing"}), "post_processor is TemplateProcessing"),
        (lambda t: t["model"]["vocab"].update(zz=40), "ids from 0 to 40 in a vocabulary of 40"),
        (lambda t: t["model"]["vocab"].update(zz=7), "id 7 is 'f' and 'zz'"),
        (lambda t: t["added_tokens"].append({"id": 33, "content": "a"}), "token 'a' has more than one id"),
        (lambda t: t["model"].update(merges=["a b c"]), "merge 0 is 'a b c', expected two"),
    ],
)
def test_tokenizers_that_the_keys_cannot_express(checkpoint, tmp_path, change, match):
    change(checkpoint.tokenizer)
    refused(checkpoint, tmp_path, match)


def test_a_special_token_outside_the_vocabulary(checkpoint, tmp_path):
    checkpoint.tokenizer_config["eos_token"] = "</s>"
    refused(checkpoint, tmp_path, "eos_token '</s>' is not in the vocabulary")
