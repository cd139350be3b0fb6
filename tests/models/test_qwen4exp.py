"""Qwen4-Exp files: each key and tensor is needed, right, and used; what a file may leave out, and what that means.

Files are the random model's, read and taken apart by the `gguf` package, with one thing changed. Their data is a hole:
no more than headers is written, and no more is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

import trueup
from trueup.models import Model, load_model
from trueup.models.gguf import GGUFError
from trueup.models.qwen4exp import Parameters, Qwen4Exp

RANDOM = Path(__file__).parents[1] / "data" / "qwen4exp-random" / "qwen4exp-random-bf16.gguf"
KINDS = {"UINT32": "u32", "INT32": "i32", "UINT64": "u64", "FLOAT32": "f32", "BOOL": "bool", "STRING": "str"}
PREFIX = "qwen4exp."

Keys = dict[str, tuple[str, Any]]
Tensors = dict[str, tuple[list[int], int, int]]


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(RANDOM)


@pytest.fixture(scope="module")
def all_keys(reader: GGUFReader) -> Keys:
    """Name → (kind, value), as the writer takes them."""
    out: Keys = {}
    for name, f in reader.fields.items():
        if not name.startswith("GGUF."):
            kinds = [KINDS.get(t.name, "") for t in f.types]
            out[name] = (kinds[0] or f"[{kinds[-1]}]", f.contents())
    return out


@pytest.fixture(scope="module")
def keys(all_keys: Keys) -> Keys:
    """All but the tokenizer's, which take the time."""
    return {n: v for n, v in all_keys.items() if not n.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def tensors(reader: GGUFReader) -> Tensors:
    """Name → (ne in GGUF's order, type number, bytes)."""
    return {t.name: ([int(n) for n in t.shape], int(t.tensor_type), int(t.n_bytes)) for t in reader.tensors}


@pytest.fixture
def written(gguf_bytes: Any, tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of these keys and tensors; of data there is none, but room for twice as much as is named."""

    def write(keys: Keys, tensors: Tensors) -> Path:
        offsets, end = {}, 0
        for name, (ne, _, nbytes) in tensors.items():
            offsets[name] = end
            end += -(-2 * max(nbytes, 4 * int(np.prod(ne))) // 32) * 32
        w = gguf_bytes.build(
            [(n, kind, value) for n, (kind, value) in keys.items()],
            [(n, ne, code, b"") for n, (ne, code, _) in tensors.items()],
            offsets=offsets,
        )
        path = tmp_path / "model.gguf"
        with path.open("wb") as f:
            f.write(w.data)
            f.truncate(len(w.data) + 32 + end)
        return path

    return write


@pytest.fixture
def opened(written: Callable[..., Path], keys: Keys, tensors: Tensors) -> Callable[..., Model]:
    """Opens the file with some keys and tensors changed, None leaving one out."""

    def open(changes: dict[str, Any] = {}, others: dict[str, Any] = {}) -> Model:  # noqa: B006
        def changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
            return {n: v for n, v in (old | new).items() if v is not None}

        return load_model(written(changed(keys, changes), changed(tensors, others)))

    return open


def refused(open: Callable[[], Any], *, key: str = "", tensor: str = "", message: str = "") -> None:
    with pytest.raises(GGUFError, match=message) as caught:
        open()
    found = caught.value
    assert (found.key or "", found.tensor or "") == (key and PREFIX + key, tensor), str(found)
    assert "model.gguf" in str(found) and (not key or PREFIX + key in str(found)) and tensor in str(found)


def parameters(model: Model) -> Parameters:
    assert isinstance(model.architecture, Qwen4Exp)
    return model.architecture.p


def own(keys: Keys) -> list[str]:
    return [n.removeprefix(PREFIX) for n in keys if n.startswith(PREFIX)]


OPTIONAL = {"full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers", "ple.layers"}


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_file_as_it_is(opened: Callable[..., Model]) -> None:
    """By hand from the file's key list."""
    p = parameters(opened())
    assert p.layers == ("gdn", "gdn", "qsa", "gdn", "gdn", "qsa") and p.draft_layers == 1
    assert (p.hidden, p.streams, p.stream_rank, p.vocab_size, p.context_length) == (256, 4, 32, 1024, 4096)
    assert (p.heads, p.kv_heads, p.head_dim, p.rope_dims, p.rope_base) == (4, 2, 64, 32, 10000.0)
    assert p.rope_sections == (6, 5, 5, 0) and p.eps == np.float32(1e-6)
    assert (p.delta_dim, p.key_heads, p.value_heads, p.conv_taps) == (128, 2, 4, 4)
    assert (p.experts, p.experts_used, p.expert_width, p.shared_width) == (16, 4, 32, 64)
    assert (p.index_heads, p.index_dim, p.index_budget, p.index_block) == (4, 64, 32, 4)
    n = p.ngram
    assert n is not None and (n.layer, n.size, n.heads, n.taps, n.eos, n.width) == (1, 3, 16, 4, 1018, 16)
    assert n.multipliers == (4295158889766209, 8433018892997163, 1270917961435699), "45 bits and more, exactly"
    assert len(n.offsets) == len(n.sizes) == 16 and n.offsets[1] == n.sizes[0] == 211
    assert parameters(load_model(RANDOM)) == p


@pytest.mark.fault("B65")
def test_each_key_is_needed(opened: Callable[..., Model], keys: Keys) -> None:
    needed = [k for k in own(keys) if k not in OPTIONAL]
    assert len(needed) == 34
    for k in needed:
        refused(lambda k=k: opened({PREFIX + k: None}), key=k, message="key is missing")
    for k in ("general.name", "general.file_type", "general.size_label", "general.quantization_version"):
        opened({k: None})
    with pytest.raises(GGUFError, match=r"general.architecture.*key is missing|key is missing.*general.architecture"):
        opened({"general.architecture": None})
    with pytest.raises(GGUFError, match="qwen4exp"):
        opened({"general.architecture": ("str", "qwen9")})


def test_keys_of_another_kind(opened: Callable[..., Model], keys: Keys) -> None:
    """An array for a scalar and the other way round, text for a number, a whole number for a float."""
    for k in own(keys):
        kind, value = keys[PREFIX + k]
        others = [("str", "4"), ("[str]", ["4"]), ("f64", 4.5) if kind != "f32" else ("u32", 1)]
        others.append((kind[1:-1], value[0]) if kind.startswith("[") else (f"[{kind}]", [value]))
        for other in others:
            refused(lambda k=k, other=other: opened({PREFIX + k: other}), key=k, message="value is of the wrong type")


ARRAYS = {
    "rope.dimension_sections": 0,
    "attention.recurrent_layers": False,
    "attention.compress_ratios": 4,
    "ple.layers": 0,
    "ple.layer_multipliers": 3,
    "ple.head_offsets": 0,
    "ple.head_vocab_sizes": 1,
}


@pytest.mark.fault("B65")
@pytest.mark.parametrize("k", ARRAYS)
def test_arrays_one_short_and_one_long(opened: Callable[..., Model], keys: Keys, k: str) -> None:
    kind, value = keys[PREFIX + k]
    for other in (value[:-1], [*value, ARRAYS[k]], []):
        refused(
            lambda other=other: opened({PREFIX + k: (kind, other)}),
            key=k,
            message=f"array is of the wrong length.*found {len(other)}.*expected {len(value)}",
        )


def test_all_arrays_are_tested(keys: Keys) -> None:
    assert ARRAYS.keys() == {k for k in own(keys) if keys[PREFIX + k][0].startswith("[")}


def test_numbers_out_of_range(opened: Callable[..., Model], keys: Keys) -> None:
    for k in own(keys):
        if keys[PREFIX + k][0] != "u32":
            continue
        wrong = [("i64", -(2**40)), ("i8", -1)]
        wrong += [("u32", 0)] if k not in ("nextn_predict_layers", "ple.eos_token_id") else []
        wrong += [("u64", 2**40)] if k != "full_attention_interval" else []
        for value in wrong:
            refused(lambda k=k, value=value: opened({PREFIX + k: value}), key=k, message="out of range")


WRONG = [
    ("attention.value_length", ("u32", 32), "differs from key_length"),
    ("attention.head_count_kv", ("u32", 3), "does not divide head_count"),
    ("ssm.group_count", ("u32", 3), "does not divide time_step_rank"),
    ("ssm.inner_size", ("u32", 500), "is not state_size times time_step_rank"),
    ("rope.dimension_count", ("u32", 31), "must be even and fit the heads"),
    ("rope.dimension_count", ("u32", 66), "must be even and fit the heads"),
    ("rope.dimension_sections", ("[i32]", [6, 5, 4, 0]), "must sum to half of dimension_count"),
    ("rope.dimension_sections", ("[i32]", [8, 9, -1, 0]), r"value\[2\] is out of range"),
    ("rope.freq_base", ("f32", 0.5), "out of range"),
    ("rope.freq_base", ("f32", float("nan")), "not finite"),
    ("attention.layer_norm_rms_epsilon", ("f32", -1.0), "out of range"),
    ("attention.layer_norm_rms_epsilon", ("f32", float("inf")), "not finite"),
    ("attention.indexer.top_k", ("u32", 30), "is no multiple of the block size"),
    ("expert_used_count", ("u32", 17), "exceeds expert_count"),
    ("nextn_predict_layers", ("u32", 2), "out of range"),
    ("attention.compress_ratios", ("[i32]", [0, 0, 4, 0, 0, 8, 4]), "must be equal and above 1"),
    ("attention.compress_ratios", ("[i32]", [0, 0, 1, 0, 0, 1, 1]), "must be equal and above 1"),
    ("attention.compress_ratios", ("[i32]", [0, 0, -4, 0, 0, 4, 4]), r"value\[2\] is out of range"),
    ("attention.compress_ratios", ("[i32]", [0, 4, 4, 0, 0, 4, 4]), "entry 1 contradicts the layer's kind"),
    ("attention.compress_ratios", ("[i32]", [0, 0, 0, 0, 0, 4, 4]), "entry 2 contradicts the layer's kind"),
    ("attention.compress_ratios", ("[i32]", [0, 0, 4, 0, 0, 4, 0]), "entry 6 contradicts the layer's kind"),
    ("attention.recurrent_layers", ("[bool]", [True, True, False, True, True, False, True]), "draft block can't be"),
    ("ple.layers", ("[i32]", [2]), "names a layer that is not recurrent"),
    ("ple.layers", ("[i32]", [6]), "out of range"),
    ("ple.layers", ("[i32]", [-1]), "out of range"),
    ("ple.eos_token_id", ("u32", 1024), "found 1024.*expected 0 to 1023"),
    ("ple.eos_token_id", ("i32", -1), "out of range"),
    ("ple.eos_token_id", ("u32", 2**32 - 1), "out of range"),
    ("ple.image_token_id", ("u32", 1024), "out of range"),
    ("embedding_length_per_layer_input", ("u32", 15), "times 16 heads is not embedding_length"),
    ("ple.layer_multipliers", ("[u64]", [3, 5, 2**54]), r"value\[2\] is out of range"),
    ("ple.layer_multipliers", ("[u64]", [3, 0, 5]), r"value\[1\] is out of range"),
    ("ple.layer_multipliers", ("[u64]", [2**64 - 1, 3, 5]), r"value\[0\] is out of range"),
    ("ple.head_vocab_sizes", ("[u64]", [0] * 16), "out of range"),
    ("ple.head_vocab_sizes", ("[u64]", [2**63] * 16), "out of range"),
    ("ple.head_offsets", ("[u64]", [2**32] * 16), "out of range"),
]


@pytest.mark.parametrize("k, value, message", WRONG, ids=[f"{k}-{i}" for i, (k, *_) in enumerate(WRONG)])
def test_values_that_contradict(opened: Callable[..., Model], k: str, value: Any, message: str) -> None:
    refused(lambda: opened({PREFIX + k: value}), key=k, message=message)


def test_kinds_of_layers_must_agree(opened: Callable[..., Model]) -> None:
    flipped = ("[bool]", [True, False, False, True, True, False, False])
    refused(
        lambda: opened({PREFIX + "attention.recurrent_layers": flipped}),
        key="attention.compress_ratios",
        message="entry 1 contradicts the layer's kind.*found 0.*expected above 1",
    )


def test_offsets_reach_past_the_table(opened: Callable[..., Model], keys: Keys, tensors: Tensors) -> None:
    kind, offsets = keys[PREFIX + "ple.head_offsets"]
    _, sizes = keys[PREFIX + "ple.head_vocab_sizes"]
    (width, rows), code, nbytes = tensors["per_layer_token_embd.weight"]
    end = offsets[-1] + sizes[-1]
    assert end <= rows
    moved = {PREFIX + "ple.head_offsets": (kind, [*offsets[:-1], rows - sizes[-1]])}
    opened(moved)
    moved = {PREFIX + "ple.head_offsets": (kind, [*offsets[:-1], rows - sizes[-1] + 1])}
    refused(lambda: opened(moved), key="ple.head_offsets", message="reach past the table")
    short = {"per_layer_token_embd.weight": ([width, end - 1], code, nbytes)}
    refused(lambda: opened({}, short), key="ple.head_offsets", message=f"found {end}.*expected at most {end - 1}")


def test_special_tokens_in_range(opened: Callable[..., Model]) -> None:
    assert parameters(opened({PREFIX + "ple.eos_token_id": ("u32", 1023)})).ngram.eos == 1023  # type: ignore[union-attr]
    opened({PREFIX + "ple.image_token_id": ("u32", 7)})


@pytest.mark.parametrize("blocks", [6, 8, 1, 2**31 - 1])
def test_block_count_lies(opened: Callable[..., Model], blocks: int) -> None:
    refused(
        lambda: opened({PREFIX + "block_count": ("u32", blocks)}),
        key="nextn_predict_layers" if blocks == 1 else "attention.recurrent_layers",
        message="leaves no trunk" if blocks == 1 else f"found 7.*expected {blocks}",
    )


def test_block_count_and_arrays_lie(opened: Callable[..., Model], keys: Keys, tensors: Tensors) -> None:
    """One layer more or less, in all keys alike: the tensors tell."""
    _, kinds = keys[PREFIX + "attention.recurrent_layers"]
    _, ratios = keys[PREFIX + "attention.compress_ratios"]

    def blocks(kinds: list[bool], ratios: list[int]) -> Any:
        return {
            PREFIX + "block_count": ("u32", len(kinds)),
            PREFIX + "attention.recurrent_layers": ("[bool]", kinds),
            PREFIX + "attention.compress_ratios": ("[i32]", ratios),
        }

    more, fewer = blocks([True, *kinds], [0, *ratios]), blocks(kinds[:-2] + kinds[-1:], ratios[:-2] + ratios[-1:])
    with pytest.raises(GGUFError, match="tensor is missing") as caught:
        opened(more)
    assert str(caught.value.tensor).startswith("blk.")
    with pytest.raises(GGUFError, match=r"tensor is missing|uses .* nowhere"):
        opened(fewer)


def test_kinds_of_layers_from_the_interval(opened: Callable[..., Model]) -> None:
    """Without the array the interval says it, without either it is 4, which here contradicts."""
    array, interval = PREFIX + "attention.recurrent_layers", PREFIX + "full_attention_interval"
    want = parameters(opened())
    assert parameters(opened({array: None})) == want
    assert parameters(opened({interval: None})) == want
    assert parameters(opened({interval: ("u32", 2)})) == want, "the array wins"
    for changes in ({array: None, interval: None}, {array: None, interval: ("u32", 2)}):
        refused(lambda c=changes: opened(c), key="attention.compress_ratios", message="contradicts the layer's kind")


def test_without_the_draft_block(opened: Callable[..., Model], keys: Keys, tensors: Tensors) -> None:
    """As converters write it on demand; a draft block that no key speaks of is no part of the model."""
    _, kinds = keys[PREFIX + "attention.recurrent_layers"]
    _, ratios = keys[PREFIX + "attention.compress_ratios"]
    trunk = {
        PREFIX + "block_count": ("u32", 6),
        PREFIX + "attention.recurrent_layers": ("[bool]", kinds[:-1]),
        PREFIX + "attention.compress_ratios": ("[i32]", ratios[:-1]),
    }
    gone = {n: None for n in tensors if n.startswith("blk.6.")}
    want = replace(parameters(opened()), draft_layers=0)
    for draft in (None, ("u32", 0)):
        m = opened(trunk | {PREFIX + "nextn_predict_layers": draft}, gone)
        assert parameters(m) == want
        assert m.architecture.summary().layers == ("gdn", "gdn+ngram", "qsa", "gdn", "gdn", "qsa")
    assert opened().architecture.summary().layers[-1] == "mtp"
    refused(lambda: opened({PREFIX + "nextn_predict_layers": None}), message=r"nowhere: blk\.6\.nextn")
    refused(lambda: opened({PREFIX + "nextn_predict_layers": ("u32", 0)}), message=r"nowhere: blk\.6\.nextn")


def test_without_ngrams(opened: Callable[..., Model], keys: Keys, tensors: Tensors) -> None:
    gone = {n: None for n in tensors if "ple_" in n or n.startswith("per_layer")}
    assert len(gone) == 7
    group = {PREFIX + k: None for k in own(keys) if k.startswith("ple.")}
    assert parameters(opened(group, gone)) == replace(parameters(opened()), ngram=None)
    refused(lambda: opened({PREFIX + "ple.layers": None}), message="uses 7 of the file's tensors nowhere")


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_each_tensor_is_needed(opened: Callable[..., Model], tensors: Tensors) -> None:
    for name in tensors:
        if name != "output.weight":
            refused(lambda n=name: opened({}, {n: None}), tensor=name, message="tensor is missing")


def test_each_tensor_has_its_shape(opened: Callable[..., Model], tensors: Tensors) -> None:
    """One more along each axis, an axis more, and one less."""
    believed = {("token_embd.weight", 1), ("per_layer_token_embd.weight", 1)}  # the sizes that these alone say
    for name, (ne, *rest) in tensors.items():
        if name.startswith(("blk.3.", "blk.4.", "blk.5.")):
            continue  # layers of kinds that the others have
        axes = [i for i in range(len(ne)) if (name, i) not in believed]
        shapes = [[*ne[:i], ne[i] + 1, *ne[i + 1 :]] for i in axes] + [[*ne, 2]]
        if len(ne) > 1 and ne[-1] != 1:
            shapes.append(ne[:-1])
        for other in shapes:
            change = {name: (other, *rest)}
            refused(lambda change=change: opened({}, change), tensor=name, message="wrong shape")


@pytest.mark.fault("B69")
@pytest.mark.parametrize(
    "name", ["blk.0.attn_qkv.bias", "blk.6.extra.weight", "output_norm.weight", "rope_freqs.weight"]
)
def test_a_tensor_left_over(opened: Callable[..., Model], name: str) -> None:
    refused(lambda: opened({}, {name: ([256], 0, 1024)}), message=f"uses 1 of the file's tensors nowhere: {name}")


def test_vocabulary_of_the_embedding(opened: Callable[..., Model], all_keys: Keys, tensors: Tensors) -> None:
    """The embedding says how many tokens there are; output and tokenizer must agree with it."""

    def sized(n: int, *names: str) -> Any:
        return {name: ([256, n], *tensors[name][1:]) for name in names}

    both = ("token_embd.weight", "output.weight")
    refused(lambda: opened({}, sized(1025, both[0])), tensor="output.weight", message="wrong shape")
    padded = opened(all_keys, sized(1040, *both))
    assert padded.architecture.vocab_size == 1040 and padded.tokenizer.vocab_size == 1024
    small = opened(all_keys, sized(1020, *both))
    assert small.architecture.vocab_size == 1020
    with pytest.raises(GGUFError, match="tokenizer has more tokens than the model") as caught:
        small.tokenizer  # noqa: B018
    assert caught.value.key == "tokenizer.ggml.tokens"
    refused(lambda: opened({}, sized(1018, *both)), key="ple.eos_token_id", message="found 1018.*expected 0 to 1017")


def test_output_tied_to_the_embedding(opened: Callable[..., Model]) -> None:
    arch = opened({}, {"output.weight": None}).architecture
    assert isinstance(arch, Qwen4Exp)
    assert arch.weights["output.weight"] is arch.weights["token_embd.weight"]


def test_a_row_stored_as_a_vector(gguf_bytes: Any, reader: GGUFReader, all_keys: Keys, tmp_path: Path) -> None:
    """The gate of the shared expert as [H] and as [H, 1]: the same model, with its data, bit for bit."""
    name = "blk.0.ffn_gate_inp_shexp.weight"
    parts = []
    for t in reader.tensors:
        ne = [int(n) for n in t.shape]
        vector = t.name.endswith("ffn_gate_inp_shexp.weight")
        assert not vector or ne == [256, 1]
        parts.append((t.name, ne[:1] if vector else ne, int(t.tensor_type), t.data.tobytes()))
    path = tmp_path / "vectors.gguf"
    path.write_bytes(gguf_bytes.build([(n, *v) for n, v in all_keys.items()], parts).data)
    a, b = (trueup.load(p, backend="reference", context=64) for p in (path, RANDOM))
    assert a.model.file.tensors[name].shape == (256,) and b.model.file.tensors[name].shape == (1, 256)
    assert a.model.fingerprint == b.model.fingerprint
    assert np.array_equal(a.logits([1, 2, 3]), b.logits([1, 2, 3]))
