"""The tokenizer of a model, built from the `tokenizer.*` metadata of its GGUF by the `tokenizers` library.

Knows the byte-level BPE of the Qwen family. Never lets user text become a control token unless the caller asks for it,
never drops a byte of text, and never guesses: what it can't read exactly it refuses, naming the key.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers as hf
from tokenizers import models, normalizers, pre_tokenizers

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "Tokenizer", "TokenizerError"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_PREFIX, _ID_SUFFIX = "tokenizer.ggml.", "_token_id"
_END_KEYS = ("eos", "eot", "eom")


class TokenizerError(ValueError):
    """Tokenizer metadata, a token id or a text that can't be used as it is."""


@dataclass(frozen=True)
class PreTokenizer:
    """What one value of `tokenizer.ggml.pre` stands for; GGUF stores the name only.

    `pattern` cuts text before BPE (Oniguruma syntax). `ends` are control tokens that end a turn or a text in this
    family even where no key says so: converters write one `eos_token_id`, chat models end with another.
    """

    pattern: str
    ends: tuple[str, ...]


def _qwen(letters: str) -> str:
    """The Qwen cut; `letters` is what counts as part of a word. Source: tokenizer.json of Qwen2 and of Qwen3.5."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
        r"|\p{N}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Both normalize to NFC first, for which GGUF has no key; by the tables of `tokenizers` (Unicode 9), as in training.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "qwen2": PreTokenizer(_qwen(r"\p{L}"), ends=("<|im_end|>", "<|endoftext|>")),
    "qwen35": PreTokenizer(_qwen(r"\p{L}\p{M}"), ends=("<|im_end|>", "<|endoftext|>")),
}


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet: printable Latin-1 is itself, the rest lies from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back. Build it with `from_metadata`; immutable, may be used by several threads.

    `special_ids` are the control (and unknown) tokens. User-defined tokens (`<think>`, `<tool_call>`) are not special:
    they are ordinary words that are never cut, and are found in any text, as in `tokenizers` and llama.cpp.
    `eos_ids`: any of these ends generation. `chat_template` is the Jinja source, None where the file has none.
    """

    source: str
    bos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int | None
    add_bos: bool
    special_ids: frozenset[int]
    chat_template: str | None
    _tokens: Sequence[str] = field(repr=False)
    _types: np.ndarray[Any, np.dtype[np.int32]] = field(repr=False)
    _eos_id: int | None = field(repr=False)
    _plain: hf.Tokenizer = field(repr=False)
    _parsing: hf.Tokenizer = field(repr=False)
    _special_pattern: re.Pattern[str] = field(repr=False)
    _special_by_text: Mapping[str, int] = field(repr=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
        """Build from GGUF metadata, a mapping from full keys (`tokenizer.ggml.tokens`) to values.

        `source` names the file in errors. Raises TokenizerError naming key, what was found and what was expected.
        """
        return _Reader(metadata, source).build(cls)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else self._tokens[self.bos_id]

    @property
    def eos_token(self) -> str | None:
        """Text of the token that `eos_token_id` names (of `eos_ids` the one that templates call eos)."""
        return None if self._eos_id is None else self._tokens[self._eos_id]

    @property
    def special_texts(self) -> Mapping[str, int]:
        """Text -> id of each special token."""
        return self._special_by_text

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`, normalized to NFC first.

        `parse_special` reads the text of a control token as that token; leave it False for anything a user wrote.
        `add_bos=None` does what the file says. Raises TokenizerError (a ValueError) where `text` holds a lone
        surrogate, or where a bos is asked for and the file has none.
        """
        _check_text(text)
        ids = list((self._parsing if parse_special else self._plain).encode(text, add_special_tokens=False).ids)
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise TokenizerError(f"{self.source}: add_bos was asked for, but there is no {_PREFIX}bos_token_id")
            ids.insert(0, self.bos_id)
        return ids

    def split_special(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut `text` at special tokens, leftmost and longest first: (piece, id of the special token or None)."""
        at = 0
        for found in self._special_pattern.finditer(text):
            if found.start() > at:
                yield text[at : found.start()], None
            yield found[0], self._special_by_text[found[0]]
            at = found.end()
        if at < len(text):
            yield text[at:], None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. TokenizerError on an id outside the vocabulary."""
        parts = [b"" if skip_special and self.is_special(i) else self.token_bytes(i) for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; of special and user-defined tokens their text, of unused ids nothing."""
        i = self._check_id(token_id)
        text, kind = self._tokens[i], self._types[i]
        if kind == UNUSED:
            return b""
        if kind == NORMAL:
            try:
                return bytes(map(_BYTE_OF.__getitem__, text))
            except KeyError:  # a token stored as plain text; `tokenizers` decodes it so, too
                pass
        return text.encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """The token as the file stores it: in the byte-level alphabet, so for display only."""
        return self._tokens[self._check_id(token_id)]

    def is_special(self, token_id: int) -> bool:
        return self._check_id(token_id) in self.special_ids

    def _check_id(self, token_id: int) -> int:
        i = operator.index(token_id)
        if not 0 <= i < len(self._tokens):
            raise TokenizerError(f"{self.source}: token id {i} is outside the vocabulary of {len(self._tokens)} tokens")
        return i


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text to encode must be str, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise TokenizerError(
            f"text holds a lone surrogate U+{ord(text[e.start]):04X} at character {e.start}, which no UTF-8 can carry"
        ) from None


class _Reader:
    """Reads and checks the metadata, key by key."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def error(self, key: str, text: str) -> TokenizerError:
        return TokenizerError(f"{self.source}: {key}: {text}")

    def build(self, cls: type[Tokenizer]) -> Tokenizer:
        model = self.text(_PREFIX + "model")
        if model != "gpt2":
            raise self.error(_PREFIX + "model", f"found {model!r}, supported is 'gpt2' (byte-level BPE)")
        pre_name = self.text(_PREFIX + "pre")
        pre = PRE_TOKENIZERS.get(pre_name)
        if pre is None:
            raise self.error(_PREFIX + "pre", f"found {pre_name!r}, known are {', '.join(map(repr, PRE_TOKENIZERS))}")
        tokens = self.strings(_PREFIX + "tokens")
        if not tokens:
            raise self.error(_PREFIX + "tokens", "the vocabulary is empty")
        types = self.types(len(tokens))
        vocab = self.vocabulary(tokens, types)
        bpe = models.BPE(vocab=vocab, merges=self.merges(vocab))
        special = {tokens[i]: int(i) for i in np.flatnonzero((types == CONTROL) | (types == UNKNOWN)) if tokens[i]}
        ids = self.special_token_ids(len(tokens))
        ends = {ids[k] for k in _END_KEYS if k in ids} | {special[t] for t in pre.ends if t in special}
        user_defined = [tokens[i] for i in np.flatnonzero(types == USER_DEFINED) if tokens[i]]
        return cls(
            source=self.source,
            bos_id=ids.get("bos"),
            eos_ids=frozenset(ends),
            pad_id=ids.get("padding"),
            add_bos=self.flag(_PREFIX + "add_bos_token", default=False),
            special_ids=frozenset(special.values()),
            chat_template=self.text("tokenizer.chat_template", optional=True),
            _tokens=tokens,
            _types=types,
            _eos_id=ids.get("eos"),
            _plain=_pipeline(bpe, pre.pattern, user_defined, ()),
            _parsing=_pipeline(bpe, pre.pattern, user_defined, special),
            _special_pattern=_alternatives(special),
            _special_by_text=special,
        )

    def value(self, key: str) -> Any:
        try:
            return self.metadata[key]
        except KeyError:
            raise self.error(key, "the key is missing; a tokenizer can't be built without it") from None

    def text(self, key: str, *, optional: bool = False) -> Any:
        if optional and key not in self.metadata:
            return None
        value = self.value(key)
        if not isinstance(value, str):
            raise self.error(key, f"found {type(value).__name__}, expected a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self.error(key, f"found {value!r}, expected true or false")
        return bool(value)

    def strings(self, key: str) -> list[str]:
        value = self.value(key)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise self.error(key, f"found {type(value).__name__}, expected an array of strings")
        out = list(value)
        for i, s in enumerate(out):
            if not isinstance(s, str):
                raise self.error(f"{key}[{i}]", f"found {type(s).__name__}, expected a string")
        return out

    def types(self, n_tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        key = _PREFIX + "token_type"
        types = np.asarray(self.value(key))
        if types.ndim != 1 or types.dtype.kind not in "iu":
            raise self.error(key, f"found {types.dtype} of shape {list(types.shape)}, expected an array of integers")
        if len(types) != n_tokens:
            raise self.error(key, f"has {len(types)} entries, {_PREFIX}tokens has {n_tokens}")
        bad = np.flatnonzero((types < NORMAL) | (types > UNUSED))
        if bad.size:
            i = int(bad[0])
            raise self.error(
                f"{key}[{i}]",
                f"found {int(types[i])}, a byte-level vocabulary has 1 (normal) to 5 (unused); {bad.size} such entries",
            )
        return types.astype(np.int32)

    def vocabulary(self, tokens: list[str], types: np.ndarray[Any, np.dtype[np.int32]]) -> dict[str, int]:
        """Text -> id. Unused ids are left out: they pad the vocabulary, and no text may become one."""
        key = _PREFIX + "tokens"
        used = types != UNUSED
        vocab = {t: i for i, t in enumerate(tokens) if used[i]}
        if len(vocab) != int(used.sum()):
            i = next(i for i, t in enumerate(tokens) if used[i] and vocab[t] != i)
            raise self.error(f"{key}[{vocab[tokens[i]]}]", f"repeats the token {tokens[i]!r} of [{i}]")
        missing = sorted(b for c, b in _BYTE_OF.items() if c not in vocab)
        if missing:
            raise self.error(
                key,
                f"{len(missing)} of the 256 byte tokens are missing (first: {missing[0]:#04x}), "
                "so text with these bytes could not be encoded",
            )
        return vocab

    def merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        key = _PREFIX + "merges"
        lines = self.strings(key)
        out: list[tuple[str, str]] = []
        for i, line in enumerate(lines):
            left, _, right = line.partition(" ")
            if not left or not right or " " in right:
                raise self.error(f"{key}[{i}]", f"found {line!r}, expected two tokens with one space between")
            if left not in vocab or right not in vocab or left + right not in vocab:
                absent = next(t for t in (left, right, left + right) if t not in vocab)
                raise self.error(f"{key}[{i}]", f"{line!r} needs the token {absent!r}, which the vocabulary lacks")
            out.append((left, right))
        if len(set(lines)) != len(lines):
            seen: dict[str, int] = {}
            i, line = next((i, s) for i, s in enumerate(lines) if seen.setdefault(s, i) != i)
            raise self.error(f"{key}[{i}]", f"repeats {line!r} of [{seen[line]}], so its rank is unclear")
        return out

    def special_token_ids(self, vocab_size: int) -> dict[str, int]:
        """Every `tokenizer.ggml.<name>_token_id` by its name, each checked: bos, eos, eot, padding, mask, fim_pre, …"""
        out = {}
        for key in self.metadata:
            if not (key.startswith(_PREFIX) and key.endswith(_ID_SUFFIX)):
                continue
            value = self.metadata[key]
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
                raise self.error(key, f"found {value!r}, expected an integer")
            if not 0 <= value < vocab_size:
                raise self.error(key, f"found {value}, outside the vocabulary of {vocab_size} tokens")
            out[key.removeprefix(_PREFIX).removesuffix(_ID_SUFFIX)] = int(value)
        return out


def _pipeline(bpe: models.BPE, pattern: str, user_defined: Iterable[str], special: Iterable[str]) -> hf.Tokenizer:
    """A `tokenizers` pipeline; two of them share one BPE, since special tokens can be parsed or not only as a whole."""
    tok = hf.Tokenizer(bpe)
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(hf.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.add_tokens([hf.AddedToken(t, normalized=False) for t in user_defined])
    tok.add_special_tokens([hf.AddedToken(t, normalized=False) for t in special])
    return tok


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `texts` at a place; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
