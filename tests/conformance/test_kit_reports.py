"""What a run leaves behind: JSON of a stable schema, JUnit, a page; expected failures and what became of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trueup.cli.check import _show_run
from trueup.conformance.errors import KitError
from trueup.conformance.harness import Spec
from trueup.conformance.process import Worker
from trueup.conformance.properties import Property, Verdict
from trueup.conformance.report import SCHEMA, as_data, write
from trueup.conformance.results import Options, Run
from trueup.conformance.runner import _work, replay, run
from trueup.conformance.tasks import Task
from trueup.conformance.xfails import Expected


@pytest.fixture(scope="module")
def done() -> Run:
    """A backend whose ties are wrong, on two ops, speed included."""
    options = Options(
        Spec("wrong_tie", ("bad_backends",)), levels=("ops",), ops=("top_k", "add"), examples=0, speed=True
    )
    return run(options)


def test_the_schema_is_what_it_was(done: Run) -> None:
    """A field that goes or changes its meaning needs another SCHEMA."""
    data = as_data(done, Expected().judge(done))
    assert SCHEMA == "1.0"
    assert data["schema"] == SCHEMA and data["green"] is False
    assert set(data) == {
        "schema", "trueup", "backend", "options", "green", "seconds", "cases", "results", "expected_failures",
        "unexpectedly_passing", "unmatched", "copy_bandwidth",
    }  # fmt: skip
    (top_k,) = (r for r in data["results"] if r["name"] == "top_k")
    assert set(top_k) == {
        "level", "name", "status", "cases", "outcomes", "where", "worst", "worst_case", "bound", "exact", "properties",
        "refusals", "skipped", "failures", "seconds", "speed",
    }  # fmt: skip
    assert top_k["status"] == "failed" and top_k["properties"]["ties"]["failed"]
    (failure,) = top_k["failures"]
    assert list(failure["properties"]) == ["ties"]
    assert failure["replay"] == f"trueup check --plugin bad_backends --backend wrong_tie --replay '{failure['case']}'"


def test_speed_is_a_share_of_the_copy(done: Run) -> None:
    (add,) = (r for r in done.results if r.name == "add")
    assert done.copy_bandwidth and add.speed
    assert add.speed["share"] == pytest.approx(add.speed["gb_s"] * 1e9 / done.copy_bandwidth)


def test_three_files_that_agree(done: Run, tmp_path: Path) -> None:
    write(tmp_path / "deep" / "folder", done, Expected().judge(done))
    folder = tmp_path / "deep" / "folder"
    data = json.loads((folder / "report.json").read_text())
    root = ElementTree.fromstring((folder / "junit.xml").read_text())
    failed = [(c.get("classname"), c.get("name")) for c in root.iter("testcase") if c.find("failure") is not None]
    assert failed == [("ops.top_k", "ties")]
    assert "--replay" in (root.find(".//failure").text or "")  # type: ignore[union-attr]
    page = (folder / "index.html").read_text()
    assert data["results"][0]["failures"][0]["case"].replace("&", "&amp;") in page

    class Tags(HTMLParser):
        seen: Counter[str] = Counter()

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen[tag] += 1
            assert not {"src", "href", "onclick"} & {k for k, _ in attrs}

    Tags().feed(page)
    assert Tags.seen["script"] == Tags.seen["link"] == 0 < Tags.seen["table"]


def written(path: Path, text: str) -> Expected:
    path.write_text(text)
    return Expected.read(path)


def test_an_expected_failure_needs_a_reason(tmp_path: Path) -> None:
    with pytest.raises(KitError, match=r"x:2: ops/top_k/ties has no reason"):
        written(tmp_path / "x", "# a comment\nops/top_k/ties:\n")
    with pytest.raises(KitError, match="expected level/op/property: reason"):
        written(tmp_path / "x", "top_k: slow\n")
    with pytest.raises(KitError, match="listed twice"):
        written(tmp_path / "x", "a/b/c: why\na/b/c: why\n")


def test_expected_failures_pass_and_stale_ones_are_reported(done: Run, tmp_path: Path) -> None:
    judged = written(tmp_path / "x", "ops/top_k/ties: the sort is not stable\n").judge(done)
    assert judged.green(strict=True) and judged.expected == [(("ops", "top_k", "ties"), "the sort is not stable")]
    judged = written(tmp_path / "x", "ops/top_k/ties: a\nops/add/values: b\nops/mul/values: c\n").judge(done)
    assert judged.passing == [("ops", "add", "values")] and judged.unmatched == [("ops", "mul", "values")]
    assert judged.green() and not judged.green(strict=True)


def test_the_table_tells_expected_failures_from_others(done: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for known, said in (
        (Expected({("ops", "top_k", "ties"): "not stable"}), "failed as expected: ties"),
        (Expected(), "FAILED ties"),
    ):
        _show_run(done, known.judge(done))
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ops") and " top_k " in line)
        assert said in row and ("FAILED" in row) == (not known.reasons)


def test_a_failure_replays_by_its_line(spec: Callable[[str], Spec], done: Run) -> None:
    from trueup.conformance.runner import replay

    (failure,) = (f for r in done.results for f in r.failures)
    assert replay(spec("wrong_tie"), failure.case, 20).failed == ["ties"]
    assert replay(spec("numpy_addressed"), failure.case, 20).outcome == "passed"


@pytest.mark.parametrize(
    ("backend", "op", "said"),
    [("never_interleaved", "rope", "attr.interleaved=True"), ("last_place_of_the_table", "attention", "")],
)
def test_a_line_holds_the_values_that_are_told(spec: Callable[[str], Spec], backend: str, op: str, said: str) -> None:
    """Also where another call than the case's own, of other values or attributes, was the first to be wrong."""
    (r,) = run(Options(spec(backend), levels=("ops",), ops=(op,), examples=0)).results
    assert r.failures
    for f in r.failures:
        assert said in f.case and not any(" with " in f" {d}" or "seed" in d for d in f.properties.values()), f
        again = replay(spec(backend), f.case, 20)
        assert {n: again.properties[n].detail for n in again.failed} == f.properties


def test_a_case_has_as_much_time_alone_as_in_its_run(
    spec: Callable[[str], Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case of a whole model takes long; its replay must not be a hang where the run found something else."""
    limits: list[float | None] = []

    def ask(self: Worker, request: Any, timeout: float | None = None) -> dict[str, Any]:
        limits.append(timeout)
        return {"verdict": Verdict(request["case"], "failed", properties={"logits": Property("failed", "off")}).json()}

    monkeypatch.setattr(Worker, "start", lambda self: None)
    monkeypatch.setattr(Worker, "ask", ask)
    case = "model/logits?tokens=24&seed=0"
    assert replay(spec("numpy_addressed"), case, 3).failed == ["logits"]
    worker, options = Worker(spec("numpy_addressed"), 3), Options(spec("numpy_addressed"), timeout=3)
    result = _work(worker, Task("model", "logits", [case], [], False), options)
    assert [f.case for f in result.failures] == [case] and set(limits) == {30}
