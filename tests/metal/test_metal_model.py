"""A whole model on MLX: the kit in short, the CPU's text, errors found on the device, steps that leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

import trueup
import trueup.core.ops as ops
from trueup.backends.metal import Metal
from trueup.backends.metal.ops import table
from trueup.core.backend import Storage, Target
from trueup.core.graph import Graph
from trueup.core.op import OPS
from trueup.core.plan import build_plan
from trueup.core.state import Capacity, PerToken
from trueup.core.weight import Weight
from trueup.runtime import Engine

MAIN = "import sys; sys.argv[0] = 'trueup'; from trueup.cli import main; main()"


@pytest.fixture(scope="module")
def target() -> Target:
    return Metal().open(Metal().devices()[0])


@pytest.fixture(scope="module")
def bundled() -> Iterator[Engine]:
    e = trueup.load(backend="metal", context=512)
    yield e
    e.close()


def test_every_op_has_a_kernel_and_none_is_a_body() -> None:
    found = table().kernels
    assert {op.name for op in found} == {
        name for name, op in OPS.items() if not op.view and op.body.__module__.startswith("trueup.core.ops")
    }
    assert not [k for kernels in found.values() for k in kernels if k.reference]


KINDS = ("attention", "gated_delta_rule", "linear", "top_k")


def test_it_passes_the_kit(tmp_path: Path) -> None:
    given = ["--backend", "metal", "--level", "ops", "--level", "effects", "--examples", "0"]
    given += [w for op in KINDS for w in ("--op", op)]
    command = [sys.executable, "-c", MAIN, "check", *given, "--report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_greedy_tokens_are_the_cpus(bundled: Engine) -> None:
    cpu = trueup.load(backend="cpu", context=512)
    try:
        for prompt in ("def ", "import os\n\n\nclass Path:\n    def "):
            text = ["".join(p.text for p in e.generate(prompt, max_tokens=48, temperature=0)) for e in (bundled, cpu)]
            assert text[0] == text[1]
    finally:
        cpu.close()


def test_a_long_prompt_goes_in_chunks_to_the_same_logits(bundled: Engine) -> None:
    ids = np.random.default_rng(3).integers(0, 4096, 150).tolist()
    with bundled.session() as whole, bundled.session() as rows:
        at_once = whole.feed(ids, logits="all")
        one_by_one = np.concatenate([rows.feed(ids[i : i + 50], logits="all") for i in range(0, 150, 50)])
    np.testing.assert_allclose(at_once, one_by_one, rtol=0, atol=2e-4)


def test_a_state_that_nothing_reads_is_no_expression_that_grows(target: Target) -> None:
    g = Graph(Capacity(slots=1, pages=4, page=8))
    cache = g.state("cache", PerToken((1024,)))
    seqs = {"cu": np.array([0, 1], np.int32), "past": np.array([3], np.int32), "table": np.array([[2]], np.int32)}
    names = [g.input(n, *a.shape, dtype="i32") for n, a in seqs.items()]
    ops.paged_append(g.input("rows", 1, 1024), *names, cache)
    handle = target.memory.allocate(cache.type)
    step = target.compile(build_plan(g, target), Storage({"cache": handle}))
    for i in range(21):
        step.run({"rows": np.full((1, 1024), i, np.float32), **seqs})
        if i == 0:
            before = mx.get_active_memory()
    assert mx.get_active_memory() <= before
    assert np.all(target.memory.download(handle)[2, 3] == 20)


# -- numbers that lie on the device ------------------------------------------------------------------------------------


def experts(target: Target) -> Any:
    """A plan of `x[2, 32]` through one of 3 experts, and its storage."""
    g = Graph()
    w = g.weight(Weight.of("w", np.arange(3 * 4 * 32, dtype=np.float32).reshape(3, 4, 32)))
    g.output("y", ops.expert_linear(g.input("x", 2, 32), g.input("experts", 2, 1, dtype="i32"), w))
    return build_plan(g, target), Storage()


def test_a_wrong_expert_is_an_error_of_its_step_alone(target: Target) -> None:
    plan, storage = experts(target)
    step = target.compile(plan, storage)
    x = np.ones((2, 32), np.float32)
    right = {"x": x, "experts": np.array([[2], [-1]], np.int32)}
    want = step.run(right)["y"]
    assert want[0].any() and not want[1].any()
    with pytest.raises(ValueError, match="^expert_linear: the expert 3 is not in -1:3"):
        step.run({"x": x, "experts": np.array([[0], [3]], np.int32)})
    assert np.array_equal(step.run(right)["y"], want)


def test_a_kernel_alone_says_so_at_once() -> None:
    from trueup.backends.metal.ops.products import embed

    with pytest.raises(ValueError, match="^embed: the id 9 is not in 0:4"):
        embed(mx.zeros((4, 2)), mx.array([1, 9]))


def test_a_step_of_one_token_waits_for_nothing_before_its_end(bundled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait in the middle of each layer is what makes a decoder slow."""
    waits: list[str] = []
    evaluate, item = mx.eval, mx.array.item
    with bundled.session() as s:
        s.feed([5])
        monkeypatch.setattr(mx, "eval", lambda *a: (waits.append("eval"), evaluate(*a))[1])
        monkeypatch.setattr(mx.array, "item", lambda a: (waits.append("item"), item(a))[1])
        s.feed([7])
    assert waits[:2] == ["eval", "eval"], "of results and states, then of the checks, which that has evaluated"
    assert set(waits[2:]) == {"item"}


def test_selections_do_not_depend_on_how_mlx_sorts() -> None:
    from trueup.backends.metal.ops.select import argmax, top_k

    nan = np.float32(np.nan)
    row = np.array([[-0.0, 0.0, nan, 1e-45, -np.inf, -nan, -1e-45, np.inf, 0.0]], np.float32)
    values, indices = top_k(mx.array(row), k=9)
    assert np.array(indices)[0].tolist() == [7, 3, 0, 1, 8, 6, 2, 5, -1]
    assert np.array_equal(np.array(values)[0, :2], row[0, [7, 3]])
    assert argmax(mx.array(row)).item() == 2
    assert argmax(mx.array(row[:, :2])).item() == 0
    assert argmax(mx.full((1, 3), -mx.inf)).item() == 0
