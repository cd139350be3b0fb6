"""Verifying while a model runs: every node of a step against the reference, on what the device itself gave it.

`Verifier` is a watcher (`trueup.load(watch=…)`, `core.backend.observe`); `StepWatch` looks on at one step and hands what
it finds to a callback. The plan that runs is the one that is judged: fused kernels, states, and the order as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.alone import Alone, alone
from trueup.core.backend import Look, Target, Watch
from trueup.core.graph import Node
from trueup.core.passes.fuse import Pattern
from trueup.core.plan import Plan

from .bounds import ACTIVATIONS
from .compare import same_bits
from .errors import KitError
from .given import arrays, given, shown
from .nodes import Expected, Part, expect, judge

Array = NDArray[Any]


def rounding(target: Target) -> float:
    """Unit roundoff of the activations that a target declares to round."""
    return ACTIVATIONS[getattr(target.capabilities, "activations", "f32")]


@dataclass
class Finding:
    """What is wrong at a node. `part` is None where the node was not run, or not when it must be."""

    node: Node
    step: int
    kernel: str
    wrong: str
    part: Part | None = None
    reason: str = ""
    made: Alone | None = None
    inputs: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)
    whole: bool = False
    """The step as a whole is at fault; `node` is only its last."""

    @property
    def op(self) -> str:
        """The op's name, or that of the fusion."""
        return self.node.op.name

    def about(self) -> dict[str, Any]:
        """As JSON data."""
        n, p = self.node, self.part
        fused = [m.op.name for m in n.op.graph.nodes] if isinstance(n.op, Pattern) else []
        given_ = {} if self.made is None else given(self.made, self.inputs, self.states)
        return {
            "step": self.step, "whole_step": self.whole, "node": n.id, "op": n.op.name, "call": n.describe(),
            "kernel": self.kernel, "fused": fused, "origin": sorted(n.origin), "wrong": self.wrong,
            "output": p and p.name, "at": p and p.at,
            "got": p and _number(p.got), "expected": p and _number(p.expected), "bound": p and _number(p.bound),
            "error_over_bound": p and _number(p.found.worst), "reason": self.reason,
            "inputs": shown(given_),
        }  # fmt: skip


def _number(x: float | int | None) -> Any:
    return x if x is None or np.isfinite(x) else str(x)


class Mismatch(RuntimeError):
    """A node left its bound while a model ran. `finding` has the node, what it was given and its worst entry."""

    def __init__(self, finding: Finding, backend: str) -> None:
        f, p = finding, finding.part
        bound = f"; its bound: {f.reason}" if p is not None and f.reason else ""
        super().__init__(f"step {f.step}: {backend} computes {f.node.describe()} wrongly: {f.wrong}{bound}")
        self.finding, self.op, self.step, self.node = f, f.op, f.step, f.node
        self.worst = None if p is None else p.found.worst
        self.bound = None if p is None else p.bound


@dataclass
class Tally:
    """What came of judging: nodes, the worst error as a share of its bound by op, and how often that op was judged."""

    nodes: int = 0
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, op: str, share: float) -> None:
        known, count = self.worst.get(op, (0.0, 0))
        self.nodes, self.worst[op] = self.nodes + 1, (max(known, share), count + 1)


class StepWatch:
    """Looks on at one step: judges each node that `only` picks, and that each runs once, after those it must follow.

    `found(finding)` is called for what is wrong; an exception from it ends the step. `inputs`: read again after the
    node, too.
    """

    def __init__(
        self, plan: Plan, step: int, found: Callable[[Finding], None], *, a: float = 0.0, tally: Tally | None = None,
        inputs: bool = False, run: Callable[[Node, Alone, Any, Any], tuple[Any, Any]] | None = None,
    ) -> None:  # fmt: skip
        """`run(node, alone, inputs, states)`: gives results and states in the place of what the node itself gave."""
        self.plan, self.step, self.found, self.a = plan, step, found, a
        self.tally, self.again, self.run = tally if tally is not None else Tally(), inputs, run
        self.edges, self.ran = plan.graph.edges(), set[Node](n for n in plan.graph.nodes if n.host)
        self.at: tuple[Alone, dict[str, Array], dict[str, Array]] | None = None
        self.current: Node | None = None
        """The node whose turn it is; where a step fails, the one that failed."""

    def wants(self, node: Node) -> bool:
        self.current = node
        missing = min((m for m in self._before(node) if m not in self.ran), key=lambda m: m.id, default=None)
        if missing is not None:
            self._say(node, f"it runs before {missing}, which it must follow")
        if node in self.ran:
            self._say(node, "it runs twice")
        self.ran.add(node)
        return True

    def _before(self, node: Node) -> Iterator[Node]:
        """What must have run, views looked through."""
        for m in self.edges.get(node, ()):
            if m.op.view:
                yield from self._before(m)
            else:
                yield m

    def before(self, node: Node, look: Look) -> None:
        made = alone(node)
        self.at = made, *arrays(made, look.read)

    def after(self, node: Node, look: Look) -> None:
        assert self.at is not None
        made, inputs, states = self.at
        expected = expect(made, inputs, states, self.a)
        if self.run is not None:
            got, after = self.run(node, made, inputs, states)
        else:
            got = {r.name: np.asarray(look.read(o)) for r, o in zip(node.op.results, node.outputs, strict=True)}
            after = {name: np.asarray(look.read(s)) for name, s in made.states.items()}
        finding, worst = find(node, self.step, self._kernel(node), made, inputs, states, expected, got, after)
        self.tally.add(node.op.name, worst)
        if finding is None and self.again and self.run is None:
            for name, v in made.inputs.items():
                if not same_bits(np.asarray(look.read(v)).reshape(v.type.shape), inputs[name]):
                    wrong = f"its argument {name}, which it only reads, was changed"
                    finding = Finding(node, self.step, self._kernel(node), wrong, None, "", made, inputs, states)
                    break
        self.at = None
        if finding is not None:
            self.found(finding)

    def end(self) -> None:
        for n in self.plan.graph.nodes:
            if n not in self.ran and not n.op.view:
                self._say(n, "it is in the plan, and was not run")

    def _say(self, node: Node, wrong: str) -> None:
        self.found(self.bare(node, wrong))

    def bare(self, node: Node, wrong: str) -> Finding:
        """A finding without values."""
        return Finding(node, self.step, self._kernel(node), wrong)

    def _kernel(self, node: Node) -> str:
        placed = self.plan.placements.get(node)
        return "" if placed is None else placed.kernel if placed.where == "device" else placed.where


def find(
    node: Node, step: int, kernel: str, made: Alone, inputs: dict[str, Array], states: dict[str, Array],
    expected: Expected, got: dict[str, Array], after: dict[str, Array],
) -> tuple[Finding | None, float]:  # fmt: skip
    """The first result or state that leaves its bound, and the largest error as a share of its bound."""
    parts = judge(expected, got, after)
    worst = max((p.found.worst for p in parts), default=0.0)
    wrong = next((p for p in parts if p.found.wrong), None)
    if wrong is None:
        return None, worst
    return Finding(node, step, kernel, wrong.found.wrong, wrong, expected.reason, made, inputs, states), worst


class Verifier:
    """A watcher that judges every node of every `every`-th step, from the first on; the first wrong one is a Mismatch."""

    def __init__(self, *, every: int = 1) -> None:
        if every < 1:
            raise KitError(f"every must be at least 1, got {every}")
        self.every, self.steps, self.verified, self.tally = every, 0, 0, Tally()

    def __call__(self, target: Target, plan: Plan) -> Watch | None:
        self.steps += 1
        if (self.steps - 1) % self.every:
            return None
        self.verified += 1

        def stop(finding: Finding) -> None:
            raise Mismatch(finding, target.name)

        return StepWatch(plan, self.steps - 1, stop, a=rounding(target), tally=self.tally)

    def about(self) -> dict[str, Any]:
        """As JSON data: steps, nodes judged, and by op the worst error as a share of its bound."""
        return {
            "steps": self.steps, "verified": self.verified, "nodes": self.tally.nodes,
            "worst": {op: _number(w) for op, (w, _) in sorted(self.tally.worst.items())},
        }  # fmt: skip

    def summary(self) -> str:
        """One line for a person."""
        op, (worst, _) = max(self.tally.worst.items(), key=lambda e: e[1][0], default=("", (0.0, 0)))
        nearest = f"; nearest to its bound came {op}, at {worst:.2g} of it" if worst else ""
        return f"trueup: {self.tally.nodes} nodes of {self.verified} of {self.steps} steps are within their bounds{nearest}"

    @classmethod
    def read(cls, text: str) -> Verifier:
        """From `reference` or `reference:every=N`; KitError for anything else."""
        name, more, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        if name != "reference" or (more and (key != "every" or not equals or not value.isdecimal())):
            raise KitError(f"can't verify by {text!r}: give reference or reference:every=N")
        return cls(every=int(value) if more else 1)
