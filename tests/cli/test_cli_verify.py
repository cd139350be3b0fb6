"""`trueup run --verify`: the same text, judged node by node; a wrong kernel ends it with one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
ARGS = ("run", "-p", "def fib(n):", "-n", 3, "--temp", 0)

WRONG = """
    import numpy as np

    from trueup.core.backend import AddressedTarget, Backend, Device, KernelTable
    from trueup.core.op import OPS
    from trueup.core.ops import linear
    from trueup.core.plugins import hookimpl

    kernels = KernelTable()


    @kernels.implements(linear)
    def _(ctx, x, w):
        ctx.out[...] = linear.body(x, w)
        if w.name == "blk.4.attn_gate.weight" and len(x) == 1:
            ctx.out[0, 5] *= np.float32(1.01)


    for op in OPS.values():
        if not op.view and op is not linear:
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
def wrong(plugin: Callable[[str, str], None]) -> None:
    """A backend with one wrong kernel, in one layer, for steps of one row."""
    plugin("wrong", WRONG)


def test_the_text_is_the_same_and_a_line_says_what_was_judged(trueup: Run) -> None:
    done, plain = trueup(*ARGS, "--verify", "reference:every=2"), trueup(*ARGS)
    assert done.code == 0 and done.out == plain.out
    said = done.err.splitlines()
    assert len(said) == 2 and " nodes of 2 of 4 steps are within their bounds; nearest to its bound came " in said[1]


def test_json_has_the_worst_of_each_op(trueup: Run) -> None:
    about = json.loads(trueup(*ARGS, "--verify", "reference", "--json").out)["verified"]
    assert about["steps"] == about["verified"] == 4 and about["nodes"] > 1000
    assert 0 < about["worst"]["linear"] <= 1


def test_a_wrong_kernel_ends_it(trueup: Run, wrong: None) -> None:
    done = trueup(*ARGS, "--backend", "wrong", "--verify", "reference")
    assert done.code == 1
    assert "step 1: wrong computes #" in done.err and "linear(x: f32[1, 256]" in done.err
    assert "out[0, 5] is " in done.err and " ± " in done.err and "its bound: gamma_(n+2)" in done.err
    assert trueup(*ARGS, "--backend", "wrong").code == 0, "nobody looks"


def test_what_cannot_be_read_is_a_usage_error(trueup: Run) -> None:
    assert "give reference or reference:every=N" in trueup(*ARGS, "--verify", "cpu").refused(2)
