"""A failing property prints one command, and that command fails in the same way on the same case."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PROPERTY = """
from hypothesis import given, strategies as st

@given(st.lists(st.integers()), st.booleans())
def test_sum(numbers, unused):
    print("case", numbers)
    assert sum(numbers) < 1000
"""


def test_the_printed_command_replays_the_case(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent.parent / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "test_sum.py").write_text(PROPERTY)

    def run(*args: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    shown = run("--profile", "full")
    command = re.search(r"^python -m pytest (.+ --replay .+)$", shown, re.MULTILINE)
    assert command, shown
    replayed = run(*shlex.split(command[1]))
    assert re.findall(r"^case (.*)$", replayed, re.MULTILINE) == ["[1000]"], replayed
    assert "assert 1000 < 1000" in replayed
