"""`--strict` of `run` and `explain`: the bundled model is strict; a graph that is not is one line that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trueup.core.ops import silu
from trueup.models.qwen4exp import Qwen4Exp

Run = Callable[..., Any]


def test_the_bundled_model_is_strict(trueup: Run) -> None:
    args = ("run", "-p", "def fib(n):", "-n", 2, "--temp", 0)
    assert trueup(*args, "--strict", "--verify", "reference").out == trueup(*args).out
    assert trueup("explain", "--strict", "--tokens", 5).code == 0


@pytest.mark.parametrize("command", [("run", "-p", "x", "-n", 1), ("explain",)])
def test_a_graph_that_is_not_strict_is_refused(
    trueup: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[Any, ...]
) -> None:
    build = Qwen4Exp.build

    def careless(self: Any, *args: Any, **more: Any) -> Any:
        graph = build(self, *args, **more)
        silu(graph.outputs["logits"])
        return graph

    monkeypatch.setattr(Qwen4Exp, "build", careless)
    said = trueup(*command, "--strict").refused(1)
    assert said.startswith("nobody uses what #") and "silu(x: f32[1, 4096]; scale=1.0) gives" in said
    assert trueup(*command).code == 0
