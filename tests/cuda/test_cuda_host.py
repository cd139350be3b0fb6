"""The CUDA backend's host side on the emulated device: one capture and its replays, errors that leave nothing behind,
allocation failure, faults that kernels report, and looking on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.core.backend import Storage
from trueup.core.graph import Graph
from trueup.core.ops import add, embed, linear, silu, top_k
from trueup.core.plan import Plan, build_plan
from trueup.core.state import Capacity
from trueup.core.weight import Weight

Make = Callable[..., Any]
R = np.random.default_rng(5)
W = Weight.of("w", R.standard_normal((24, 48)).astype(np.float32))
TABLE = Weight.of("table", R.standard_normal((7, 16)).astype(np.float32))


def step(target: Any, rows: int = 3) -> Plan:
    """silu(x w) + y, its largest entries, and rows of a table."""
    g = Graph(Capacity(1, 1, 1))
    x, y, ids = g.input("x", rows, 48), g.input("y", rows, 24), g.input("ids", rows, dtype="i32")
    out = add(silu(linear(x, g.weight(W)), scale=1.0), y)
    g.output("out", out)
    g.output("best", top_k(out, k=2)[1])
    g.output("rows", embed(g.weight(TABLE), ids))
    return build_plan(g, target)


def inputs(rows: int = 3) -> dict[str, Any]:
    return {
        "x": R.standard_normal((rows, 48)).astype(np.float32),
        "y": R.standard_normal((rows, 24)).astype(np.float32),
        "ids": R.integers(0, 7, rows).astype(np.int32),
    }


def right(given: dict[str, Any], out: dict[str, Any]) -> None:
    made = given["x"] @ np.asarray(W).T
    want = made / (1 + np.exp(-made)) + given["y"]
    np.testing.assert_allclose(out["out"], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out["best"], np.argsort(-out["out"], axis=1, kind="stable")[:, :2])
    np.testing.assert_array_equal(out["rows"], np.asarray(TABLE)[given["ids"]])


def test_a_plan_is_captured_once_and_replayed(emulated: Make) -> None:
    target = emulated()
    exe = target.compile(step(target), Storage())
    kept = []
    for _ in range(4):
        given = inputs()
        out = exe.run(given)
        right(given, out)
        kept.append((given, out))
    assert target.driver.launches == exe.launches > 3
    for given, out in kept:  # results are the caller's own: later steps do not reach them
        right(given, out)
    exe.close()
    exe.close()
    assert target.driver.used == target.memory.used == 0


def test_a_plan_without_rows_starts_nothing(emulated: Make) -> None:
    target = emulated()
    exe = target.compile(step(target, 0), Storage())
    assert [a.shape for a in exe.run(inputs(0)).values()] == [(0, 24), (0, 2), (0, 16)]
    assert exe.launches == target.driver.launches == 0
    exe.close()


def test_an_index_outside_is_an_error_that_names_its_node_and_the_next_step_is_right(emulated: Make) -> None:
    target = emulated()
    exe = target.compile(step(target), Storage())
    bad = inputs() | {"ids": np.array([0, 7, 1], np.int32)}
    for _ in range(2):
        with pytest.raises(ValueError, match="embed.*points outside of what it indexes"):
            exe.run(bad)
        given = inputs()
        right(given, exe.run(given))
    exe.close()


def test_no_room_is_a_memory_error_and_leaves_nothing(emulated: Make) -> None:
    whole = emulated()
    exe = whole.compile(step(whole), Storage())
    need = whole.driver.used
    exe.close()
    for room in range(256, need, 1024):
        target = emulated(memory=room)
        with pytest.raises(MemoryError, match="device has no .* in use"):
            target.compile(step(target), Storage()).run(inputs())
        assert target.driver.used == target.memory.used == 0
    target = emulated(memory=need)
    given = inputs()
    exe = target.compile(step(target), Storage())
    right(given, exe.run(given))
    exe.close()


def test_a_launch_that_the_device_refuses_is_an_error_and_leaves_nothing(emulated: Make) -> None:
    target = emulated()
    target.driver.attributes = target.driver.attributes | {"max_grid_dim_x": 1}
    with pytest.raises(ValueError, match="linear.*blocks of linear_4; the device starts 1 at most"):
        target.compile(step(target), Storage())
    assert target.driver.used == 0


def test_two_plans_share_a_weight_until_the_last_is_closed(emulated: Make) -> None:
    target, storage = emulated(), Storage()
    first, second = (target.compile(step(target, n), storage) for n in (1, 2))
    given = inputs(2)
    first.close()
    right(given, second.run(given))
    second.close()
    assert target.driver.used == 0
    again = target.compile(step(target, 2), storage)
    right(given, again.run(given))
    again.close()


def test_looking_on_sees_each_node_and_changes_nothing(emulated: Make) -> None:
    target = emulated()
    exe = target.compile(step(target), Storage())
    seen: dict[str, Any] = {}

    class Everything:
        def wants(self, node: Any) -> bool:
            return True

        def before(self, node: Any, look: Any) -> None: ...

        def after(self, node: Any, look: Any) -> None:
            seen[node.op.name] = look.read(node.outputs[0])

        def end(self) -> None: ...

    given = inputs()
    traced, plain = exe.trace(given, Everything()), exe.run(given)
    right(given, traced)
    for name in plain:
        np.testing.assert_array_equal(traced[name], plain[name])
    assert set(seen) >= {"linear", "silu", "add", "top_k", "embed"}
    np.testing.assert_array_equal(seen["add"], plain["out"])
    exe.close()


def test_bytes_filled_and_copied_by_rows(emulated: Make) -> None:
    from trueup.core.types import TensorType

    memory = emulated().memory
    handle = memory.allocate(TensorType((5, 3), "f32"))
    memory.upload(handle, np.arange(15, dtype=np.float32).reshape(5, 3))
    memory.fill_rows(handle, [1, -1], -np.inf)
    memory.copy_rows(handle, [0], [2])
    memory.write_rows(handle, [3], np.full((1, 3), 8, np.float32))
    want = np.array([[6, 7, 8], [-np.inf] * 3, [6, 7, 8], [8] * 3, [-np.inf] * 3], np.float32)
    np.testing.assert_array_equal(memory.download(handle), want)
    np.testing.assert_array_equal(memory.read_rows(handle, [3, 0]), want[[3, 0]])
    with pytest.raises(IndexError, match="row 5 of"):
        memory.read_rows(handle, [5])
    memory.free(handle)
    memory.free(handle)
    assert memory.used == 0
