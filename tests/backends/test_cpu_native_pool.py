"""The native thread pool: any number of threads, callers at once, a fork, a reset in between."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 512)).astype(np.float32)
W = RNG.standard_normal((700, 512)).astype(np.float32)
RAW = W.view(np.uint8)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    threads = native.threads()
    yield
    native.set_threads(threads)


def product() -> NDArray[np.float32]:
    out = np.full((3, 700), np.nan, np.float32)
    native.linear(out, X, RAW, "f32")
    return out


def test_default_is_the_physical_cores() -> None:
    assert 1 <= native.physical_cores()
    assert native.threads() == native.physical_cores()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    native.set_threads(1)
    want = product()
    native.set_threads(threads)
    assert native.threads() == threads
    for _ in range(50):
        np.testing.assert_array_equal(product(), want)


def test_callers_at_once_get_their_own_results_while_the_count_changes() -> None:
    native.set_threads(1)
    want = product()

    def work(seed: int) -> bool:
        good = True
        for i in range(60):
            if seed == 0:
                native.set_threads(1 + i % 3)
            good = good and bool(np.array_equal(product(), want))
        return good

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(work, range(4)))


def test_other_python_threads_run_during_a_kernel() -> None:
    x, raw = np.ones((64, 4096), np.float32), np.ones((2048, 4096), np.float32).view(np.uint8)
    out, ticks, done = np.zeros((64, 2048), np.float32), [0], threading.Event()
    native.set_threads(1)

    def kernel() -> None:
        for _ in range(5):
            native.linear(out, x, raw, "f32")
        done.set()

    thread = threading.Thread(target=kernel)
    thread.start()
    while not done.is_set():
        ticks[0] += 1
    thread.join()
    assert ticks[0] > 1000


def child(connection: object) -> None:
    connection.send(product())  # type: ignore[attr-defined]


def test_a_forked_child_starts_workers_of_its_own() -> None:
    native.set_threads(2)
    want = product()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,))
    process.start()
    assert here.poll(60), "the child hangs"
    np.testing.assert_array_equal(here.recv(), want)
    process.join(60)
    assert process.exitcode == 0
    np.testing.assert_array_equal(product(), want)


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_a_senseless_number_of_threads_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"set_threads: count is {count}, expected 1 to 1024"):
        native.set_threads(count)


def test_an_unknown_instruction_set_is_refused_with_those_there_are() -> None:
    before = native.isa()
    with pytest.raises(ValueError, match="name is 'mmx', expected one that this machine has: .*portable"):
        native.set_isa("mmx")
    assert native.isa() == before


def test_an_empty_region_runs() -> None:
    for tasks in (0, 1, 2, 1000):
        native.dispatch(tasks)
    with pytest.raises(ValueError, match="tasks is -1"):
        native.dispatch(-1)
