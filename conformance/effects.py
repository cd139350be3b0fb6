"""Level effects: made-up graphs with every kind of dependence between effects, in program order and in random legal
ones.

Appends to and reads of one cache through overlapping and disjoint regions, tails that are read and written, several
steps
over the same states. All numbers are small integers, so that every result is exact and must be equal bit for bit, in
whatever order terms are added. Needs the core alone.

    values, states   program order gives what the bodies give          orders   so does every other legal order, bit
    for bit
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.graph import Graph, State, Value
from trueup.core.ops import add, causal_conv, delay, index_scores, paged_append, split_heads
from trueup.core.plan import PlanOptions
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.weight import Weight

from .compare import Found, bits, merge
from .errors import KitError
from .harness import Rig
from .propagate import interpret, outputs
from .properties import Verdict
from .steps import steps_for
from .whole import ELSEWHERE, WholeGraph, fresh_states

Array = NDArray[Any]

TOKENS, SEQS, SLOTS, PAGES, PAGE, BLOCKS, WIDTH = 5, 3, 5, 12, 4, 4, 8
ORDERS = 4
"""Random legal orders tried for each graph, besides program order."""


@dataclass(frozen=True)
class Program:
    """A made-up graph: `nodes` effects drawn by `seed`, run for `steps` steps."""

    nodes: int = 8
    steps: int = 2
    seed: int = 0

    def __str__(self) -> str:
        return f"effects/mix?nodes={self.nodes}&steps={self.steps}&seed={self.seed}"

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program of a line `mix?nodes=8&seed=0`; KitError where it can't be read."""
        name, _, rest = text.partition("?")
        try:
            if name != "mix":
                raise ValueError
            return cls(**{k: int(v) for k, v in (w.split("=") for w in filter(None, rest.split("&")))})
        except (ValueError, TypeError):
            raise KitError(f"case effects/{text}: can't be read; expected effects/mix?nodes=N&steps=N&seed=N") from None

    def simpler(self) -> Iterator[Program]:
        for n in sorted({1, 2, self.nodes // 2, self.nodes - 1} - {0, self.nodes}):
            if n < self.nodes:
                yield Program(n, self.steps, self.seed)
        if self.steps > 1:
            yield Program(self.nodes, 1, self.seed)


def programs(count: int, seed: int) -> list[str]:
    """So many programs, small ones first."""
    return [str(Program(3 + i % 10, 1 + i % 3, seed * 1000 + i)) for i in range(count)]


class _Writer:
    """Records a program's nodes. `pool` holds values [tokens, width] by width."""

    def __init__(self, p: Program) -> None:
        self.rng = np.random.default_rng(p.seed)
        self.g = g = Graph(Capacity(SLOTS, PAGES, PAGE))
        self.pool = {4: [g.input("x4", TOKENS, 4)], 8: [g.input("x8", TOKENS, 8)]}
        self.query = {4: g.input("q4", TOKENS, 4), 8: g.input("q8", TOKENS, 8)}

        def i32(name: str, *shape: int) -> Value:
            return g.input(name, *shape, dtype="i32")

        self.cu, self.slots, self.past = i32("cu_seqlens", SEQS + 1), i32("slots", SEQS), i32("past", SEQS)
        self.table, self.keep = i32("block_table", SEQS, BLOCKS), i32("keep", TOKENS)
        self.made = 0

    def node(self) -> None:
        kind = ["append", "score", "delay", "conv", "append", "score", "add"][int(self.rng.integers(7))]
        getattr(self, kind)()
        self.made += 1

    def _of(self, width: int) -> Value:
        pool = self.pool[width]
        return pool[int(self.rng.integers(len(pool)))]

    def _region(self, name: str, kind: Any) -> tuple[State, int]:
        """A state, whole or a region of its last axis; the regions 0:4, 2:6 and 4:8 overlap in part."""
        state = self.g.state(name, kind)
        pick = int(self.rng.integers(5))
        if pick < 2:
            return state, WIDTH
        start = 2 * (pick - 2)
        return state.view(2, start, start + 4), 4

    def append(self) -> None:
        cache, width = self._region(f"cache{int(self.rng.integers(2))}", PerToken((WIDTH,)))
        paged_append(self._of(width), self.cu, self.past, self.table, cache)

    def score(self) -> None:
        cache, width = self._region(f"cache{int(self.rng.integers(2))}", PerToken((WIDTH,)))
        q = split_heads(self.query[width], heads=1)
        self.g.output(f"scores{self.made}", index_scores(q, cache, self.cu, self.past, self.table, every=1, scale=1.0))

    def delay(self) -> None:
        tail, width = self._region("tail", PerSequence((2, WIDTH)))
        self._new(width, delay(self._of(width), self.cu, self.slots, tail, self.keep, by=2))

    def conv(self) -> None:
        tail, width = self._region("tail", PerSequence((2, WIDTH)))
        w = self.g.weight(Weight.of(f"w{self.made}", self.rng.integers(-1, 2, size=(width, 3)).astype(np.float32)))
        self._new(width, causal_conv(self._of(width), w, self.cu, self.slots, tail, self.keep))

    def add(self) -> None:
        width = 4 * int(self.rng.integers(1, 3))
        self._new(width, add(self._of(width), self._of(width)))

    def _new(self, width: int, value: Value) -> None:
        self.pool[width].append(value)
        self.g.output(f"value{self.made}", value)


def graph_of(p: Program) -> Graph:
    """The program as a graph; the same nodes for the same seed, so that fewer nodes are a beginning of more."""
    w = _Writer(p)
    for _ in range(p.nodes):
        w.node()
    if not w.g.nodes:
        w.add()
    return w.g


def examine(rig: Rig, p: Program) -> Verdict:
    """Program order against the bodies, then random legal orders against that."""
    start, verdict = time.perf_counter(), Verdict(str(p))
    graph, held = graph_of(p), rig.bytes
    steps = steps_for(graph, p.seed, p.steps, fill="integers")
    want_states = fresh_states(graph, poison=False)
    want = [{k: v.copy() for k, v in outputs(graph, interpret(graph, s, want_states)).items()} for s in steps]
    for seed in (None, *range(p.seed, p.seed + ORDERS)):
        with WholeGraph(rig, graph, PlanOptions(True, seed is not None, seed)) as whole:
            if not whole.where:
                verdict.outcome, verdict.reason = "refused", ELSEWHERE
                break
            verdict.where = verdict.where or whole.where
            found, states, broken = _once(whole, steps, want, want_states)
        if seed is None:
            verdict.say("values", found)
            verdict.say("states", states)
        else:
            worse = merge([found, states])
            verdict.say("orders", worse.wrong and f"with the legal order of seed {seed}: {worse.wrong}")
        verdict.say("canaries", broken)
    left = rig.bytes - held
    verdict.say("memory", f"{left} bytes stay allocated" if left else "")
    verdict.seconds = time.perf_counter() - start
    return verdict


def _once(
    whole: WholeGraph, steps: list[dict[str, Array]], want: list[dict[str, Array]], want_states: dict[str, Array]
) -> tuple[Found, Found, str]:
    whole.put(fresh_states(whole.graph, poison=False))
    found = []
    for i, s in enumerate(steps):
        got = whole.run(s)
        found += [bits(f"{k} of step {i}", got[k], w) for k, w in want[i].items()]
    after = whole.states()
    states = [bits(f"state {k}", after[k], w) for k, w in want_states.items()]
    return merge(found), merge(states), whole.broken()
