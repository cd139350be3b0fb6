"""Fusions on OpenCL: the bits of the ops one by one, in every plan where they pay, and fewer launches. `trueup check` judges
each by its bound; here they are looked for in the bundled model's plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from trueup.backends.opencl import devices
from trueup.backends.opencl.ops import table
from trueup.backends.opencl.ops.fused import one_format
from trueup.backends.opencl.target import OpenCLTarget
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import Device
from trueup.core.errors import Unavailable
from trueup.core.plan import PlanOptions
from trueup.core.types import TensorType
from trueup.models import load_model
from trueup.runtime import Engine


@pytest.fixture(scope="module", params=["vectors", "gpu"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """With fusions and without, as on processors and as on GPUs."""
    try:
        device, handle = devices.find()[0]
    except Unavailable as e:
        pytest.skip(str(e))
    kind = "gpu" if request.param == "gpu" else "cpu"
    tuning = Tuning.of(replace(device, kind=kind), invariant=True)
    made = tuple(
        Engine(
            load_model(), OpenCLTarget(device, handle, tuning=tuning), context=256, options=PlanOptions(fusion=fusion)
        )
        for fusion in (True, False)
    )
    yield made
    for e in made:
        e.close()
        assert e.target.memory.used == 0


@pytest.mark.parametrize("sizes", [[1, 8, 9]])
def test_a_fused_step_has_the_bits_of_an_unfused_one(engines: tuple[Engine, Engine], sizes: list[int]) -> None:
    """On both sides of the number of rows up to which products are fused."""
    ids = np.random.default_rng(0).integers(10, 4000, sum(sizes))
    found = []
    for e in engines:
        with e.session() as s:
            parts = np.split(ids, np.cumsum(sizes)[:-1])
            found.append(np.concatenate([s.feed(p.tolist(), logits="all") for p in parts]))
    np.testing.assert_array_equal(*found)


def test_decoding_fuses_all_that_it_can(engines: tuple[Engine, Engine]) -> None:
    fused, plain = engines
    reports = {r.name: r for r in fused.plan(fused.shape(1)).fusions}
    without = {n for n, r in reports.items() if not r.fused}
    assert without <= {"swiglu_linears", "silu_linear", "sigmoid_linear", "two_linears"}, reports
    assert sum(r.fused for r in reports.values()) >= 100
    launches = [e.executable(e.shape(1)).launches for e in engines]
    assert launches[0] * 1.7 < launches[1], launches


def test_the_smaller_patterns_take_what_the_larger_leave(engines: tuple[Engine, Engine]) -> None:
    """The last mix writes nothing back, so its gate stands alone; a prompt leaves products as they are."""
    reports = {r.name: r for r in engines[0].plan(engines[0].shape(1)).fusions}
    assert reports["silu_linear"].fused == 1 and reports["swiglu_linears"].fused == 8
    prompt = {r.name: r for r in engines[0].plan(engines[0].shape(64)).fusions}
    assert not prompt["delta_inputs"].fused and "64 rows" in prompt["delta_inputs"].declined[0]
    assert prompt["route"].fused == 8 and prompt["silu_conv"].fused == 7


def test_weights_of_two_types_are_not_read_in_one_launch() -> None:
    q8, f32 = TensorType((4, 32), "q8_0"), TensorType((4, 32))
    assert one_format(q8, q8) is True and one_format(TensorType((4, 32), "q5_0"), f32) is True
    assert one_format(q8, f32) == "weights of f32, q8_0, of which a launch reads one"


def test_every_fusion_has_a_name_of_its_own() -> None:
    patterns = table(Tuning.of(Device("Processor", "cpu"))).fusions
    assert len({p.name for p in patterns}) == len(patterns) == 14
