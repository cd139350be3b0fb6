"""`trueup gate spec`: passes where speculation is exact, fails where a token or a state is not, and says where."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.runtime import state
from trueup.runtime.speculation import rounds

Run = Callable[..., Any]
SMALL = ("--prompts", "2", "-n", "16")


@pytest.mark.parametrize("draft", ["3", "auto"])
def test_it_passes_here(trueup: Run, draft: str) -> None:
    done = trueup("gate", "spec", "--draft", draft, *SMALL, "--json")
    said = json.loads(done.out)
    assert done.code == 0 and said["passed"] and said["tolerance"] == 0
    assert said["worst_gap"] == 0 and set(said["states"].values()) == {0.0}
    assert said["tokens"] == 32 and said["same_text"] == 2
    assert said["gap_counts"][0] == 32
    assert said["drafted"] or draft == "auto", "which may find that drafts don't pay here"
    assert all(a <= d for a, d in zip(said["accepted"], said["drafted"], strict=False))


def test_for_a_person(trueup: Run) -> None:
    done = trueup("gate", "spec", "--draft", "2", *SMALL)
    assert done.code == 0 and done.out.endswith("passed, tolerance 0\n")
    assert "accepted by position: " in done.out and "ratio " in done.out


def test_a_token_that_the_model_did_not_choose(trueup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that takes row 0 for every row commits tokens that plain decoding never would."""
    right = rounds.verify
    monkeypatch.setattr(rounds, "verify", lambda logits, *rest: right(np.repeat(logits[:1], len(logits), 0), *rest))
    done = trueup("gate", "spec", "--draft", "4", *SMALL, "--json")
    said = json.loads(done.out)
    assert done.code == 1 and not said["passed"] and said["worst_gap"] > 0.1


def test_a_state_that_was_not_taken_back(trueup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of another row is seen in the states, and named."""
    right = state.Bundle.settle

    def settle(self: Any, s: Any, snapshots: Any, rows: int) -> None:
        if 1 < rows < s.length - snapshots.length:
            snapshots.slots[rows - 1], snapshots.slots[rows - 2] = snapshots.slots[rows - 2], snapshots.slots[rows - 1]
        right(self, s, snapshots, rows)

    monkeypatch.setattr(state.Bundle, "settle", settle)
    done = trueup("gate", "spec", "--draft", "4", "--rollback", "snapshots", *SMALL, "--json")
    said = json.loads(done.out)
    assert done.code == 1 and max(said["states"].values()) > 0.01


def test_without_a_head_it_says_so(trueup: Run) -> None:
    assert "no drafter 'nobody'" in trueup("gate", "spec", "--drafter", "nobody").refused()
