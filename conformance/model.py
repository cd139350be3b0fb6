"""Level model: a whole model on an engine, against the reference: logits, chunks, sequences, forks, checkpoints,
greedy text.

Imports the runtime; no other level does. Every row of logits is judged by the bound that errors within each op's
bound can
carry to it (`propagate`), so one run of the reference judges every way in which the same text can be run.

    logits     each row within its bound                  greedy    each token an argmax of the reference within the
    bound
    chunks     however the text is cut into steps         sequences however many others are in the step
    fork       and after a fork, on both sides            restore   and after going back to a checkpoint
    memory     an engine that closes, or that fails while it opens, gives everything back
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.errors import Refused
from trueup.core.state import Capacity

from .compare import Found, dense, merge
from .errors import KitError
from .harness import Rig
from .propagate import allowed
from .properties import Verdict
from .whole import fresh_states

Array = NDArray[Any]

TOKENS = 20
"""Length of the text; short, because the reference runs it several times with rounding."""
LONG = 150
"""Length of the text that outgrows the budget of a sparse indexer, where `examples` allow it."""
Scenario = Callable[["Rig", "Text"], tuple[str, Found]]
"""Runs on a target with a text; where its nodes ran, and how far what it gave is from the reference."""
SCENARIOS: dict[str, Scenario] = {}


def scenario(f: Scenario) -> Scenario:
    SCENARIOS[f.__name__] = f
    return f


class Text:
    """A text, its logits on the reference, and the bound of each."""

    def __init__(self, model: Any, ids: Array, a: float) -> None:
        """`model`: a `trueup.models.Model`; `ids[tokens]`; `a` as in `bounds`."""
        from trueup.models.architecture import StepShape

        self.model, self.ids, self.a = model, ids.astype(np.int32), a
        arch, tokens = model.architecture, len(ids)
        page = max(16, arch.page_multiple)
        page += -page % arch.page_multiple
        blocks = -(-tokens // page)
        graph = arch.build(StepShape(tokens, 1, blocks, tokens), Capacity(1, blocks, page))
        inputs = inputs_of(arch, self.ids, blocks)
        want, _, wide, _ = allowed(graph, inputs, fresh_states(graph, poison=False), a=a, seed=tokens)
        self.logits: Array = want["logits"]
        self.bound: Array = wide["logits"] + 2.0**-24 * np.abs(want["logits"])

    def judge(self, what: str, got: Array, first: int = 0) -> Found:
        """Rows from `first` on against the reference's."""
        rows = slice(first, first + len(got))
        return dense(what, got, self.logits[rows], self.bound[rows])


def inputs_of(arch: Any, ids: Array, blocks: int) -> dict[str, Array]:
    """The inputs of a step that is one text from its start, with the logits of all rows."""
    tokens = len(ids)
    positions = np.repeat(np.arange(tokens, dtype=np.int32)[:, None], arch.position_components, 1)
    return {
        "ids": ids, "positions": positions, "cu_seqlens": np.array([0, tokens], np.int32),
        "slots": np.zeros(1, np.int32), "past": np.zeros(1, np.int32),
        "block_table": np.arange(blocks, dtype=np.int32)[None], "keep": np.full(tokens, -1, np.int32),
        "out_rows": np.arange(tokens, dtype=np.int32),
    }  # fmt: skip


@functools.lru_cache(maxsize=2)
def text_of(path: str | None, tokens: int, seed: int, a: float) -> Text:
    """A random text for a model file, or for the bundled model."""
    from trueup.models import load_model

    model = load_model(path)
    ids = np.random.default_rng(seed).integers(0, model.architecture.vocab_size, size=tokens)
    return Text(model, ids, a)


def cases(model: str | None, seed: int, *, long: bool) -> dict[str, list[str]]:
    """The scenarios; the long text where there is time for it."""
    source = f"&model={model}" if model else ""
    out = {name: [f"model/{name}?tokens={TOKENS}&seed={seed}{source}"] for name in SCENARIOS}
    if long:
        for name in ("logits", "chunks"):
            out[name].append(f"model/{name}?tokens={LONG}&seed={seed}{source}")
    return out


def examine(
    rig: Rig, case: str, a: float, *, level: str = "model", scenarios: Mapping[str, Scenario] = SCENARIOS
) -> Verdict:
    """One scenario; KitError where there is no such one, or the model can't be read."""
    name, _, rest = case.partition("?")
    words = dict(w.partition("=")[::2] for w in filter(None, rest.split("&")))
    if name not in scenarios:
        raise KitError(f"case {level}/{case}: no such scenario; known are {', '.join(scenarios)}")
    start, verdict, held = time.perf_counter(), Verdict(f"{level}/{case}"), rig.bytes
    try:
        text = text_of(words.get("model"), int(words.get("tokens", TOKENS)), int(words.get("seed", 0)), a)
    except (ValueError, OSError) as e:
        raise KitError(f"model {words.get('model') or 'bundled'}: {e}") from None
    try:
        verdict.where, found = scenarios[name](rig, text)
        verdict.worst = found.worst if np.isfinite(found.worst) else 0.0
        verdict.say(name, found)
    except Refused as e:
        verdict.outcome, verdict.reason = "refused", str(e)
    verdict.say("canaries", rig.guards.broken() if rig.guards else "")
    left = rig.bytes - held
    verdict.say("memory", f"{left} bytes stay allocated after the engine was closed" if left else "")
    verdict.seconds = time.perf_counter() - start
    return verdict


@contextmanager
def engine(rig: Rig, text: Text, **more: Any) -> Iterator[Any]:
    """An engine on the target under test; closing it leaves the target open for the next case."""
    from trueup.runtime import Engine

    close, rig.target.close = rig.target.close, lambda: None  # type: ignore[method-assign]
    try:
        engine = Engine(text.model, rig.target, context=max(2 * len(text.ids), 32), page=16, **more)
        try:
            engine.bundle.poison = True
            yield engine
        finally:
            engine.close()
    finally:
        rig.target.close = close  # type: ignore[method-assign]


def where(engine: Any) -> str:
    plans = engine.plans()
    return "device" if plans else ""


@scenario
def logits(rig: Rig, text: Text) -> tuple[str, Found]:
    """All rows in one step."""
    with engine(rig, text) as e:
        got = e.logits(text.ids.tolist())
        return where(e), text.judge("logits", got)


@scenario
def chunks(rig: Rig, text: Text) -> tuple[str, Found]:
    """The text in steps of 1, 7, 1, 3 … rows."""
    with engine(rig, text) as e, e.session() as s:
        found, at, sizes = [], 0, (1, 7, 1, 3, 5)
        for i in range(len(text.ids)):
            if at >= len(text.ids):
                break
            n = min(sizes[i % len(sizes)], len(text.ids) - at)
            found.append(
                text.judge(
                    f"logits after chunks, from row {at}:", s.feed(text.ids[at : at + n].tolist(), logits="all"), at
                )
            )
            at += n
        return where(e), merge(found)


@scenario
def sequences(rig: Rig, text: Text) -> tuple[str, Found]:
    """Three sequences in one step, all of this text and of different lengths; then each by a row."""
    n = len(text.ids)
    with engine(rig, text) as e:
        lengths = [n // 3, n - 2, n // 2]
        sessions = [e.session() for _ in lengths]
        got = e.step([(s, text.ids[:k].tolist()) for s, k in zip(sessions, lengths, strict=True)], logits="all")
        found = [text.judge(f"logits of sequence {i}", g) for i, g in enumerate(got)]
        got = e.step(
            [(s, text.ids[k : k + 1].tolist()) for s, k in zip(sessions, lengths, strict=True)][::-1], logits="all"
        )
        for k, g in zip(reversed(lengths), got, strict=True):
            found.append(text.judge(f"logits of the sequence of {k} tokens, going on:", g, k))
        return where(e), merge(found)


@scenario
def fork(rig: Rig, text: Text) -> tuple[str, Found]:
    """A fork in the middle; one side goes elsewhere first, then the other goes on."""
    n = len(text.ids) // 2 + 1
    with engine(rig, text) as e, e.session() as s:
        found = [text.judge("logits before the fork", s.feed(text.ids[:n].tolist(), logits="all"))]
        with s.fork() as other:
            other.feed(text.ids[:3][::-1].tolist())
            found.append(text.judge("logits after the fork", s.feed(text.ids[n:].tolist(), logits="all"), n))
        with s.fork() as late:
            late.reset()
            found.append(text.judge("logits of a fork that was reset", late.feed(text.ids.tolist(), logits="all")))
        return where(e), merge(found)


@scenario
def restore(rig: Rig, text: Text) -> tuple[str, Found]:
    """Back to a checkpoint, twice, after other tokens."""
    n = len(text.ids) // 2
    with engine(rig, text) as e, e.session() as s:
        s.feed(text.ids[:n].tolist())
        point = s.checkpoint()
        found = []
        for turn in range(2):
            s.feed(text.ids[:5][::-1].tolist())
            s.restore(point)
            found.append(
                text.judge(f"logits after restoring, time {turn}:", s.feed(text.ids[n:].tolist(), logits="all"), n)
            )
            s.restore(point)
        return where(e), merge(found)


@scenario
def greedy(rig: Rig, text: Text) -> tuple[str, Found]:
    """Greedy tokens on the target, judged one by one on the reference: each an argmax of its row, within the bound."""
    n, count = 4, len(text.ids) - 4
    with engine(rig, text) as e, e.session() as s:
        row, chosen = s.feed(text.ids[:n].tolist()), []
        for _ in range(count):
            chosen.append(int(np.argmax(row)))
            row = s.feed([chosen[-1]])
        place = where(e)
    forced = Text(text.model, np.array([*text.ids[:n].tolist(), *chosen]), text.a)
    worst = 0.0
    for i, token in enumerate(chosen):
        want, bound = forced.logits[n - 1 + i], forced.bound[n - 1 + i]
        best = int(np.argmax(want))
        gap, room = float(want[best] - want[token]), float(bound[best] + bound[token])
        worst = max(worst, gap / room if gap else 0.0)
        if gap > room:
            return place, Found(
                np.inf, f"token {i} is {token}, but the reference's is {best}, by {gap:.4g} ± {room:.2g}"
            )
    return place, Found(worst)


@scenario
def memory(rig: Rig, text: Text) -> tuple[str, Found]:
    """An engine whose n-th allocation fails raises MemoryError and holds nothing; the next one works."""
    held = rig.bytes
    for n in (1, 2, 5, 9, 14, 20, *range(24, 64, 3)):
        rig.fail_at = n
        try:
            with engine(rig, text) as e:
                e.logits(text.ids[:2].tolist())
            rig.fail_at = 0
            break
        except MemoryError:
            pass
        except Exception as e:
            return "", Found(
                np.inf, f"allocation {n} failed, and {type(e).__name__}: {e} came of it, expected MemoryError"
            )
        finally:
            rig.fail_at = 0
        if rig.bytes != held:
            return "", Found(np.inf, f"allocation {n} failed, and {rig.bytes - held} bytes stay allocated")
    return logits(rig, text)
