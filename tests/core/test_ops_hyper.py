"""Hyper-connections: constants, and no look beyond the row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trueup.core.ops import hc_read, hc_write

pytestmark = pytest.mark.filterwarnings("error")

F = np.float32


def test_read_by_hand() -> None:
    # gates sigmoid(0) = 1/2, sigmoid(ln 3) = 3/4: (.5·4 + .75·8) / 2 = 4; (.75·4 + .5·2) / 2 = 2
    l3 = math.log(3)
    assert hc_read(F([[[4, 4], [8, 2]]]), F([[0, l3, l3, 0]])).tolist() == [[4, 2]]


def test_write_by_hand() -> None:
    # inject / 2 streams: sigmoid(0) = 1/2 adds y once, sigmoid(2 ln 3 / 2) = 3/4 adds 1.5 y
    out = hc_write(F([[[1, 1], [2, 2]]]), F([[10, 20]]), F([[0, 2 * math.log(3)]]))
    assert out.tolist() == [[[11, 21], [17, 32]]]


def test_gates_at_their_ends() -> None:
    assert hc_read(F([[[4], [8]]]), F([[np.inf, -np.inf]])).tolist() == [[2]]
    assert hc_write(F([[[1], [1]]]), F([[8]]), F([[np.inf, -np.inf]])).tolist() == [[[17], [1]]]


@pytest.mark.fault("B42")
def test_rows_are_apart_and_b42_bits_do_not_depend_on_their_number() -> None:
    rng = np.random.default_rng(0)
    normed, gate = rng.standard_normal((13, 9, 7)).astype(F), rng.standard_normal((13, 63)).astype(F)
    y, inject = rng.standard_normal((13, 7)).astype(F), rng.standard_normal((13, 9)).astype(F)
    normed[4], y[4] = np.nan, np.nan
    read, write = hc_read(normed, gate), hc_write(normed, y, inject)
    for r in range(13):
        one = slice(r, r + 1)
        assert np.array_equal(read[one], hc_read(normed[one], gate[one]), equal_nan=True)
        assert np.array_equal(write[one], hc_write(normed[one], y[one], inject[one]), equal_nan=True)
        assert np.isnan(read[r]).any() == np.isnan(write[r]).any() == (r == 4)


def test_against_exactly_rounded_sums() -> None:
    rng = np.random.default_rng(1)
    normed, gate = rng.standard_normal((3, 4, 5)).astype(F), rng.standard_normal((3, 20)).astype(F)
    out = hc_read(normed, gate)
    for r in range(3):
        for i in range(5):
            parts = [float(normed[r, s, i]) / (1 + math.exp(-float(gate[r, 5 * s + i]))) for s in range(4)]
            assert out[r, i] == pytest.approx(math.fsum(parts) / 4, rel=2.0**-23, abs=1e-12)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 1, 3)])
def test_small_sizes(shape: tuple[int, int, int]) -> None:
    rows, streams, n = shape
    x = np.ones(shape, F)
    assert hc_read(x, np.zeros((rows, streams * n), F)).tolist() == np.full((rows, n), 0.5).tolist()
    assert hc_write(x, np.ones((rows, n), F), np.zeros((rows, streams), F)).tolist() == np.full(shape, 2.0).tolist()
