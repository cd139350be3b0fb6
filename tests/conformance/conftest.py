"""What the tests of the kit share: the bad backends on the path, and ways to run the kit on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trueup.conformance import effects, graphs
from trueup.conformance.cases import drawn, explicit
from trueup.conformance.harness import Spec
from trueup.conformance.levels import Bench
from trueup.conformance.properties import Verdict
from trueup.conformance.spaces import find, text

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def bad_backends_on_path() -> Iterator[None]:
    """So that `bad_backends` can be imported here and, through the path, in workers."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture
def spec() -> Callable[[str], Spec]:
    """How a backend of `bad_backends` is named."""
    return lambda name: Spec(name, ("bad_backends",))


@pytest.fixture
def judge(spec: Callable[[str], Spec]) -> Callable[..., Iterator[Verdict]]:
    """Verdicts on a backend of this package, in this process: of an op's cases, or of a level's."""

    def verdicts(
        name: str, level: str, op: str = "", examples: int = 0, least: int = 0, most: int = 1 << 20
    ) -> Iterator[Verdict]:
        """`least`, `most`: of the largest size of a case."""
        bench = Bench(spec(name))
        if level == "ops":
            recipes = explicit(find(op), {}) + drawn(find(op), examples, 1)
            cases = [f"ops/{text(r)}" for r in recipes if least <= max((*r.axes.values(), *r.dots)) <= most]
        elif level == "effects":
            cases = effects.programs(20, 0)
        else:
            made = graphs.cases(0, 0) | graphs.fusion_cases([p.name for p in bench.rig.target.patterns], 0)
            cases = [c for lines in made.values() for c in lines if "from=model" not in c]
        for case in cases:
            yield bench.run(case)

    return verdicts
