"""A run as data: JSON of a stable schema, and JUnit XML. The page for people is in `page`.

`SCHEMA` changes its first number when a field goes or changes its meaning, its second when one is added.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .bounds import BITS
from .page import page
from .results import Result, Run
from .runner import replay_command
from .xfails import Judged

SCHEMA = "1.0"


def as_data(run: Run, judged: Judged) -> dict[str, Any]:
    """The whole run as JSON data."""
    o = run.options
    return {
        "schema": SCHEMA,
        "trueup": _version(),
        "backend": {"name": o.spec.name, **{k: v for k, v in run.about.items() if k != "claimed"}},
        "options": {"levels": list(o.levels), "examples": o.examples, "ops": list(o.ops), "seed": o.seed},
        "green": judged.green(),
        "seconds": round(run.seconds, 3),
        "cases": sum(r.cases for r in run.results),
        "results": [_result(r, run) for r in run.results],
        "expected_failures": [{"key": "/".join(k), "reason": why} for k, why in judged.expected],
        "unexpectedly_passing": ["/".join(k) for k in judged.passing],
        "unmatched": ["/".join(k) for k in judged.unmatched],
        "copy_bandwidth": run.copy_bandwidth,
    }


def _result(r: Result, run: Run) -> dict[str, Any]:
    return {
        "level": r.level,
        "name": r.name,
        "status": r.status,
        "cases": r.cases,
        "outcomes": _counts(r.outcomes),
        "where": _counts(r.where),
        "worst": _finite(r.worst),
        "worst_case": r.worst_case,
        "bound": r.bound,
        "exact": r.level == "ops" and r.name in BITS,
        "properties": {n: {**_counts(c), "detail": r.details.get(n, "")} for n, c in r.properties.items()},
        "refusals": _counts(r.refusals),
        "skipped": r.skipped,
        "failures": [
            {"case": f.case, "found": f.found, "properties": f.properties, "replay": replay_command(run.options.spec, f.case)}
            for f in r.failures
        ],
        "seconds": round(r.seconds, 3),
        "speed": r.speed,
    }  # fmt: skip


def _counts(c: Counter[str]) -> dict[str, int]:
    return {k: n for k, n in c.items() if n}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _version() -> str:
    try:
        return version("trueup")
    except PackageNotFoundError:
        return "unknown"


def junit(run: Run, judged: Judged) -> str:
    """JUnit XML: a suite for each level, a test case for each name and property."""
    root = ElementTree.Element("testsuites", name=f"trueup check --backend {run.options.spec.name}")
    expected = dict(judged.expected)
    for level in dict.fromkeys(r.level for r in run.results):
        results = [r for r in run.results if r.level == level]
        suite = ElementTree.SubElement(root, "testsuite", name=level)
        total = Counter[str]()
        for r in results:
            for name in list(r.properties) or ["cases"]:
                case = ElementTree.SubElement(suite, "testcase", classname=f"{level}.{r.name}", name=name)
                case.set("time", f"{r.seconds / max(len(r.properties), 1):.3f}")
                total["tests"] += 1
                key = (level, r.name, name)
                if key in expected:
                    ElementTree.SubElement(case, "skipped", message=f"expected: {expected[key]}")
                    total["skipped"] += 1
                elif name in r.failed:
                    text = [f for f in r.failures if name in f.properties]
                    node = ElementTree.SubElement(
                        case, "failure", message=_clean(text[0].properties[name]) if text else name
                    )
                    node.text = _clean("\n".join(replay_command(run.options.spec, f.case) for f in text if f.case))
                    total["failures"] += 1
                elif r.status == "refused":
                    ElementTree.SubElement(case, "skipped", message=_clean("refused: " + "; ".join(r.refusals)))
                    total["skipped"] += 1
        for k in ("tests", "failures", "skipped"):
            suite.set(k, str(total[k]))
        suite.set("time", f"{sum(r.seconds for r in results):.3f}")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _clean(text: str) -> str:
    """Without what XML can't hold."""
    return "".join(c for c in text if c in "\t\n" or c >= " ")


def write(folder: Path, run: Run, judged: Judged) -> None:
    """report.json, junit.xml and index.html into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    data = as_data(run, judged)
    (folder / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    (folder / "junit.xml").write_text(junit(run, judged))
    (folder / "index.html").write_text(page(data))
