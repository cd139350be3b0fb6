"""Drafters that can't serve a model are refused at load, in a line that says what is lacking; heads in files of their own.

Files are the random model's, taken apart and written by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

import trueup
from trueup.core.errors import Unavailable
from trueup.models.gguf import GGUFError
from trueup.models.model import bundled_path
from trueup.runtime import Engine
from trueup.runtime.speculation import DrafterRefused

PROMPT = [3, 1, 4, 1, 5]
HEAD = "blk.6."
SHARED = ("token_embd.weight", "output.weight")
PER_LAYER = ("qwen4exp.attention.recurrent_layers", "qwen4exp.attention.compress_ratios")
OPTIONS: dict[str, Any] = {"context": 64, "page": 8, "sequences": 1}


@pytest.fixture(scope="module")
def reader(random_path: Path) -> GGUFReader:
    return GGUFReader(random_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def write(reader: GGUFReader, folder: Path) -> Callable[..., Path]:
    """Writes the tensors that `keep` says, with some keys changed; None leaves one out."""

    def written(name: str, keep: Callable[[str], bool], changes: dict[str, Any]) -> Path:
        path = folder / name
        w = GGUFWriter(path, "qwen4exp")
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            value = changes.get(key, field.contents())
            if value is not None:
                sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                w.add_key_value(key, value, field.types[0], sub_type=sub)
        for t in reader.tensors:
            if keep(t.name):
                w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return path

    return written


@pytest.fixture(scope="module")
def without_ngrams(reader: GGUFReader) -> dict[str, Any]:
    """A sidecar has no n-gram table."""
    return {k: None for k in reader.fields if ".ple." in k or k.endswith("per_layer_input")}


@pytest.fixture(scope="module")
def trunk(write: Callable[..., Path], reader: GGUFReader) -> Path:
    """The model without its head."""
    shorter = {k: reader.fields[k].contents()[:-1] for k in PER_LAYER if k in reader.fields}
    changes = {"qwen4exp.nextn_predict_layers": None, "qwen4exp.block_count": 6, **shorter}
    return write("trunk.gguf", lambda n: not n.startswith(HEAD), changes)


def of_head(name: str) -> bool:
    return name.startswith((HEAD, "output_hc_")) or name in SHARED


@pytest.fixture(scope="module")
def sidecar(write: Callable[..., Path], without_ngrams: dict[str, Any]) -> Path:
    """The head alone, as converters write it: embedding, output and last block."""
    return write("head.gguf", of_head, without_ngrams)


def opened(path: Any, **options: Any) -> Iterator[Engine]:
    e = trueup.load(path, **OPTIONS | options)
    try:
        yield e
    finally:
        e.close()


def said(path: Any, *, draft: int = 3, **options: Any) -> tuple[list[int], list[list[int]], Any]:
    """Greedy text, the drafts of `depth` tokens along it, and what was accepted."""
    for e in opened(path, draft=draft, **options):
        text = [t for p in e.generate(PROMPT, max_tokens=12, ignore_eos=True) for t in p.tokens]
        drafts = []
        with e.session() as s:
            for t in PROMPT + text:
                if e._draft:
                    drafts.append(e.draft([(s, t)], depth=draft)[0].tolist())
                s.feed([t], logits=None)
        assert e.speculator is not None
        return text, drafts, e.speculator.tally
    raise AssertionError


def test_a_sidecar_drafts_as_the_joint_file(random_path: Path, trunk: Path, sidecar: Path) -> None:
    joint, beside = said(random_path), said(trunk, mtp=sidecar)
    assert joint == beside and len(joint[1]) == len(PROMPT) + 12
    assert said(random_path, mtp=sidecar) == joint, "a head in both: the one that was given"


def test_a_sidecar_may_leave_out_what_the_model_has(
    random_path: Path, trunk: Path, write: Callable[..., Path], without_ngrams: dict[str, Any], reader: GGUFReader
) -> None:
    """The output, which is the trunk's, and the vocabulary."""
    no_words = {k: None for k in reader.fields if k.startswith("tokenizer.")}
    small = write("small.gguf", lambda n: of_head(n) and n != "output.weight", without_ngrams | no_words)
    assert said(trunk, mtp=small) == said(random_path)


def refused(path: Any, error: type[Exception], text: str, **options: Any) -> None:
    with pytest.raises(error, match=text) as caught:
        trueup.load(path, **OPTIONS | options).close()
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)


@pytest.mark.fault("B53")
def test_a_sidecar_alone_says_what_it_is_for(sidecar: Path) -> None:
    refused(sidecar, GGUFError, r"head\.gguf.*draft head \(MTP\) without its model; give it as --mtp beside that")


@pytest.mark.fault("B53")
@pytest.mark.parametrize(
    "changes, text",
    [
        ({"tokenizer.ggml.tokens": 1}, "is not the model's vocabulary"),
        ({"qwen4exp.hyper_connection.low_rank": 16}, "the draft head is of another model: stream_rank"),
        ({"qwen4exp.attention.indexer.top_k": 64}, "the draft head is of another model: index_budget"),
        ({"qwen4exp.rope.freq_base": 5e5}, "the draft head is of another model: rope_base"),
        ({"qwen4exp.nextn_predict_layers": 0}, "has no draft head"),
    ],
)
def test_a_head_of_another_model_is_refused(
    trunk: Path, write: Callable[..., Path], without_ngrams: dict[str, Any], reader: GGUFReader, changes: Any, text: str
) -> None:
    if "tokenizer.ggml.tokens" in changes:
        words = reader.fields["tokenizer.ggml.tokens"].contents()
        changes = {"tokenizer.ggml.tokens": [*words[:-1], "another"]}
    refused(trunk, GGUFError, text, draft=2, mtp=write("other.gguf", of_head, without_ngrams | changes))


def test_a_file_of_another_architecture_is_no_head(trunk: Path, folder: Path) -> None:
    w = GGUFWriter(folder / "llama.gguf", "llama")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    text = r"llama\.gguf.*general\.architecture.*is not the model's.*llama.*qwen4exp"
    refused(trunk, GGUFError, text, draft=2, mtp=folder / "llama.gguf")
    refused(trunk, GGUFError, "is not the model's vocabulary", draft=2, mtp=bundled_path())


def test_the_trunk_is_no_head(trunk: Path) -> None:
    refused(trunk, GGUFError, "has no draft head", draft=2, mtp=trunk)


@pytest.mark.fault("B53")
def test_a_file_without_head(trunk: Path) -> None:
    refused(
        trunk, DrafterRefused, r"trunk\.gguf has no draft head: it needs .* --mtp, a sidecar .* or another drafter",
        draft=2,
    )  # fmt: skip


@pytest.mark.fault("B53")
def test_the_key_without_the_tensors(write: Callable[..., Path]) -> None:
    """Armed by a key alone: the tensor that is missing is named, with or without drafting."""
    path = write("armed.gguf", lambda n: not n.startswith(HEAD), {})
    for options in ({}, {"draft": 2}):
        refused(path, GGUFError, r"armed\.gguf.*blk\.6\.", **options)
    some = write("some.gguf", lambda n: n != HEAD + "nextn.eh_proj.weight", {})
    refused(some, GGUFError, r"blk\.6\.nextn\.eh_proj\.weight")


@pytest.mark.fault("B53")
def test_the_tensors_without_the_key(write: Callable[..., Path], reader: GGUFReader) -> None:
    shorter = {k: reader.fields[k].contents()[:-1] for k in PER_LAYER if k in reader.fields}
    changes = {"qwen4exp.nextn_predict_layers": None, "qwen4exp.block_count": 6, **shorter}
    refused(write("silent.gguf", lambda n: True, changes), GGUFError, r"silent\.gguf.*blk\.6\.", draft=2)


def test_drafters_and_options_that_there_are_not(random_path: Path) -> None:
    refused(random_path, Unavailable, "no drafter 'nobody'; there are lookup, model, mtp", draft=2, drafter="nobody")
    refused(random_path, DrafterRefused, "mtp has no option speed", draft=2, drafter_options={"speed": 1})
    refused(random_path, DrafterRefused, "lookup has no option n", draft=2, drafter="lookup", drafter_options={"n": 1})
    for wrong in (0, -1, True, 2.0, "many"):
        refused(random_path, ValueError, "draft must be 'auto' or a number of tokens of at least 1", draft=wrong)
    refused(random_path, ValueError, "rollback must be 'auto'", draft=2, rollback="hope")


def test_a_small_model_of_another_vocabulary(random_path: Path) -> None:
    small = {"drafter": "model", "drafter_options": {"model": bundled_path()}}
    refused(random_path, DrafterRefused, "its vocabulary of 4096 tokens is not the model's of 1024", draft=2, **small)
    refused(random_path, DrafterRefused, r"takes a draft model \(--draft-model FILE\)", draft=2, drafter="model")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 4}])
def test_a_small_model_that_is_the_model_is_always_right(random_path: Path, options: dict[str, Any]) -> None:
    """By the same random numbers: sampled text is drafted rightly too."""
    small = {"drafter": "model", "drafter_options": {"model": random_path}}
    for e in opened(random_path, draft=3, **small):
        texts = [
            [t for p in e.generate(PROMPT, max_tokens=13, ignore_eos=True, speculate=s, **options) for t in p.tokens]
            for s in (False, True)
        ]
        assert texts[0] == texts[1]
        tally = e.speculator.tally  # type: ignore[union-attr]
        assert tally.rounds == 3 and tally.drafted == tally.accepted == [3, 3, 3]
