"""How fast an op's kernel moves its bytes, beside how fast the device copies. Judges nothing.

An op's bytes are what its cost says that it must move at least; the device's bandwidth is that of its own copy (`contiguous`,
or rows copied in its memory, whichever is faster), read and written bytes together. Time spent on moving inputs and results
between host and device is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trueup.core.backend.addressed import AddressedExecutable
from trueup.core.errors import Refused
from trueup.core.types import TensorType

from .build import Call, build
from .harness import Blamed, Rig, Step
from .recipe import Recipe
from .spaces import axis_names, default, find, has_dots

WIDE: dict[str, int] = {
    "n": 1024, "m": 1024, "d": 64, "dv": 64, "dk": 64, "heads": 8, "kv": 2, "group": 4, "kheads": 4, "rep": 2, "e": 16,
    "k": 4, "candidates": 4096, "vocab": 4096, "streams": 4, "groups": 4, "half": 16, "components": 1, "channels": 1024,
    "taps": 4, "seqs": 1, "blocks": 8, "entries": 64, "pages": 8, "slot": 2, "per": 4, "picks": 16, "outs": 64, "rows": 64,
}  # fmt: skip
"""Sizes as models of a few billion weights have them, scaled so that a host keeps up."""
ROWS = ("rows", "tokens", "outs")
LOOKUPS = ("embed", "take_rows")
"""Ops that read of their first argument only what they return."""
ENOUGH = 0.03
"""Seconds of a run after which rows are not made more."""
CACHED = 8 << 20
"""Bytes below which a cache may have held it all."""
COPY = 1 << 23
"""Elements of the copy."""


def measure(rig: Rig, name: str) -> dict[str, float] | None:
    """Bytes a second of an op, at the number of rows at which it moves most, and its share of the copy; None where the
    target refuses every size. Sizes that fit a cache count only where there are no others."""
    copied = bandwidth(rig)
    found: list[dict[str, float]] = []
    for rows in (1, 8, 64, 512, 4096):
        recipe = _recipe(name, rows)
        try:
            call = build(recipe)
            seconds = _seconds(rig, call)
        except (Refused, MemoryError, Blamed):
            break
        if seconds is None:
            break
        op = call.op
        types = [
            tuple(map(TensorType.of, g)) if isinstance(g, tuple) else None if g is None else TensorType.of(g)
            for g in call.args.values()
        ]
        moved = op.cost(types, call.attrs).bytes if name not in LOOKUPS else 2 * sum(t.nbytes for t in call.types())
        found.append(
            {
                "gb_s": moved / seconds / 1e9, "share": moved / seconds / copied, "bytes": moved, "seconds": seconds,
                "rows": rows, "copy": copied,
            }
        )  # fmt: skip
        if seconds > ENOUGH:
            break
    return max(found, key=lambda f: (f["bytes"] >= CACHED, f["gb_s"]), default=None)


def bandwidth(rig: Rig) -> float:
    """Bytes that the device reads and writes in a second when it copies; measured once."""
    known: float | None = getattr(rig, "copy_bandwidth", None)
    if known is None:
        known = max(_copy_rows(rig), _contiguous(rig), _host_copy() if rig.guards else 0.0)
        rig.copy_bandwidth = known  # type: ignore[attr-defined]
    return known


def _copy_rows(rig: Rig) -> float:
    memory, type = rig.target.memory, TensorType((2, COPY))
    handle = memory.allocate(type)
    try:
        memory.upload(handle, np.zeros(type.shape, np.float32))

        def run() -> None:
            memory.copy_rows(handle, [0], [1])
            memory.read_rows(handle, [])  # a device with a queue has finished once it answers

        return 2 * type.nbytes / 2 / _best(run)
    finally:
        memory.free(handle)


def _host_copy() -> float:
    source, to = np.zeros(COPY, np.float32), np.ones(COPY, np.float32)
    return 2 * source.nbytes / _best(lambda: np.copyto(to, source))


def _contiguous(rig: Rig) -> float:
    call = build(default(find("contiguous"), dots=(8, COPY // 8)))
    try:
        seconds = _seconds(rig, call)
    except (Refused, MemoryError, Blamed):
        return 0.0
    return 2 * 4 * COPY / seconds if seconds else 0.0


def _recipe(name: str, rows: int) -> Recipe:
    op = find(name)
    axes = {a: rows if a in ROWS[:2] else WIDE.get(a, 64) for a in axis_names(op)}
    axes |= {"take_rows": {"outs": rows}, "linear": {"m": 4096}}.get(name, {})
    fills = {"cu_seqlens": "ragged", "past": "zero"}
    attrs: dict[str, Any] = {"k": 64} if name == "top_k" else {}
    return default(
        op, axes=axes, attrs=attrs, fills={k: v for k, v in fills.items() if k in {p.name for p in op.params}},
        **({"dots": (rows,) if axis_names(op) else (rows, 4096)} if has_dots(op) else {}),
    )  # fmt: skip


def _seconds(rig: Rig, call: Call) -> float | None:
    """Seconds that the kernels of one step take."""
    step = Step(rig, call)
    try:
        exe, inputs = step.exe, step.recorded.inputs(call)
        step.run(call)
        if type(exe) is AddressedExecutable:
            return _best(lambda: [s() for s in exe.steps])
        whole = _best(lambda: exe.run(inputs))
        return max(whole - _transfer(rig, call, inputs), whole / 20)
    finally:
        step.close()


def _transfer(rig: Rig, call: Call, inputs: dict[str, Any]) -> float:
    """Seconds that inputs up and results down take by themselves."""
    memory = rig.target.memory
    handles = {k: memory.allocate(TensorType.of(a)) for k, a in inputs.items()}
    results = [memory.allocate(t) for t in call.types()]
    try:

        def run() -> None:
            for k, a in inputs.items():
                memory.upload(handles[k], a)
            for r in results:
                memory.download(r)

        return _best(run)
    finally:
        for h in (*handles.values(), *results):
            memory.free(h)


def _best(run: Callable[[], Any], *, times: int = 5) -> float:
    """The shortest of a few runs, in seconds."""
    run()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        if best > 1:
            break
    return max(best, 1e-9)
