"""Engines of the random model on targets of the host, with all of their state poisoned until it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
