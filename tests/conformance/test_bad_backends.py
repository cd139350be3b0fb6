"""Every wrong backend is caught, and by the property that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trueup.conformance.harness import Spec
from trueup.conformance.process import Worker
from trueup.conformance.properties import Verdict
from trueup.conformance.runner import failing
from trueup.core.errors import Unavailable

Judge = Callable[..., Iterator[Verdict]]

BAD = [
    # backend, op, property; others that may be met first; public faults that it has
    ("rows_and_k_swapped", "top_k", "values", {"batch"}, "B01"),
    ("wrong_tie", "top_k", "ties", set(), "B02"),
    ("truncated_keys", "top_k", "values", set()),
    ("nan_ignored", "top_k", "values", set(), "B05"),
    ("argmax_skips_nan", "argmax", "values", set(), "B05"),
    ("few_in_a_workgroup", "top_k", "values", set(), "B03"),
    ("fillers_left", "top_k", "written", set()),
    ("off_by_one", "take_rows", "values", set()),
    ("page_offset", "paged_append", "states", set(), "B21"),
    ("wrong_axis", "group_rms_norm", "values", set()),
    ("never_interleaved", "rope", "values", set()),
    ("last_place_of_the_table", "attention", "values", set()),
    ("masked_row_nan", "softmax", "values", set(), "B07"),
    ("bf16_state", "gated_delta_rule", "states", set(), "B34"),
    ("slow_drift", "gated_delta_rule", "drift", {"split", "states"}, "B34"),
    ("no_subtraction", "gated_delta_rule", "values", set(), "B35"),
    ("one_past_for_all", "index_scores", "values", set(), "B12"),
    ("offset_twice", "index_scores", "values", set(), "B13"),
    ("sink_forgotten", "merge_attention", "values", set()),
    ("bf16_activations", "linear", "values", set()),
    ("batch_shape_noise", "linear", "batch", set(), "B42"),
    ("run_to_run", "linear", "repeat", set()),
    ("beyond_the_grid", "expert_linear", "written", {"batch"}, "B76"),
    ("uninitialized", "repeat_streams", "written", set()),
    ("past_the_end", "concat", "canaries", set()),
    ("in_place", "silu", "inputs", set()),
    ("weight_scribbled", "linear", "inputs", set()),
    ("neighbour_slot", "delay", "states", set()),
    ("reads_wide", "scale_rows", "values", set()),
    ("leaking", "add", "memory", set()),
    ("stale_graph", "add", "replay", set(), "B40"),
    ("keyed_by_shape", "clamp", "cache", set(), "B40"),
    ("lying_supports", "linear", "refusal", set(), "B84"),
    ("lying_quietly", "embed", "values", set(), "B84"),
    ("no_reason", "linear", "refusal", set(), "B84"),
    ("wavering", "linear", "refusal", set(), "B84"),
    ("broken_after_errors", "expert_combine", "errors", set(), "B76"),
    ("two_thousand_in_a_workgroup", "top_k", "values", set(), "B03"),
    ("lanes_of_padding", "top_k", "values", set(), "B06"),
    ("first_for_every_choice", "top_k", "values", set(), "B08"),
    ("short_index", "top_k", "values", set(), "B76"),
    ("right_once", "top_k", "repeat", set(), "B23"),
    ("finite_mask", "softmax", "values", set(), "B07"),
    ("unseen_row_nan", "attention", "values", set(), "B07"),
    ("empty_parts_nan", "merge_attention", "values", set(), "B07"),
    ("not_normalized", "normalize", "values", set(), "B10"),
    ("divided_by_zero", "normalize", "values", set(), "B10"),
    ("some_rows_wanted", "expert_linear", "refusal", set(), "B09"),
    ("one_past_for_attention", "attention", "values", set(), "B12"),
    ("masked_by_zero", "attention", "values", set(), "B16"),
    ("one_table_for_all", "paged_append", "states", set(), "B17"),
    ("no_relu", "index_scores", "values", set(), "B19"),
    ("unfinished_block", "index_scores", "values", set(), "B19"),
    ("tail_forgotten", "attention", "values", set(), "B19"),
    ("padding_as_rows", "causal_conv", "values", set(), "B32"),
    ("gate_before_norm", "gated_rms_norm", "values", set(), "B35"),
    ("one_plus_weight", "gated_rms_norm", "values", set(), "B35"),
    ("kept_before_the_row", "causal_conv", "states", set(), "B46"),
    ("columns_beyond_the_grid", "linear", "written", {"values"}, "B76"),
    ("smallest_scale_is_zero", "embed", "values", set(), "B67"),
    ("appends_beyond_the_grid", "paged_append", "states", set(), "B76"),
    ("entries_beyond_the_grid", "index_scores", "written", {"values"}, "B76"),
    ("input_handed_on", "silu", "values", set(), "B84"),
    ("room_for_one_run", "silu", "repeat", set()),
    ("long_rows_cut", "linear", "values", set()),
    ("long_quantized_rows_cut", "linear", "values", set()),
    ("wide_norm_unfinished", "rms_norm", "values", set()),
    ("few_taps", "causal_conv", "values", set()),
    ("short_delay", "delay", "values", set()),
    ("few_heads", "attention", "values", set()),
    ("narrow_window", "attention", "values", set()),
    ("few_picks", "attention", "values", set()),
    ("few_experts", "expert_linear", "values", set()),
    ("few_choices", "expert_combine", "values", set()),
    ("narrow_values", "gated_delta_rule", "values", set()),
    ("few_pages", "index_scores", "values", set()),
    ("no_empty_buffers", "add", "refusal", set(), "B78"),
    ("leaking_after_errors", "expert_combine", "memory", set(), "B79"),
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


def marked(row: tuple[Any, ...], plain: int) -> Any:
    """A row as a parameter: what follows the first `plain` entries are ids of faults."""
    return pytest.param(*row[:plain], id=row[0], marks=[pytest.mark.fault(*row[plain:])] if row[plain:] else [])


@pytest.mark.parametrize(("backend", "op", "name", "others"), [marked(b, 4) for b in BAD])
def test_a_wrong_kernel_is_caught(judge: Judge, backend: str, op: str, name: str, others: set[str]) -> None:
    v = caught(judge(backend, "ops", op), name, others)
    assert v.properties[name].detail


ORDERS = [
    ("dropped_sink", "states", "B37"),
    ("deferred_sinks", "values", "B37"),
    ("swapped_sinks", "values", "B38"),
    ("overlaps_ignored", "values", "B38"),
]


@pytest.mark.parametrize(("backend", "name"), [marked(b, 2) for b in ORDERS])
def test_wrong_orders_of_effects_are_caught(judge: Judge, backend: str, name: str) -> None:
    """A sink that is dropped, deferred to the end, or exchanged with another."""
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


@pytest.mark.parametrize("op", ["argmax", "top_k", "paged_append", "embed"])
def test_a_wrong_call_of_an_op_that_is_refused_is_refused(judge: Judge, op: str) -> None:
    """An error that is found before the backend is asked says nothing of it: it would count as a case that it passed."""
    verdicts = list(judge("only_linear", "ops", op, most=64))
    assert any("fault=" in v.case for v in verdicts)
    assert {v.outcome for v in verdicts} == {"refused"} and {v.reason for v in verdicts} == {f"no kernel for {op}"}


def test_a_backend_that_does_not_open_says_what_it_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception, not the line of source that raised it, which is the first to hold the word error."""
    (tmp_path / "no_device.py").write_text(
        "from bad_backends.make import backend\nfrom trueup.core.backend import KernelTable\n"
        "from trueup.core.plugins import hookimpl\nmade = backend('no_device', KernelTable())\n"
        "def devices(self):\n    raise RuntimeError('no ' + 'card')\nmade.devices = devices\n"
        "@hookimpl\ndef trueup_backends():\n    return [made]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unavailable, match="the process ended by exit code 1: RuntimeError: no card$"):
        Worker(Spec("no_device", ("no_device",)), timeout=20).start()
