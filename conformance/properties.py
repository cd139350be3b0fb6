"""What is asked of one op call: the properties, and the verdict on them. Knows ops, bounds and the harness.

refusal    `supports` answers, twice alike, with a sentence where it says no; a no is not launched, a yes does not
           raise
values     results within their bound
states     written states too, and nothing else of them touched
ties       equal scores in the rule's order, equal keys with equal scores
repeat     run to run the same bits
replay     a compiled step follows the values that it is given
cache      graphs that differ in attributes or weights share nothing
batch      a row's bits depend on no other row
padding    nor on padding, which writes nothing
split      nor on how a sequence is split into steps
drift      over 512 steps a state errs no more than roundings do
inputs     what is read is left as it was
written    every entry of a result is written
canaries   nothing beside a buffer is
memory     allocations come back to where they were
errors     a wrong call is an error, and the next one is right
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trueup.core.errors import ContractError, Refused
from trueup.core.graph import Node
from trueup.core.op import OPS

from . import oracles, variants
from .bounds import ACTIVATIONS, Judged, bounds, typical
from .build import Call, build
from .compare import Found, dense, differences, merge, same_bits, selection
from .harness import Blamed, Outcome, Rig, Step, record
from .recipe import Recipe
from .spaces import text

FAILED, PASSED, NOT_HERE = "failed", "passed", "n/a"
LIMIT = "limit"
MEASURED = "measured"
"""Not claimed by the backend, so it can't fail; what was found is shown."""


@dataclass
class Property:
    """One property of one case: passed, failed, n/a (it can't be seen on this kind of target) or measured."""

    status: str
    detail: str = ""


@dataclass
class Verdict:
    """A case judged. `outcome`: "passed", "failed", "refused" (with `reason`) or "limit" (a typed error at run time)."""

    case: str
    """The line that replays it: LEVEL/…"""
    outcome: str = PASSED
    reason: str = ""
    where: str = ""
    worst: float = 0.0
    seconds: float = 0.0
    properties: dict[str, Property] = field(default_factory=dict)
    instead: str = ""
    """Where not the case's own call was wrong but another that was made from it: the case whose own call that is."""
    trace: str = ""
    """Where in the backend the first exception arose, as Python prints it."""

    def raised(self, name: str, said: str, error: Exception) -> None:
        """An exception that breaks a property."""
        self.say(name, said)
        self.trace = self.trace or "".join(traceback.format_exception(error))

    def say(self, name: str, found: Found | str, detail: str = "") -> None:
        """A property's result; a failure stays."""
        wrong = found.wrong if isinstance(found, Found) else found
        known = self.properties.get(name)
        if known is None or known.status != FAILED:
            self.properties[name] = Property(FAILED if wrong else PASSED, wrong or detail)
        if wrong:
            self.outcome = FAILED

    def limit(self, reason: str) -> None:
        """A typed error at run time, or a no: nothing of it is judged, but what was found before it stays."""
        if self.outcome != FAILED:
            self.outcome, self.reason = LIMIT, reason

    def note(self, name: str, status: str, detail: str = "") -> None:
        self.properties.setdefault(name, Property(status, detail))

    @property
    def failed(self) -> list[str]:
        return [n for n, p in self.properties.items() if p.status == FAILED]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Verdict:
        return cls(**{**data, "properties": {k: Property(**p) for k, p in data["properties"].items()}})


class Examiner:
    """Judges recipes on a rig."""

    def __init__(self, rig: Rig, *, own_oracles: bool = False, reopen: Callable[[], Rig] | None = None) -> None:
        """`own_oracles`: compare with the kit's oracles instead of the ops' bodies, where it has them: for the reference.
        `reopen` opens the same device anew: what fails there too is not the fault of what ran before."""
        self.rig, self.own_oracles, self.reopen = rig, own_oracles, reopen
        capabilities = rig.target.capabilities
        self.deterministic, self.invariant = capabilities.deterministic, capabilities.batch_invariant
        self.a = ACTIVATIONS[getattr(capabilities, "activations", "f32")]

    def examine(self, recipe: Recipe) -> Verdict:
        """Everything asked of one call. Exceptions of the backend are findings; those of the kit come through."""
        start = time.perf_counter()
        verdict = Verdict("ops/" + text(recipe))
        call = build(recipe)
        held = self.rig.bytes
        if recipe.fault:
            self._fault(call, verdict)
        elif recipe.steps > 1:
            if self._supported(call, verdict):
                self._guarded(lambda: self._drift(call, verdict), verdict)
        elif self._supported(call, verdict):
            self._run(call, verdict)
        if verdict.outcome != "refused":
            left = self.rig.bytes - held
            verdict.say("memory", f"{left} bytes stay allocated" if left else "")
        verdict.seconds = time.perf_counter() - start
        return verdict

    # -- asking --------------------------------------------------------------------------------------------------------

    def _supported(self, call: Call, verdict: Verdict) -> bool:
        """Whether the target takes the call; its answer is judged too. A refused one must not be in the plan."""
        recorded = record(call)
        node = next(n for n in recorded.graph.nodes if n.op.name == call.op.name)
        if call.op.view:
            return True
        try:
            first, second = self.rig.target.supports(node), self.rig.target.supports(node)
        except Exception as e:
            verdict.raised("refusal", f"supports raised {_text(e)}", e)
            return False
        if bool(first) != bool(second) or first.reason != second.reason:
            verdict.say("refusal", f"supports answered {first} and then {second} about the same node")
            return False
        if first:
            verdict.say("refusal", "")
            return True
        verdict.outcome, verdict.reason = "refused", first.reason
        verdict.say("refusal", "" if first.reason.strip() else f"a no without a reason about {node.describe()}")
        return self._lowered(call, node, verdict)

    def _lowered(self, call: Call, node: Node, verdict: Verdict) -> bool:
        """A refused call may still run in other form: by its decomposition, or after a copy."""
        try:
            step = Step(self.rig, call)
        except Refused:
            return False
        except Blamed as e:
            verdict.raised("refusal", f"the plan of a refused call failed otherwise: {e}", e.error)
            return False
        step.close()
        launched = [n for n in step.plan.kernels if n.op.name == call.op.name and _same_types(n, node)]
        if launched:
            verdict.say("refusal", f"{launched[0].describe()} was refused, and is in the plan")
            return False
        if verdict.outcome == "refused":
            verdict.outcome = PASSED
        return True

    # -- running -------------------------------------------------------------------------------------------------------

    def _run(self, call: Call, verdict: Verdict) -> None:
        try:
            step = Step(self.rig, call)
        except Refused as e:
            if call.op.view:  # the kit looks at views through a copy, which this target may lack
                verdict.outcome, verdict.reason = "refused", str(e)
            else:
                verdict.say("refusal", f"supports said yes, the plan no: {e}")
            return
        except MemoryError as e:
            verdict.limit(_text(e))
            return
        except Blamed as e:
            verdict.raised("refusal", f"supports said yes, compiling raised {e}", e.error)
            return
        verdict.where = step.where
        try:
            self._guarded(lambda: self._examine(step, call, verdict), verdict)
        finally:
            step.close()

    def _guarded(self, run: Callable[[], None], verdict: Verdict) -> None:
        """What a run raises, as a finding."""
        try:
            run()
        except (MemoryError, Refused) as e:
            verdict.limit(_text(e))
        except Blamed as e:
            verdict.raised("refusal", f"supports said yes, the run raised {e}", e.error)

    def _examine(self, step: Step, call: Call, verdict: Verdict) -> None:
        first = step.run(call)
        verdict.say("inputs", f"{first.changed} was changed" if first.changed else "")
        if step.applies["canaries"]:
            verdict.say("canaries", first.broken)
        else:
            verdict.note("canaries", NOT_HERE, "the target's memory is not the host's")
        self._judge(call, first, verdict)
        self._repeat(step, call, first, verdict)
        self._written(step, call, first, verdict)
        self._replay(step, call, first, verdict)
        self._company(call, first, verdict)
        self._sibling(call, verdict)

    def _judge(self, call: Call, got: Outcome, verdict: Verdict) -> None:
        """Values, states and ties against the reference."""
        found, states, ties = self.compare(call, got)
        verdict.worst = max(w for w in (0.0, found.worst, states.worst) if w < np.inf)
        verdict.say("values", found)
        if got.states:
            verdict.say("states", states)
        if ties is not None and not found.wrong:
            verdict.say("ties", ties)

    def _wrong(self, call: Call, got: Outcome) -> tuple[str, str]:
        """The property by which an outcome is wrong, and how; ("", "") where it is right."""
        for name, found in zip(("values", "states", "ties"), self.compare(call, got), strict=True):
            if found is not None and found.wrong:
                return name, found.wrong
        return "", ""

    def compare(self, call: Call, got: Outcome) -> tuple[Found, Found, Found | None]:
        """Results, states and order of ties, each against the reference."""
        results, states = oracles.expected(call) if self.own_oracles else call.reference()
        judged = Judged(call, results, states, self.a)
        allowed, allowed_states = bounds(judged)
        ties = None
        if call.op.name == "top_k":
            found, ties = selection(call.args["scores"], got.results[0], got.results[1], call.attrs["k"])
        else:
            found = merge([
                dense(r.name, g, w, b)
                for r, g, w, b in zip(call.op.results, got.results, results, allowed, strict=True)
            ])  # fmt: skip
            if call.op.name == "index_scores":
                ties = _equal_keys(call, got.results[0])
        parts = []
        for p, before in call.states():
            if p.mutates:
                parts.append(dense(f"state {p.name}", got.states[p.name], states[p.name], allowed_states[p.name]))
            elif not same_bits(got.states[p.name], before):
                parts.append(Found(np.inf, f"state {p.name}, which is only read, was changed"))
        return found, merge(parts), ties

    def _again(self, name: str, step: Step, call: Call, verdict: Verdict, poison: int = 0xFF) -> Outcome | None:
        """One more run of a step that ran: there is room for it, and it is supported."""
        try:
            return step.run(call, poison)
        except (MemoryError, Refused) as e:
            verdict.say(name, f"the step ran, and raised when it was run again: {_text(e)}")
            return None

    def _repeat(self, step: Step, call: Call, first: Outcome, verdict: Verdict) -> None:
        second = self._again("repeat", step, call, verdict)
        if second is None:
            return
        difference = _differ(first, second)
        self._claim("repeat", self.deterministic, difference and f"two runs differ: {difference}", verdict)

    def _claim(self, name: str, claimed: bool, wrong: str, verdict: Verdict) -> None:
        """A property that backends may claim or not."""
        if claimed:
            verdict.say(name, wrong)
        else:
            verdict.note(name, MEASURED, wrong or "held")

    def _written(self, step: Step, call: Call, first: Outcome, verdict: Verdict) -> None:
        """Poisoned with other bytes, the results must be the same."""
        if not step.applies["written"]:
            verdict.note("written", NOT_HERE, "results are new arrays")
            return
        second = self._again("repeat", step, call, verdict, poison=0x5A)
        if second is None:
            return
        difference = _differ(first, second)
        if difference and verdict.properties["repeat"].status != PASSED:
            return
        verdict.say("written", f"results depend on what the buffer held before: {difference}" if difference else "")

    def _replay(self, step: Step, call: Call, first: Outcome, verdict: Verdict) -> None:
        """Other values, then the first again, through the same compiled step."""
        if verdict.outcome == FAILED:
            return
        other = build(call.recipe.but(seed=call.recipe.seed + 1_000_003))
        for p in call.op.params:
            if p.dtype == "weight":
                other.args[p.name] = call.args[p.name]
        got = self._again("replay", step, other, verdict)
        if got is None:
            return
        _, wrong = self._wrong(other, got)
        if wrong:
            name, fresh = self._wrong(other, self._other(other))
            if fresh:
                verdict.say(name, f"with seed {other.recipe.seed}: {fresh}")
                verdict.instead = "ops/" + text(other.recipe)
                return
        verdict.say("replay", f"other values through the same step: {wrong}" if wrong else "")
        last = self._again("replay", step, call, verdict) if self.deterministic else None
        if last is not None:
            difference = _differ(first, last)
            verdict.say("replay", difference and f"the first values again give other bits: {difference}")

    def _sibling(self, call: Call, verdict: Verdict) -> None:
        """A graph that differs in one attribute, in weights and values, but in no shape; then the first graph anew."""
        if verdict.outcome == FAILED:
            return
        other = variants.sibling(call)
        said = ", ".join(f"{k}={v}" for k, v in other.attrs.items() if call.attrs[k] != v) or "other weights"
        _, wrong = self._wrong(other, self._other(other))
        if wrong:
            name, alone = self._anew(lambda e: e._wrong(other, e._other(other)))
            if alone:
                verdict.say(name, f"with {said} and seed {other.recipe.seed}: {alone}")
                verdict.instead = "ops/" + text(other.recipe)
            else:
                verdict.say("cache", f"a graph of {said} after this one: {wrong}")
            return
        _, again = self._wrong(call, self._other(call))
        verdict.say("cache", again and f"this graph again, after one of {said}: {again}")

    def _anew(self, ask: Callable[[Examiner], tuple[str, str]]) -> tuple[str, str]:
        """What is wrong on the device opened anew: nothing, also where it can't be opened twice."""
        if self.reopen is None:
            return "", ""
        try:
            rig = self.reopen()
        except Exception:
            return "", ""
        try:
            return ask(Examiner(rig, own_oracles=self.own_oracles))
        finally:
            rig.target.close()

    # -- the same rows in other company --------------------------------------------------------------------------------

    def _company(self, call: Call, full: Outcome, verdict: Verdict) -> None:
        if verdict.outcome == FAILED:
            return
        rng = np.random.default_rng(call.recipe.seed)
        if "cu_seqlens" in call.args:
            self._sequences(call, full, verdict, rng)
            return
        axis = variants.row_axis(call)
        n = len(full.results[0]) if axis else 0
        if not n:
            return
        for index in (np.array([rng.integers(n)]), rng.integers(0, n, size=min(2 * n + 1, n + 70))):
            other = variants.rows(call, index)
            got = self._other(other)
            wrong = ""
            for r, whole, some in zip(call.op.results, full.results, got.results, strict=True):
                want = np.ascontiguousarray(whole[index])
                if not wrong and not same_bits(some, want):
                    wrong = f"{r.name} of {len(index)} of {n} rows: {differences(some, want)} (among them, in the full step)"
            self._claim("batch", self.invariant, wrong, verdict)

    def _sequences(self, call: Call, full: Outcome, verdict: Verdict, rng: np.random.Generator) -> None:
        tokens = next(len(call.args[p.name]) for p in call.op.params if p.axes and p.axes[0].text == "tokens")
        got = self._other(variants.padded(call, 3))
        wrong = ""
        for r, whole, some in zip(call.op.results, full.results, got.results, strict=True):
            wrong = wrong or _unlike(f"{r.name} with padding", some[:tokens], whole)
        for name, state in full.states.items():
            wrong = wrong or _unlike(f"state {name} with padding", got.states[name], state)
        self._claim("padding", self.invariant, wrong, verdict)
        busy = [s for s, (a, b) in enumerate(call.sequences) if a < b]
        if not busy:
            return
        s = int(rng.choice(busy))
        a, b = call.sequences[s]
        single = variants.alone(call, s)
        got = self._other(single)
        wrong = ""
        for r, whole, some in zip(call.op.results, full.results, got.results, strict=True):
            wrong = wrong or _unlike(f"{r.name} of sequence {s} alone", some, whole[a:b])
        for name, at in _own(call, s).items():
            wrong = wrong or _unlike(f"state {name} of sequence {s} alone", got.states[name][at], full.states[name][at])
        self._claim("batch", self.invariant, wrong, verdict)
        writes = any(p.mutates for p in call.op.params)
        if writes and b - a > 1 and call.op.name not in variants.NO_SPLIT:
            self._split(single, got, int(rng.integers(1, b - a)), verdict)

    def _split(self, single: Call, whole: Outcome, at: int, verdict: Verdict) -> None:
        """A sequence in two steps instead of one."""
        n = single.sequences[0][1]
        first = variants.part(single, 0, at)
        one = self._other(first)
        second = variants.part(single, at, n)
        for name, state in one.states.items():
            second.args[name] = state.copy()
        two = self._other(second)
        wrong = ""
        for r, w, x, y in zip(single.op.results, whole.results, one.results, two.results, strict=True):
            wrong = wrong or _unlike(f"{r.name} in steps of {at} and {n - at} rows", np.concatenate([x, y]), w)
        for name, state in two.states.items():
            wrong = wrong or _unlike(f"state {name} after steps of {at} and {n - at} rows", state, whole.states[name])
        self._claim("split", self.invariant, wrong, verdict)

    def _other(self, call: Call) -> Outcome:
        step = Step(self.rig, call)
        try:
            return step.run(call)
        finally:
            step.close()

    def _drift(self, call: Call, verdict: Verdict) -> None:
        """A row at a time through one compiled step, the state staying where it is; then the state against float64's.

        Roundings that are independent grow with the root of the number of rows; what grows faster is a drift.
        """
        parts = [variants.part(call, t, t + 1) for t in range(call.recipe.steps)]
        step = Step(self.rig, parts[0])
        try:
            verdict.where = step.where
            for i, p in enumerate(parts):
                got = step.run(p, upload=i == 0)
        finally:
            step.close()
        states = oracles.delta_rule(call, rounded=False)[1]
        with typical():
            _, allowed = bounds(Judged(call, call.reference()[0], states, self.a))
        found = merge(
            [dense(f"state {k} after {len(parts)} rows", got.states[k], w, allowed[k]) for k, w in states.items()]
        )
        verdict.worst = found.worst if np.isfinite(found.worst) else 0.0
        verdict.say("drift", found)

    # -- calls that break the contract ---------------------------------------------------------------------------------

    def _fault(self, call: Call, verdict: Verdict) -> None:
        """An error, or, where values lie on the device, any result: but no canary broken, and the next call is right."""
        right = self._faultless(call)
        if right.outcome in ("refused", LIMIT):  # of an op that the backend does not run a wrong call says nothing
            verdict.outcome, verdict.reason, verdict.properties = right.outcome, right.reason, right.properties
            return
        if wrong := _what_failed(right):
            verdict.say("values", f"without the fault: {wrong}")
            return
        step = None
        try:
            record(call)
        except ContractError as e:
            verdict.say("errors", "", f"refused when it is recorded: {e}")
            return
        try:
            step = Step(self.rig, call)
            got = step.run(call)
            verdict.note("errors", MEASURED, "not detected")
            verdict.say("canaries", got.broken)
        except (Refused, MemoryError, Blamed) as e:
            error = e.error if isinstance(e, Blamed) else e
            verdict.reason = _text(error)
            verdict.say("errors", "" if _typed(error) else f"a wrong call ended in {_text(error)}", _text(error))
            verdict.say("canaries", self.rig.guards.broken() if self.rig.guards else "")
        finally:
            if step is not None:
                step.close()
        wrong = _what_failed(self._faultless(call))
        verdict.say("errors", wrong and f"the call after a wrong one fails: {wrong}")

    def _faultless(self, call: Call) -> Verdict:
        """The same call without its fault."""
        good, verdict = build(call.recipe.but(fault="")), Verdict("")
        if self._supported(good, verdict):
            self._run(good, verdict)
        return verdict


def _what_failed(verdict: Verdict) -> str:
    return next((f"{n}: {verdict.properties[n].detail}" for n in verdict.failed), "")


def _own(call: Call, s: int) -> dict[str, Any]:
    """Of each written state the rows that sequence s alone may write."""
    out: dict[str, Any] = {}
    for p, _ in call.states():
        if p.mutates:
            who = "block_table" if p.axes[0].text == "pages" else "slots"
            named = np.ravel(call.args[who][s])
            out[p.name] = named[named >= 0]
    return out


def _unlike(what: str, got: Any, want: Any) -> str:
    return "" if same_bits(got, want) else f"{what}: {differences(got, want)} (there, in the full step)"


def _differ(a: Outcome, b: Outcome) -> str:
    for i, (x, y) in enumerate(zip(a.results, b.results, strict=True)):
        if not same_bits(x, y):
            return f"result {i}, {differences(x, y)}"
    for name, state in a.states.items():
        if not same_bits(state, b.states[name]):
            return f"state {name}, {differences(state, b.states[name])}"
    return ""


def _equal_keys(call: Call, scores: Any) -> Found:
    """Entries of equal keys score exactly alike."""
    keys, table, every = call.args["keys"], call.args["block_table"], call.attrs["every"]
    for s, (a, b) in enumerate(call.sequences):
        n = (int(call.args["past"][s]) + b - a) // every if a < b else 0
        if n < 2:
            continue
        at = np.arange(n)
        rows = keys[table[s, at // keys.shape[1]], at % keys.shape[1]]
        _, group, members = np.unique(rows.view(np.uint32), axis=0, return_inverse=True, return_counts=True)
        several = np.flatnonzero(members > 1)
        for t in range(a, b):
            seen = (int(call.args["past"][s]) + t - a + 1) // every
            row = np.ascontiguousarray(scores[t, :seen]).view(np.uint32)
            for g in several:
                same = row[group[:seen] == g]
                if len(np.unique(same)) > 1 and not np.isnan(same.view(np.float32)).all():
                    return Found(np.inf, f"row {t}: entries of equal keys score {same.view(np.float32)[:4].tolist()}")
    return Found()


def _same_types(a: Node, b: Node) -> bool:
    return [str(t) for t in a.types] == [str(t) for t in b.types]


def _typed(e: BaseException) -> bool:
    """Whether an error says what was wrong with the call: a ValueError, an ArgumentError, Refused, …; not a stray
    one."""
    stray = (KeyError, IndexError, AttributeError, NameError, ZeroDivisionError, AssertionError, UnboundLocalError)
    return not isinstance(e, stray)


def _text(e: BaseException) -> str:
    return " ".join(f"{type(e).__name__}: {e}".split())


def claimed(rig: Rig) -> set[str]:
    """Ops for which the target has a kernel of its own or a body, where it has a table of kernels to look at."""
    table: Any = getattr(rig.target, "kernels", None)
    known: dict[Any, Any] = getattr(table, "kernels", {})
    return {op.name for op in OPS.values() if op in known}


Check = Callable[[Recipe], Verdict]
