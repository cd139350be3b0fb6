"""Cases: legal, complete by construction, the same for the same seed, and told in one line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trueup.core.ops  # noqa: F401  # registers the ops
from trueup.conformance.adversarial import FILLS, values
from trueup.conformance.build import build
from trueup.conformance.cases import GRID, ROW_AXES, drawn, explicit, recipes
from trueup.conformance.errors import KitError
from trueup.conformance.shrink import shrink, simpler_cases
from trueup.conformance.spaces import (
    LARGE,
    LARGE_ATTRIBUTES,
    arguments,
    axis_choices,
    axis_names,
    default,
    find,
    read,
    space,
    text,
)
from trueup.conformance.weights import BLOCKS, weight
from trueup.core.op import OPS

SMALL = 2000


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_reference_takes_every_case_and_refuses_every_fault(name: str) -> None:
    found = explicit(find(name), {}) + drawn(find(name), 5, 3)
    for r in found:
        if max((*r.axes.values(), *r.dots)) > SMALL or r.steps > 1:
            continue
        if not r.fault:
            build(r).reference()
            continue
        with pytest.raises(ValueError):
            build(r).reference()


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_choice_is_met(name: str) -> None:
    op, found = find(name), explicit(find(name), {})
    for a in arguments(op):
        assert {r.fills.get(a.name) for r in found} >= set(a.fills), a.name
        assert {r.lays.get(a.name, "row") for r in found} >= set(a.lays), a.name
        if len(a.types) > 1:
            assert {r.types.get(a.name) for r in found} >= set(a.types), a.name
        if a.optional:
            assert {a.name in r.absent for r in found} == {True, False}
    assert {r.fault for r in found} == {"", *space(op).faults}
    for axis in axis_names(op):
        assert len({r.axes[axis] for r in found}) > min(2, len(axis_choices(op, axis)) - 1)


@pytest.mark.fault("B76")
@pytest.mark.parametrize("name", ["take_rows", "paged_append", "top_k", "rms_norm", "linear", "expert_linear", "embed"])
def test_rows_around_the_largest_grid(name: str) -> None:
    """B76: 65,535, 65,536 and 65,537 rows, the rest narrow."""

    def rows(most: int | None) -> set[int]:
        found = explicit(find(name), {}, max_rows=most)
        return {max((0, *r.dots, *(n for a, n in r.axes.items() if a in ROW_AXES))) for r in found}

    assert set(GRID) <= rows(None) and GRID[2] not in rows(65_536)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_size_is_met_as_large_as_models_have_it(name: str) -> None:
    op, found = find(name), explicit(find(name), {})
    for table, sizes in (("axes", LARGE), ("attrs", LARGE_ATTRIBUTES)):
        for k in sizes.keys() & getattr(default(op), table):
            assert max(getattr(r, table)[k] for r in found) >= sizes[k][0], k
    plain = {k for k, v in default(op).attrs.items() if type(v) is int} - {"eos", "k"}
    assert set(axis_names(op)) <= LARGE.keys() and plain <= LARGE_ATTRIBUTES.keys(), "an axis that models have, too"


def test_both_sides_of_every_declared_threshold() -> None:
    found = explicit(find("top_k"), {"candidates": (300,), "k": (50,), "linear.n": (99,)})
    assert {299, 300, 301} <= {r.axes["candidates"] for r in found}
    assert {49, 50, 51} <= {r.attrs["k"] for r in found if r.axes["candidates"] >= 50}
    assert {98, 99, 100} <= {r.axes["n"] for r in explicit(find("linear"), {"linear.n": (99,)})}


def test_the_same_seed_gives_the_same_cases_and_bits() -> None:
    first, second, other = (drawn(find("attention"), 20, s) for s in (1, 1, 2))
    assert [text(r) for r in first] == [text(r) for r in second] != [text(r) for r in other]
    assert len(first) == 20
    for r in first:
        for a, b in zip(build(r).args.values(), build(read(text(r))).args.values(), strict=True):
            assert (a is None and b is None) or np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(OPS)).flatmap(lambda n: recipes(find(n))))
def test_a_line_says_all_of_a_recipe(r: object) -> None:
    again = read(text(r))  # type: ignore[arg-type]
    assert dict(again.words()) == dict(r.words())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("top_k?axis.bogus=3", "top_k has no 'bogus' for 'axis', only rows, candidates"),
        ("top_k?attr.n=3", "top_k has no 'n' for 'attr', only k"),
        ("top_k?fill.x=zeros", "top_k has no 'x' for 'fill', only scores"),
        ("top_k?lay.x=heads", "top_k has no 'x' for 'lay', only scores"),
        ("top_k?type.x=f16", "top_k has no 'x' for 'type', only scores"),
        ("top_k?absent=x", "top_k has no 'x' for 'absent', only scores"),
    ],
)
def test_a_mistyped_line_is_no_other_case(line: str, said: str) -> None:
    """It would pass as the op's simplest call."""
    with pytest.raises(KitError, match=said):
        read(line)


def test_a_filling_that_is_none_is_named() -> None:
    with pytest.raises(KitError, match="top_k: there is no filling 'bogus' for scores; known are .*zeros"):
        build(read("top_k?fill.scores=bogus"))


@pytest.mark.parametrize("line", ["top_k?axis.rows=x", "top_k?rows=3", "top_k?seed=", "top_k?fill=3", "nothing?seed=1"])
def test_lines_that_say_nothing_are_refused(line: str) -> None:
    with pytest.raises(KitError):
        read(line)


def test_fillings_hold_what_they_promise() -> None:
    rng = np.random.default_rng(0)
    bits = {n: values(n, (8, 64), rng).view(np.uint32) for n in FILLS if n not in ("freqs",)}
    assert {0x7FC00000, 0xFFC00000} <= set(bits["nan"].flat), "NaN of both signs"
    assert {0x7F800000, 0xFF800000} <= set(bits["inf"].flat), "infinities of both signs"
    assert {0, 0x80000000} == set(bits["zeros"].flat), "zeros of both signs"
    assert len({b >> 16 for b in bits["narrow"].flat}) == 1 < len(set(bits["narrow"].flat))
    assert all(b & 0x7F800000 == 0 and b & 0x7FFFFF for b in bits["denormal"].flat)
    assert len(set(bits["equal"].flat)) == 1
    assert (np.sort(values("ties", (1, 64), rng))[0, -8:] == 5).all(), "more copies of the largest than a small k"
    assert np.isneginf(values("allmasked", (4, 8), rng)[0]).all()


@pytest.mark.parametrize("dtype", BLOCKS)
def test_weights_of_every_type_are_finite_and_of_every_code(dtype: str) -> None:
    w = weight("w", (64, 512), dtype, np.ones((64, 512), np.float32), np.random.default_rng(1))
    array = np.asarray(w)
    assert np.isfinite(array).all() and array.std() > 1e-4
    assert len(np.unique(w.data)) == 256


@pytest.mark.fault("B16")
def test_unnamed_pages_and_slots_are_poison() -> None:
    c = build(default(find("gated_delta_rule"), axes={"slot": 6}))
    used = c.args["slots"].tolist()
    for i, row in enumerate(c.args["state"]):
        assert np.isnan(row).all() == (i not in used)


@pytest.mark.fault("B16")
def test_entries_beyond_a_sequence_are_poison_in_its_own_pages() -> None:
    c = build(default(find("attention"), axes={"tokens": 2, "entries": 4, "blocks": 2}, fills={"past": "zero"}))
    page = c.args["block_table"][0, 0]
    for state in (c.args["keys"], c.args["values"]):
        assert np.isfinite(state[page, :2]).all() and np.isnan(state[page, 2:]).all()


@pytest.mark.fault("B84")
def test_every_argument_that_can_lie_in_strides_does() -> None:
    """Of tensors of one axis there are no strides: a filling of one axis is no test of them."""
    for op in OPS.values():
        for a in arguments(op):
            p = next(p for p in op.params if p.name == a.name)
            if "columns" in a.lays:
                laid = [r for r in explicit(op, {}) if r.lays.get(a.name) == "columns"]
                assert any(build(r).args[p.name].ndim > 1 for r in laid), f"{a.name} of {op.name}"


@pytest.mark.fault("B12")
def test_several_sequences_with_and_without_each_optional_argument() -> None:
    for op in OPS.values():
        if "seqs" in axis_names(op):
            several = [r for r in explicit(op, {}) if r.axes["seqs"] > 1 and not r.fault]
            for a in arguments(op):
                assert {a.name in r.absent for r in several} == ({False, True} if a.optional else {False}), op.name


@pytest.mark.fault("B76")
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("top_k", ["candidates"]), ("argmax", ["candidates"]), ("linear", ["m"]), ("embed", ["vocab"]),
        ("index_scores", ["blocks", "entries"]), ("attention", ["blocks", "entries"]), ("paged_append", ["tokens"]),
    ],
)  # fmt: skip
def test_more_than_a_grid_holds_along_any_axis(name: str, axes: list[str]) -> None:
    """In steps of sequences the rows around the largest grid are padding; here they are rows."""
    large = [r for r in explicit(find(name), {}) if np.prod([r.axes[a] for a in axes]) > GRID[1]]
    assert any(r.fills.get("cu_seqlens") != "few" for r in large)


@pytest.mark.fault("B03", "B06")
def test_rows_are_chosen_from_as_a_whole_and_by_the_budget_of_sparse_attention() -> None:
    found = {(r.axes["candidates"], r.attrs["k"]) for r in explicit(find("top_k"), {})}
    assert {(n, n) for n in (1, 31, 33, 1023, 1025, 2700, 4097)} <= found
    assert {(3000, k) for k in (1023, 1024, 2047, 2048, 2049, 2051, 3000)} | {(2050, 2050)} <= found


def test_a_failing_case_becomes_as_small_as_it_can() -> None:
    """A property that fails from 5 rows and 9 candidates on, where scores tie."""
    start = "ops/" + text(
        default(find("top_k"), axes={"rows": 33, "candidates": 257}, fills={"scores": "ties"}, attrs={"k": 8})
    )

    def fails(case: str) -> bool:
        r = read(case.removeprefix("ops/"))
        return r.axes["rows"] >= 5 and r.axes["candidates"] >= 9 and r.fills["scores"] == "ties"

    small = read(shrink(start, fails, seconds=20).removeprefix("ops/"))
    assert (small.axes, small.attrs["k"], small.fills) == ({"rows": 5, "candidates": 9}, 1, {"scores": "ties"})


def test_effects_shrink_by_nodes_and_steps() -> None:
    assert "effects/mix?nodes=4&steps=1&seed=7" in set(simpler_cases("effects/mix?nodes=4&steps=3&seed=7"))
    assert "effects/mix?nodes=2&steps=3&seed=7" in set(simpler_cases("effects/mix?nodes=4&steps=3&seed=7"))
