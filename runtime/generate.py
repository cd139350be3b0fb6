"""Generation: sample, feed, decode, until something ends it. Knows sessions, sampling and text; knows no backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .sampling import NonFiniteLogits, Sampler, sample, uniform
from .text import StopStrings, TextStream

if TYPE_CHECKING:
    from trueup.models import Model

    from .session import Session

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Usage:
    """Tokens counted as APIs do: those of the prompt, and those that were chosen (an end token not among them)."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Piece:
    """A part of the output.

    `text` never ends inside a character, and may lag behind `tokens`: an unfinished character or the possible beginning of
    a stop string is held back. `logprobs` are natural logarithms under the plain softmax of the logits. Only the last
    piece has a `finish_reason` ("stop": an end token or a stop string, then in `stop`; "length": max_tokens, or the context
    is full) and `usage`.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None


def generate(
    session: Session,
    model: Model,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    choice: int = 0,
    ignore_eos: bool = False,
    skip_special: bool = True,
    going_on: bool = True,
) -> Iterator[Piece]:
    """Feed the prompt, then choose token after token; see `Engine.generate`. `choice` numbers the `n` outputs of a prompt.

    With `going_on`, everything chosen has been fed when it ends by itself, so that the session can be continued.
    """
    sampler = sampler.seeded()
    seed = sampler.seed or 0
    texts, stops = TextStream(model.tokenizer, skip_special=skip_special), StopStrings(stop)
    ends = frozenset() if ignore_eos else model.tokenizer.eos_ids
    limit = session.engine.context
    logits = session.feed(prompt)
    chosen = 0
    reason: FinishReason
    while True:
        if chosen == max_tokens or len(session) == limit:
            reason = "length"
            break
        position = len(session)
        try:
            token, logprob = sample(logits, sampler, draw=uniform(seed, choice, position, "sample"))
        except NonFiniteLogits as e:
            raise NonFiniteLogits(
                f"after {position} tokens on backend {session.engine.target.name}: {e}", e.position
            ) from None
        if token in ends:
            reason = "stop"
            break
        chosen += 1
        text = stops.push(texts.push(token))
        yield Piece(text, (token,), (logprob,))
        if stops.stopped is not None or chosen == max_tokens:
            if going_on:
                session.feed([token], logits=None)
            reason = "stop" if stops.stopped is not None else "length"
            break
        logits = session.feed([token])
    tail = stops.push(texts.finish())
    if stops.stopped is None:
        tail += stops.finish()
    elif reason == "length":
        reason = "stop"
    yield Piece(tail, finish_reason=reason, stop=stops.stopped, usage=Usage(len(prompt), chosen))
