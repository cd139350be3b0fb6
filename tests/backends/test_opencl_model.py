"""Whole models on OpenCL: the text of the CPU, transformers' logits, sequences that don't meet, states kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pyopencl")

import trueup
from trueup.core.errors import Unavailable
from trueup.runtime import Engine

DATA = Path(__file__).parents[1] / "data"
RANDOM, TINY = DATA / "qwen4exp-random", DATA / "qwen4exp-tiny"

Array = NDArray[Any]


def load(path: Path | None = None, **options: Any) -> Engine:
    try:
        return trueup.load(path, backend="opencl", **options)
    except Unavailable as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def bundled() -> Iterator[Engine]:
    e = load(context=512, batch=128)
    yield e
    e.close()
    assert e.target.memory.used == 0, "an engine gives back all that it took"


@pytest.fixture(scope="module")
def cpu() -> Iterator[Engine]:
    e = trueup.load(backend="cpu", context=512)
    yield e
    e.close()


@pytest.fixture(scope="module")
def random() -> Iterator[Engine]:
    e = load(RANDOM / "qwen4exp-random-bf16.gguf", context=512)
    yield e
    e.close()


def fed(engine: Engine, ids: Array, size: int) -> Array:
    with engine.session() as s:
        return np.concatenate([s.feed(ids[i : i + size], logits="all") for i in range(0, len(ids), size)])


# -- the same as others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "sizes"), [("short", [24, 7]), ("mid", [200, 64])])
def test_logits_of_the_random_model(random: Engine, prompt: str, sizes: list[int]) -> None:
    """transformers', in one step and in several; with the very same bits in both."""
    ref = np.load(RANDOM / "ref.npz")
    whole, parts = (fed(random, ref[f"{prompt}_ids"], n) for n in sizes)
    np.testing.assert_allclose(whole, ref[f"{prompt}_logits"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_greedy_text_of_the_bundled_model(bundled: Engine, cpu: Engine, i: int) -> None:
    """transformers', and the CPU's."""
    prompt, path = list(json.loads((TINY / "greedy_q8_0.json").read_text()).items())[i]
    found, other = (
        [t for p in engine.generate(prompt, max_tokens=48, ignore_eos=True) for t in p.tokens]
        for engine in (bundled, cpu)
    )
    assert found == path["out"][:48]
    assert found == other


@pytest.mark.fault("B83", "B84")
def test_all_of_a_step_runs_on_the_device(bundled: Engine) -> None:
    """B83, B84: no reference, no fallback, one upload, one wait; each kernel's name says which weights it reads."""
    plan = bundled.plan(bundled.shape(3, 2))
    assert set(plan.counts()) == {"device", "view", "prologue"}
    names = {p.kernel for p in plan.placements.values()}
    assert {"linear q8_0", "embed q8_0", "expert_combine q8_0", "attention", "delta_inputs"} <= names


def test_no_host_round_trip_within_a_step(bundled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyopencl as cl

    moved: list[int] = []
    copy = cl.enqueue_copy
    with bundled.session() as s:
        s.feed([5, 6, 7])
        s.feed([8])
        monkeypatch.setattr(cl, "enqueue_copy", lambda *a, **k: moved.append(1) or copy(*a, **k))
        s.feed([9])
    assert len(moved) == 3, "the inputs, the word for faults, the logits"


# -- sequences ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B12", "B13", "B17")
def test_sequences_in_one_step_are_what_each_is_alone(bundled: Engine) -> None:
    """B12, B13, B17: other pasts, other lengths, in either order, bit for bit."""
    texts = [list(range(10, 51)), [7], list(range(400, 270, -1))]
    alone = []
    for ids in texts:
        with bundled.session() as s:
            alone.append((s.feed(ids), s.feed([3, 4], logits="all")))
    for order in ([0, 1, 2], [2, 0, 1]):
        sessions = [bundled.session() for _ in order]
        first = bundled.step([(s, texts[i]) for s, i in zip(sessions, order, strict=True)])
        second = bundled.step([(s, [3, 4]) for s in sessions], logits="all")
        for i, a, b in zip(order, first, second, strict=True):
            np.testing.assert_array_equal(a.ravel(), alone[i][0].ravel())
            np.testing.assert_array_equal(b, alone[i][1])
        for s in sessions:
            s.close()


@pytest.mark.fault("B24")
def test_forks_and_checkpoints_come_back_to_the_same_bits(bundled: Engine) -> None:
    ids, more = list(range(20, 171)), list(range(300, 330))
    with bundled.session() as s:
        s.feed(ids)
        want = s.feed(more, logits="all")
    with bundled.session() as s:
        s.feed(ids)
        point, fork = s.checkpoint(), s.fork()
        s.feed(list(range(500, 540)))
        s.restore(point)
        np.testing.assert_array_equal(s.feed(more, logits="all"), want)
        np.testing.assert_array_equal(fork.feed(more, logits="all"), want)
        fork.close()


@pytest.mark.fault("B21")
def test_a_saved_session_goes_on_elsewhere(bundled: Engine, cpu: Engine, tmp_path: Path) -> None:
    """To a file, and from there to the CPU's engine."""
    ids = list(range(30, 90))
    with bundled.session() as s:
        s.feed(ids)
        s.save(tmp_path / "s")
        want = s.feed([5, 6], logits="all")
    with bundled.session(tmp_path / "s") as s:
        np.testing.assert_array_equal(s.feed([5, 6], logits="all"), want)
    with cpu.session(tmp_path / "s") as s:
        np.testing.assert_allclose(s.feed([5, 6], logits="all"), want, rtol=0, atol=1e-4)


@pytest.mark.fault("B37")
def test_a_random_legal_order_gives_the_same_bits(random: Engine) -> None:
    ids = np.load(RANDOM / "ref.npz")["short_ids"]
    shuffled = load(RANDOM / "qwen4exp-random-bf16.gguf", context=512, order_seed=7)
    np.testing.assert_array_equal(fed(shuffled, ids, 24), fed(random, ids, 24))
    shuffled.close()
