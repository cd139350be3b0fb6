"""Generation: sample, feed, decode, until something ends it. Knows sessions, sampling and text; knows no backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from .sampling import NonFiniteLogits, Sampled, Sampler, sample, uniform
from .speculation import Job, Speculator, Turn
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
    a stop string is held back. `tokens` is one token, or what one round of speculative decoding gave, so that a session
    never holds a token that was not handed out. `logprobs` are natural logarithms under the plain softmax of the logits.
    Only the last piece has a `finish_reason` ("stop": an end token or a stop string, then in `stop`; "length": max_tokens,
    or the context is full) and `usage`.
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
    speculator: Speculator | None = None,
) -> Iterator[Piece]:
    """Feed the prompt, then choose token after token; see `Engine.generate`. `choice` numbers the `n` outputs of a prompt.

    A `speculator` makes several tokens a step; what comes out is the same. With `going_on`, everything chosen has been fed
    when it ends by itself, so that the session can be continued.
    """
    sampler = sampler.seeded()
    texts, stops = TextStream(model.tokenizer, skip_special=skip_special), StopStrings(stop)
    ends = frozenset() if ignore_eos else model.tokenizer.eos_ids
    turns = _Turns(session, sampler, choice, speculator)
    limit = session.engine.context
    logits = session.feed(prompt)
    chosen = 0
    reason: FinishReason | None = "length" if max_tokens == 0 or len(session) == limit else None
    turn = turns.first(logits) if reason is None else Turn(())
    while reason is None:
        pieces: list[Piece] = []
        fed = 0  # of the turn's tokens, those that have to be fed now
        error: BaseException | None = None
        try:
            for token, logprob in turn.chosen:
                fed = len(pieces)
                if turns.start + fed == limit:
                    reason = "length"
                elif token in ends:
                    reason = "stop"
                else:
                    chosen += 1
                    pieces.append(Piece(stops.push(texts.push(token)), (token,), (logprob,)))
                    if stops.stopped is not None or chosen == max_tokens:
                        reason = "length" if stops.stopped is None else "stop"
                        fed += going_on
                if reason is not None:
                    break
        except (
            BaseException
        ) as e:  # a token that the tokenizer lacks, say: what is before it stands, as in plain decoding
            error = e
        turns.settle(min(fed, turn.accepted))
        if pieces:  # as one, since the session holds all of them but the last: who drops the iterator has seen them
            yield _joined(pieces)
        if error is not None:
            raise error
        if reason is not None:
            turns.feed(turn.chosen[turn.accepted : fed])
        elif turns.start + len(pieces) == limit:
            turns.feed(turn.chosen[-1:])
            reason = "length"
        else:
            turn = turns.after(turn.chosen[-1].token, most=None if max_tokens is None else max_tokens - chosen)
    tail = stops.push(texts.finish())
    if stops.stopped is None:
        tail += stops.finish()
    elif reason == "length":
        reason = "stop"
    yield Piece(tail, finish_reason=reason, stop=stops.stopped, usage=Usage(len(prompt), chosen))


def _joined(pieces: Sequence[Piece]) -> Piece:
    """The tokens of a turn as one piece."""
    return Piece(
        "".join(p.text for p in pieces),
        tuple(t for p in pieces for t in p.tokens),
        tuple(x for p in pieces for x in p.logprobs),
    )


class _Turns:
    """One turn after the other: tokens that the model chose after those that are fed. `start`: how many are fed before a
    turn's first token; of the turn's own the first `accepted` are fed too, as its speculation left them."""

    def __init__(self, session: Session, sampler: Sampler, choice: int, speculator: Speculator | None) -> None:
        self.session, self.sampler, self.choice, self.speculator = session, sampler, choice, speculator
        self.start = 0
        self._settle: Callable[[int], None] | None = None

    def first(self, logits: NDArray[np.float32]) -> Turn:
        """The turn after a prompt: plain sampling from its logits."""
        self.start = position = len(self.session)
        try:
            draw = 0.0 if self.sampler.greedy else uniform(self.sampler.seed or 0, self.choice, position, "sample")
            return Turn((sample(logits, self.sampler, draw=draw),))
        except NonFiniteLogits as e:
            raise NonFiniteLogits(
                f"after {position} tokens on backend {self.session.engine.target.name}: {e}", e.position
            ) from None

    def after(self, token: int, *, most: int | None) -> Turn:
        """The turn after a token that is not fed yet; `most` tokens are wanted at most."""
        if self.speculator is None:
            return self.first(self.session.feed([token]))
        self.start = len(self.session) + 1
        (turn,) = self.speculator.round(
            [
                Job(
                    self.session,
                    token,
                    self.sampler,
                    self.choice,
                    self.session.engine.context if most is None else most - 1,
                )
            ]
        )
        self._settle = lambda fed: self.speculator.commit([turn], [1 + fed]) if self.speculator else None
        return turn

    def settle(self, fed: int) -> None:
        """Of the turn's tokens that its speculation fed, the first `fed` stay."""
        if self._settle is not None:
            self._settle(fed)
            self._settle = None

    def feed(self, tokens: Sequence[Sampled]) -> None:
        if tokens:
            self.session.feed([t.token for t in tokens], logits=None)
