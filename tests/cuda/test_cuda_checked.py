"""Each op's kernels with every access of memory looked at, and in several orders of their threads: what compute-sanitizer's
memcheck, racecheck and initcheck look for, on small cases of the kit, which also judges the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import trueup.core.ops  # noqa: F401  # registers the ops
from trueup.conformance.cases import drawn, explicit
from trueup.conformance.harness import Spec
from trueup.conformance.levels import Bench
from trueup.conformance.spaces import find, text
from trueup.core.op import OPS

LARGEST = 130
"""Largest size of a case: of more threads and blocks no more can be learnt here."""
CASES = {"cuda_checked": 12, "cuda_shuffled": 6}
"""How many small cases an op is given."""
TYPES = {"f32", "bf16", "q4_k", "i32", "u8"}
"""Types that small cases may have: each type of weight is a program to compile; `test_cuda_ops` runs them all."""
REACH = {
    "top_k": [
        "axis.rows=2&axis.candidates=700&attr.k=33",
        "axis.rows=2&axis.candidates=700&attr.k=1&fill.scores=equal",
        "axis.rows=1&axis.candidates=9000&attr.k=70",
    ],
    "argmax": ["axis.rows=2&axis.candidates=700"],
    "attention": [
        "axis.tokens=2&axis.pages=6&axis.blocks=6&axis.entries=32&fill.past=full&axis.d=33&axis.dv=17",
        "axis.tokens=2&axis.pages=6&axis.blocks=6&axis.entries=32&fill.past=full&attr.window=100",
    ],
    "gated_delta_rule": [
        "axis.tokens=100&axis.kheads=1&axis.rep=2&axis.dk=16&axis.dv=9&axis.seqs=1&axis.slot=6",
        "axis.tokens=100&axis.kheads=1&axis.rep=2&axis.dk=16&axis.dv=9&axis.seqs=1&axis.slot=6&absent=&fill.keep=some",
    ],
    "linear": ["dots=9&axis.n=300&axis.m=40&type.weight=bf16", "dots=2&axis.n=512&axis.m=33&type.weight=q4_k"],
}
"""Cases that reach what small ones don't: rows longer than a block, several chunks, several passes."""


@pytest.fixture(scope="module")
def bench(emulator_on_path: None) -> Iterator[Callable[[str], Bench]]:
    """The kit in this process, on an emulated device."""
    made: dict[str, Bench] = {}
    yield lambda name: made.setdefault(name, Bench(Spec(name, ("emulated_cuda.backend",))))
    for b in made.values():
        b.rig.target.close()


def cases(op: str, count: int) -> list[str]:
    """The first explicit cases of an op that are small enough, and as many random ones."""
    known = [*explicit(find(op), {}), *drawn(find(op), count, 1)]
    small = [
        r for r in known
        if max((*r.axes.values(), *r.dots), default=0) <= LARGEST and set(r.types.values()) <= TYPES
    ]  # fmt: skip
    made = [f"ops/{text(r)}" for r in small[:: max(1, len(small) // count)][:count]]
    return made + [f"ops/{op}?{line}" for line in REACH.get(op, ())]


@pytest.mark.parametrize("backend", CASES)
@pytest.mark.parametrize("op", sorted(n for n, o in OPS.items() if not o.view))
def test_no_access_is_wrong(bench: Callable[[str], Bench], backend: str, op: str) -> None:
    ran: list[Any] = []
    for case in cases(op, CASES[backend]):
        verdict = bench(backend).run(case)
        ran.append(verdict)
        assert verdict.outcome != "failed", f"{case}: " + "; ".join(
            f"{n}: {verdict.properties[n].detail}" for n in verdict.failed
        )
    assert any(v.outcome == "passed" for v in ran)


def test_a_model_makes_no_wrong_access(bench: Callable[[str], Bench]) -> None:
    """The bundled model's greedy text is the reference's too."""
    verdict = bench("cuda_checked").run("model/greedy")
    assert verdict.outcome == "passed", "; ".join(f"{n}: {verdict.properties[n].detail}" for n in verdict.failed)
