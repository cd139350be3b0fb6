"""What the OpenCL backend holds: buffers of any size and layout, typed refusals, and nothing left after an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from trueup.backends.opencl import devices, programs
from trueup.backends.opencl.memory import OpenCLMemory
from trueup.backends.opencl.target import OpenCLTarget
from trueup.backends.opencl.tuning import Tuning
from trueup.core.backend import Storage
from trueup.core.backend.recorded import DeviceTensor
from trueup.core.errors import Refused, Unavailable
from trueup.core.graph import Graph
from trueup.core.ops import add, embed, linear, merge_attention, rms_norm, silu, take_rows
from trueup.core.plan import build_plan
from trueup.core.types import TensorType
from trueup.core.weight import Weight


def opened(**options: Any) -> OpenCLTarget:
    try:
        found = devices.find()
    except Unavailable as e:
        pytest.skip(str(e))
    return OpenCLTarget(*found[0], **options)


@pytest.fixture(scope="module")
def target() -> Iterator[OpenCLTarget]:
    t = opened()
    yield t
    t.close()
    assert t.memory.used == 0


@pytest.fixture
def memory(target: OpenCLTarget) -> Iterator[OpenCLMemory]:
    before = target.memory.used
    yield target.memory
    assert target.memory.used == before


def of(array: Any) -> TensorType:
    return TensorType.of(np.asarray(array))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "i32", "i64", "u8"])
def test_rows_are_read_written_copied_and_filled(memory: OpenCLMemory, dtype: str) -> None:
    a = np.arange(60).reshape(5, 4, 3).astype(TensorType((), dtype).element.numpy)
    h = memory.allocate(of(a))
    memory.upload(h, a)
    want = a.copy()
    memory.copy_rows(h, [0, 4], [3, 1])
    want[[0, 4]] = want[[3, 1]]
    memory.fill_rows(h, [2], 7)
    want[2] = 7
    memory.write_rows(h, [3, 1], a[:2])
    want[[3, 1]] = a[:2]
    np.testing.assert_array_equal(memory.download(h), want)
    np.testing.assert_array_equal(memory.read_rows(h, [4, 0, 4]), want[[4, 0, 4]])
    assert memory.read_rows(h, []).shape == (0, 4, 3)
    memory.free(h)


def test_rows_fill_with_nan_and_bf16_with_its_own_bits(memory: OpenCLMemory) -> None:
    h = memory.allocate(TensorType((2, 3)))
    memory.fill_rows(h, [0], float("nan"))
    memory.fill_rows(h, [1], -1.5)
    got = memory.download(h)
    assert np.isnan(got[0]).all() and (got[1] == -1.5).all()
    b = memory.allocate(TensorType((1, 4), "bf16"))
    memory.fill_rows(b, [0], -1.5)
    assert memory.download(b).view(np.uint16).tolist() == [0xBFC0] * 4
    for x in (h, b):
        memory.free(x)


@pytest.mark.fault("B78")
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_a_tensor_of_nothing_is_a_tensor(memory: OpenCLMemory, shape: tuple[int, ...]) -> None:
    """B78."""
    h = memory.allocate(TensorType(shape))
    memory.upload(h, np.zeros(shape, np.float32))
    assert memory.download(h).shape == shape
    rows = list(range(shape[0]))
    memory.fill_rows(h, rows, 1)
    memory.copy_rows(h, rows, rows)
    memory.write_rows(h, rows, np.zeros(shape, np.float32))
    assert memory.read_rows(h, rows).shape == shape
    memory.free(h)


def test_strided_tensors_are_read_and_written_between_their_neighbours(memory: OpenCLMemory) -> None:
    whole = memory.allocate(TensorType((4, 6)))
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    memory.upload(whole, a)
    part = whole.at(2, TensorType((4, 3)).with_strides((6, 1)))
    np.testing.assert_array_equal(memory.download(part), a[:, 2:5])
    memory.upload(part, -a[:, 2:5])
    a[:, 2:5] *= -1
    np.testing.assert_array_equal(memory.download(whole), a)
    with pytest.raises(ValueError, match="do not lie one after the other"):
        memory.read_rows(part, [0])
    memory.free(whole)


def test_a_row_that_is_not_there_is_an_error(memory: OpenCLMemory) -> None:
    h = memory.allocate(TensorType((2, 3)))
    with pytest.raises(IndexError, match="row 2 of f32"):
        memory.fill_rows(h, [2], 0)
    memory.free(h)


def test_what_is_freed_twice_is_freed_once(memory: OpenCLMemory) -> None:
    a = memory.allocate(TensorType((8,)))
    memory.free(a)
    b = memory.allocate(TensorType((8,)))
    memory.free(a)
    memory.upload(b, np.ones(8, np.float32))
    memory.free(b)


@pytest.mark.fault("B79")
def test_more_than_a_buffer_may_hold_is_a_typed_error_with_the_sizes(
    target: OpenCLTarget, memory: OpenCLMemory
) -> None:
    """B79: the original error, nothing kept, and the next allocation works."""
    limit = target.device.limits["allocation"]
    with pytest.raises(MemoryError, match=rf"{limit + 4:,} bytes; the device allows {limit:,} in one buffer"):
        memory.allocate(TensorType((limit // 4 + 1,)))
    memory.free(memory.allocate(TensorType((4,))))


def test_a_device_that_is_full_is_a_typed_error(memory: OpenCLMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyopencl as cl

    def full(*args: Any) -> None:
        raise cl.Error("MEM_OBJECT_ALLOCATION_FAILURE")

    monkeypatch.setattr("trueup.backends.opencl.memory.cl.Buffer", full)
    with pytest.raises(MemoryError, match=r"no 32 bytes for f32\[8\].*MEM_OBJECT_ALLOCATION_FAILURE"):
        memory.allocate(TensorType((8,)))


# -- plans -------------------------------------------------------------------------------------------------------------


def small_graph() -> tuple[Graph, dict[str, Any], dict[str, Any]]:
    """Two weights, a constant, a view, scratch, two outputs; its inputs, and what NumPy computes."""
    rng = np.random.default_rng(0)
    w, v = (rng.standard_normal(s).astype(np.float32) for s in ((6, 5), (6,)))
    x, at = rng.standard_normal((3, 5)).astype(np.float32), np.array([2, -1], np.int32)
    lse = rng.standard_normal((3, 2)).astype(np.float32)
    g = Graph()
    given = g.input("x", 3, 5)
    y = rms_norm(linear(given, g.weight(Weight.of("w", w))), g.weight(Weight.of("v", v)), eps=1e-6)
    g.output("y", y)
    g.output("rows", take_rows(add(y, y), g.input("at", 2, dtype="i32")))
    parts = g.constant("parts", np.ones((3, 2, 4), np.float32))
    g.output("merged", merge_attention([parts, parts], [g.constant("lse", lse), g.input("lses", 3, 2)])[0])
    inputs = {"x": x, "at": at, "lses": lse}
    y = (x @ w.T) / np.sqrt(np.mean((x @ w.T) ** 2, -1, keepdims=True) + 1e-6) * v
    return g, inputs, {"y": y, "rows": np.stack([2 * y[2], 0 * y[2]]), "merged": np.ones((3, 2, 4))}


def test_a_plan_runs_again_and_again_and_leaves_nothing(target: OpenCLTarget, memory: OpenCLMemory) -> None:
    g, inputs, want = small_graph()
    storage = Storage()
    exe = target.compile(build_plan(g, target), storage)
    for _ in range(3):
        got = exe.run(inputs)
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)
    exe.close()
    exe.close()


def test_weights_lie_there_until_the_last_plan_that_uses_them_is_closed(
    target: OpenCLTarget, memory: OpenCLMemory
) -> None:
    g, inputs, want = small_graph()
    storage, before = Storage(), memory.used
    one, two = (target.compile(build_plan(g, target), storage) for _ in range(2))
    one.close()
    np.testing.assert_allclose(two.run(inputs)["y"], want["y"], rtol=1e-5, atol=1e-6)
    two.close()
    assert memory.used == before
    again = target.compile(build_plan(g, target), storage)
    np.testing.assert_allclose(again.run(inputs)["y"], want["y"], rtol=1e-5, atol=1e-6)
    again.close()


@pytest.mark.fault("B79")
def test_an_allocation_that_fails_leaves_nothing(
    target: OpenCLTarget, memory: OpenCLMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B79: fail at the 1st, 2nd, … allocation of a plan; the error is the original, and the next plan works."""
    g, inputs, want = small_graph()
    allocate, before = memory.allocate, memory.used
    for fails in range(1, 20):
        left = fails

        def counted(type: TensorType) -> DeviceTensor:
            nonlocal left
            left -= 1
            if not left:
                raise MemoryError("full")
            return allocate(type)

        monkeypatch.setattr(memory, "allocate", counted)
        exe, storage = None, Storage()
        try:
            exe = target.compile(build_plan(g, target), storage)
        except MemoryError as e:
            assert str(e).endswith("full")
        if exe is not None:
            assert fails > 4, "the plan makes several allocations"
            np.testing.assert_allclose(exe.run(inputs)["y"], want["y"], rtol=1e-5, atol=1e-6)
            exe.close()
            return
        assert memory.used == before
    pytest.fail("the plan never came to its end")


@pytest.mark.fault("B79")
def test_no_room_for_a_weight_names_the_weight(
    target: OpenCLTarget, memory: OpenCLMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = target.prepare_weight(Weight.of("blk.0.w", np.zeros((4, 8), np.float32)))
    monkeypatch.setattr(memory, "largest", 64)
    with pytest.raises(MemoryError, match=r"weight blk.0.w \(f32\[4, 8\]\): .* takes 128 bytes; the device allows 64"):
        _ = made.values


@pytest.mark.fault("B84")
def test_a_node_with_a_tensor_above_the_limit_is_refused_with_the_sizes(target: OpenCLTarget) -> None:
    """B84: never launched."""
    rows = target.device.limits["allocation"] // 4 + 1
    g = Graph()
    g.output("y", silu(g.input("x", 1, rows)))
    with pytest.raises(Refused, match=rf"{4 * rows:,} bytes; the device allows"):
        build_plan(g, target)


@pytest.mark.fault("B76")
def test_an_index_out_of_range_is_an_error_that_names_the_node_and_the_next_step_works(
    target: OpenCLTarget, memory: OpenCLMemory
) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    g = Graph()
    g.output("y", embed(g.weight(Weight.of("table", table)), g.input("ids", 2, dtype="i32")))
    exe = target.compile(build_plan(g, target), Storage())
    for wrong in (4, -1, 2**31 - 1):
        with pytest.raises(ValueError, match=r"#0 embed\(.*outside of what it indexes"):
            exe.run({"ids": np.array([0, wrong], np.int32)})
    np.testing.assert_array_equal(exe.run({"ids": np.array([3, 1], np.int32)})["y"], table[[3, 1]])
    exe.close()


# -- programs ----------------------------------------------------------------------------------------------------------


def test_programs_are_built_once_a_process_and_kernels_are_apart(target: OpenCLTarget) -> None:
    again = opened()
    assert again.programs is target.programs and again.context is target.context
    one, two = target.programs.kernel("silu"), target.programs.kernel("silu")
    assert one.int_ptr != two.int_ptr
    other = opened(tuning=Tuning(**{**vars(target.tuning), "run": 8}))
    assert other.programs is not target.programs
    for t in (again, other):
        t.close()


@pytest.mark.fault("B84")
def test_a_kernel_that_does_not_build_is_an_error_with_the_compiler_s_log(
    target: OpenCLTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B84: no silent fallback."""
    monkeypatch.setattr(programs, "source", lambda name: "kernel void broken( {")
    fresh = programs.Programs(target.context, target.device, target.tuning)
    with pytest.raises(programs.BuildError, match="OpenCL kernels .*do not build on"):
        fresh.kernel("broken")
