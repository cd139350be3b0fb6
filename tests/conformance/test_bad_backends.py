"""Every wrong backend is caught, and by the property that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from trueup.conformance.harness import Spec
from trueup.conformance.process import Worker
from trueup.conformance.properties import Verdict
from trueup.conformance.runner import failing

Judge = Callable[..., Iterator[Verdict]]

BAD = [
    # backend, op, property; others that may be met first
    ("rows_and_k_swapped", "top_k", "values", {"batch"}),
    ("wrong_tie", "top_k", "ties", set()),
    ("truncated_keys", "top_k", "values", set()),
    ("nan_ignored", "top_k", "values", set()),
    ("argmax_skips_nan", "argmax", "values", set()),
    ("few_in_a_workgroup", "top_k", "values", set()),
    ("fillers_left", "top_k", "written", set()),
    ("off_by_one", "take_rows", "values", set()),
    ("page_offset", "paged_append", "states", set()),
    ("wrong_axis", "group_rms_norm", "values", set()),
    ("masked_row_nan", "softmax", "values", set()),
    ("bf16_state", "gated_delta_rule", "states", set()),
    ("slow_drift", "gated_delta_rule", "drift", {"split", "states"}),
    ("no_subtraction", "gated_delta_rule", "values", set()),
    ("one_past_for_all", "index_scores", "values", set()),
    ("offset_twice", "index_scores", "values", set()),
    ("sink_forgotten", "merge_attention", "values", set()),
    ("bf16_activations", "linear", "values", set()),
    ("batch_shape_noise", "linear", "batch", set()),
    ("run_to_run", "linear", "repeat", set()),
    ("beyond_the_grid", "expert_linear", "written", {"batch"}),
    ("uninitialized", "repeat_streams", "written", set()),
    ("past_the_end", "concat", "canaries", set()),
    ("in_place", "silu", "inputs", set()),
    ("weight_scribbled", "linear", "inputs", set()),
    ("neighbour_slot", "delay", "states", set()),
    ("reads_wide", "scale_rows", "values", set()),
    ("leaking", "add", "memory", set()),
    ("stale_graph", "add", "replay", set()),
    ("keyed_by_shape", "clamp", "cache", set()),
    ("lying_supports", "linear", "refusal", set()),
    ("lying_quietly", "embed", "values", set()),
    ("no_reason", "linear", "refusal", set()),
    ("wavering", "linear", "refusal", set()),
    ("broken_after_errors", "expert_combine", "errors", set()),
]


def caught(verdicts: Iterator[Verdict], name: str, others: set[str]) -> Verdict:
    """The first case that fails by this property; none may fail by another before."""
    for v in verdicts:
        if v.failed:
            first = next(iter(failing(v)))
            if first == name:
                return v
            assert first in others, f"{v.case} fails by {first}: {v.properties[first].detail}"
    pytest.fail(f"no case fails by {name}")


@pytest.mark.parametrize(("backend", "op", "name", "others"), BAD, ids=[b[0] for b in BAD])
def test_a_wrong_kernel_is_caught(judge: Judge, backend: str, op: str, name: str, others: set[str]) -> None:
    v = caught(judge(backend, "ops", op), name, others)
    assert v.properties[name].detail


@pytest.mark.parametrize(
    ("backend", "name"), [("dropped_sink", "states"), ("deferred_sinks", "values"), ("swapped_sinks", "values")]
)
def test_wrong_orders_of_effects_are_caught(judge: Judge, backend: str, name: str) -> None:
    """B37, B38: a sink that is dropped, deferred to the end, or exchanged with another."""
    caught(judge(backend, "effects"), name, {"states", "values"})


def test_a_wrong_fusion_is_caught_alone_and_in_the_graph(judge: Judge) -> None:
    failed = [v for v in judge("wrong_axis_folded", "graph") if v.failed]
    assert any(v.case.startswith("graph/fusion?name=heads_out") and "fusion" in v.failed for v in failed)
    assert any(v.case.startswith("graph/delta?") and "fused" in v.properties["values"].detail for v in failed)


@pytest.mark.fault("B06")
@pytest.mark.parametrize(
    ("backend", "case", "name", "said"),
    [
        ("segfault", "ops/add?dots=33", "crash", "SIGSEGV"),
        ("exits", "ops/sigmoid?dots=3", "crash", "exit code 7"),
        ("hang", "ops/mul?dots=33", "hang", "no answer within 1 s"),
    ],
)
def test_a_crash_and_a_hang_are_failed_cases(
    spec: Callable[[str], Spec], backend: str, case: str, name: str, said: str
) -> None:
    """B06: the worker is lost, the run is not: the next case gets another worker."""
    with Worker(spec(backend), timeout=20 if name == "crash" else 1) as worker:
        v = worker.judge(case)
        assert list(v.properties) == [name] and said in v.properties[name].detail
        worker.timeout = 20
        after = worker.judge("ops/softplus?dots=3")
        assert after.outcome == "passed", after.properties
