"""A vocabulary of the size that models have now parses at once, and holds little memory until it is read."""

from __future__ import annotations

import struct
import time
import tracemalloc

import numpy as np
import pytest

from trueup.models.gguf import open_gguf

VOCAB = 248_320


def strings(words: list[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(words)) + b"".join(struct.pack("<Q", len(w)) + w for w in words)


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[bytes], list[bytes]]:
    """As many tokens and merges, of 1 to 16 characters that are 1 to 3 bytes long."""
    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzĠĊÄ漢字"))
    text = "".join(letters[rng.integers(0, len(letters), VOCAB * 16)])
    tokens = [text[16 * i : 16 * i + n].encode() for i, n in enumerate(rng.integers(1, 17, VOCAB).tolist())]
    return tokens, [a + b" " + b for a, b in zip(tokens, reversed(tokens), strict=True)]


@pytest.fixture
def file(vocabulary, tmp_path):
    path = tmp_path / "vocabulary.gguf"
    body = b"".join(
        struct.pack("<Q", len(name)) + name + value
        for name, value in (
            (b"tokenizer.ggml.tokens", strings(vocabulary[0])),
            (b"tokenizer.ggml.merges", strings(vocabulary[1])),
            (b"tokenizer.ggml.token_type", struct.pack("<IIQ", 9, 5, VOCAB) + np.ones(VOCAB, np.int32).tobytes()),
        )
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + body)
    return path


def test_a_large_vocabulary_parses_at_once(file, vocabulary):
    """About 0.2 s of one core; the limit leaves room for a slow one."""
    began = time.process_time()
    f = open_gguf(file)
    took = time.process_time() - began
    assert took < 1.5, took
    assert [s.encode() for s in f.metadata["tokenizer.ggml.tokens"]] == vocabulary[0]
    merges = f.metadata["tokenizer.ggml.merges"]
    assert len(merges) == VOCAB and merges[-1].encode() == vocabulary[1][-1]


def test_strings_are_held_as_their_bytes(file):
    """And eight bytes a string: a third more than the file here; some copies of one array while it is checked."""
    tracemalloc.start()
    f = open_gguf(file)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.5 * f.size and peak < 4.5 * f.size, (held / f.size, peak / f.size)
