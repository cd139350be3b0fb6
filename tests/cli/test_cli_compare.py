"""`trueup compare`: what it prints, its exit codes, and the command that it prints to run a node again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
TOKENS = ("--tokens", "101,2002,33", "-n", 1)

WRONG = """
    import numpy as np

    from trueup.core.backend import AddressedTarget, Backend, Device, KernelTable
    from trueup.core.op import OPS
    from trueup.core.ops import swiglu
    from trueup.core.plugins import hookimpl

    kernels = KernelTable()


    @kernels.implements(swiglu)
    def late(ctx, gate, up, *, limit):
        ctx.out[...] = swiglu.body(gate, up, limit=limit)
        if ctx.out.ndim == 3:
            ctx.out[-1, 0, 2] *= np.float32(1.001)


    for op in OPS.values():
        if not op.view and op is not swiglu:
            kernels.body(op)


    class Wrong(Backend):
        name = "wrong"
        API = (1, 0)
        driver = False

        def devices(self):
            return [Device("Wrong One", "cpu")]

        def open(self, device):
            return AddressedTarget("wrong", device, kernels)


    @hookimpl
    def trueup_backends():
        return [Wrong]
"""


@pytest.fixture
def wrong(plugin: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backend with one wrong kernel; the folder in which commands run."""
    plugin("wrong", WRONG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_equal_backends(trueup: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = trueup("compare", *TOKENS)
    assert done.code == 0 and done.err == ""
    lines = done.out.splitlines()
    assert lines[0].startswith("cpu (") and "against reference (NumPy): steps of 3 tokens, 1 token" in lines[0]
    assert lines[-1] == "equal: every node is within its bound"
    assert "the likeliest token is the same in 2 of 2 steps" in lines[-2]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_node_is_shown_and_written_and_its_command_finds_it_again(trueup: Run, wrong: Path) -> None:
    done = trueup("compare", "--backend", "wrong", *TOKENS)
    assert done.code == 1
    assert "wrong is wrong at step 0, #" in done.out and "swiglu(gate: f32[3, 4, " in done.out
    assert "layer        blk.0 gdn" in done.out and "kernel       late" in done.out and "recorded as  #" in done.out
    assert "worst entry  out[2, 0, 2]: " in done.out and "|up| times the bound of silu" in done.out
    assert "given" in done.out and "mean" in done.out
    command = shlex.split(done.out.splitlines()[-1])
    assert command[:3] == ["trueup", "compare", "--replay"] and (wrong / command[3]).is_file()
    again = trueup(*command[1:])
    assert again.code == 1 and "by itself on wrong" in again.out and "worst entry  out[2, 0, 2]: " in again.out
    right = trueup("compare", "--replay", command[3], "--backend", "cpu")
    assert right.code == 0 and right.out.splitlines()[-1].startswith("equal: within its bound, at ")


def test_json(trueup: Run, wrong: Path) -> None:
    done = trueup("compare", "--backend", "wrong", "--against", "cpu", *TOKENS, "--json", "--write", "node.safetensors")
    about = json.loads(done.out)
    assert done.code == 1 and about["equal"] is False and about["steps"] == [3]
    found = about["finding"]
    assert (found["backend"], found["op"], found["layer"], found["at"]) == ("wrong", "swiglu", "blk.0 gdn", [2, 0, 2])
    assert abs(found["peer"] - found["expected"]) < found["bound"] < abs(found["got"] - found["expected"])
    assert found["origin"] == [f"#{found['node']} swiglu"] and found["replay"] == "node.safetensors"
    assert [i["name"] for i in found["inputs"]] == ["gate", "up"]
    again = json.loads(trueup("compare", "--replay", "node.safetensors", "--backend", "wrong", "--json").out)
    assert again["equal"] is False and again["from"]["op"] == "swiglu" and again["finding"]["at"] == [2, 0, 2]


def test_the_other_side_may_be_the_wrong_one(trueup: Run, wrong: Path) -> None:
    done = trueup("compare", "--backend", "cpu", "--against", "wrong", *TOKENS)
    assert done.code == 1 and "wrong is wrong at step 0" in done.out and "cpu, given the same: " in done.out
    assert done.out.splitlines()[-1].endswith("--backend wrong")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--backend", "nowhere"), "there is no backend 'nowhere'"),
        (("--tokens", "1,x"), "--tokens: '1,x' is no list of numbers"),
        (("--tokens", "1", "-p", "x"), "give --tokens or a text, not both"),
        (("--tokens", ""), "there are no tokens"),
        (("--tokens", "99999999"), "lies outside the vocabulary"),
        (("--replay", "nothing.safetensors"), "nothing.safetensors: not a replay file"),
        (("--replay", "x", "-p", "x"), "--replay takes no model"),
        (("nothing.gguf",), "nothing.gguf"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2(trueup: Run, args: tuple[str, ...], said: str) -> None:
    assert said in trueup("compare", *args).refused(2)
