"""PyTorch as a backend: of another author than the bodies, whole, and right where PyTorch is there to run it."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import trueup.core.ops  # noqa: F401  # defines them
from trueup.core.errors import Unavailable
from trueup.core.op import OPS

Command = Callable[..., "subprocess.CompletedProcess[str]"]
PACKAGE = Path(__file__).parents[2] / "examples" / "backend-torch" / "trueup_torch"
FAMILIES = ("attention", "caches", "delta", "dense", "experts", "select")


def trees() -> dict[str, ast.Module]:
    return {p.stem: ast.parse(p.read_text()) for p in PACKAGE.glob("*.py")}


def test_every_op_has_a_kernel_of_its_own() -> None:
    found = [
        d.args[0].attr
        for family in FAMILIES
        for f in ast.walk(trees()[family])
        if isinstance(f, ast.FunctionDef)
        for d in f.decorator_list
        if isinstance(d, ast.Call) and isinstance(d.args[0], ast.Attribute)
    ]
    wanted = [name for name, op in OPS.items() if not op.view and op.body.__module__.startswith("trueup.core.ops")]
    assert sorted(found) == sorted(wanted)


def test_kernels_call_neither_numpy_nor_the_bodies() -> None:
    for name, tree in trees().items():
        modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert name == "target" or not any(m.partition(".")[0] == "numpy" for m in modules), name
        called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
        assert not [f.attr for f in called if isinstance(f, ast.Attribute) and ast.unparse(f.value) == "ops"], name


@pytest.fixture
def module() -> ModuleType:
    """The plugin's module, which imports no torch by itself."""
    spec = importlib.util.spec_from_file_location("trueup_torch_alone", PACKAGE / "__init__.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    before = "torch" in sys.modules
    spec.loader.exec_module(made)
    assert before or "torch" not in sys.modules
    return made


def test_where_there_is_no_torch_it_says_so(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unavailable, match="^PyTorch can't be imported: ModuleNotFoundError: "):
        module.Torch().devices()


# -- where PyTorch is --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch(installed: Callable[[str], Command]) -> Command:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return installed("backend-torch")


def test_it_lists_devices_by_torchs_names(torch: Command) -> None:
    (found,) = (b for b in json.loads(torch("backends", "--json").stdout) if b["name"] == "torch")
    assert found["available"], found["reason"]
    assert (found["devices"][0]["name"], found["devices"][0]["kind"]) == ("cpu", "cpu")
    assert all(d["name"].startswith(("cuda:", "mps")) and d["kind"] == "gpu" for d in found["devices"][1:])


OPERATIONS = (
    "attention", "index_scores", "causal_conv", "ngram_rows", "paged_append", "gated_delta_rule", "chunk_delta_scan",
    "chunk_wy", "expert_combine", "linear", "rms_norm", "rope", "top_k", "softmax",
)  # fmt: skip


@pytest.mark.parametrize("level", ["ops", "effects", "graph"])
def test_it_passes_the_kit(torch: Command, level: str) -> None:
    chosen = [w for op in OPERATIONS for w in ("--op", op)] if level == "ops" else []
    done = torch("check", "--backend", "torch", "--level", level, "--examples", 1, *chosen, "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    results = json.loads(done.stdout)["results"]
    assert all(not r["refusals"] for r in results)
    if level == "ops":
        assert {r["name"]: set(r["where"]) for r in results} == {op: {"device"} for op in OPERATIONS}


def test_a_model_writes_the_same_text_and_nothing_falls_back(torch: Command) -> None:
    given = ("-n", 12, "--temp", 0)
    done = torch("run", "--backend", "torch:cpu", *given)
    assert done.returncode == 0 and "fell back" not in done.stderr
    assert done.stdout == torch("run", "--backend", "reference", *given).stdout
