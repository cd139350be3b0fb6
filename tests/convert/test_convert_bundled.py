"""The bundled model: what its card says, what another converter writes, and its bf16 weights."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def bundled() -> Path:
    return Path(str(files("trueup.models.bundled"))) / "qwen4exp-tiny-q8_0.gguf"


def test_the_card_names_the_file_that_is_there(bundled):
    raw = bundled.read_bytes()
    card = (bundled.parent / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert hashlib.sha256(raw).hexdigest() in card
    assert f"{len(raw):,}" in card and len(raw) <= 17_000_000


def test_keys_and_tensors_are_those_of_another_converter(bundled, read):
    """The file of random weights was made by another converter, from a model of other sizes."""
    ours, theirs = read(bundled), read(DATA / "qwen4exp-random" / "qwen4exp-random-bf16.gguf")
    assert {k: ours.kinds.get(k) for k in theirs.kinds} == theirs.kinds
    more = {"general.license", "trueup.converted_by", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token"}
    assert set(ours.kinds) - set(theirs.kinds) == more

    def family(g) -> set:
        names = [(re.sub(r"blk\.\d+\.", "blk.", n), len(g.shape(n))) for n in g.order]
        return set(names)

    assert family(ours) == family(theirs)


def test_a_conversion_writes_the_types_of_another_converter(checkpoint, converted, read):
    """The bundled file is what a converter wrote once; this is what it writes now, from the synthetic checkpoint."""
    ours, theirs = converted(checkpoint), read(DATA / "qwen4exp-random" / "qwen4exp-random-bf16.gguf")
    other = {"tokenizer.ggml.padding_token_id"}  # the synthetic checkpoint has none
    assert {k: ours.kinds.get(k) for k in set(theirs.kinds) - other} == {
        k: v for k, v in theirs.kinds.items() if k not in other
    }


@pytest.mark.fault("B74")
def test_every_tensor_is_its_bf16_original_within_the_format(bundled, read):
    """B74: had one tensor missed its reordering, it would be off by its own size. Bound as in a single block."""
    q8, bf16 = read(bundled), read(DATA / "qwen4exp-tiny" / "qwen4exp-tiny-bf16.gguf")
    assert q8.order == bf16.order
    assert {k: v for k, v in q8.meta.items() if k != "general.file_type"} == {
        k: v for k, v in bf16.meta.items() if k != "general.file_type"
    }
    for name in q8.order:
        want, got = bf16[name].astype(np.float64), q8[name]
        if q8.type(name) == "Q8_0":
            d = np.abs(want.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
            bound = np.broadcast_to(0.5 * d + 127.5 * np.maximum(d * 2**-11, 2**-25), (d.size, 32)).reshape(want.shape)
            assert (np.abs(got - want) <= bound * (1 + 1e-6)).all(), name
        elif q8.type(name) == "F16":
            assert (np.abs(got - want) <= np.maximum(np.abs(want) * 2**-11, 2**-25)).all(), name
        else:
            np.testing.assert_array_equal(got, want, err_msg=name)
