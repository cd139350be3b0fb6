"""The trained MTP head against values of other authors: transformers-style logits of a torch implementation, and how often
it agrees with the trunk (3,033 of 4,092 rows of held-out text, 528 of 573 along greedy text)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.models import load_model
from trueup.runtime import Engine
from trueup.runtime.engine import _Part, open_target

DATA = Path(__file__).parents[1] / "data/qwen4exp-tiny"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = load_model(DATA / "qwen4exp-tiny-bf16.gguf")
    made = Engine(model, open_target("cpu", {}), draft_head=True, sequences=1)
    yield made
    made.close()


def logits_of(e: Engine, ids: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
    """Logits of trunk and head at every token; row p of the head comes from (x_p, R_{p-1}), and says what x_{p+1} is."""
    s = e.bundle.create()
    found: dict[str, list[NDArray[np.float32]]] = {"logits": [], "draft_logits": []}
    try:
        e.bundle.reserve(s, len(ids))
        for start in range(0, len(ids), 256):
            part = np.asarray(ids[start : start + 256], np.int32)
            shape, inputs, _ = e._inputs([_Part(s, part, [-1] * len(part), True)], "all")
            out = e.executable(replace(shape, draft="logits")).run(inputs)
            for name, parts in found.items():
                parts.append(out[name][: len(part)].copy())
            s.length += len(part)
    finally:
        e.bundle.free(s)
    return {name: np.concatenate(parts) for name, parts in found.items()}


@pytest.mark.parametrize("i", [0, 1, 2])
def test_logits_of_the_head(engine: Engine, i: int) -> None:
    ref = np.load(DATA / "ref_logits.npz")
    rows = ref[f"mtp_rows_{i}"]
    got = logits_of(engine, ref[f"ids_{i}"])["draft_logits"]
    want = ref[f"mtp0_logits_{i}"]  # row t there predicts x_{t+2} from (R_t, x_{t+1}): our row t+1
    assert np.abs(got[rows + 1] - want).max() < 5e-5


def test_agreement_on_held_out_text(engine: Engine) -> None:
    agreed = rows = 0
    for ids in np.load(DATA / "heldout.npz")["ids"]:
        found = logits_of(engine, ids)
        same = found["logits"].argmax(-1) == found["draft_logits"].argmax(-1)
        agreed, rows = agreed + int(same[1:].sum()), rows + len(ids) - 1
    assert rows == 4092 and abs(agreed - 3033) <= 5


def test_agreement_along_greedy_text(engine: Engine) -> None:
    agreed = rows = 0
    for said in json.loads((DATA / "greedy.json").read_text()).values():
        found = logits_of(engine, np.array([*said["ids"], *said["out"]]))
        same = found["logits"].argmax(-1) == found["draft_logits"].argmax(-1)
        part = same[len(said["ids"]) : -1]
        agreed, rows = agreed + int(part.sum()), rows + len(part)
    assert rows == 573 and abs(agreed - 528) <= 3
