"""Backends that are right pass, whatever their kind; what they do not claim is measured, what they refuse is listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from trueup.conformance.harness import Spec
from trueup.conformance.levels import Bench
from trueup.conformance.properties import Verdict
from trueup.conformance.results import Options
from trueup.conformance.runner import run
from trueup.conformance.spaces import find, text

Judge = Callable[..., Iterator[Verdict]]

SAMPLE = (
    "top_k",
    "linear",
    "expert_combine",
    "attention",
    "gated_delta_rule",
    "paged_append",
    "delay",
    "rope",
    "softmax",
)


def wrong(verdicts: Iterator[Verdict]) -> list[str]:
    return [f"{v.case}: {n}: {v.properties[n].detail}" for v in verdicts for n in v.failed]


@pytest.mark.parametrize("op", SAMPLE)
@pytest.mark.parametrize("backend", ["numpy_addressed", "numpy_managed"])
def test_bodies_pass(judge: Judge, backend: str, op: str) -> None:
    """Many rows are left to `test_many_rows`, as bodies are slow."""
    assert wrong(judge(backend, "ops", op, examples=5, most=1100)) == []


def test_a_region_of_one_entry_is_still_a_region(spec: Callable[[str], Spec]) -> None:
    """Where what lies in strides is contiguous by chance."""
    v = Bench(spec("numpy_addressed")).run("ops/trailing_mean?axis.tokens=1&axis.n=1&attr.every=2&lay.tail=region")
    assert v.outcome == "passed", v.properties


@pytest.mark.fault("B76")
@pytest.mark.parametrize("op", ["take_rows", "top_k", "rms_norm"])
def test_many_rows(judge: Judge, op: str) -> None:
    assert wrong(v for v in judge("numpy_addressed", "ops", op, least=65_000)) == []


@pytest.mark.fault("B37")
@pytest.mark.parametrize("backend", ["numpy_addressed", "numpy_managed"])
def test_bodies_pass_in_every_legal_order(judge: Judge, backend: str) -> None:
    assert wrong(judge(backend, "effects")) == []


def test_right_fusions_pass_and_are_used(judge: Judge) -> None:
    verdicts = list(judge("numpy_fused", "graph"))
    assert wrong(iter(verdicts)) == []
    used = {v.case.split("name=")[1].split("&")[0] for v in verdicts if "fusion" in v.properties}
    assert used == {"norm_gate_up", "rope_append"}


def test_the_reference_is_judged_by_oracles_of_another_author() -> None:
    from trueup.conformance.cases import explicit

    bench = Bench(Spec("reference"))
    assert bench.examiner.own_oracles
    for op in ("rms_norm", "merge_attention", "chunk_wy", "ngram_rows", "index_scores", "trailing_mean"):
        cases = [f"ops/{text(r)}" for r in explicit(find(op), {})[::2] if max((*r.axes.values(), *r.dots)) < 1000]
        assert wrong(bench.run(c) for c in cases) == []


def test_poison_and_canaries_do_not_apply_to_managed_memory(judge: Judge) -> None:
    v = next(judge("numpy_managed", "ops", "add"))
    assert (v.properties["written"].status, v.properties["canaries"].status) == ("n/a", "n/a")


@pytest.mark.fault("B42")
def test_what_is_not_claimed_is_measured(judge: Judge) -> None:
    v = next(judge("undeclared", "ops", "linear"))
    assert {n: v.properties[n].status for n in ("repeat", "batch")} == {"repeat": "measured", "batch": "measured"}
    assert v.properties["batch"].detail == "held"


def test_what_kernels_print_disturbs_nothing(spec: Callable[[str], Spec]) -> None:
    done = run(Options(spec("prints"), levels=("ops",), ops=("softplus",), examples=0))
    assert [r.status for r in done.results] == ["passed"]


def test_a_backend_of_one_op_passes_and_its_refusals_are_listed(spec: Callable[[str], Spec]) -> None:
    done = run(Options(spec("only_linear"), levels=("ops",), ops=("linear",), examples=0))
    assert done.results[0].status == "passed"
    done = run(Options(spec("only_linear"), levels=("ops",), ops=("add",), examples=0))
    (r,) = done.results
    assert dict(r.refusals).keys() == {"no kernel for add"}
    assert r.failed == ["cases"], "asked for by name, an op that runs nothing is no pass"


@pytest.mark.fault("B84")
def test_nothing_of_nothing_is_no_pass(spec: Callable[[str], Spec]) -> None:
    """A backend whose kernels refuse every call has claimed them."""
    done = run(Options(spec("claims_nothing"), levels=("ops",), ops=("mul",), examples=0))
    assert done.results[0].failed == ["cases"]
    assert "0 of" in done.results[0].failures[0].properties["cases"]


@pytest.mark.parametrize(("backend", "op"), [("never_room", "silu"), ("not_now", "take_rows")])
def test_errors_of_the_right_type_alone_are_no_pass(spec: Callable[[str], Spec], backend: str, op: str) -> None:
    """A yes may end in a typed error, but what never computed anything was not judged."""
    (r,) = run(Options(spec(backend), levels=("ops",), ops=(op,), examples=0)).results
    assert r.ran == 0 and r.status == "failed" and r.failed == ["cases"]
    detail = r.failures[0].properties["cases"]
    assert f"0 of {r.cases} cases" in detail and ("no room" in detail or "not now" in detail)


def test_a_typed_error_hides_nothing(spec: Callable[[str], Spec]) -> None:
    """What was found before it is told, with the command that replays it."""
    (r,) = run(Options(spec("wrong_and_then_no_room"), levels=("ops",), ops=("softmax",), examples=0)).results
    assert r.outcomes["failed"] and "values" in r.failed
    assert any("values" in f.properties and f.case for f in r.failures)


@pytest.mark.parametrize(
    ("levels", "name"), [(("effects",), "mix"), (("graph",), "ngrams"), (("graph",), "dense")], ids=str
)
def test_a_graph_that_the_reference_alone_runs_is_no_pass(
    spec: Callable[[str], Spec], levels: tuple[str, ...], name: str
) -> None:
    """Nothing of the backend was judged by it."""
    done = run(Options(spec("only_top_k"), levels=levels, examples=20))
    r = next(r for r in done.results if r.name == name)
    assert r.ran == 0 and r.status != "passed" and not r.where
    assert dict(r.refusals) == {"the backend runs no node of it": r.cases}


def test_a_scenario_that_is_left_out_is_no_pass(spec: Callable[[str], Spec]) -> None:
    v = Bench(spec("undeclared")).run("speculative/sampled?tokens=8&seed=0")
    assert v.outcome == "refused" and "does not claim to be batch-invariant" in v.reason


def test_where_effects_ran_is_said(spec: Callable[[str], Spec]) -> None:
    for name, where in (("numpy_addressed", "device"), ("only_linear", "")):
        (r,) = run(Options(spec(name), levels=("effects",), examples=20)).results
        assert list(r.where) == [where] * bool(where)


@pytest.mark.parametrize(
    ("backend", "scenario"), [("numpy_managed", "restore"), ("bf16_state", "chunks"), ("dropped_sink", "logits")]
)
def test_a_model_is_right_on_right_backends_alone(spec: Callable[[str], Spec], backend: str, scenario: str) -> None:
    v = Bench(spec(backend)).run(f"model/{scenario}?tokens=12")
    assert v.failed == ([] if backend == "numpy_managed" else [scenario]), v.properties
