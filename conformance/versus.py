"""Two backends on the same steps of a model: the first node of either that leaves its bound.

Each runs its own plan. At every node the reference gets exactly what the device gave that node, so errors do not
accumulate, and one pass finds the first wrong one. A plan must also give the same bits when nobody stops it: where it
does not, the node is found by bisection over how far it runs freely. Imports the runtime.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.alone import Alone
from trueup.core.backend import Executable, HostMemory, Look, Storage, Support, Target, Watch, observe
from trueup.core.backend.kernels import Kernel
from trueup.core.errors import Refused, Unavailable
from trueup.core.graph import Node, State, Value
from trueup.core.plan import Plan, PlanOptions
from trueup.core.plugins import host
from trueup.core.weight import Weight
from trueup.models import Model
from trueup.runtime import Engine, Session

from .compare import same_bits
from .errors import KitError
from .harness import Blamed, Rig, Spec, open_target
from .nodes import expect
from .replay import Ran, Saved, run
from .verify import Finding, StepWatch, Tally, find, rounding

Array = NDArray[Any]
Say = Callable[[str], None]
REFERENCE = "reference"


class _Found(Exception):
    """Ends a step at the first finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.wrong)
        self.finding = finding


@dataclass
class Outcome:
    """What came of one backend. `how`: "in its plan", or "one by one" where its executable can't be looked into.

    `unwatched`: how its steps differ when nobody stops them, where the backend does not claim to be deterministic.
    """

    backend: str
    device: str
    how: str = "in its plan"
    tally: Tally = field(default_factory=Tally)
    finding: Finding | None = None
    plan: Plan | None = None
    unwatched: str = ""


@dataclass
class Compared:
    """Two backends compared. `distance`: for each step the largest difference of the logits, and whether both have the
    same argmax; `peer`: what the other backend gives for what the wrong node was given."""

    sides: tuple[Outcome, Outcome]
    steps: list[list[int]]
    distance: list[tuple[float, bool]] = field(default_factory=list)
    peer: Ran | None = None
    next: int = 0
    """The token of the next step."""

    @property
    def wrong(self) -> Outcome | None:
        """The first side that is wrong: the backend judged before the one it is compared with."""
        return next((s for s in self.sides if s.finding is not None), None)


class Side:
    """A backend with the model on it."""

    def __init__(self, spec: Spec, model: Model, context: int, options: PlanOptions) -> None:
        self.spec, self.options = spec, options
        target = open_target(spec)
        self.judged = target.name != REFERENCE
        self.watcher: Callable[[Plan], Watch] | None = None
        observe(target, lambda _, plan: None if self.watcher is None else self.watcher(plan))
        self.outcome = Outcome(target.name, target.device.name)
        self.target, self.engine = target, _engine(model, target, context, options)
        self.bodies: tuple[Engine, Rig] | None = None
        self.model, self.context = model, context
        self.base = self.engine.session()
        self.shadow: Session | None = None

    def close(self) -> None:
        if self.bodies is not None:
            self.bodies[0].close()
            self.bodies[1].target.close()
        self.engine.close()

    def step(self, ids: list[int], number: int) -> Array | None:
        """One step, run as ever and then node by node; the logits, or None where something was found."""
        free = self.base.fork()
        try:
            logits: Array = free.feed(ids)
        except (Refused, MemoryError):
            raise
        except Exception as e:
            self.outcome.finding = self._raised(ids, number, e)
            return None
        if not self.judged:
            self.base.close()
            self.base = free
            return logits
        try:
            if self.bodies is None:
                watched = self._watched(ids, number, logits, free)
            if self.bodies is not None:
                self._one_by_one(ids, number)
                watched = free
        except _Found as e:
            self.outcome.finding = e.finding
            self.outcome.plan = next(iter(reversed((self.bodies or [self.engine])[0].plans().values())))
            return None
        if watched is not free:
            free.close()
        self.base.close()
        self.base = watched
        return logits

    def _raised(self, ids: list[int], number: int, error: Exception) -> Finding:
        """The node that raises; the error itself where it can't be told."""
        watches: list[StepWatch] = []

        def look(plan: Plan) -> Watch:
            watches.append(StepWatch(plan, number, _stop, a=rounding(self.target)))
            return watches[-1]

        with self.base.fork() as s:
            try:
                self._feed(s, ids, look)
            except _Found as e:  # what goes before is wrong already
                self.outcome.plan = watches[-1].plan
                return e.finding
            except Exception as e:
                if watches and watches[-1].current is not None and str(e) == str(error):
                    self.outcome.plan = watches[-1].plan
                    said = " ".join(f"{type(e).__name__}: {e}".split())
                    return watches[-1].bare(watches[-1].current, f"it raised {said}")
        raise error

    # -- in its plan ---------------------------------------------------------------------------------------------------

    def _watched(self, ids: list[int], number: int, logits: Array, free: Session) -> Session:
        watched = self.base.fork()
        a = rounding(self.target)

        def look(plan: Plan) -> Watch:
            return StepWatch(plan, number, _stop, a=a, tally=self.outcome.tally, inputs=True)

        try:
            again = self._feed(watched, ids, look)
        except Unavailable as e:
            if number:
                raise KitError(f"backend {self.target.name}: {e}") from None
            watched.close()
            self.outcome.how = "one by one"
            self.bodies = self._stand_in()
            return free
        except Blamed as e:
            raise KitError(str(e)) from None
        differs = _differs(self.engine, (logits, free), (again, watched))
        if differs:
            finding = self._bisect(ids, number, differs)
            if self.target.capabilities.deterministic:
                raise _Found(finding)
            self.outcome.unwatched = finding.wrong
        return watched

    def _feed(self, session: Session, ids: list[int], watcher: Callable[[Plan], Watch] | None) -> Array:
        self.watcher = watcher
        try:
            out: Array = session.feed(ids)
            return out
        finally:
            self.watcher = None

    def _bisect(self, ids: list[int], number: int, differs: str) -> Finding:
        """The first node that gives other bits when the plan runs freely up to it, or up to the one that takes them."""
        stopped: dict[Node, dict[Value, str]] = {}
        plans: list[Plan] = []

        def all_nodes(plan: Plan) -> Watch:
            plans.append(plan)
            return _Digests(stopped)

        def freely(at: Node) -> dict[Value, str]:
            here: dict[Node, dict[Value, str]] = {}
            with self.base.fork() as s:
                self._feed(s, ids, lambda plan: _Digests(here, at))
            return here[at]

        with self.base.fork() as s:
            self._feed(s, ids, all_nodes)
        nodes = list(stopped)
        low, high = 0, len(nodes)
        while low < high:
            middle = (low + high) // 2
            if freely(nodes[middle]) == stopped[nodes[middle]]:
                low = middle + 1
            else:
                high = middle
        if low == len(nodes):
            wrong = f"it gives other {differs} than when the plan is stopped at every node, and no node does"
            return Finding(nodes[-1], number, "", wrong, whole=True)
        node, seen = nodes[low], freely(nodes[low])
        value = next((v for v, d in stopped[node].items() if seen[v] != d), node.outputs[0])
        node = value.storage.node or node
        placed = plans[0].placements[node]
        wrong = (
            f"{value!r} has other bits when nothing stops the plan before {nodes[low]} than when it is stopped at every node: "
            "a kernel that does not wait, or storage that is used again too early"
        )
        return Finding(node, number, placed.kernel or placed.where, wrong)

    # -- one by one ----------------------------------------------------------------------------------------------------

    def _stand_in(self) -> tuple[Engine, Rig]:
        """The backend's plans run by bodies, and the backend opened anew to run each of their nodes alone."""
        engine = _engine(self.model, _Bodies(open_target(self.spec), lambda: self.watcher), self.context, self.options)
        self.shadow = engine.session()
        return engine, Rig(open_target(self.spec))

    def _one_by_one(self, ids: list[int], number: int) -> None:
        assert self.bodies is not None and self.shadow is not None
        rig = self.bodies[1]

        def alone(node: Node, made: Alone, inputs: Any, states: Any) -> tuple[Any, Any]:
            try:
                got = run(rig, made, inputs, states, self.options)
            except Blamed as e:
                raise KitError(f"{node.describe()}: {e}") from None
            return got.results, got.states

        self._feed(
            self.shadow, ids,
            lambda plan: StepWatch(plan, number, _stop, a=rounding(rig.target), tally=self.outcome.tally, run=alone),
        )  # fmt: skip


def _stop(finding: Finding) -> None:
    raise _Found(finding)


def _engine(model: Model, target: Target, context: int, options: PlanOptions) -> Engine:
    return Engine(model, target, context=context, sequences=4, checkpoints=0, options=options)


class _Digests:
    """Notes a digest of what nodes are given and of what they give, at one node or at all of them.

    Inputs and states are left out: they name slots and pages, which differ from sequence to sequence.
    """

    def __init__(self, out: dict[Node, dict[Value, str]], only: Node | None = None) -> None:
        self.out, self.only = out, only

    def wants(self, node: Node) -> bool:
        return self.only is None or node is self.only

    def before(self, node: Node, look: Look) -> None:
        given = [v for v in node.values if not isinstance(v, State) and v.data is None and v.storage.leaf != "input"]
        self.out[node] = {v: _digest(v, look) for v in given}

    def after(self, node: Node, look: Look) -> None:
        self.out[node].update((v, _digest(v, look)) for v in node.outputs)

    def end(self) -> None: ...


def _digest(value: Value, look: Look) -> str:
    return hashlib.sha256(np.ascontiguousarray(look.read(value)).tobytes()).hexdigest()


def _differs(engine: Engine, a: tuple[Array, Session], b: tuple[Array, Session]) -> str:
    """What of a step differs between two runs of it: the logits or a state, "" where all bits are equal."""
    if not same_bits(a[0], b[0]):
        return "logits"
    one, other = (engine.bundle.export(s.sequence) for s in (a[1], b[1]))
    return next((f"state {k}" for k in one if not same_bits(one[k], other[k])), "")


class _Bodies(Target):
    """The plans of a target, run by the ops' bodies on the host."""

    def __init__(self, inner: Target, watcher: Callable[[], Callable[[Plan], Watch] | None]) -> None:
        self.inner, self.name, self.device, self.memory = inner, inner.name, inner.device, HostMemory()
        self.capabilities = inner.capabilities
        reference = host().backend(REFERENCE)
        self.reference = reference.open(reference.devices()[0])
        observe(self.reference, lambda _, plan: (found := watcher()) and found(plan))

    @property
    def patterns(self) -> Any:
        return self.inner.patterns

    def supports(self, node: Node) -> Support:
        return self.inner.supports(node)

    def kernel(self, node: Node) -> Kernel:
        return self.inner.kernel(node)

    def accepts(self, *args: Any) -> Support:
        return self.inner.accepts(*args)

    def prepare_weight(self, weight: Weight) -> Any:
        return self.reference.prepare_weight(weight)

    def prepare_constant(self, array: Array) -> Any:
        return self.reference.prepare_constant(array)

    def compile(self, plan: Plan, storage: Storage) -> Executable:
        return self.reference.compile(plan, storage)

    def close(self) -> None:
        self.inner.close()


# -- the search --------------------------------------------------------------------------------------------------------


def compare(
    model: Model, backend: Spec, against: Spec, tokens: list[int], more: int, *, options: PlanOptions = PlanOptions(),  # noqa: B008
    context: int | None = None, say: Say = lambda text: None,
) -> Compared:  # fmt: skip
    """Run `tokens`, then `more` steps of the token that `against` finds likeliest, until a node is wrong.

    Unavailable, Refused and errors of the model come through.
    """
    if not tokens:
        raise KitError("there are no tokens to run")
    length = len(tokens) + more
    context = max(context or 0, length)
    if context > model.architecture.context_length:
        raise KitError(f"{length} tokens exceed the model's context of {model.architecture.context_length}")
    with ExitStack() as open_:
        sides = [
            open_.enter_context(closing(Side(spec, model, context, options))) for spec in (backend, against)
        ]  # fmt: skip
        done = Compared((sides[0].outcome, sides[1].outcome), [])
        for number, ids in enumerate(_steps(tokens, more, sides[0].engine.batch, done)):
            say(f"step {number}, {len(ids)} token{'s' * (len(ids) != 1)}")
            done.steps.append(ids)
            logits = [s.step(ids, number) for s in sides]
            if done.wrong is not None:
                break
            a, b = (x for x in logits if x is not None)
            with np.errstate(all="ignore"):
                done.distance.append((float(np.max(np.abs(a - b))), int(np.argmax(a)) == int(np.argmax(b))))
            done.next = int(np.argmax(b))
        wrong = done.wrong
        if wrong is not None and wrong.finding is not None and wrong.finding.made is not None:
            other = against if wrong is done.sides[0] else backend
            if other.name.partition(":")[0] != REFERENCE:
                done.peer = _peer(other, wrong.finding, options)
    return done


def _steps(tokens: list[int], more: int, batch: int, done: Compared) -> Iterator[list[int]]:
    for at in range(0, len(tokens), batch):
        yield tokens[at : at + batch]
    for _ in range(more):
        yield [done.next]


def _peer(spec: Spec, finding: Finding, options: PlanOptions) -> Ran:
    assert finding.made is not None
    rig = Rig(open_target(spec))
    try:
        return run(rig, finding.made, finding.inputs, finding.states, options)
    except (Refused, Blamed, MemoryError) as e:
        return Ran(refused=str(e))
    finally:
        rig.target.close()


def saved(finding: Finding, backend: str) -> Saved | None:
    """What a replay file of a finding holds; None where no values are at fault."""
    if finding.made is None:
        return None
    return Saved(finding.made, finding.inputs, finding.states, {"backend": backend, **finding.about()})


def replay(spec: Spec, file: Saved, options: PlanOptions = PlanOptions()) -> tuple[Outcome, Finding | None]:  # noqa: B008
    """A saved node on a backend, judged; KitError where it does not run."""
    rig = Rig(open_target(spec))
    try:
        outcome = Outcome(rig.target.name, rig.target.device.name, "by itself")
        expected = expect(file.made, file.inputs, file.states, rounding(rig.target))
        try:
            got = run(rig, file.made, file.inputs, file.states, options)
        except (Blamed, MemoryError) as e:
            raise KitError(f"backend {rig.target.name}: {e}") from None
        node = file.made.ops[-1]
        outcome.finding, worst = find(
            node, int(file.about.get("step", 0)), str(file.about.get("kernel", "")), file.made, file.inputs, file.states,
            expected, got.results, got.states,
        )  # fmt: skip
        outcome.tally.add(node.op.name, worst)
        if outcome.finding is None and got.changed:
            wrong = f"its argument {got.changed}, which it only reads, was changed"
            outcome.finding = Finding(node, 0, "", wrong, made=file.made, inputs=file.inputs, states=file.states)
        return outcome, outcome.finding
    finally:
        rig.target.close()
