"""Built programs on disk: found by the next process, and never believed where they are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyopencl")

import pyopencl as cl

from trueup.backends.opencl import devices
from trueup.backends.opencl.caches import POCL, Binaries, mend_pocl
from trueup.core.errors import Unavailable

SOURCE = "kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }"


@pytest.fixture(scope="module")
def device() -> tuple[Any, Any]:
    try:
        _, handle = devices.find()[0]
    except Unavailable as e:
        pytest.skip(str(e))
    return cl.Context([handle]), handle


def built(device: tuple[Any, Any], folder: Path, source: str = SOURCE, options: tuple[str, ...] = ()) -> int:
    """How often the compiler was asked; the program must have its kernel."""
    context, handle = device
    asked: list[int] = []

    def build() -> Any:
        asked.append(1)
        return cl.Program(context, source).build(list(options))

    cl.Kernel(Binaries(folder).program(context, handle, source, list(options), build), "twice")
    return len(asked)


def test_a_program_is_built_once(device: tuple[Any, Any], tmp_path: Path) -> None:
    assert [built(device, tmp_path) for _ in range(3)] == [1, 0, 0]
    assert built(device, tmp_path, SOURCE + " ") == 1 and built(device, tmp_path, options=("-w",)) == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["empty", "short", "bit", "other"])
def test_what_is_damaged_is_built_anew(device: tuple[Any, Any], tmp_path: Path, damage: str) -> None:
    """Nothing half-written is loaded, and the entry is whole again after."""
    built(device, tmp_path)
    (path,) = tmp_path.iterdir()
    raw = path.read_bytes()
    bad = {"empty": b"", "short": raw[:-100], "bit": raw[:90] + bytes([raw[90] ^ 1]) + raw[91:], "other": b"x" * 500}
    path.write_bytes(bad[damage])
    assert [built(device, tmp_path) for _ in range(2)] == [1, 0]


def test_a_folder_that_can_not_be_written_costs_a_build(device: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert [built(device, tmp_path / "file" / "x") for _ in range(2)] == [1, 1]


def test_a_damaged_cache_of_pocl_is_survived_and_used_again(device: tuple[Any, Any], tmp_path: Path) -> None:
    """PoCL ends a process that loads a cut file. The second process builds nothing; after damage, only what was hurt."""
    if device[1].platform.name != POCL:
        pytest.skip("the first device is not PoCL's")
    code = (
        "from trueup.backends.opencl import devices\n"
        "from trueup.backends.opencl.target import OpenCLTarget\n"
        "from trueup.core.backend import Storage\n"
        "from trueup.core.graph import Graph\n"
        "from trueup.core.ops import add\n"
        "from trueup.core.plan import build_plan\n"
        "import numpy as np\n"
        "t = OpenCLTarget(*devices.find()[0])\n"
        "g = Graph(); x = g.input('x', 4); g.output('y', add(x, x))\n"
        "print(t.compile(build_plan(g, t), Storage()).run({'x': np.ones(4, np.float32)})['y'].sum())\n"
    )

    def process() -> set[Path]:
        env = {**os.environ, "POCL_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout.strip() == "8.0", done.stderr[-2000:]
        return {p for p in tmp_path.rglob("*.*") if p.suffix in (".so", ".bc")}

    first = process()
    times = {p: p.stat().st_mtime_ns for p in first}
    assert process() == first and {p: p.stat().st_mtime_ns for p in first} == times
    for kind in (".so", ".bc"):
        hurt = next(p for p in first if p.suffix == kind)
        hurt.write_bytes(hurt.read_bytes()[:-200] if kind == ".so" else b"")
        assert {p.suffix for p in process()} == {".so", ".bc"}


def test_whole_programs_of_pocl_stay(tmp_path: Path) -> None:
    (tmp_path / "AB" / "CD" / "add").mkdir(parents=True)
    (tmp_path / "AB" / "CD" / "program.bc").write_bytes(b"BC\xc0\xde" + b"x" * 40)
    (tmp_path / "tempfile").write_bytes(b"")
    assert mend_pocl(tmp_path) == [] and mend_pocl(tmp_path / "none") == []
    (tmp_path / "AB" / "CD" / "add" / "add.so").write_bytes(b"\x7fELF")
    assert mend_pocl(tmp_path) == [tmp_path / "AB" / "CD"] and not (tmp_path / "AB" / "CD").exists()
