"""Positions that repeat, as tokens of an image have them: blocks go by rank, their keys by position.

A step gets positions of its own instead of a text's. What the indexer must have stored is computed here in plain NumPy,
from the raw keys of single tokens, which its tail shows one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import trueup
from trueup.models.architecture import StepShape
from trueup.models.qwen4exp import Qwen4Exp
from trueup.runtime import Engine

RANDOM = Path(__file__).parents[1] / "data" / "qwen4exp-random" / "qwen4exp-random-bf16.gguf"
TOKENS = [730, 258, 1006, 452, 485, 512, 17, 300, 44, 901, 620, 3]
IMAGE = [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4]
TEXT = list(range(12))
POSITIONS = {
    "text": np.repeat(np.array(TEXT)[:, None], 3, 1),
    "one position for all of an image": np.repeat(np.array(IMAGE)[:, None], 3, 1),
    "rows and columns of an image": np.array(
        [IMAGE, [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7], [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 6, 7]]
    ).T,
}
QSA = ("blk.2.", "blk.5.")

Array = NDArray[Any]


class Placed:
    """An executable whose steps get positions from a table, by the rank of each row in its sequence."""

    def __init__(self, inner: Any, positions: Array) -> None:
        self.inner, self.positions = inner, positions

    def run(self, inputs: Mapping[str, Array]) -> Any:
        at = inputs["positions"][:, 0]
        return self.inner.run({**inputs, "positions": self.positions[at].astype(np.int32)})


@pytest.fixture(scope="module", params=["reference", "cpu"])
def plain(request: pytest.FixtureRequest) -> Iterator[Engine]:
    e = trueup.load(RANDOM, backend=request.param, context=64, page=8)
    yield e
    e.close()


@pytest.fixture(params=POSITIONS)
def positions(request: pytest.FixtureRequest) -> Array:
    return POSITIONS[request.param]


@pytest.fixture
def engine(plain: Engine, positions: Array, monkeypatch: pytest.MonkeyPatch) -> Engine:
    inner = plain.executable

    def executable(shape: StepShape) -> Any:
        return Placed(inner(shape), positions)

    monkeypatch.setattr(plain, "executable", executable)
    return plain


def run(engine: Engine, size: int) -> tuple[Array, dict[str, Array], dict[str, list[Array]]]:
    """Logits of all rows, the states after them, and of each step the last raw key of each indexer."""
    raw: dict[str, list[Array]] = {b: [] for b in QSA}
    with engine.session() as s:
        logits = []
        for i in range(0, len(TOKENS), size):
            logits.append(s.feed(TOKENS[i : i + size], logits="all"))
            states = engine.bundle.export(s.sequence)
            for b in QSA:
                raw[b].append(states[b + "index_tail"][-1])
    return np.concatenate(logits), states, raw


def block_key(raw: Array, gamma: Array, position: Array) -> Array:
    """Mean of a block's raw keys, then the norm, then the rotation at `position` (time, height, width), in float64.

    The random model turns 32 dims, by sections of 6, 5 and 5: pair i is (i, 16 + i), and turns by the height where i % 3
    is 1 and i < 15, by the width where i % 3 is 2 and i < 15, else by the time.
    """
    x = raw.astype(np.float64).mean(0)
    x = x / np.sqrt((x * x).mean() + 1e-6) * gamma
    out = x.copy()
    for i in range(16):
        angle = position[i % 3 if i < 15 else 0] * 10000.0 ** (-2 * i / 32)
        a, b = x[i], x[16 + i]
        out[i], out[16 + i] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


@pytest.mark.fault("B18")
def test_blocks_by_rank_keys_at_the_first_members_position(engine: Engine, positions: Array) -> None:
    arch = engine.model.architecture
    assert isinstance(arch, Qwen4Exp)
    _, _, raw = run(engine, 1)
    _, states, _ = run(engine, len(TOKENS))
    for b in QSA:
        gamma = np.asarray(arch.weights[b + "indexer.k_norm.weight"], np.float64)
        stored = states[b + "index"]
        assert stored.shape == (3, 64), "twelve tokens are three blocks, whatever their positions"
        for block in range(3):
            members = np.stack(raw[b][4 * block : 4 * block + 4])
            want = block_key(members, gamma, positions[4 * block])
            np.testing.assert_allclose(stored[block], want, rtol=0, atol=2e-5, err_msg=f"{b} block {block}")


@pytest.mark.parametrize("size", [1, 5, 7])
def test_any_split_has_the_same_positions(engine: Engine, size: int) -> None:
    """The position of a block's first member comes from a step before, where that holds it."""
    whole, states, _ = run(engine, len(TOKENS))
    parts, others, _ = run(engine, size)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)
    for name, want in states.items():
        np.testing.assert_allclose(others[name], want, rtol=0, atol=1e-5, err_msg=name)
    if engine.target.capabilities.batch_invariant:
        assert np.array_equal(parts, whole)


def test_positions_matter(plain: Engine) -> None:
    """Each component of them: no two of the tables give the same logits, and of the first two tokens all do."""
    logits = []
    for table in POSITIONS.values():
        with pytest.MonkeyPatch.context() as m:
            inner = plain.executable
            m.setattr(plain, "executable", lambda shape, inner=inner, table=table: Placed(inner(shape), table))
            logits.append(run(plain, len(TOKENS))[0])
    assert np.array_equal(logits[0], plain.logits(TOKENS))
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert np.array_equal(a[:3], b[:3])
            assert np.abs(a[6:] - b[6:]).max() > 1e-3
