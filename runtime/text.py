"""From token ids to text, piece by piece: whole characters only, and cut at stop strings.

Knows bytes and characters. Whatever the cut into tokens or pieces, the pieces joined are the text as if read at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["StopStrings", "TextStream", "TokenBytes"]


class TokenBytes(Protocol):
    """What a TextStream asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class TextStream:
    """Decodes tokens one by one; never gives half a character.

    All pieces joined, `finish()` included, equal all bytes joined and decoded with errors="replace": invalid bytes
    become U+FFFD as soon as it is sure that they are, an unfinished character at the end becomes one U+FFFD. Special
    tokens give no text unless `skip_special` is False.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._finished = False

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty. Raises what the tokenizer raises on a bad id."""
        if self._finished:
            raise RuntimeError("push after finish: a TextStream decodes one text")
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held: nothing, or one U+FFFD. No push may follow; finishing twice is harmless."""
        self._finished = True
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes text on up to the first stop string, and no character of it.

    The first is the one complete first; of those that end at the same character the longest. So the result is that of
    pushing character by character, however the text is cut into pieces. Held back is only the longest end of the text
    that begins a stop. `stops`: none, one string or several; an empty one is refused.
    """

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        self._stops = _checked(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that is now sure to precede every stop; empty once `stopped` names one."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, self.stopped = min(ends)
            self._held = ""
            return text[: end - len(self.stopped)]
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text still held, which turned out to begin no stop."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop."""
        for n in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0


def _checked(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    if stops is None:
        return ()
    found = (stops,) if isinstance(stops, str) else tuple(stops)
    for i, stop in enumerate(found):
        if not isinstance(stop, str):
            raise ValueError(f"stop[{i}]: found {type(stop).__name__}, expected a string")
        if not stop:
            raise ValueError(f"stop[{i}]: an empty stop string would end every text at once")
    return found
