"""A byte-level BPE tokenizer from tokenizer.json and tokenizer_config.json to GGUF's `tokenizer.*` keys.

GGUF names a pre-tokenizer and can't describe one, so only those that are recognised word for word are converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import TokenType

from trueup.models.convert_rules import ConvertError, Key

from .checkpoint import Checkpoint

PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
}
"""GGUF's name by the regular expression that splits the text; they differ in where combining marks go."""

SPECIAL = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def tokenizer_keys(checkpoint: Checkpoint, vocab_size: int) -> list[Key]:
    """The keys, with as many tokens as the embedding has rows: rows without a token get a name and the type `unused`.

    Raises ConvertError for a tokenizer that these keys can't express, or whose special ids lie outside the vocabulary.
    """
    data, config = checkpoint.json("tokenizer.json"), checkpoint.json("tokenizer_config.json")
    _check_model(data)
    tokens, types = _tokens(data, vocab_size)
    keys = [
        Key("ggml.model", "str", "gpt2"),
        Key("ggml.pre", "str", _pre_tokenizer(data)),
        Key("ggml.tokens", "str[]", tokens),
        Key("ggml.token_type", "i32[]", types),
        Key("ggml.merges", "str[]", _merges(data)),
    ]
    ids = {token: i for i, token in enumerate(tokens)}
    for name, key in SPECIAL:
        id = _special(name, checkpoint.config, config, ids)
        if id is not None:
            keys.append(Key(f"ggml.{key}_token_id", "u32", id))
    keys.append(Key("ggml.add_bos_token", "bool", config.get("add_bos_token") is True))
    template = config.get("chat_template") or checkpoint.optional_text("chat_template.jinja")
    if template is not None:
        if not isinstance(template, str):
            raise ConvertError(
                f"tokenizer_config.json: chat_template is a {type(template).__name__}, expected a string"
            )
        keys.append(Key("chat_template", "str", template))
    return keys


def _check_model(data: Mapping[str, Any]) -> None:
    model = data.get("model") or {}
    want = {"type": "BPE", "byte_fallback": False, "ignore_merges": False, "dropout": None}
    for key, value in want.items():
        if (model.get(key) or None) != (value or None):
            raise ConvertError(f"tokenizer.json: model.{key} is {model.get(key)!r}, expected {value!r}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ConvertError(f"tokenizer.json: model.{key} is {model[key]!r}, expected none")
    for key, allowed in (
        ("normalizer", (None, "NFC")),
        ("post_processor", (None, "ByteLevel")),
        ("decoder", ("ByteLevel",)),
    ):
        kind = (data.get(key) or {}).get("type")
        if kind not in allowed:
            raise ConvertError(f"tokenizer.json: {key} is {kind}, expected {' or '.join(str(a) for a in allowed)}")


def _pre_tokenizer(data: Mapping[str, Any]) -> str:
    pre = data.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers") or [pre]
    split, rest = parts[0], parts[1:]
    pattern = (split.get("pattern") or {}).get("Regex") if split.get("type") == "Split" else None
    plain = [
        p.get("type") == "ByteLevel" and not p.get("use_regex", True) and not p.get("add_prefix_space") for p in rest
    ]
    if (
        pattern in PRE_TOKENIZERS
        and plain == [True]
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
    ):
        return PRE_TOKENIZERS[pattern]
    kinds = " + ".join(str(p.get("type")) for p in parts)
    raise ConvertError(
        f"tokenizer.json: unknown pre-tokenizer ({kinds}, pattern {pattern!r}); "
        f"known are those of {', '.join(PRE_TOKENIZERS.values())}"
    )


def _tokens(data: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    found: dict[int, tuple[str, int]] = {}
    added = {
        t["id"]: (t["content"], TokenType.CONTROL if t.get("special") else TokenType.USER_DEFINED)
        for t in data.get("added_tokens", [])
    }
    for token, id in data["model"]["vocab"].items():
        if found.setdefault(id, (token, TokenType.NORMAL))[0] != token:
            raise ConvertError(f"tokenizer.json: id {id} is {found[id][0]!r} and {token!r}")
    found |= added
    if found and not 0 <= min(found) <= max(found) < size:
        raise ConvertError(f"tokenizer.json: ids from {min(found)} to {max(found)} in a vocabulary of {size}")
    listed = [found.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(size)]
    tokens = [token for token, _ in listed]
    if len(set(tokens)) != size:
        twice = next(t for t in tokens if tokens.count(t) > 1)
        raise ConvertError(f"tokenizer.json: token {twice!r} has more than one id")
    return tokens, [int(kind) for _, kind in listed]


def _merges(data: Mapping[str, Any]) -> list[str]:
    merges = []
    for i, merge in enumerate(data["model"].get("merges") or []):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or any(not p or " " in p for p in parts):
            raise ConvertError(f"tokenizer.json: merge {i} is {merge!r}, expected two byte-level pieces")
        merges.append(" ".join(parts))
    return merges


def _special(name: str, model: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]) -> int | None:
    """tokenizer_config.json's token where it names one, else config.json's id; of a list, the first."""
    token = config.get(f"{name}_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        if token not in ids:
            raise ConvertError(f"tokenizer_config.json: {name}_token {token!r} is not in the vocabulary")
        return ids[token]
    text = model.get("text_config", {})
    id = model.get(f"{name}_token_id", text.get(f"{name}_token_id"))
    id = id[0] if isinstance(id, list) and id else id
    if id is None:
        return None
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < len(ids):
        raise ConvertError(f"config.json: {name}_token_id is {id!r} in a vocabulary of {len(ids)}")
    return id
