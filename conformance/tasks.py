"""What a run consists of: for each level and name its cases. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.core.op import OPS

from .spaces import text


@dataclass
class Task:
    """The cases of one name. `must`: always met; `more`: as time allows. `claimed`: none running is a failure."""

    level: str
    name: str
    must: list[str]
    more: list[str]
    claimed: bool


def groups(
    levels: Sequence[str], ops: Sequence[str], examples: int, seed: int, model: str | None, about: Mapping[str, Any]
) -> list[list[Task]]:
    """Tasks, grouped by what one worker should run in a row: scenarios of a model share the reference's logits."""
    out: list[list[Task]] = []
    if "ops" in levels:
        out += [[t] for t in _ops(ops, examples, seed, about)]
    if ops:
        return out
    if "effects" in levels:
        from .effects import programs

        out.append([Task("effects", "mix", programs(max(20, examples), seed), [], True)])
    if "graph" in levels:
        from . import graphs

        found = graphs.cases(examples // 20, seed) | graphs.fusion_cases(about["fusions"], seed)
        out += [[Task("graph", name, cases, [], True)] for name, cases in found.items()]
    if "model" in levels:
        from .model import cases

        scenarios = cases(model, seed, long=examples >= 100)
        out.insert(0, [Task("model", name, lines, [], False) for name, lines in scenarios.items()])
    if "speculative" in levels:
        from . import speculative

        scenarios = speculative.cases(model, seed, long=examples >= 100)
        out.insert(0, [Task("speculative", name, lines, [], False) for name, lines in scenarios.items()])
    return out


def _ops(names: Sequence[str], examples: int, seed: int, about: Mapping[str, Any]) -> Iterator[Task]:
    from .cases import drawn, explicit  # hypothesis is needed here alone

    claims, claimed = about["claims"], set(about["claimed"])
    for name in names or sorted(OPS):
        op = OPS[name]
        must, more = explicit(op, claims["thresholds"], claims["max_rows"]), drawn(op, examples, seed)
        lines, others = ([f"ops/{text(r)}" for r in recipes] for recipes in (must, more))
        yield Task("ops", name, lines, others, ("contiguous" if op.view else name) in claimed)
