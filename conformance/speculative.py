"""Level speculative: drafts verified, accepted and undone on a whole model, against the reference's logits.

Imports the runtime. Drafts come from stubs that are right for a given number of tokens and then wrong, so every length of
acceptance is met at every depth, whatever the model; and from the model's own draft head, where it has one.

    accept     rounds of every depth: each token an argmax of the reference within the bound
    snapshots  undone to every row by the states that the step wrote      head     the draft head's own proposals
    replay     undone by a checkpoint and the kept rows again             sampled  the text of plain sampling
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.errors import Refused
from trueup.core.state import Capacity

from .compare import Found, merge
from .harness import Rig
from .model import LONG, TOKENS, Scenario, Text, engine, inputs_of, where
from .propagate import allowed
from .whole import fresh_states

SCENARIOS: dict[str, Scenario] = {}
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)


def scenario(f: Scenario) -> Scenario:
    SCENARIOS[f.__name__] = f
    return f


def cases(model: str | None, seed: int, *, long: bool) -> dict[str, list[str]]:
    """The scenarios; the head's on a text that outgrows its sparse attention, where there is time for it."""
    source = f"&model={model}" if model else ""
    out = {name: [f"speculative/{name}?tokens={TOKENS}&seed={seed}{source}"] for name in SCENARIOS}
    if long:
        out["head"].append(f"speculative/head?tokens={LONG}&seed={seed}{source}")
    return out


class Stub:
    """Drafts what is said to follow, and is wrong from the j-th token on, j counting up from 0 to the depth."""

    name = "stub"

    def __init__(self, text: Sequence[int], vocab: int) -> None:
        self.text, self.vocab, self.calls = list(text), vocab, 0

    def propose(self, requests: Sequence[Any]) -> list[Any]:
        from trueup.runtime.speculation import Draft

        out = []
        for r in requests:
            right, self.calls = self.calls % (r.depth + 1), self.calls + 1
            at = len(r.session) + 1
            known = [*self.text[at : at + r.depth], *[0] * r.depth][: r.depth]
            out.append(Draft(tuple(t if i < right else (t + 1) % self.vocab for i, t in enumerate(known))))
        return out

    def close(self) -> None:
        return None


def _rounds(e: Any, drafter: Any, depth: int, rollback: str, sampler: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that rounds commit after a prompt, in a session of their own."""
    from trueup.runtime.speculation import Speculator

    e.speculator = Speculator(e, drafter, depth=depth, most=depth, rollback=rollback)  # type: ignore[arg-type]
    pieces = e.generate(
        prompt,
        max_tokens=count,
        ignore_eos=True,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        seed=sampler.seed,
    )
    return [t for p in pieces for t in p.tokens]


@scenario
def accept(rig: Rig, text: Text) -> tuple[str, Found]:
    """Greedy rounds of every depth and both ways back; each token judged on the reference, teacher-forced."""
    from trueup.runtime.sampling import Sampler

    n, count, found, at = 4, len(text.ids) - 4, [], ""
    with engine(rig, text, snapshots=max(DEPTHS) + 1) as e:
        prompt = text.ids[:n].tolist()
        plain = [t for p in e.generate(prompt, max_tokens=count, ignore_eos=True) for t in p.tokens]
        at, texts = where(e), {}
        for depth in DEPTHS:
            way = "replay" if depth % 2 else "snapshots"
            got = _rounds(e, Stub([*prompt, *plain], e.vocab_size), depth, way, Sampler(), prompt, count)
            texts.setdefault(tuple(got), f"depth {depth}, {way}")
            if len(got) != count:
                found.append(Found(np.inf, f"rounds of depth {depth} gave {len(got)} of {count} tokens"))
    for got, how in texts.items():
        found.append(_argmaxes(text, prompt, list(got), how))
    return at, merge(found)


def _argmaxes(text: Text, prompt: list[int], chosen: list[int], how: str) -> Found:
    """Each chosen token an argmax of the reference's row, within the bounds."""
    forced = Text(text.model, np.array([*prompt, *chosen]), text.a)
    worst = 0.0
    for i, token in enumerate(chosen):
        want, bound = forced.logits[len(prompt) - 1 + i], forced.bound[len(prompt) - 1 + i]
        best = int(np.argmax(want))
        gap, room = float(want[best] - want[token]), float(bound[best] + bound[token])
        if gap > room:
            what = f"{how}: token {i} is {token}, but the reference's is {best}, by {gap:.4g} ± {room:.2g}"
            return Found(np.inf, what)
        worst = max(worst, gap / room if gap else 0.0)
    return Found(worst)


def _undone(rig: Rig, text: Text, way: str) -> tuple[str, Found]:
    """Rows of a step that are taken back, in two sequences at once and each to another row; then both go on."""
    from trueup.runtime.speculation.rollback import WAYS

    found, ids = [], text.ids.tolist()
    depth = 4
    with engine(rig, text, snapshots=depth + 1) as e:
        for kept in range(1, depth + 2):
            sessions = [e.session(), e.session()]
            starts, keeps = (3, 5), (kept, depth + 2 - kept)
            for s, n in zip(sessions, starts, strict=True):
                s.feed(ids[:n], logits=None)
            work = [
                (s, [*ids[n : n + k], *((t + 1) % e.vocab_size for t in ids[n + k : n + depth + 1])])
                for s, n, k in zip(sessions, starts, keeps, strict=True)
            ]
            rows = WAYS[way](e, work)
            try:
                got = rows.run()
                for (_, n, k), g in zip(zip(sessions, starts, keeps, strict=True), got, strict=True):
                    found.append(text.judge(f"logits of a verify step's right rows from {n}:", g[:k], n))
                rows.keep(keeps)
            finally:
                rows.drop()
            for s, n, k in zip(sessions, starts, keeps, strict=True):
                if len(s) != n + k:
                    found.append(Found(np.inf, f"{k} rows were kept after {n}, but the session holds {len(s)}"))
                    continue
                went_on = s.feed(ids[n + k :], logits="all")
                found.append(text.judge(f"logits after {k} of {depth + 1} rows were kept by {way}:", went_on, n + k))
            for s in sessions:
                s.close()
        return where(e), merge(found)


@scenario
def snapshots(rig: Rig, text: Text) -> tuple[str, Found]:
    return _undone(rig, text, "snapshots")


@scenario
def replay(rig: Rig, text: Text) -> tuple[str, Found]:
    return _undone(rig, text, "replay")


@scenario
def head(rig: Rig, text: Text) -> tuple[str, Found]:
    """The draft head after each row of the text: its first proposal an argmax of the reference's head, within the bound."""
    if not text.model.architecture.has_draft_head:
        raise Refused("the model has no draft head")
    want, bound = head_of(text.model.file.path, len(text.ids), tuple(text.ids.tolist()), text.a)
    found = []
    with engine(rig, text, draft_head=True, snapshots=2) as e, e.session() as s:
        for n in range(len(text.ids) - 1):
            token = int(e.draft([(s, int(text.ids[n]))], depth=1 + n % 3)[0, 0])
            best = int(np.argmax(want[n]))
            gap, room = float(want[n, best] - want[n, token]), float(bound[n, best] + bound[n, token])
            what = (
                ""
                if gap <= room
                else f"after {n + 1} tokens the head drafts {token}, the reference's {best}, by {gap:.3g}"
            )
            found.append(Found(np.inf if what else gap / room if gap else 0.0, what))
            s.feed([int(text.ids[n])], logits=None)
        return where(e), merge(found)


@functools.lru_cache(maxsize=2)
def head_of(path: Any, tokens: int, ids: tuple[int, ...], a: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The draft head's logits on the reference, and their bound."""
    from trueup.models import load_model
    from trueup.models.architecture import StepShape

    arch = load_model(path).architecture
    page = max(16, arch.page_multiple)
    page += -page % arch.page_multiple
    blocks = -(-tokens // page)
    graph = arch.build(StepShape(tokens, 1, blocks, tokens, "logits"), Capacity(1, blocks, page))
    inputs = inputs_of(arch, np.array(ids, np.int32), blocks)
    want, _, wide, _ = allowed(graph, inputs, fresh_states(graph, poison=False), a=a, seed=tokens)
    return want["draft_logits"], wide["draft_logits"] + 2.0**-24 * np.abs(want["draft_logits"])


@scenario
def sampled(rig: Rig, text: Text) -> tuple[str, Found]:
    """Where results don't depend on the batch: with a seed, rounds of every depth write what plain sampling writes."""
    from trueup.runtime.sampling import Sampler

    if not rig.target.capabilities.batch_invariant:
        raise Refused("the backend does not claim to be batch-invariant, so rounds may write another text")
    settings, prompt, count = Sampler(0.9, top_p=0.95, seed=7), text.ids[:4].tolist(), len(text.ids) - 4
    with engine(rig, text, snapshots=max(DEPTHS) + 1) as e:
        plain = [
            t
            for p in e.generate(prompt, max_tokens=count, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7)
            for t in p.tokens
        ]
        at = where(e)
        for depth in DEPTHS[::3]:
            got = _rounds(e, Stub([*prompt, *plain], e.vocab_size), depth, "snapshots", settings, prompt, count)
            if got != plain:
                first = next(i for i, (a, b) in enumerate(zip([*got, -1], [*plain, -1], strict=False)) if a != b)
                return at, Found(np.inf, f"depth {depth}: token {first} differs from that of plain sampling")
        return at, Found(0.0)
