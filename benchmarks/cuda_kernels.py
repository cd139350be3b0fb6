"""How fast kernels are on an NVIDIA GPU at the shapes that models have, beside its own copy, torch, and the kit's verdict.

    python benchmarks/cuda_kernels.py [--backend cuda[:DEVICE]] [--only TEXT] [--model FILE] [--json FILE] [--no-check]
        [--no-torch]

A line's work is captured into a CUDA graph that holds it many times, and the graph is replayed: the figure is the median of
several timings, a share of one replay, so no launch from Python is in it. Bytes are what must be read and written at least;
weights of successive repeats differ, so that no cache holds them. `check` is what the conformance kit says of the same op at
the size named beside it, judged in this run. torch's figures are of the same device: "called" as from Python, "graph" captured
and replayed where it allows that. Exits with 1 where a check fails.
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

import backend as common
import numpy as np
from numpy.typing import NDArray

import trueup
from trueup.core import ops
from trueup.core.backend import Storage, Target
from trueup.core.errors import Refused
from trueup.core.graph import Graph, Value
from trueup.core.plan import build_plan
from trueup.core.plugins import device_json
from trueup.core.state import Capacity, PerSequence
from trueup.core.types import TensorType
from trueup.runtime.engine import open_target

REPLAYS = 20
"""Timings of which the median counts."""
LONG = 2e-3
"""Seconds of work that a captured graph should hold at least."""
Array = NDArray[Any]


@dataclass
class Work:
    """Some independent repeats of the same work, each on arrays of its own; `bytes` that one repeat must move."""

    name: str
    build: Callable[[Graph, np.random.Generator], list[Value]]
    """The result of each repeat."""
    bytes: int
    cases: tuple[str, ...]
    """Cases of the kit's level `ops` that judge the kernels at these sizes."""
    capacity: Capacity = field(default_factory=lambda: Capacity(1, 1, 1))
    torch: Callable[[Any], Callable[[], Any]] | None = None
    """Given torch, the call that does the same."""
    goal: str = ""


@dataclass
class Row:
    """A line of the table."""

    name: str
    us: float | None = None
    gb_s: float | None = None
    share: float | None = None
    torch_called: float | None = None
    torch_graph: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    goal: str = ""
    check: str = ""


def main() -> int:
    options = _arguments()
    torch = None if options.no_torch else _torch()
    judge = None if options.no_check else Judge(options.backend)
    target = open_target(options.backend, {})
    copied = common.copy_bandwidth(target, options.copy)
    print(f"{target.device.name}, {dict(target.device.versions)}; copy {copied / 1e12:.2f} TB/s", file=sys.stderr)
    rows = []
    for work in works():
        if options.only and options.only not in work.name:
            continue
        row = measure(target, work, copied)
        if torch is not None and work.torch is not None:
            row.torch_called, row.torch_graph = beside(torch, work.torch)
        if judge is not None:
            row.check = row.check or judge(work.cases)
        rows.append(row)
        print(line(row), file=sys.stderr)
    device = device_json(target.device)
    target.close()
    if options.model:
        for row in model(options.backend, options.model, copied, judged=judge is not None):
            rows.append(row)
            print(line(row), file=sys.stderr)
    print(table(rows))
    if options.json:
        with open(options.json, "w") as f:
            json.dump({"device": device, "copy": copied, "rows": [asdict(r) for r in rows]}, f, indent=1)
    return 1 if any("FAILED" in r.check for r in rows) else 0


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--backend", default="cuda", help="NAME[:DEVICE]")
    p.add_argument("--only", metavar="TEXT", help="only lines whose name holds this")
    p.add_argument("--model", metavar="FILE", help="a GGUF file: tokens a second of prompts and decode")
    p.add_argument("--json", metavar="FILE", help="write the figures here too")
    p.add_argument("--copy", type=int, default=1 << 31, metavar="BYTES", help="size of the copy that shares are of")
    p.add_argument("--no-check", action="store_true", help="do not judge what was timed")
    p.add_argument("--no-torch", action="store_true", help="do not time torch, though it is there")
    return p.parse_args()


# -- timing ------------------------------------------------------------------------------------------------------------


def measure(target: Target, work: Work, copied: float) -> Row:
    """The time of one repeat."""
    graph, rng = Graph(work.capacity), np.random.default_rng(0)
    results = work.build(graph, rng)
    for i, v in enumerate(results):
        graph.output(str(i), v)
    row = Row(work.name, goal=work.goal)
    try:
        plan = build_plan(graph, target)
    except Refused as e:
        row.check = f"refused: {e}"
        return row
    memory = target.memory
    states = {n: memory.allocate(s.type) for n, s in graph.states.items()}
    for h in states.values():
        memory.fill_rows(h, range(h.type.shape[0]), 0.0)
    exe: Any = target.compile(plan, Storage(states=states))
    try:
        exe.run({})
        seconds = _replayed(target, exe) / len(results)
    finally:
        exe.close()
        for h in states.values():
            memory.free(h)
    row.us, row.gb_s, row.share = seconds * 1e6, work.bytes / seconds / 1e9, work.bytes / seconds / copied
    return row


def _replayed(target: Any, exe: Any) -> float:
    """Median seconds of the executable's calls, of replays of a graph that holds them as often as fills some time."""

    def once() -> None:
        for step in exe.steps:
            step()

    driver = getattr(target, "driver", None)
    if driver is None:  # a device that captures nothing: calls, one after the other
        waited = target.memory.allocate(TensorType((1, 1)))
        try:
            return common.median(once, lambda: target.memory.read_rows(waited, []))
        finally:
            target.memory.free(waited)
    count = 1
    while True:
        driver.begin_capture()
        for _ in range(count):
            once()
        graph = driver.end_capture()

        def timed(graph: Any = graph) -> float:
            start = time.perf_counter()
            driver.launch_graph(graph)
            driver.synchronize()
            return time.perf_counter() - start

        timed()
        took = min(timed() for _ in range(3))
        if took >= LONG or count >= 1024:
            return statistics.median(timed() for _ in range(REPLAYS)) / count
        count = min(1024, max(2 * count, int(count * LONG / max(took, 1e-6)) + 1))


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def beside(torch: Any, make: Callable[[Any], Callable[[], Any]]) -> tuple[float, float | None]:
    """Microseconds of torch's call, as called from Python, and captured into a graph (None where it can't be)."""
    call = make(torch)
    for _ in range(10):
        call()
    torch.cuda.synchronize()

    def timed(run: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / count

    called = statistics.median(timed(call, 50) for _ in range(REPLAYS))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        graph.replay()
        captured: float | None = statistics.median(timed(graph.replay, 5) for _ in range(REPLAYS)) / 20
    except Exception as e:  # whatever a capture forbids
        print(f"torch can't capture this: {e}", file=sys.stderr)
        captured = None
    return called, captured


class Judge:
    """The conformance kit in this process: what it says of cases."""

    def __init__(self, backend: str) -> None:
        from trueup.conformance.harness import Spec
        from trueup.conformance.levels import Bench

        self.bench = Bench(Spec(backend))
        self.known: dict[str, str] = {}

    def __call__(self, cases: tuple[str, ...]) -> str:
        said = dict.fromkeys(self._of(c) for c in cases)
        return "; ".join(s for s in said if s != "green") or "green"

    def _of(self, case: str) -> str:
        if case not in self.known:
            v = self.bench.run(f"ops/{case}")
            why = "; ".join(f"{n}: {v.properties[n].detail}" for n in v.failed) or v.reason
            self.known[case] = "green" if v.outcome == "passed" else f"{v.outcome.upper()} {case} ({why})"
        return self.known[case]


# -- what is timed -----------------------------------------------------------------------------------------------------


def works() -> Iterator[Work]:
    """The shapes of models that decode a few sequences and read long prompts."""
    for rows, width, k in ((1, 65536, 512), (64, 65536, 512), (1, 262144, 2048), (16, 262144, 2048)):
        yield _top_k(rows, width, k)
    for rows in (1, 4, 8):
        yield _argmax(rows, 248320)
    for rows in (1, 16, 128, 512):
        yield _routing(rows, 512, 10)
    for seqs in (1, 16, 64):
        yield _delta(seqs, seqs, f"delta rule, decode of {seqs}", "10x a recurrent kernel")
    for tokens in (4, 8):
        yield _delta(tokens, 1, f"delta rule, {tokens} rows of one sequence", "")
    for tokens in (2048, 32768):
        yield _delta(tokens, 1, f"delta rule, a prompt of {tokens}", "2.82 ms / 1.5" if tokens == 32768 else "")
    for dtype in ("bf16", "q4_k"):
        for rows in (1, 4, 16):
            yield _experts(dtype, rows)
    for dtype in ("bf16", "q8_0", "q4_k", "q6_k"):
        for rows, m, n in ((1, 2560, 2560), (1, 12288, 2560), (4, 12288, 2560), (16, 12288, 2560), (4096, 2560, 2560)):
            yield _linear(dtype, rows, m, n)


def _constant(g: Graph, name: str, array: Array) -> Value:
    return g.constant(name, np.ascontiguousarray(array))


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def _on_device(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, device="cuda")


def _top_k(rows: int, width: int, k: int) -> Work:
    def torch(t: Any) -> Callable[[], Any]:
        x = _on_device(t, rows, width)
        return lambda: t.topk(x, k)

    return Work(
        f"top_k [{rows}, {width}] k {k}",
        lambda g, rng: [ops.top_k(_constant(g, "scores", _normal(rng, rows, width)), k=k)[0]],
        rows * (4 * width + 8 * k),
        (f"top_k?axis.rows={rows}&axis.candidates={width}&attr.k={k}",),
        torch=torch,
        goal="5x torch.topk",
    )


def _argmax(rows: int, width: int) -> Work:
    def torch(t: Any) -> Callable[[], Any]:
        x = _on_device(t, rows, width)
        return lambda: t.argmax(x, -1)

    return Work(
        f"argmax [{rows}, {width}]",
        lambda g, rng: [ops.argmax(_constant(g, "scores", _normal(rng, rows, width)))],
        rows * (4 * width + 4),
        (f"argmax?axis.rows={rows}&axis.candidates={width}",),
        torch=torch,
        goal="2x torch.argmax",
    )


def _routing(rows: int, experts: int, k: int) -> Work:
    def build(g: Graph, rng: np.random.Generator) -> list[Value]:
        share, _ = ops.top_k(ops.softmax(_constant(g, "x", _normal(rng, rows, experts))), k=k)
        return [ops.normalize(share)]

    def torch(t: Any) -> Callable[[], Any]:
        x = _on_device(t, rows, experts)

        def call() -> Any:
            share, chosen = t.topk(t.softmax(x, -1), k)
            return share / share.sum(-1, keepdim=True), chosen

        return call

    return Work(
        f"routing [{rows}, {experts}] k {k}",
        build,
        rows * (4 * experts + 8 * k),
        (
            f"top_k?axis.rows={rows}&axis.candidates={experts}&attr.k={k}",
            f"softmax?dots={rows}&axis.n={experts}",
            f"normalize?dots={rows}&axis.n={k}",
        ),
        torch=torch,
        goal="4x torch",
    )


def _delta(tokens: int, seqs: int, name: str, goal: str) -> Work:
    """16 key heads and 32 value heads of 128."""
    keys, heads, d = 16, 32, 128

    def build(g: Graph, rng: np.random.Generator) -> list[Value]:
        def unit(name: str) -> Value:
            x = _normal(rng, tokens, keys, d)
            return _constant(g, name, x / np.linalg.norm(x, axis=-1, keepdims=True).astype(np.float32))

        decay = -np.abs(_normal(rng, tokens, heads)) * np.float32(0.1)
        beta = (1 / (1 + np.exp(-_normal(rng, tokens, heads)))).astype(np.float32)
        given = [unit("q"), unit("k"), _constant(g, "v", _normal(rng, tokens, heads, d))]
        given += [_constant(g, "decay", decay), _constant(g, "beta", beta)]
        cu = _constant(g, "cu", np.linspace(0, tokens, seqs + 1).astype(np.int32))
        slots = _constant(g, "slots", np.arange(seqs, dtype=np.int32))
        state = g.state("state", PerSequence((heads, d, d)))
        return [ops.gated_delta_rule(*given, cu, slots, state, None, scale=d**-0.5, tiled=False)]

    moved = 4 * (2 * seqs * heads * d * d + tokens * (2 * keys * d + 2 * heads * d + 2 * heads))
    few = min(tokens, 512)
    sizes = f"axis.kheads={keys}&axis.rep=2&axis.dk={d}&axis.dv={d}&axis.slot={seqs}&axis.seqs={seqs}"
    rows = "ones" if tokens == seqs else "ragged"
    case = f"gated_delta_rule?axis.tokens={few}&{sizes}&fill.cu_seqlens={rows}"
    return Work(name, build, moved, (case,), Capacity(seqs, 1, 1), goal=goal)


def _experts(dtype: str, rows: int, experts: int = 512, k: int = 10, n: int = 2048, m: int = 512) -> Work:
    """Gate, up and down of the chosen experts; each repeat chooses others."""

    def build(g: Graph, rng: np.random.Generator) -> list[Value]:
        x, mix = _constant(g, "x", _normal(rng, rows, n)), _constant(g, "mix", np.full((rows, k), 1 / k, np.float32))
        gate, up = (common._weight(g, rng, name, dtype, experts, m, n) for name in ("gate", "up"))
        down = common._weight(g, rng, "down", dtype, experts, n, m)
        out = []
        for i in range(max(2, 16 // rows)):
            picks = np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
            chosen = _constant(g, f"chosen{i}", picks)
            h = ops.swiglu(ops.expert_linear(x, chosen, gate), ops.expert_linear(x, chosen, up))
            out.append(ops.expert_combine(h, chosen, mix, down))
        return out

    rng = np.random.default_rng(1)  # how many of the experts a repeat reads, on average
    seen = [len(set(np.concatenate([rng.permutation(experts)[:k] for _ in range(rows)]))) for _ in range(50)]
    moved = int(statistics.mean(seen) * 3 * TensorType((m, n), dtype).nbytes) + 4 * rows * 2 * n
    sizes = f"axis.tokens={rows}&axis.k={k}&axis.e=16&type.weight={dtype}"
    return Work(
        f"expert FFN {dtype}, {k} of {experts}, {n}x{m}, rows {rows}",
        build,
        moved,
        (f"expert_linear?{sizes}&axis.m={m}&axis.n={n}", f"expert_combine?{sizes}&axis.m={m}&axis.n={n}"),
        goal="60% of copy",
    )


def _linear(dtype: str, rows: int, m: int, n: int) -> Work:
    bytes = TensorType((m, n), dtype).nbytes
    count = min(32, max(2, -(-(256 << 20) // bytes))) if rows < 512 else 2

    def build(g: Graph, rng: np.random.Generator) -> list[Value]:
        x = _constant(g, "x", _normal(rng, rows, n))
        return [ops.linear(x, common._weight(g, rng, f"w{i}", dtype, m, n)) for i in range(count)]

    case = f"linear?dots={min(rows, 64)}&axis.m={m}&axis.n={n}&type.weight={dtype}"
    return Work(f"linear {dtype} {m}x{n}, rows {rows}", build, bytes + 4 * rows * (m + n), (case,))


# -- a whole model -----------------------------------------------------------------------------------------------------


def model(backend: str, file: str, copied: float, *, judged: bool) -> Iterator[Row]:
    """Tokens a second of prompts, and of decode after them; what of the copy bandwidth decode's weights take."""
    engine = trueup.load(file, backend=backend, context=20480)
    try:
        ids = np.random.default_rng(0).integers(10, 4000, 20000).tolist()
        for length in (4096, 16384):

            def prompt(length: int = length) -> None:
                with engine.session() as s:
                    s.feed(ids[:length])

            prompt()
            seconds = statistics.median(_once(prompt) for _ in range(3))
            yield Row(f"prompt of {length}", figures={"tok/s": length / seconds})
        for length in (16, 16384):
            with engine.session() as s:
                s.feed(ids[:length])
                for i in ids[length : length + 16]:
                    s.feed([i])
                took = [_once(lambda i=i: s.feed([i])) for i in ids[length + 16 : length + 272]]
            seconds = statistics.median(took)
            yield Row(f"decode at {length}", seconds * 1e6, figures={"tok/s": 1 / seconds})
    finally:
        engine.close()
    if judged:
        yield Row("the kit's level model, of this file", check=_judged(backend, file))


def _judged(backend: str, file: str) -> str:
    from trueup.conformance import runner
    from trueup.conformance.harness import Spec
    from trueup.conformance.results import Options

    found = runner.run(Options(Spec(backend), levels=("model",), model=file), lambda result: None).results
    wrong = [f"FAILED {r.name}: {', '.join(r.failed)}" for r in found if r.failed]
    return "; ".join(wrong) or ("green" if any(r.ran for r in found) else "not judged")


def _once(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# -- the table ---------------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    cells = dict(zip(HEAD, cells_of(row), strict=True))
    return f"{row.name}: " + ", ".join(f"{k} {v}" for k, v in list(cells.items())[1:] if v)


HEAD = ("", "us", "GB/s", "% of copy", "torch called", "torch graph", "tok/s", "goal", "check")


def cells_of(row: Row) -> list[str]:
    number = common._number
    return [
        row.name, number(row.us), number(row.gb_s), number(None if row.share is None else 100 * row.share),
        _times(row.torch_called, row.us), _times(row.torch_graph, row.us), number(row.figures.get("tok/s")), row.goal,
        row.check,
    ]  # fmt: skip


def _times(theirs: float | None, ours: float | None) -> str:
    """Their microseconds, and how many times ours that is."""
    if theirs is None:
        return ""
    return common._number(theirs) + (f" ({theirs / ours:.1f}x)" if ours else "")


def table(rows: list[Row]) -> str:
    lines = [list(HEAD), *map(cells_of, rows)]
    widths = [max(len(x[i]) for x in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(c.ljust(w) if i in (0, 8) else c.rjust(w) for i, (c, w) in enumerate(zip(x, widths, strict=True)))
        for x in lines
    )


if __name__ == "__main__":
    sys.exit(main())
