"""The guides' Python blocks run as written, and the op reference has an entry for every op."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import trueup.core.ops  # noqa: F401  # all are defined before a guide defines more
from trueup.core.op import OPS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def undefine():
    """Ops that a guide defines are forgotten again."""
    before = set(OPS)
    yield
    for name in set(OPS) - before:
        del OPS[name]


@pytest.mark.parametrize("page", ["add-an-op", "add-a-model", "add-a-backend"])
def test_the_guides_code_runs(page: str, undefine: None, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), namespace)
    for claimed in re.findall(r"print\(.*\)  # (.*)", "".join(blocks)):
        assert claimed in capsys.readouterr().out


def test_the_backend_of_the_guide_runs_the_bundled_model() -> None:
    import trueup.models
    from trueup.core.plan import PlanOptions
    from trueup.runtime.engine import Engine

    block = re.search(r"```python\n(.*?)```", (DOCS / "add-a-backend.md").read_text(), re.S)
    assert block
    namespace: dict[str, object] = {}
    exec(compile(block[1], "add-a-backend.md", "exec"), namespace)
    backend = namespace["Mine"]()
    engine = Engine(trueup.models.load_model(), backend.open(backend.devices()[0]), options=PlanOptions())
    text = "".join(p.text for p in engine.generate("import os\n\ndef ", max_tokens=4))
    reference = trueup.load(backend="reference")
    assert text == "".join(p.text for p in reference.generate("import os\n\ndef ", max_tokens=4))
    used = {p.kernel for p in engine.plan(next(iter(engine._plans)).shape).placements.values()}
    assert "small_k" in used


def test_every_op_is_in_the_reference() -> None:
    text = runpy.run_path(str(DOCS / "hooks.py"))["ops"]()
    missing = [name for name in OPS if f"### {name}" not in text]
    assert not missing
