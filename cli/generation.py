"""One generation as commands run it: the text as it comes, and afterwards what was counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trueup.cli.drafting import summary, tally
from trueup.cli.prompt import feed

if TYPE_CHECKING:
    from trueup.core.plan import Plan
    from trueup.runtime import Engine, Session


@dataclass
class Output:
    """What came of a prompt. `finish_reason` is "stop", "length" or "interrupted"; times are in seconds.

    `prompt_tokens` are those of the whole prompt, `fed` those that the session did not hold yet.
    """

    prompt_tokens: int = 0
    fed: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "interrupted"
    stop: str | None = None
    prompt_time: float = 0.0
    output_time: float = 0.0

    def rates(self) -> tuple[float | None, float | None]:
        """Tokens per second of the prompt and of the output, None where there is nothing to divide."""
        return (
            self.fed / self.prompt_time if self.fed and self.prompt_time else None,
            len(self.tokens) / self.output_time if self.tokens and self.output_time else None,
        )


def generate(
    engine: Engine,
    session: Session,
    ids: list[int],
    out: Output,
    *,
    mark: Callable[[], None] | None = None,
    **options: Any,
) -> Generator[str, None, None]:
    """Feed a prompt and choose tokens, filling `out`; yields text. `options` are those of `Engine.generate`.

    The steps are those that `Engine.generate` itself would make, unless `mark` wants to be called when all of the
    prompt but its last token is fed. Raises as `Engine.generate` does, ContextFull before anything is fed.
    """
    from trueup.runtime import ContextFull

    if len(session) + len(ids) > engine.context:
        raise ContextFull(
            f"the prompt's {len(session) + len(ids)} tokens exceed the context of {engine.context}; --ctx sets another"
        )
    out.prompt_tokens, out.fed = len(session) + len(ids), len(ids)
    start = time.perf_counter()
    head = max(0, len(ids) - 1)
    head = head if mark is not None else head // engine.batch * engine.batch
    pieces = engine.generate(ids[head:], session=session, **options)
    feed(session, ids[:head])
    if mark is not None:
        mark()
    prompt_end = 0.0
    try:
        for piece in pieces:
            prompt_end = prompt_end or time.perf_counter()
            out.text += piece.text
            out.tokens += piece.tokens
            out.logprobs += piece.logprobs
            if piece.finish_reason is not None:
                out.finish_reason, out.stop = piece.finish_reason, piece.stop
            yield piece.text
    finally:
        end = time.perf_counter()
        prompt_end = prompt_end or end
        out.prompt_time, out.output_time = prompt_end - start, end - prompt_end


def statistics(out: Output, engine: Engine) -> str:
    """One line for a person: tokens and their rates, why it ended, and where the nodes ran if any fell back."""
    prompt, output = (f", {r:.1f} tok/s" if r is not None else "" for r in out.rates())
    ended = f"stop at {out.stop!r}" if out.stop is not None else out.finish_reason
    held = "" if out.fed == out.prompt_tokens else f" ({out.fed} new)"
    parts = [
        f"prompt {out.prompt_tokens} tokens{held}{prompt}",
        f"output {len(out.tokens)} tokens{output}",
        f"finish: {ended}",
        f"{engine.target.name} on {engine.target.device.name}",
    ]
    drafted = summary(engine)
    if drafted is not None:
        parts.append(drafted)
    plan = last_plan(engine)
    if plan is not None and plan.fallbacks:
        counts = ", ".join(f"{n} {where}" for where, n in sorted(plan.counts().items()))
        parts.append(
            f"{len(plan.fallbacks)} of {len(plan.placements)} nodes of a step fell back to the reference ({counts})"
        )
    return "trueup: " + "; ".join(parts)


def as_json(out: Output, engine: Engine, *, model: str, load_time: float, seed: int | None) -> dict[str, Any]:
    """The same for a program, with text, tokens and log-probabilities."""
    prompt_rate, output_rate = out.rates()
    plan = last_plan(engine)
    return {
        "model": model,
        "text": out.text,
        "tokens": out.tokens,
        "logprobs": out.logprobs,
        "finish_reason": out.finish_reason,
        "stop": out.stop,
        "seed": seed,
        "usage": {"prompt_tokens": out.prompt_tokens, "completion_tokens": len(out.tokens)},
        "timings": {
            "load_s": load_time,
            "prompt_s": out.prompt_time,
            "output_s": out.output_time,
            "prompt_tokens_per_s": prompt_rate,
            "output_tokens_per_s": output_rate,
        },
        "backend": {
            "name": engine.target.name,
            "device": engine.target.device.name,
            "kind": engine.target.device.kind,
        },
        "speculation": tally(engine),
        "placements": {
            "nodes": {} if plan is None else plan.counts(),
            "fallbacks": []
            if plan is None
            else [{"node": n.describe(), "reason": p.reason, "bytes": p.bytes} for n, p in plan.fallbacks],
        },
    }


def last_plan(engine: Engine) -> Plan | None:
    """The plan of the step that ran last: with output, the one for a single token."""
    plans = list(engine.plans().values())
    return plans[-1] if plans else None
