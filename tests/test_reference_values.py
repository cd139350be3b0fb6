"""What other implementations compute, transformers in float32 above all: logits, layers, greedy text, held-out loss.

How the data was made: tests/oracle/make_reference.py. `--profile full` runs on the reference all that is by default left
to faster backends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import trueup
from trueup.models import qwen4exp
from trueup.models.architecture import StepShape
from trueup.runtime import Engine

DATA = Path(__file__).parent / "data"
RANDOM, TINY = DATA / "qwen4exp-random", DATA / "qwen4exp-tiny"
BACKENDS = ["reference", "cpu"]
LOGITS = 1e-4
PERPLEXITY = 1e-5
"""Relative, to transformers on the same weights."""

Array = NDArray[Any]
Open = Callable[..., Engine]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def opened(backend: str) -> Iterator[Open]:
    """Opens a model on the backend once for all tests of this file."""
    engines: dict[Any, Engine] = {}

    def get(path: Path | None = None) -> Engine:
        if path not in engines:
            engines[path] = trueup.load(path, backend=backend)
        return engines[path]

    yield get
    for e in engines.values():
        e.close()


@pytest.fixture(scope="module")
def thorough(backend: str, request: pytest.FixtureRequest) -> bool:
    """Whether the long tests run in full on this backend."""
    return backend != "reference" or request.config.getoption("--profile") == "full"


def fed(engine: Engine, ids: Array, size: int) -> Array:
    """Logits at every position, `size` tokens a step."""
    with engine.session() as s:
        return np.concatenate([s.feed(ids[i : i + size], logits="all") for i in range(0, len(ids), size)])


def check_logits(got: Array, want: Array) -> None:
    """Equal within the bound, and the same token is the best, unless two tie."""
    assert got.dtype == np.float32 and got.shape == want.shape
    off = np.abs(got - want).max(1)
    assert off.max() <= LOGITS, f"row {off.argmax()} is off by {off.max():.2g}"
    rows = np.arange(len(want))
    wrong = np.flatnonzero(want[rows, got.argmax(1)] < want.max(1))
    assert not wrong.size, f"at {wrong} another token is the best"


# -- random weights: every position, in steps of any size --------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 64, 17, 1])
@pytest.mark.parametrize("prompt", ["short", "mid"])
def test_logits_of_the_random_model(opened: Open, prompt: str, size: int) -> None:
    """`short` (24 tokens) stays within the budget of sparse attention (32), `mid` (200) does not."""
    ref = np.load(RANDOM / "ref.npz")
    engine = opened(RANDOM / "qwen4exp-random-bf16.gguf")
    check_logits(fed(engine, ref[f"{prompt}_ids"], size), ref[f"{prompt}_logits"])


class Watched(qwen4exp._Rows):
    """The recorder of a step that gives what each layer and its parts compute as outputs of the graph."""

    def layer(self, R: Any, kind: str, b: str) -> Any:
        return self.seen(b + "out", super().layer(R, kind, b))

    def delta_net(self, x: Any, b: str) -> Any:
        return self.seen(b + "linear_attn", super().delta_net(x, b))

    def sparse_attention(self, x: Any, b: str) -> Any:
        return self.seen(b + "self_attn", super().sparse_attention(x, b))

    def experts(self, x: Any, b: str) -> Any:
        return self.seen(b + "mlp", super().experts(x, b))

    def inject_ngrams(self, R: Any, e: Any, n: Any, b: str) -> Any:
        return self.seen(b + "after_ple", super().inject_ngrams(self.seen(b + "before_ple", R), e, n, b))

    def mix(self, R: Any, b: str, *, inject: bool = True) -> Any:
        x, gates = super().mix(R, b, inject=inject)
        return (x if inject else self.seen("mixer", x)), gates

    def seen(self, name: str, value: Any) -> Any:
        self.g.output(name, value)
        return value


def test_layers_of_the_random_model(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer and part by part, in the order in which they run: the first that differs is where a fault lies."""
    monkeypatch.setattr(qwen4exp, "_Rows", Watched)
    engine = opened(RANDOM / "qwen4exp-random-bf16.gguf")
    ids = np.load(RANDOM / "ref.npz")["short_ids"]
    results: dict[str, Array] = {}

    def executable(shape: StepShape) -> Any:
        exe = engine.target.compile(engine.plan(shape), engine.bundle.storage)
        monkeypatch.setattr(exe, "run", lambda inputs, run=exe.run: results.update(run(inputs)) or results)
        return exe

    monkeypatch.setattr(engine, "executable", executable)
    fed(engine, ids, len(ids))
    results["blk.1.ple"] = results["blk.1.after_ple"] - results["blk.1.before_ple"]
    want = np.load(RANDOM / "ref_layers.npz")
    for name in want:
        key = name.removeprefix("short.").replace("layer", "blk.").replace("hyper_connection_mixer", "mixer")
        got = results[key].reshape(len(ids), -1)
        np.testing.assert_allclose(got, want[name], rtol=0, atol=2e-5, err_msg=name)


# -- trained weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("i", [0, 1, 2])
def test_logits_of_the_trained_model(opened: Open, i: int) -> None:
    """bf16 weights; prompts of 5, 64 and 300 tokens, the last beyond the budget of sparse attention (128)."""
    ref = np.load(TINY / "ref_logits.npz")
    ids, rows = ref[f"ids_{i}"], ref[f"rows_{i}"]
    logits = opened(TINY / "qwen4exp-tiny-bf16.gguf").logits(ids)
    check_logits(logits[rows], ref[f"logits_{i}"])
    np.testing.assert_array_equal(logits.argmax(1), ref[f"argmax_{i}"])
    np.testing.assert_allclose(next_logprobs(logits, ids), ref[f"logprob_next_{i}"], rtol=0, atol=LOGITS)


@pytest.mark.parametrize("prompt", ["import os\n\ndef ", "class Stack:\n    def __init__(self", "for i in range("])
def test_greedy_text_of_the_bundled_model(opened: Open, thorough: bool, prompt: str) -> None:
    """Token for token transformers' on the same dequantized weights: in one pass over them, and one by one."""
    path = json.loads((TINY / "greedy_q8_0.json").read_text())[prompt]
    ids, out = path["ids"], path["out"]
    assert len(out) == 192 and min(path["margin"]) > LOGITS, "no two tokens tie, so all must be equal"
    engine = opened()
    assert engine.model.tokenizer.encode(prompt) == ids
    assert engine.logits(ids + out[:-1])[len(ids) - 1 :].argmax(1).tolist() == out
    n = len(out) if thorough else 24
    got = [t for piece in engine.generate(prompt, max_tokens=n, ignore_eos=True) for t in piece.tokens]
    assert got == out[:n]


@pytest.mark.parametrize("weights", ["bf16", "q8_0"])
def test_heldout_perplexity(opened: Open, thorough: bool, weights: str) -> None:
    """Four texts of 1,024 tokens: transformers' perplexity on the same weights; Q8_0 costs less than 0.1 %."""
    original = np.load(TINY / "heldout.npz")
    want = original["nll"] if weights == "bf16" else np.load(TINY / f"heldout_{weights}.npz")["nll"]
    engine = opened(TINY / "qwen4exp-tiny-bf16.gguf" if weights == "bf16" else None)
    rows = original["ids"] if thorough else original["ids"][:1]
    nll = np.array([-next_logprobs(engine.logits(ids), ids).mean() for ids in rows])
    np.testing.assert_allclose(np.exp(nll), np.exp(want[: len(rows)]), rtol=PERPLEXITY)
    if thorough:
        np.testing.assert_allclose(np.exp(nll.mean()), np.exp(original["nll"].mean()), rtol=1e-3)


def next_logprobs(logits: Array, ids: Array) -> Array:
    """float64 [tokens - 1]: of each next token."""
    x = logits[:-1].astype(np.float64)
    top = x.max(1)
    logprobs: Array = x[np.arange(len(x)), ids[1:]] - top - np.log(np.exp(x - top[:, None]).sum(1))
    return logprobs
