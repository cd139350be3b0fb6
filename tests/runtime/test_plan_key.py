"""The key under which plans are kept: every field of all that enters a graph or its lowering changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from trueup.core.errors import ArgumentError
from trueup.core.plan import PlanOptions
from trueup.core.state import Capacity
from trueup.core.types import TensorType
from trueup.core.weight import Weight
from trueup.models import Model
from trueup.models.architecture import StepShape
from trueup.models.qwen4exp import NGramParameters, Parameters, Qwen4Exp
from trueup.runtime import Engine
from trueup.runtime.engine import PlanKey, _Part

Make = Callable[..., Engine]
SHAPE = StepShape(4, 2, 8, 2)


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if value is None:
        return 1
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    assert isinstance(value, tuple), value
    return (*value[:-1], changed(value[-1])) if value else (1,)


def mutants(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of a dataclass with one field changed, fields of fields one by one, and what is optional left out."""
    for f in fields(value):
        old = getattr(value, f.name)
        name = f"{path}{f.name}"
        if is_dataclass(old):
            for inner, new in mutants(old, name + "."):
                yield inner, replace(value, **{f.name: new})
            if "None" in str(f.type):
                yield name, replace(value, **{f.name: None})
        else:
            yield name, replace(value, **{f.name: changed(old)})


@pytest.fixture
def key(make: Make) -> PlanKey:
    return make().key(SHAPE)


@pytest.mark.fault("B40")
def test_every_field_of_the_key_counts(key: PlanKey) -> None:
    seen = {}
    for name, other in mutants(key):
        assert other != key, name
        seen[name] = other
    parts = {"shape": StepShape, "capacity": Capacity, "options": PlanOptions}
    inner = {f"{p}.{f.name}" for p, c in parts.items() for f in fields(c)}
    assert seen.keys() == {f.name for f in fields(PlanKey)} - parts.keys() | inner
    assert len({*seen.values(), key}) == len(seen) + 1


def test_the_key_is_made_of_what_the_engine_has(make: Make) -> None:
    """Each part of the key comes from the engine: an engine that differs in it has another key."""
    base = make().key(SHAPE)
    bodies = make("bodies").key(SHAPE)
    assert (base.backend, bodies.backend) == ("reference", "bodies")
    others = [
        bodies,
        make().key(replace(SHAPE, draft="cache")),
        make(page=16).key(SHAPE),
        make(context=128).key(SHAPE),
        make(sequences=5).key(SHAPE),
        make(options=PlanOptions(fusion=False)).key(SHAPE),
        make(target_options=(("threads", 2),)).key(SHAPE),
    ]
    assert len({base, *others}) == len(others) + 1
    assert make().key(SHAPE) == base
    e = make()
    assert e.key(SHAPE).model == e.model.fingerprint
    assert len({e.key(shape) for _, shape in mutants(SHAPE)} | {e.key(SHAPE)}) == 1 + len(fields(StepShape))
    e.target.device = replace(e.target.device, name="another")
    assert e.key(SHAPE).device == "another"


def test_every_hyper_parameter_tells_models_apart(random_model: Model) -> None:
    arch = random_model.architecture
    assert isinstance(arch, Qwen4Exp)
    prints = {"itself": arch.fingerprint()}
    for name, p in mutants(arch.p):
        prints[name] = Qwen4Exp(p, arch.weights).fingerprint()
    assert len(set(prints.values())) == len(prints)
    names = {f.name for f in fields(Parameters)} | {f"ngram.{f.name}" for f in fields(NGramParameters)}
    assert names | {"itself"} == prints.keys()
    assert arch.fingerprint() == Qwen4Exp(arch.p, dict(reversed(arch.weights.items()))).fingerprint()


def test_every_weight_tells_models_apart(random_model: Model) -> None:
    """Its bytes and its type; a plan is compiled for the type."""
    arch = random_model.architecture
    assert isinstance(arch, Qwen4Exp)
    prints = {arch.fingerprint()}
    for name, w in arch.weights.items():
        data = w.data.copy()
        data.reshape(-1)[0] ^= 1
        prints.add(Qwen4Exp(arch.p, arch.weights | {name: Weight(name, w.type, data)}).fingerprint())
        if w.type.dtype == "bf16":
            other = Weight(name, TensorType(w.shape, "f16"), w.data)
            prints.add(Qwen4Exp(arch.p, arch.weights | {name: other}).fingerprint())
    typed = sum(w.type.dtype == "bf16" for w in arch.weights.values())
    assert typed and len(prints) == 1 + len(arch.weights) + typed


@pytest.mark.fault("B40")
def test_what_changes_the_graph_changes_the_key(make: Make) -> None:
    """Of shape, capacity and model: two graphs that differ have keys that differ."""
    e = make()
    arch = e.model.architecture
    assert isinstance(arch, Qwen4Exp)
    key = e.key(SHAPE)
    graph = arch.build(SHAPE, e.capacity).fingerprint()
    told = 0
    cases = [(n, arch, s, e.capacity) for n, s in mutants(SHAPE)]
    cases += [(n, arch, SHAPE, c) for n, c in mutants(e.capacity) if n != "page"]
    cases += [("page", arch, SHAPE, replace(e.capacity, page=16))]
    cases += [(n, Qwen4Exp(p, arch.weights), SHAPE, e.capacity) for n, p in mutants(arch.p)]
    for name, a, shape, capacity in cases:
        try:
            other = a.build(shape, capacity).fingerprint()
        except (ArgumentError, KeyError, ValueError):  # no model: its weights are of other sizes
            continue
        if other != graph:
            told += 1
            assert replace(key, model=a.fingerprint(), shape=shape, capacity=capacity) != key, name
    assert told > 15
    assert arch.build(SHAPE, e.capacity).fingerprint() == graph


def test_graphs_of_equal_keys_are_equal(make: Make) -> None:
    """A step's tokens, their places and their pages are inputs: they are not in the graph."""
    e = make()
    s = e.session()
    prints = set()
    for tokens in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        e.bundle.reserve(s.sequence, 3)
        shape, _, _ = e._inputs([_Part(s.sequence, np.array(tokens, np.int32), [-1] * len(tokens), True)], "last")
        prints.add((e.key(shape), e.model.architecture.build(shape, e.capacity).fingerprint()))
        s.feed(tokens)
    assert len(prints) == 1
