"""Benchmarks: what is timed and what is not, the arithmetic, and no figure without a green check."""

from __future__ import annotations

import csv
import io
import itertools
import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import trueup
from trueup.cli.app import app
from trueup.conformance.bench import Judge, Speed, measure
from trueup.conformance.verify import Mismatch


class Fake:
    """An engine that notes what it is fed."""

    vocab_size, context, batch = 100, 64, 8

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.held = 0

    def session(self) -> Fake:
        return self

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *exc: object) -> None:
        self.said.append("close")

    def feed(self, ids: list[int], logits: str | None = "last") -> None:
        assert all(0 <= i < 100 for i in ids)
        self.said.append(len(ids))
        self.held += len(ids)

    def checkpoint(self) -> int:
        return self.held

    def restore(self, at: int) -> None:
        self.said.append("restore")
        self.held = at

    def drop(self, at: int) -> None:
        self.said.append("drop")


def test_each_repetition_begins_at_the_depth_and_the_first_is_not_counted() -> None:
    engine, ticks = Fake(), itertools.count(0, 2.0)
    made = list(measure(engine, prompts=[4], outputs=[3], depths=[0, 5], repetitions=2, clock=lambda: next(ticks)))  # type: ignore[arg-type]
    assert [s.test for s in made] == ["pp4", "tg3", "pp4 @ d5", "tg3 @ d5"]
    assert all(s.seconds == (2.0, 2.0) for s in made) and made[0].mean == 2.0 and made[1].mean == 1.5
    once = [4, "restore"] * 3 + ["drop"] + [1, 1, 1, "restore"] * 3 + ["drop"]
    assert engine.said == [*once, "close", 5, *once, "close"]


def test_mean_and_deviation_are_of_the_rates() -> None:
    made = Speed("pp", 10, 0, (1.0, 2.0))
    assert made.rates == [10, 5] and made.mean == 7.5 and made.deviation == pytest.approx(12.5**0.5)
    assert Speed("tg", 1, 0, (4.0,)).deviation == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompts": [0]}, "prompts must be at least 1, got 0"),
        ({"depths": [-1]}, "depths must be at least 0, got -1"),
        ({"repetitions": 0}, "repetitions must be at least 1"),
        ({"prompts": [60], "depths": [5]}, "65 tokens, depth included, exceed the context of 64"),
    ],
)
def test_what_can_not_be_measured(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list(measure(Fake(), **{"prompts": [1], "outputs": [1]} | options))  # type: ignore[arg-type]


def test_the_check_judges_the_nodes_of_the_steps_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge()
    engine = trueup.load(None, backend="cpu", context=64, watch=judge)
    try:
        with engine.session() as s:
            s.feed([1, 2])
        assert judge.verifier.verified == 0
        judge.check(engine)
        assert judge.verifier.verified == 2 and judge.verifier.tally.nodes > 300
        from trueup.backends.cpu import _native as native

        good = native.silu
        wrong = trueup.load(None, backend="cpu", context=64, watch=judge)
        monkeypatch.setattr(native, "silu", lambda out, x, scale=1.0: good(out, x, scale=1.01 * scale))
        from trueup.backends.cpu.kernels import kernels
        from trueup.core.ops import silu

        run = kernels.kernels[silu][0].run
        cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))  # type: ignore[attr-defined]
        monkeypatch.setattr(cells["function"], "cell_contents", native.silu)
        with pytest.raises(Mismatch, match="silu"):
            judge.check(wrong)
        wrong.close()
    finally:
        engine.close()


def test_the_command_in_its_three_forms() -> None:
    def said(*more: str) -> str:
        run = CliRunner().invoke(app, ["bench", "-p", "3", "-n", "2", "-d", "0,4", "-r", "2", *more])
        assert run.exit_code == 0, run.output
        return run.stdout

    rows = list(csv.DictReader(io.StringIO(said("-o", "csv", "--no-check"))))
    assert [r["test"] for r in rows] == ["pp3", "tg2", "pp3 @ d4", "tg2 @ d4"]
    assert all(float(r["t/s"]) > 0 and r["check"] == "not checked" for r in rows)
    made = json.loads(said("-o", "json"))
    assert made["check"] == "passed" and made["backend"] == "cpu" and len(made["lines"]) == 4
    line = made["lines"][1]
    assert line["t/s"] == pytest.approx(np.mean([2 / s for s in line["seconds"]])) and len(line["seconds"]) == 2
    table = said("-p", "0", "--no-check").splitlines()
    assert table[0].startswith("| model") and [t.split("|")[7].strip() for t in table[2:]] == ["tg2", "tg2 @ d4"]


@pytest.mark.parametrize(("arg", "value"), [("-p", "x"), ("-n", "-1"), ("-d", ""), ("-o", "xml")])
def test_wrong_options_are_usage_errors(arg: str, value: str) -> None:
    run = CliRunner().invoke(app, ["bench", arg, value])
    assert run.exit_code == 2 and "expected" in run.output
