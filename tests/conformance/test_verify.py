"""Verifying while a model runs: honest backends pass, and one wrong op deep in the model is named, with its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trueup.conformance.errors import KitError
from trueup.conformance.harness import Spec, open_target
from trueup.conformance.verify import Mismatch, Verifier
from trueup.core.backend import observe
from trueup.core.plan import PlanOptions
from trueup.models import load_model
from trueup.runtime import Engine
from trueup.runtime.state import StateError

PROMPT = [101, 2002, 33, 404, 55, 606, 7]
Named = Callable[[str], Spec]


@contextmanager
def engine(spec: Spec, verifier: Verifier | None, **options: Any) -> Iterator[Engine]:
    target = open_target(spec)
    if verifier is not None:
        observe(target, verifier)
    made = Engine(load_model(), target, context=64, options=PlanOptions(allow_fallback=True), **options)
    try:
        yield made
    finally:
        made.close()


def weights(node: Any) -> set[str]:
    return {v.name for v in node.values if v.leaf == "weight"}


@pytest.mark.parametrize("backend", ["numpy_addressed", "numpy_managed", "numpy_fused"])
def test_honest_backends_pass_and_compute_what_they_always_do(spec: Named, backend: str) -> None:
    verifier = Verifier()
    with engine(spec(backend), verifier) as e, engine(spec(backend), None) as plain:
        for made in (a := e.session(), b := plain.session()):
            made.feed(PROMPT)
        assert a.feed([9]).tobytes() == b.feed([9]).tobytes()
        nodes = sum(
            p.where != "view" and p.where != "prologue" for p in next(iter(e.plans().values())).placements.values()
        )
        assert verifier.about()["nodes"] == 2 * nodes and verifier.about()["steps"] == 2
        assert max(w for w, _ in verifier.tally.worst.values()) <= 1


def test_the_native_backend_passes() -> None:
    verifier = Verifier(every=2)
    with engine(Spec("cpu"), verifier) as e, e.session() as s:
        s.feed(PROMPT)
        for token in (5, 6, 7):
            s.feed([token])
    assert (verifier.steps, verifier.verified) == (4, 2)
    assert 0 < max(w for w, _ in verifier.tally.worst.values()) <= 1


@pytest.mark.parametrize(
    ("backend", "op", "weight", "step"),
    [
        ("deep_linear", "linear", "blk.5.ssm_out.weight", 0),
        ("deep_fusion", "heads_out", "blk.6.ssm_out.weight", 0),
        ("deep_managed", "gated_delta_rule", "", 0),
        ("deep_state", "paged_append", "", 1),
    ],
)
def test_one_wrong_op_deep_in_the_model_is_named(spec: Named, backend: str, op: str, weight: str, step: int) -> None:
    """In an arena, fused, on versions of states, and in a cache that is right at the first step."""
    with engine(spec(backend), Verifier()) as e, e.session() as s:
        with pytest.raises(Mismatch) as caught:
            s.feed(PROMPT)
            s.feed([9])
        found = caught.value
        assert (found.op, found.step) == (op, step)
        assert not weight or weight in weights(found.node)
        assert found.worst is not None and found.worst > 1 and found.bound is not None
        assert f"step {step}: {backend} computes {found.node.describe()} wrongly" in str(found)
        with pytest.raises(StateError, match="a step failed"):
            s.feed([9])
        s.reset()


def test_states_are_named_where_they_are_wrong(spec: Named) -> None:
    with engine(spec("deep_managed"), Verifier()) as e, e.session() as s, pytest.raises(Mismatch) as caught:
        s.feed(PROMPT)
    assert caught.value.finding.part.name == "state blk.6.delta"  # type: ignore[union-attr]


@pytest.mark.fault("B37")
@pytest.mark.parametrize("backend", ["dropped_sink", "deferred_sinks"])
def test_the_order_in_which_nodes_run_is_looked_at_too(spec: Named, backend: str) -> None:
    """B37: a sink that is dropped, or deferred to the end of the step."""
    with engine(spec(backend), Verifier()) as e, e.session() as s:
        with pytest.raises(Mismatch, match="index_scores.* it runs before #[0-9]+ paged_append, which it must follow"):
            s.feed(PROMPT)


def test_steps_between_are_not_judged(spec: Named) -> None:
    """Every second step is; the cache goes wrong at the second, which nobody looks at, and again at the third."""
    with engine(spec("deep_state"), Verifier(every=2)) as e, e.session() as s:
        s.feed(PROMPT)
        s.feed([9])
        with pytest.raises(Mismatch) as caught:
            s.feed([9])
        assert caught.value.step == 2


@pytest.mark.parametrize("text", ["cpu", "reference:", "reference:every", "reference:every=0", "reference:n=2", ""])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(KitError):
        Verifier.read(text)


def test_what_can_be_read() -> None:
    assert (Verifier.read("reference").every, Verifier.read("reference:every=50").every) == (1, 50)
