"""The draft head of the random model: its logits against another author's, its selection, and why a wrong one can't be written.

`ref_mtp.npz` has a torch implementation's logits for each token, from that token's embedding and the residual before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.core.errors import ArgumentError
from trueup.core.graph import Graph, Value
from trueup.core.ops import argmax, attention, concat, embed, repeat_streams, take_rows, top_k
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.weight import Weight
from trueup.models import Model
from trueup.models import qwen4exp as architecture
from trueup.models.architecture import DraftShape, StepShape
from trueup.runtime import Engine
from trueup.runtime.engine import _Part, open_target
from trueup.runtime.speculation.drafter import DrafterRefused
from trueup.runtime.speculation.head import HeadDrafter
from trueup.runtime.speculation.rollback import WAYS

REFERENCE = Path(__file__).parents[1] / "data/qwen4exp-random/ref_mtp.npz"


@pytest.fixture(scope="module")
def texts() -> dict[str, NDArray[Any]]:
    return dict(np.load(REFERENCE))


def head(model: Model, backend: str, ids: NDArray[Any]) -> NDArray[np.float32]:
    """The head's logits at every token of a text."""
    e = Engine(model, open_target(backend, {}), draft_head=True, sequences=1, checkpoints=0, snapshots=1, context=256)
    try:
        with e.session() as s:
            e.bundle.reserve(s.sequence, len(ids))
            shape, inputs, _ = e._inputs([_Part(s.sequence, ids.astype(np.int32), [-1] * len(ids), True)], "all")
            out = e.executable(replace(shape, draft="logits")).run(inputs)["draft_logits"]
            return np.array(out[: len(ids)])
    finally:
        e.close()


@pytest.mark.parametrize("backend, text", [("reference", "short"), ("cpu", "short"), ("cpu", "mid")])
def test_logits(random_model: Model, texts: dict[str, NDArray[Any]], backend: str, text: str) -> None:
    """Within 2e-5 of another author's. What it says first is what `draft` proposes, after every token."""
    ids, want = texts[f"{text}_ids"], texts[f"{text}_mtp"]
    assert np.abs(head(random_model, backend, ids) - want).max() < 2e-5


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drafts_begin_with_the_heads_argmax(
    drafting_engine: Engine, texts: dict[str, NDArray[Any]], depth: int
) -> None:
    """Each token is paired with the residual before it, the first with none."""
    ids, want = texts["short_ids"].tolist(), texts["short_mtp"]
    with drafting_engine.session() as s:
        for p, token in enumerate(ids):
            drafts = drafting_engine.draft([(s, token)], depth=depth)
            assert drafts.shape == (1, depth) and drafts[0, 0] == want[p].argmax()
            s.feed([token], logits=None)


@pytest.mark.fault("B50")
def test_the_pending_residual_is_that_of_the_token_before(
    drafting_engine: Engine, scripted: Any, drafting: Any
) -> None:
    """Tags on every residual: the state after p tokens is R of token p-1 alone, zeros for none, whatever was undone."""
    e = drafting_engine
    text = [5, 3, 5, 8, 9, 7]
    with e.session() as s:
        tags = [e.bundle.export(s.sequence)["residual"]]
        for t in text:
            s.feed([t], logits=None)
            tags.append(e.bundle.export(s.sequence)["residual"])
    assert not tags[0].any() and len({t.tobytes() for t in tags}) == len(text) + 1
    for cls in WAYS.values():
        for kept in range(1, 6):
            with e.session() as s:
                s.feed(text[:1], logits=None)
                rows = cls(e, [(s, text[1:])])
                rows.run()
                rows.keep([kept])
                np.testing.assert_array_equal(e.bundle.export(s.sequence)["residual"], tags[1 + kept])
                rows.drop()
                s.reset()
                assert not e.bundle.export(s.sequence)["residual"].any()


def test_the_heads_attention_is_sparse(
    random_model: Model, texts: dict[str, NDArray[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense one is right up to where the budget (32) and the unfinished block (4) end, then off by 0.42 here."""
    right, rows = architecture._Rows.choose_blocks, architecture._Rows

    def dense(self: Any, x: Value, b: str) -> Value:
        p = self.p
        try:
            if b.startswith(f"blk.{len(p.layers)}."):
                self.p = replace(p, index_budget=1 << 20)
            return right(self, x, b)
        finally:
            self.p = p

    monkeypatch.setattr(rows, "choose_blocks", dense)
    off = np.abs(head(random_model, "cpu", texts["mid_ids"]) - texts["mid_mtp"]).max(1)
    assert off[:35].max() < 2e-5 and off[35] > 1e-4 and off.max() == pytest.approx(0.42, abs=0.01)


# -- a selection over the wrong axis, or row 0's for every row, is no graph --------------------------------------------


def recorded(choose: Callable[[Graph, Value], Value]) -> None:
    """Attention of 4 tokens over the blocks that `choose` gives for scores[4, 6]."""
    g = Graph(Capacity(slots=1, pages=2, page=16))
    q, scores = g.input("q", 4, 2, 8, dtype="f32"), g.input("scores", 4, 6, dtype="f32")
    K, V = g.state("k", PerToken((2, 8))), g.state("v", PerToken((2, 8)))
    pages = [g.input(n, *s, dtype="i32") for n, s in (("cu", (2,)), ("past", (1,)), ("table", (1, 2)))]
    attention(q, K, V, *pages, choose(g, scores), scale=1.0, block=4)


def first_rows(g: Graph, scores: Value) -> Value:
    return top_k(take_rows(scores, g.input("zero", 1, dtype="i32")), k=2)[1]


def other_axis(g: Graph, scores: Value) -> Value:
    return top_k(g.input("turned", 6, 4, dtype="f32"), k=2)[1]


def as_numbers(g: Graph, scores: Value) -> Value:
    return top_k(scores, k=2)[0]


@pytest.mark.parametrize(
    "choose, text",
    [
        (first_rows, "attention: axis 'tokens' is 4 in q but 1 in selected"),
        (other_axis, "attention: axis 'tokens' is 4 in q but 6 in selected"),
        (as_numbers, r"attention: selected must be i32, got f32\[4, 2\]"),
        (lambda g, s: top_k(s, k=7)[1], "k is 7, which exceeds the 6 candidates"),
    ],
)
def test_a_selection_of_other_rows_is_no_graph(choose: Any, text: str) -> None:
    """The historical fault: rows and k swapped, or the first row's candidates for all. Both have another number of rows."""
    recorded(lambda g, s: top_k(s, k=2)[1])
    with pytest.raises(ArgumentError, match=text):
        recorded(choose)


def test_argmax_of_other_rows_is_no_token() -> None:
    """A draft step's ids are one for each sequence: with those of one row the next step does not meet its residual."""
    g = Graph(Capacity(slots=1, pages=1, page=4))
    table = g.weight(Weight.of("table", np.zeros((9, 8), np.float32)))
    logits, residual = g.input("logits", 3, 9, dtype="f32"), g.input("residual", 3, 2, 8, dtype="f32")

    def joined(rows: Value) -> None:
        concat(repeat_streams(embed(table, argmax(rows)), streams=2), residual)

    joined(logits)
    with pytest.raises(ArgumentError, match=r"concat: axes '...' are \[1, 2\] in a but \[3, 2\] in b"):
        joined(take_rows(logits, g.input("zero", 1, dtype="i32")))


# -- a head whose graph does not fit its model's -----------------------------------------------------------------------


@pytest.mark.fault("B53")
def test_a_head_that_reads_what_no_step_keeps_is_refused(random_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the graph: whatever the file's keys say."""
    right = architecture.Qwen4Exp.build_draft

    def more(self: Any, shape: DraftShape, capacity: Capacity) -> Graph:
        graph = right(self, shape, capacity)
        graph.state("blk.9.secret", PerSequence((4,)))
        return graph

    e = Engine(random_model, open_target("cpu", {}), draft_head=True, sequences=1, snapshots=2, context=64)
    monkeypatch.setattr(architecture.Qwen4Exp, "build_draft", more)
    try:
        with pytest.raises(
            DrafterRefused, match=r"draft head of qwen4exp reads blk.9.secret, which its steps do not keep"
        ):
            HeadDrafter.open(e)
    finally:
        e.close()


def test_the_trunk_keeps_the_heads_states_only_where_a_drafter_asks(random_model: Model) -> None:
    arch, capacity = random_model.architecture, Capacity(slots=1, pages=2, page=16)
    plain = arch.build(StepShape(1, 1, 1, 1), capacity)
    kept = arch.build(StepShape(1, 1, 1, 1, "cache"), capacity)
    block = "blk.6."
    assert not any(n.startswith(block) or n == "residual" for n in plain.states)
    assert {n for n in kept.states if n not in plain.states} == {
        "residual", *(block + n for n in ("k", "v", "index", "index_tail"))
    }  # fmt: skip
    e = Engine(random_model, open_target("cpu", {}), sequences=1, context=64)
    try:
        with e.session() as s, pytest.raises(AttributeError, match="without the draft head"):
            e.draft([(s, 1)], depth=1)
    finally:
        e.close()
