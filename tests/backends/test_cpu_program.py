"""A plan as one native program: recorded once, the same bits as node by node, errors that name what is wrong."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import trueup
from trueup.backends.cpu import _native as native


def test_what_is_recorded_runs_later_and_again() -> None:
    program, a, out = native.Program(), np.ones(3, np.float32), np.zeros(3, np.float32)
    program.record(lambda: (native.add(out, a, a), native.mul(out, out, out)))
    assert len(program) == 2 and not out.any()
    program.run(0, 2)
    np.testing.assert_array_equal(out, [4, 4, 4])
    a[:] = 2
    program.run(0, 1)
    np.testing.assert_array_equal(out, [4, 4, 4])
    program.run(1, 2)
    np.testing.assert_array_equal(out, [16, 16, 16])


def test_a_record_that_fails_leaves_nothing() -> None:
    program, a = native.Program(), np.ones(3, np.float32)

    def call() -> None:
        native.add(a, a, a)
        native.add(a, a, a[:2])

    with pytest.raises(ValueError, match="expected the shape of"):
        program.record(call)
    assert len(program) == 0
    with pytest.raises(ValueError, match="being recorded"):
        program.record(lambda: native.Program().record(lambda: None))
    native.add(a, a, a)  # what is not recorded runs at once
    assert a[0] == 2


@pytest.mark.parametrize("part", [(0, 1), (1, 0)])
def test_a_part_that_is_not_there_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"a part of the 0 recorded"):
        native.Program().run(*part)


def test_indices_are_checked_when_the_step_runs() -> None:
    program, x, out = native.Program(), np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)
    at = np.array([9], np.int32)
    program.record(lambda: native.take_rows(out, x, at))
    with pytest.raises(ValueError, match="take_rows: the index 9 is not in -1:2"):
        program.run(0, 1)
    at[0] = 1
    program.run(0, 1)
    assert out.all()


def test_a_step_of_the_model_is_one_call_for_the_prologue_and_one_for_the_rest() -> None:
    with_native = trueup.load(None, backend="cpu", context=256)
    try:
        with_native.logits([1, 2, 3])
        for shape in with_native.plans():
            found = with_native.executable(shape)
            assert len(found.stretches) == 1 and len(found._first) == 1
    finally:
        with_native.close()


def test_a_step_of_the_model_calls_little_python() -> None:
    """Calls of Python functions in a decoded token: what a step costs besides its kernels."""
    engine = trueup.load(None, backend="cpu", context=256)
    try:
        session = engine.session()
        session.feed([1, 2, 3])
        session.feed([4])
        count = 0

        def seen(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(seen)
        try:
            session.feed([5])
        finally:
            sys.setprofile(None)
        assert count < 200
    finally:
        engine.close()
