"""What a node that stands alone is given: as arrays, as its ops see them, and as statistics. Knows graphs; runs views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.alone import Alone
from trueup.core.graph import State, Value
from trueup.core.types import TensorType

Array = NDArray[Any]


def arrays(made: Alone, read: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and states by name, each read by `read(value)`."""
    inputs = {name: np.ascontiguousarray(read(v)).reshape(v.type.shape) for name, v in made.inputs.items()}
    return inputs, {name: np.array(read(s)) for name, s in made.states.items()}


def given(made: Alone, inputs: Mapping[str, Array], states: Mapping[str, Array]) -> dict[str, Array]:
    """What the ops of a node take from outside, as they see it: views, regions of states, weights dequantized."""
    env: dict[Value, Array] = {v: inputs[name] for name, v in made.graph.inputs.items()}
    env.update((v, np.asarray(v.data)) for v in made.graph.weights.values() if v.data is not None)
    for n in made.graph.nodes:
        if n.op.view and n.values[0] in env:
            env[n.outputs[0]] = n.op.body(env[n.values[0]], **n.attrs)
    out: dict[str, Array] = {}
    for n in made.ops:
        for p, g in zip(n.op.params, n.inputs, strict=True):
            for i, v in enumerate(g if isinstance(g, tuple) else (g,)):
                name = f"{p.name}.{i}" if isinstance(g, tuple) else p.name
                if isinstance(v, State):
                    out[f"{name} (state {v.name})"] = v.slice(states[v.root.name])
                elif v in env:
                    source = f" ({v.leaf} {v.name})" if v.data is not None else ""
                    out[name + source] = env[v]
    return out


def shown(arrays: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Statistics of arrays, for a report: smallest, largest and mean of what is finite; how many NaN and infinities."""
    out = []
    for name, a in arrays.items():
        t, real = TensorType.of(a), a.dtype.kind == "f"
        finite = a[np.isfinite(a)] if real else a.reshape(-1)
        numbers = [float(f(finite, **w)) for f, w in STATISTICS] if finite.size else [None] * 3
        out.append({
            "name": name, "dtype": t.dtype, "shape": list(a.shape), "strides": t.strides and list(t.strides),
            **dict(zip(("min", "max", "mean"), numbers, strict=True)),
            "nan": int(np.isnan(a).sum()) if real else 0, "inf": int(np.isinf(a).sum()) if real else 0,
        })  # fmt: skip
    return out


STATISTICS: tuple[tuple[Any, dict[str, Any]], ...] = ((np.min, {}), (np.max, {}), (np.mean, {"dtype": np.float64}))
