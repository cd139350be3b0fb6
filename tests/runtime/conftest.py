"""Engines of the random model on targets of the host, with all of their state poisoned until it is written; and drafters
that go by a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.backends.reference import ReferenceTarget
from trueup.core.backend import AddressedTarget, Device, KernelTable, Target
from trueup.core.op import OPS, Op
from trueup.core.state import PerToken
from trueup.core.weight import Weight
from trueup.models import Model, load_model
from trueup.runtime import Bundle, Engine
from trueup.runtime.engine import open_target
from trueup.runtime.speculation import Draft, Speculator

DATA = Path(__file__).parents[1] / "data"
DEVICE = Device("NumPy", "cpu", hardware="host")


class Bodies(AddressedTarget):
    """Addressed storage whose kernels are the ops' bodies; results hold poison until a kernel writes them."""

    def __init__(self) -> None:
        table = KernelTable()
        for op in OPS.values():
            if isinstance(op, Op) and not op.view:
                table.body(op)
        super().__init__("bodies", DEVICE, table)
        self.poison = True

    def prepare_weight(self, weight: Weight) -> Any:
        return np.asarray(weight)


TARGETS: dict[str, Callable[[], Target]] = {"reference": lambda: ReferenceTarget(DEVICE), "bodies": Bodies}


def poison(bundle: Bundle) -> None:
    """Poison what is freed from now on, and everything now."""
    bundle.poison = True
    for name, kind in bundle.kinds.items():
        rows = range(bundle.capacity.pages if isinstance(kind, PerToken) else bundle.capacity.slots)
        value = float("nan") if kind.dtype.startswith("f") else -1
        bundle._memories[name].fill_rows(bundle._arrays[name], rows, value)


@pytest.fixture(scope="session")
def random_path() -> Path:
    return DATA / "qwen4exp-random" / "qwen4exp-random-bf16.gguf"


@pytest.fixture(scope="session")
def random_model(random_path: Path) -> Model:
    return load_model(random_path)


@pytest.fixture(scope="session")
def prepared() -> dict[str, dict[int, tuple[Weight, Any]]]:
    """Weights as the targets want them, so that each is dequantized once for all tests."""
    return {}


@pytest.fixture
def make(random_model: Model, prepared: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    """`make(target, **options)`: an engine of the random model; `target` is a name or an open one."""
    engines = []

    def build(target: str | Target = "reference", **options: Any) -> Engine:
        opened = TARGETS[target]() if isinstance(target, str) else target
        engine = Engine(random_model, opened, **{"context": 256, "page": 8} | options)
        engine.bundle.storage.prepared = prepared.setdefault(opened.name, {})
        poison(engine.bundle)
        engines.append(engine)
        return engine

    yield build
    for e in engines:
        e.close()


@pytest.fixture(scope="session")
def ids() -> list[int]:
    """200 tokens."""
    out: list[int] = np.load(DATA / "qwen4exp-random" / "ref.npz")["mid_ids"].tolist()
    return out


class Scripted:
    """Drafts the known text of each session, right for `right(call)` tokens and wrong from there on.

    `texts`: whole texts, prompts included; a session's is the one that begins as it does.
    """

    name = "scripted"

    def __init__(self, texts: Sequence[Sequence[int]], right: Callable[[int], int]) -> None:
        self.texts, self.right, self.calls = [list(t) for t in texts], right, 0

    def propose(self, requests: Sequence[Any]) -> list[Draft]:
        return [self._draft([*r.session.tokens, r.token], r.depth) for r in requests]

    def _draft(self, so_far: list[int], depth: int) -> Draft:
        n, self.calls = self.right(self.calls), self.calls + 1
        known = next((t[len(so_far) :] for t in self.texts if t[: len(so_far)] == so_far), [])
        known = [*known[:depth], *[0] * (depth - len(known))]
        return Draft(tuple(t if i < n else (t + 1) % 1024 for i, t in enumerate(known)))

    def close(self) -> None:
        return None


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture(scope="session")
def drafting_engine(random_model: Model) -> Iterator[Engine]:
    """An engine on `cpu`, which gives a sequence the same bits in every batch; shared, so that plans are made once."""
    e = Engine(random_model, open_target("cpu", {}), context=128, page=8, sequences=5, draft_head=True, snapshots=9)
    assert e.target.capabilities.batch_invariant
    poison(e.bundle)
    yield e
    e.speculator = None
    e.close()


@pytest.fixture
def drafting(drafting_engine: Engine) -> Iterator[Callable[..., Speculator]]:
    """`drafting(drafter, depth, way)`: a speculator on the shared engine; whatever was taken has to be back at the end."""
    e = drafting_engine

    def begin(drafter: Any, depth: Any, way: Any = "snapshots") -> Speculator:
        e.speculator = Speculator(e, drafter, depth=depth, most=8 if depth == "auto" else depth, rollback=way)
        return e.speculator

    yield begin
    e.speculator = None
    assert len(e.bundle.free_slots) == e.capacity.slots and len(e.bundle.free_pages) == e.capacity.pages
