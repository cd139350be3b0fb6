"""The tokenizer from GGUF metadata against the `tokenizers` library's own reading of the same tokenizer.json."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from trueup.models.tokenizer import PRE_TOKENIZERS, Tokenizer, TokenizerError

REPO = Path(__file__).parents[2]
DATA = REPO / "tests/data/qwen4exp-tiny"
BUNDLED = REPO / "models/bundled/qwen4exp-tiny-q8_0.gguf"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def metadata_of_json() -> dict[str, Any]:
    """What a converter writes for tokenizer.json: tokens by id, merges with one space, 3 for special tokens."""
    spec = json.loads((DATA / "tokenizer.json").read_text())
    config = json.loads((DATA / "tokenizer_config.json").read_text())
    by_id = {i: t for t, i in spec["model"]["vocab"].items()} | {a["id"]: a["content"] for a in spec["added_tokens"]}
    special = {a["id"] for a in spec["added_tokens"] if a["special"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
        "tokenizer.ggml.token_type": np.array([3 if i in special else 1 for i in range(len(by_id))], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": config["chat_template"],
    }


METADATA = metadata_of_json()
TOKENS, TYPES = METADATA["tokenizer.ggml.tokens"], METADATA["tokenizer.ggml.token_type"]
N = len(TOKENS)
OURS = Tokenizer.from_metadata(METADATA, source="tiny")
PARSING = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))
PLAIN = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))
PLAIN.encode_special_tokens = True

LIBRARY_NFC = tokenizers.normalizers.NFC()
MARKS = [c for c in map(chr, range(0x110000)) if unicodedata.category(c).startswith("M")]
LATER_MARKS = {
    c
    for c in MARKS
    for text in (f"{c}\u0334", f"\u0300{c}")  # marks of the classes 1 and 230: one of them trades places with c
    if LIBRARY_NFC.normalize_str(text) != unicodedata.normalize("NFC", text)
}

# Unassigned characters may have gained a composition in one library's Unicode version and not in another's.
assigned = st.characters(exclude_categories=["Cs", "Cn"])
combining = st.characters(categories=["Mn", "Mc", "Me"])
look_alikes = st.sampled_from(
    [*SPECIAL, "<|im_", "end|>", "<|", "|>", "<|im_start|", "'ll", "'S", "\r\n", " \n ", "é", "한"]
)
texts = st.lists(st.one_of(st.text(assigned, max_size=8), st.text(combining, max_size=3), look_alikes)).map("".join)


def changed(**keys: Any) -> dict[str, Any]:
    """The good metadata with some keys replaced; `...` removes one. Names lack their prefix `tokenizer.ggml.`."""
    out = METADATA | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
    return {k: v for k, v in out.items() if v is not ...}


@given(texts)
@example("e\u0301 \u1100\u1161\u11a8 \u0344")
@example("<|im_start|>system\nx<|im_end|>")
def test_ids_equal_those_of_the_tokenizers_library(text: str) -> None:
    assert OURS.encode(text) == PLAIN.encode(text, add_special_tokens=False).ids
    assert OURS.encode(text, parse_special=True) == PARSING.encode(text, add_special_tokens=False).ids


@given(texts)
def test_decoding_gives_back_the_normalized_text(text: str) -> None:
    ids = OURS.encode(text)
    assert not OURS.special_ids & set(ids)
    assert OURS.decode(ids) == LIBRARY_NFC.normalize_str(text)
    if LATER_MARKS.isdisjoint(text):
        assert OURS.decode(ids) == unicodedata.normalize("NFC", text)


def test_marks_newer_than_the_librarys_unicode_are_few() -> None:
    """`tokenizers` orders marks by Unicode 9: U+1DF6, of Unicode 10, is no mark to it. Models were trained so."""
    assert "\u1df6" in LATER_MARKS and len(LATER_MARKS) < 150
    assert all(c > "\u0500" for c in LATER_MARKS)
    assert OURS.decode(OURS.encode("\u1df6\u0300")) == "\u1df6\u0300"


@given(st.lists(st.integers(0, OURS.vocab_size - 1)), st.booleans())
def test_decoding_any_ids_equals_the_tokenizers_library(ids: list[int], skip: bool) -> None:
    assert OURS.decode(ids, skip_special=skip) == PARSING.decode(ids, skip_special_tokens=skip)


def test_source_files_of_this_repository_encode_as_the_tokenizers_library_does() -> None:
    files = [p for folder in ("core", "models", "runtime", "tests") for p in (REPO / folder).rglob("*.py")]
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        ids = OURS.encode(text, parse_special=True)
        assert ids == PARSING.encode(text, add_special_tokens=False).ids, path
        assert OURS.decode(OURS.encode(text)) == unicodedata.normalize("NFC", text), path


def test_every_byte_and_plane_encodes() -> None:
    text = "".join(map(chr, (*range(0x300), 0x2028, 0xFFFE, 0xFFFF, 0x1F63A, 0xF0000, 0x10FFFF)))
    assert OURS.decode(OURS.encode(text)) == unicodedata.normalize("NFC", text)
    assert OURS.encode("") == [] and OURS.decode([]) == ""


def test_one_long_word_takes_no_quadratic_time() -> None:
    start = time.process_time()
    assert OURS.decode(OURS.encode("a" * 200_000)) == "a" * 200_000
    assert time.process_time() - start < 5


def test_marks_belong_to_the_word_under_qwen35_and_not_under_qwen2() -> None:
    def words(pre: str, text: str) -> list[str]:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRE_TOKENIZERS[pre].pattern), behavior="isolated")
        return [w for w, _ in cut.pre_tokenize_str(text)]

    text = "नमस्ते 42's"
    assert words("qwen35", text) == ["नमस्ते", " ", "4", "2", "'s"]
    assert words("qwen2", text) == ["नमस", "्त", "े", " ", "4", "2", "'s"]
    qwen2 = Tokenizer.from_metadata(changed(pre="qwen2"), source="t")
    assert qwen2.decode(qwen2.encode(text)) == text


def test_special_tokens_are_read_only_where_asked() -> None:
    im_start = OURS.special_texts["<|im_start|>"]
    assert OURS.encode("<|im_start|>", parse_special=True) == [im_start]
    plain = OURS.encode("<|im_start|>")
    assert im_start not in plain and OURS.decode(plain) == "<|im_start|>"
    assert OURS.is_special(im_start) and OURS.special_ids == {0, 1, 2}
    assert list(OURS.split_special("a<|im_start|><|im_end|>b<|im_")) == [
        ("a", None),
        ("<|im_start|>", 1),
        ("<|im_end|>", 2),
        ("b<|im_", None),
    ]


def test_of_special_tokens_that_begin_alike_the_longest_is_read() -> None:
    tokens = [*TOKENS, "<|x", "<|x|>"]
    tok = Tokenizer.from_metadata(changed(tokens=tokens, token_type=np.append(TYPES, [3, 3])), source="t")
    assert tok.encode("<|x|><|x", parse_special=True) == [N + 1, N]
    assert [special for _, special in tok.split_special("<|x|><|x")] == [N + 1, N]


def test_decode_leaves_special_tokens_out_unless_asked() -> None:
    ids = OURS.encode("a<|im_end|>b", parse_special=True)
    assert OURS.decode(ids) == "ab"
    assert OURS.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_token_bytes_undo_the_byte_level_alphabet() -> None:
    for text, want in {"Ġ": b" ", "Ċ": b"\n", "Ã": b"\xc3", "!": b"!", "<|im_end|>": b"<|im_end|>"}.items():
        assert OURS.token_bytes(METADATA["tokenizer.ggml.tokens"].index(text)) == want


def test_user_defined_tokens_are_words_and_unused_ids_are_nothing() -> None:
    tokens = [*METADATA["tokenizer.ggml.tokens"], "<思>", "[PAD1]"]
    types = np.append(METADATA["tokenizer.ggml.token_type"], [4, 5]).astype(np.int32)
    tok = Tokenizer.from_metadata(changed(tokens=tokens, token_type=types), source="t")
    think, pad = len(tokens) - 2, len(tokens) - 1
    assert think in tok.encode("a<思>b") and not tok.is_special(think)
    assert tok.decode(tok.encode("a<思>b")) == "a<思>b"
    assert pad not in tok.encode("[PAD1]", parse_special=True)
    assert tok.token_bytes(pad) == b"" and tok.token_bytes(think) == "<思>".encode()


def test_text_outside_the_byte_level_alphabet_is_taken_as_it_is() -> None:
    """`é` and `Ġ` are letters of that alphabet, but not in a special or user-defined token; a space never is one."""
    tokens = [*TOKENS, "<é>", "<|Ġ|>", "two words"]
    tok = Tokenizer.from_metadata(changed(tokens=tokens, token_type=np.append(TYPES, [4, 3, 1])), source="t")
    assert [tok.token_bytes(N + i) for i in range(3)] == ["<é>".encode(), "<|Ġ|>".encode(), b"two words"]


def test_ends_are_the_keyed_ids_and_the_control_tokens_of_the_family() -> None:
    assert OURS.eos_ids == {0, 2} and OURS.pad_id == 0 and OURS.bos_id is None
    assert OURS.eos_token == "<|endoftext|>" and OURS.bos_token is None
    keyed = Tokenizer.from_metadata(changed(eot_token_id=7, eom_token_id=np.uint32(9)), source="t")
    assert keyed.eos_ids == {0, 2, 7, 9}
    types = METADATA["tokenizer.ggml.token_type"].copy()
    types[2] = 1  # the marker's text as an ordinary token ends nothing
    assert Tokenizer.from_metadata(changed(token_type=types), source="t").eos_ids == {0}


def test_bos_is_added_as_the_file_or_the_caller_says() -> None:
    tok = Tokenizer.from_metadata(changed(bos_token_id=1, add_bos_token=True), source="t")
    plain = OURS.encode("x")
    assert tok.encode("x") == [1, *plain] and tok.encode("x", add_bos=False) == plain
    with pytest.raises(TokenizerError, match="bos_token_id"):
        OURS.encode("x", add_bos=True)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc", "\udc00\ud800"])
def test_lone_surrogates_are_refused_by_position(text: str) -> None:
    with pytest.raises(ValueError, match=r"surrogate U\+D[89A-F]..? ?.*at character"):
        OURS.encode(text)


@pytest.mark.parametrize("token_id", [-1, 4096, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    for call in (OURS.token_bytes, OURS.is_special, lambda i: OURS.decode([i])):
        with pytest.raises(TokenizerError, match=f"{token_id} is outside the vocabulary of 4096"):
            call(token_id)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: found 'llama', supported is 'gpt2'"),
        ({"model": ...}, "tokenizer.ggml.model: the key is missing"),
        ({"pre": "gpt-4o"}, "tokenizer.ggml.pre: found 'gpt-4o', known are 'qwen2', 'qwen35'"),
        ({"pre": ...}, "tokenizer.ggml.pre: the key is missing"),
        ({"tokens": ...}, "tokenizer.ggml.tokens: the key is missing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens: found str, expected an array of strings"),
        ({"tokens": []}, "tokenizer.ggml.tokens: the vocabulary is empty"),
        ({"tokens": [*TOKENS[:-1], 7]}, f"tokens[{N - 1}]: found int, expected a string"),
        ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, f"tokens[{N - 1}]: repeats the token {TOKENS[5]!r} of [5]"),
        ({"tokens": [*TOKENS[:3], "not !", *TOKENS[4:]]}, "1 of the 256 byte tokens are missing (first: 0x21)"),
        ({"token_type": TYPES[:-1]}, f"token_type: has {N - 1} entries, tokenizer.ggml.tokens has {N}"),
        ({"token_type": ...}, "token_type: the key is missing"),
        ({"token_type": TYPES.astype(float)}, "token_type: found float64"),
        ({"token_type": np.where(np.arange(N) == 9, 6, TYPES)}, "token_type[9]: found 6"),
        ({"merges": ...}, "tokenizer.ggml.merges: the key is missing"),
        ({"merges": ["i n", "q z"]}, "merges[1]: 'q z' needs the token 'qz'"),
        ({"merges": ["in"]}, "merges[0]: found 'in', expected two tokens with one space"),
        ({"merges": ["i n "]}, "merges[0]: found 'i n '"),
        ({"merges": [" n"]}, "merges[0]: found ' n'"),
        ({"merges": ["i n", "i n"]}, "merges[1]: repeats 'i n' of [0]"),
        ({"merges": ["i \u0001"]}, "merges[0]: 'i \\x01' needs the token '\\x01'"),
        ({"eos_token_id": N}, f"eos_token_id: found {N}, outside the vocabulary of {N} tokens"),
        ({"eos_token_id": -1}, "eos_token_id: found -1, outside"),
        ({"padding_token_id": 2**32 - 1}, "padding_token_id: found 4294967295, outside"),
        ({"mask_token_id": N}, "mask_token_id: found"),
        ({"eos_token_id": "0"}, "eos_token_id: found '0', expected an integer"),
        ({"eos_token_id": True}, "eos_token_id: found True, expected an integer"),
        ({"add_bos_token": 1}, "add_bos_token: found 1, expected true or false"),
    ],
)
def test_bad_metadata_is_refused_by_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerError) as e:
        Tokenizer.from_metadata(changed(**change), source="model.gguf")
    assert str(e.value).startswith("model.gguf: tokenizer.") and says in str(e.value)


def test_a_chat_template_that_is_no_string_is_refused() -> None:
    with pytest.raises(TokenizerError, match="tokenizer.chat_template: found list"):
        Tokenizer.from_metadata(METADATA | {"tokenizer.chat_template": ["x"]}, source="t")


def test_a_large_vocabulary_builds_fast() -> None:
    """248,320 tokens, the size of Qwen4-Exp, made of random merges."""
    rng = np.random.default_rng(0)
    tokens = [t for t in TOKENS if len(t) == 1]
    known, merges = set(tokens), []
    while len(tokens) < 248_320:
        for i, j in rng.integers(0, len(tokens), (4096, 2)).tolist():
            new = tokens[i] + tokens[j]
            if len(new) <= 16 and new not in known and len(tokens) < 248_320:
                known.add(new)
                tokens.append(new)
                merges.append(f"{tokens[i]} {tokens[j]}")
    metadata = changed(tokens=tokens, token_type=np.ones(len(tokens), np.int32), merges=merges)
    start = time.process_time()  # other processes don't count
    tok = Tokenizer.from_metadata(metadata, source="big")
    took = time.process_time() - start
    assert tok.decode(tok.encode("Ein Beispiel: 42 Wörter.")) == "Ein Beispiel: 42 Wörter."
    assert took < 8, f"{took:.1f} s"


@pytest.mark.skipif(not BUNDLED.exists(), reason="the bundled model is not there")
def test_the_bundled_model_holds_the_same_tokenizer() -> None:
    from trueup.models.gguf import open_gguf

    metadata = open_gguf(BUNDLED).metadata
    for key in ("model", "pre", "tokens", "token_type", "merges", "eos_token_id"):
        found, want = metadata[f"tokenizer.ggml.{key}"], METADATA[f"tokenizer.ggml.{key}"]
        assert found == want if isinstance(want, str | int) else list(found) == list(want), key
    tok = Tokenizer.from_metadata(metadata, source=str(BUNDLED))
    text = Path(__file__).read_text(encoding="utf-8")
    assert tok.encode(text, parse_special=True) == PARSING.encode(text, add_special_tokens=False).ids
    assert tok.eos_ids == OURS.eos_ids
