"""A device with small limits: kernels keep to them, and what can't is refused with the sizes before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyopencl")

import pyopencl as cl

from trueup.backends.opencl import devices
from trueup.backends.opencl.target import OpenCLTarget
from trueup.core.backend import Storage
from trueup.core.errors import Refused, Unavailable
from trueup.core.graph import Graph
from trueup.core.ops import attention, silu
from trueup.core.plan import build_plan
from trueup.core.state import Capacity, PerToken
from trueup.models import load_model
from trueup.runtime import Engine

TINY = Path(__file__).parents[1] / "data" / "qwen4exp-tiny"
SMALL = {"work_group": 32, "local_memory": 16 << 10, "allocation": 16 << 20}


def opened(**limits: int) -> OpenCLTarget:
    try:
        device, handle = devices.find()[0]
    except Unavailable as e:
        pytest.skip(str(e))
    return OpenCLTarget(replace(device, kind="gpu", limits={**device.limits, **SMALL, **limits}), handle)


@pytest.fixture(scope="module")
def small() -> Iterator[OpenCLTarget]:
    t = opened()
    yield t
    t.close()


def test_a_model_runs_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group is larger than the device allows, no kernel takes more local memory, and the text is the same."""
    prompt, path = next(iter(json.loads((TINY / "greedy_q8_0.json").read_text()).items()))
    target, groups, kernels = opened(), [], {}
    start = cl.enqueue_nd_range_kernel

    def watched(queue: object, kernel: cl.Kernel, items: tuple[int], group: tuple[int]) -> object:
        groups.append(group[0])
        kernels[kernel.function_name] = kernel
        return start(queue, kernel, items, group)

    monkeypatch.setattr(cl, "enqueue_nd_range_kernel", watched)
    engine = Engine(load_model(), target, context=256)
    found = [t for p in engine.generate(prompt, max_tokens=8, ignore_eos=True) for t in p.tokens]
    with engine.session() as s:
        s.feed(list(range(10, 110)))  # a prompt that goes in chunks
    used = max(
        k.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, target.queue.device) for k in kernels.values()
    )
    engine.close()
    assert found == path["out"][:8]
    assert max(groups) == 32 and used <= 16 << 10
    assert {"delta_scan", "gated_delta_rule_shared"} <= set(kernels)


def test_more_than_one_buffer_holds_is_refused_with_the_sizes(small: OpenCLTarget) -> None:
    """B79."""
    g = Graph()
    g.output("y", silu(g.input("x", 5 << 20), scale=1.0))
    with pytest.raises(Refused, match=r"takes 20,971,520 bytes; the device allows 16,777,216 in one buffer"):
        build_plan(g, small)


@pytest.mark.parametrize(("limit", "launches"), [(16 << 20, 2), (16 << 10, 1)])
def test_attention_that_has_no_room_for_spans_goes_without(
    small: OpenCLTarget, monkeypatch: pytest.MonkeyPatch, limit: int, launches: int
) -> None:
    """128 spans of each of 8 query heads take 32 KiB."""
    g = Graph(Capacity(1, 4096, 16))
    keys, values = g.state("keys", PerToken((1, 1))), g.state("values", PerToken((1, 8)))
    q, table = g.input("q", 2, 4, 1), g.input("table", 1, 4096, dtype="i32")
    cu, past = g.input("cu", 2, dtype="i32"), g.input("past", 1, dtype="i32")
    g.output("out", attention(q, keys, values, cu, past, table, scale=1.0)[0])
    states = {n: small.memory.allocate(s.type) for n, s in g.states.items()}
    for h in states.values():
        small.memory.fill_rows(h, range(4096), 1.0)
    plan = build_plan(g, small)
    monkeypatch.setattr(small, "device", replace(small.device, limits={**small.device.limits, "allocation": limit}))
    exe = small.compile(plan, Storage(states=states))
    given = {
        "q": np.ones((2, 4, 1), np.float32), "cu": np.array([0, 2], np.int32), "past": np.array([3000], np.int32),
        "table": np.arange(4096, dtype=np.int32)[None],
    }  # fmt: skip
    assert exe.launches == launches
    np.testing.assert_array_equal(exe.run(given)["out"], np.ones((2, 4, 8), np.float32))
    exe.close()
    for h in states.values():
        small.memory.free(h)
