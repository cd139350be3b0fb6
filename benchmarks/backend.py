"""How fast a backend is on its device: the bundled model's tokens a second, and kernels beside the device's own copy.

    python benchmarks/backend.py --backend opencl[:DEVICE] [--json FILE] [--small | --large] [--no-check]

Each figure is the median of several timings in one process, and stands beside the conformance kit's verdict on the op (or on
the model). A kernel's bytes are what its op's cost says that it must move at least; of weights there are so many that no cache
holds them. Knows no kernel; judges nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trueup
from trueup.conformance.weights import weight
from trueup.core import ops
from trueup.core.backend import Storage, Target
from trueup.core.errors import Refused
from trueup.core.graph import Graph, Value
from trueup.core.op import Op
from trueup.core.plan import build_plan
from trueup.core.plugins import device_json
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.runtime.engine import open_target

TIMES = 5
"""Timings of which the median counts."""
LEAST = 0.02
"""Seconds that a timing should take at least; what is shorter is repeated within it."""
Array = NDArray[Any]


@dataclass
class Row:
    """A line of the table: what ran, its figures by unit, and what the kit says of it."""

    name: str
    figures: dict[str, float]
    ops: tuple[str, ...] = ()
    check: str = ""


@dataclass
class Work:
    """Nodes of one op in a graph of their own; every array lies on the device before the clock starts."""

    name: str
    op: Op
    build: Callable[[Graph, np.random.Generator], list[tuple[list[Any], dict[str, Any]]]]
    """The arguments and attributes of each node: arrays, weights, states, None."""
    capacity: Capacity = field(default_factory=lambda: Capacity(1, 1, 1))


def main() -> int:
    options = _arguments()
    target = open_target(options.backend, dict.fromkeys(options.option, True))
    large = options.large or (not options.small and target.device.kind != "cpu")
    copied = copy_bandwidth(target, (1 << 30) if large else (1 << 26))
    rows = [Row("copy in the device's memory", {"GB/s": copied / 1e9})]
    print(f"{options.backend}: {target.device.name}, {dict(target.device.versions)}", file=sys.stderr)
    for work in works(large):
        if options.only and options.only not in work.name:
            continue
        row = kernel(target, work, copied)
        rows.append(row)
        print(_line(row), file=sys.stderr)
    device = device_json(target.device)
    target.close()
    if not options.only:
        for row in model(options.backend, dict.fromkeys(options.option, True)):
            rows.append(row)
            print(_line(row), file=sys.stderr)
    if not options.no_check:
        check(options.backend, rows, options.examples)
    print(table(rows))
    if options.json:
        data = {"backend": options.backend, "device": device, "times": TIMES, "rows": [asdict(r) for r in rows]}
        with open(options.json, "w") as f:
            json.dump(data, f, indent=1)
    return 1 if any("FAILED" in r.check for r in rows) else 0


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--backend", default="opencl", help="NAME[:DEVICE]")
    p.add_argument("--json", metavar="FILE", help="write the figures here too")
    p.add_argument(
        "--option", action="append", default=[], metavar="NAME", help="open the device with NAME=True, as invariant"
    )
    p.add_argument("--only", metavar="TEXT", help="only kernels whose line holds this")
    p.add_argument("--examples", type=int, default=5, help="random cases for each op that is judged")
    p.add_argument("--no-check", action="store_true", help="do not judge what was timed")
    size = p.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="sizes for a processor, whatever the device")
    size.add_argument("--large", action="store_true", help="sizes for a GPU, whatever the device")
    return p.parse_args()


# -- timing ------------------------------------------------------------------------------------------------------------


def median(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Median seconds of one `run`, of several timings that each end when the device has finished."""

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        return (time.perf_counter() - start) / count

    timed(1)
    count = max(1, min(1000, int(LEAST / max(timed(1), 1e-7))))
    return statistics.median(timed(count) for _ in range(TIMES))


def copy_bandwidth(target: Target, size: int) -> float:
    """Bytes read and written a second by the device's own copy."""
    memory, type = target.memory, TensorType((2, size // 4))
    handle = memory.allocate(type)
    memory.fill_rows(handle, [0, 1], 1.0)
    seconds = median(lambda: memory.copy_rows(handle, [0], [1]), lambda: _wait(memory, handle))
    memory.free(handle)
    return 2 * size / seconds


def _wait(memory: Any, handle: Any) -> None:
    memory.read_rows(handle, [])  # a device with a queue has finished once it answers


def kernel(target: Target, work: Work, copied: float) -> Row:
    """Seconds a node of the work, its share of the copy, and its arithmetic."""
    graph, rng = Graph(work.capacity), np.random.default_rng(0)
    nodes = []
    for arguments, attrs in work.build(graph, rng):
        made = work.op(*arguments, **attrs)
        nodes.append(made)
    for i, made in enumerate(nodes[:1]):
        for j, v in enumerate(made if isinstance(made, tuple) else (made,) if made is not None else ()):
            graph.output(f"{i}.{j}", v)
    try:
        plan = build_plan(graph, target)
    except Refused as e:
        return Row(work.name, {}, (work.op.name,), f"refused: {e}")
    memory = target.memory
    states = {n: memory.allocate(s.type) for n, s in graph.states.items()}
    for h in states.values():
        memory.fill_rows(h, range(h.type.shape[0]), 0.0)
    anything = memory.allocate(TensorType((1, 1)))
    exe = target.compile(plan, Storage(states=states))
    try:
        exe.run({})
        steps = getattr(exe, "steps", None)

        def run() -> None:
            if steps is None:
                exe.run({})
            else:
                for step in steps:
                    step()

        seconds = median(run, lambda: _wait(memory, anything)) / len(nodes)
    finally:
        exe.close()
        for h in (anything, *states.values()):
            memory.free(h)
    node = next(n for n in graph.nodes if n.op is work.op)
    cost = work.op.cost(node.types, node.attrs)
    figures = {
        "us": seconds * 1e6,
        "GB/s": cost.bytes / seconds / 1e9,
        "% of copy": 100 * cost.bytes / seconds / copied,
    }
    if cost.flops:
        figures["GFLOP/s"] = cost.flops / seconds / 1e9
    return Row(work.name, figures, (work.op.name,))


# -- what is timed -----------------------------------------------------------------------------------------------------


def works(large: bool) -> Iterator[Work]:
    """Sizes as models of tens of billions of weights have them; `small` ones that a processor does in milliseconds."""
    n, copies = (4096, 16) if large else (1024, 16)
    for dtype in ("f16", "q8_0", "q4_k"):
        for rows in (1, 8, 512):
            count = copies if rows < 512 else 2
            yield Work(f"linear {dtype} {n}x{n}, rows {rows}", ops.linear, _linear(dtype, rows, n, count))
    experts = 64 if large else 16
    yield Work(
        f"expert_linear q4_k, 8 of {experts}, {n // 2}->768, rows 1", ops.expert_linear, _experts(experts, n // 2)
    )
    for rows, width, k in ((1, 1 << 18, 64), (1, 1 << 20, 2048), (64, 1 << 14, 2048), (4096, 128, 8)):
        rows, width = (rows, width) if large else (max(rows // 4, 1), max(width // 4, 128))
        k = min(k, width // 4)
        yield Work(f"top_k rows {rows}, candidates {width}, k {k}", ops.top_k, _top_k(rows, width, k))
    heads, d = (32, 128) if large else (8, 64)
    for tokens, seqs in ((1, 1), (8, 8), (4, 1), (64, 1), (256, 1), (1024, 1)):
        name = f"gated_delta_rule heads {heads}, {d}x{d}, rows {tokens} in {seqs}"
        yield Work(name, ops.gated_delta_rule, _delta(tokens, seqs, heads, d), Capacity(seqs, 1, 1))
    length = 16384 if large else 2048
    for tokens in (1, 64):
        name = f"attention heads 32 of 8, d 128, rows {tokens} over {length}"
        yield Work(name, ops.attention, _attention(tokens, length), Capacity(1, length // 64, 64))


Built = Callable[[Graph, np.random.Generator], list[tuple[list[Any], dict[str, Any]]]]


def _f32(g: Graph, rng: np.random.Generator, name: str, *shape: int) -> Value:
    return g.constant(name, rng.standard_normal(shape, np.float32))


def _i32(g: Graph, name: str, array: Any) -> Value:
    return g.constant(name, np.asarray(array, np.int32))


def _weight(g: Graph, rng: np.random.Generator, name: str, dtype: str, *shape: int) -> Value:
    small = (min(shape[0], 4), *shape[1:]) if len(shape) < 3 else (1, *shape[1:])
    array = rng.standard_normal(small, np.float32) / np.float32(shape[-1] ** 0.5)
    made = weight(name, small, dtype, array, rng)
    raw = np.concatenate([np.asarray(made.data)] * -(-shape[0] // small[0]))[: shape[0]]
    return g.weight(type(made)(name, TensorType(shape, dtype), np.ascontiguousarray(raw)))


def _linear(dtype: str, rows: int, n: int, count: int) -> Built:
    def build(g: Graph, rng: np.random.Generator) -> list[tuple[list[Any], dict[str, Any]]]:
        x = _f32(g, rng, "x", rows, n)
        return [([x, _weight(g, rng, f"w{i}", dtype, n, n)], {}) for i in range(count)]

    return build


def _experts(experts: int, n: int) -> Built:
    def build(g: Graph, rng: np.random.Generator) -> list[tuple[list[Any], dict[str, Any]]]:
        x, w = _f32(g, rng, "x", 1, n), _weight(g, rng, "w", "q4_k", experts, 768, n)
        chosen = [rng.permutation(experts)[:8] for _ in range(8)]
        return [([x, _i32(g, f"e{i}", [e]), w], {}) for i, e in enumerate(chosen)]

    return build


def _top_k(rows: int, width: int, k: int) -> Built:
    return lambda g, rng: [([_f32(g, rng, "scores", rows, width)], {"k": k})]


def _delta(tokens: int, seqs: int, heads: int, d: int) -> Built:
    def build(g: Graph, rng: np.random.Generator) -> list[tuple[list[Any], dict[str, Any]]]:
        def row(name: str, *shape: int) -> Array:
            return rng.standard_normal((tokens, *shape), np.float32)

        def unit(name: str) -> Value:
            x = row(name, heads // 2, d)
            return g.constant(name, x / np.linalg.norm(x, axis=-1, keepdims=True).astype(np.float32))

        state = g.state("state", PerSequence((heads, d, d)))
        decay = g.constant("decay", -np.abs(row("decay", heads)) * np.float32(0.1))
        beta = g.constant("beta", 1 / (1 + np.exp(-row("beta", heads))))
        cu = _i32(g, "cu", np.linspace(0, tokens, seqs + 1))
        values = [unit("q"), unit("k"), g.constant("v", row("v", heads, d)), decay, beta]
        return [([*values, cu, _i32(g, "slots", range(seqs)), state, None], {"scale": d**-0.5, "tiled": True})]

    return build


def _attention(tokens: int, length: int) -> Built:
    def build(g: Graph, rng: np.random.Generator) -> list[tuple[list[Any], dict[str, Any]]]:
        keys, values = (g.state(n, PerToken((8, 128))) for n in ("keys", "values"))
        q, pages = _f32(g, rng, "q", tokens, 32, 128), length // 64
        where = _i32(g, "cu", [0, tokens]), _i32(g, "past", [length - tokens]), _i32(g, "table", [range(pages)])
        return [([q, keys, values, *where], {"scale": 128**-0.5})]

    return build


# -- the bundled model -------------------------------------------------------------------------------------------------


def model(backend: str, given: dict[str, Any]) -> Iterator[Row]:
    """Tokens a second of the bundled model, with the device's fusions and without."""
    ids = np.random.default_rng(0).integers(10, 4000, 1024).tolist()
    for fusion in (True, False):
        engine = trueup.load(backend=backend, context=2048, fusion=fusion, **given)
        if not fusion and not engine.target.patterns:
            engine.close()
            return
        how = "" if fusion else ", no fusion"
        for count in (256, 1024):

            def prompt(count: int = count, engine: Any = engine) -> None:
                with engine.session() as s:
                    s.feed(ids[:count])

            prompt()
            seconds = statistics.median(_once(prompt) for _ in range(TIMES))
            yield Row(f"bundled model, prompt of {count}{how}", {"tok/s": count / seconds}, ("model",))

        def decode(engine: Any = engine) -> float:
            with engine.session() as s:
                s.feed(ids[:16])
                start = time.perf_counter()
                for i in ids[16:144]:
                    s.feed([i])
                return time.perf_counter() - start

        decode()
        seconds = statistics.median(decode() for _ in range(TIMES))
        exe = engine.executable(engine.shape(1))
        row = Row(f"bundled model, decode{how}", {"tok/s": 128 / seconds, "us": seconds / 128 * 1e6}, ("model",))
        if (launches := getattr(exe, "launches", None)) is not None:
            row.figures["launches"] = float(launches)
        yield row
        engine.close()


def _once(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# -- judging -----------------------------------------------------------------------------------------------------------


def check(backend: str, rows: list[Row], examples: int) -> None:
    """What the conformance kit says of each op that was timed, and of the model."""
    from trueup.conformance import runner
    from trueup.conformance.harness import Spec
    from trueup.conformance.results import Options

    names = dict.fromkeys(n for r in rows for n in r.ops)
    said: dict[str, str] = {}
    for level, some in (("ops", [n for n in names if n != "model"]), ("model", [n for n in names if n == "model"])):
        if not some:
            continue
        options = Options(
            Spec(backend, ()), levels=(level,), examples=examples, ops=tuple(some) if level == "ops" else ()
        )
        for r in runner.run(options, lambda result: None).results:
            name = r.name if level == "ops" else "model"
            failed = f"FAILED {', '.join(r.failed)}" if r.failed else ""
            said[name] = failed or said.get(name, "") or "green"
    for row in rows:
        row.check = row.check or "; ".join(said.get(n, "not judged") for n in row.ops)


def table(rows: list[Row]) -> str:
    units = list(dict.fromkeys(u for r in rows for u in r.figures))
    lines = [["", *units, "check"]]
    lines += [[r.name, *(_number(r.figures.get(u)) for u in units), r.check] for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(_pad(c, w, i) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in lines
    )


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _line(row: Row) -> str:
    return (
        f"{row.name}: "
        + ", ".join(f"{_number(x)} {u}" for u, x in row.figures.items())
        + (row.check and f" ({row.check})")
    )


if __name__ == "__main__":
    sys.exit(main())
