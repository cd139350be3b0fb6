"""The kit judges the CUDA backend on the emulated device: an op of each kind that it can emulate in a minute, since the kit's
large grids cost it minutes elsewhere. On a GPU `trueup check --backend cuda` judges all ops, at every level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEEN_ELSEWHERE = 600
"""Seconds that the kit may take on a loaded machine."""


@pytest.mark.timeout(SEEN_ELSEWHERE + 30)
def test_ops_hold_under_the_kit(tmp_path: Path) -> None:
    given = ["--backend", "cuda_emulated", "--plugin", "emulated_cuda.backend", "--level", "ops", "--examples", "0"]
    given += ["--op", "add", "--op", "top_k"]
    command = [sys.executable, "-c", "from trueup.cli import main; main()", "check", *given, "--report", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=SEEN_ELSEWHERE
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads((tmp_path / "report.json").read_text())
