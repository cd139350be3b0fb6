"""A conversation: its messages, and a session that holds as much of them as the model has read.

The messages are what counts; the session is what was computed of them. Each turn renders all messages anew and feeds
what the session does not hold. A hybrid model's state can't be cut back, so where the rendering differs from what the
session holds (an answer's text may be cut into other tokens than were chosen), it goes back to a checkpoint or starts
anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli.generation import Output, generate
from trueup.cli.prompt import chat_ids
from trueup.core.files import whole_file

if TYPE_CHECKING:
    from trueup.runtime import Engine, Session
    from trueup.runtime.state import Checkpoint

MESSAGES = "trueup_chat"
"""The metadata key under which a saved session carries its messages."""


class Conversation:
    """Messages of alternating roles on a session of `engine`; `options` are those of `Engine.generate`.

    `engine` needs room for two sequences and a checkpoint. ChatError where the model has no chat template.
    """

    def __init__(self, engine: Engine, system: str | None, **options: Any) -> None:
        self.engine, self.system, self.options = engine, system, options
        self.messages: list[dict[str, str]] = []
        self.output = Output()
        self.session: Session = engine.session()
        self._mark: Checkpoint | None = None
        chat_ids(engine.model, self._with_system([{"role": "user", "content": "?"}]))  # refuse before anyone types

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def answer(self, text: str, write: Callable[[str], None]) -> None:
        """Say something; the answer goes to `write` piece by piece. Ctrl-C ends it; what was said by then stays.

        Where it raises, the conversation is as before.
        """
        self.output = out = Output()
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            ids = chat_ids(self.engine.model, self._with_system(asked))
            held = self._align(ids)
            pieces = generate(self.engine, self.session, ids[held:], out, mark=self._checkpoint, **self.options)
            with closing(pieces):
                for piece in pieces:
                    write(piece)
        except KeyboardInterrupt:
            out.finish_reason = "interrupted"
        self.messages = [*asked, {"role": "assistant", "content": out.text}]

    def _align(self, ids: list[int]) -> int:
        """Bring the session to a beginning of `ids` that leaves at least one token to feed; its length."""
        held, mark = self.session.tokens, self._mark
        sound = not self.session.sequence.fault and len(held) == len(self.session)
        if sound and len(held) < len(ids) and ids[: len(held)] == held:
            return len(held)
        at = None if mark is None or mark.slot is None else mark.length
        if mark is not None and at is not None and at < len(ids) and ids[:at] == held[:at]:
            self.session.restore(mark)
        else:
            self.session.reset()
            self._mark = None
        return len(self.session)

    def _checkpoint(self) -> None:
        """Mark the end of the prompt: the place to go back to if the answer is rendered in other tokens."""
        if self._mark is not None:
            self.session.drop(self._mark)
        self._mark = self.session.checkpoint()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = []
        self.session.reset()
        self._mark = None

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write state and messages to one file, a saved session with messages in its metadata; whole or not at all."""
        from safetensors import safe_open
        from safetensors.numpy import save

        path = Path(path)
        with whole_file(path) as part:
            self.session.save(part)
            with safe_open(part, framework="numpy") as f:
                arrays = {name: f.get_tensor(name) for name in f.keys()}
                about = dict(f.metadata())
            about[MESSAGES] = json.dumps({"system": self.system, "messages": self.messages})
            part.write_bytes(save(arrays, metadata=about))

    def load(self, path: str | Path) -> None:
        """Go on from a saved conversation. StateError where it is none, or another model's; nothing changes then."""
        from trueup.runtime import OutOfState

        system, messages = saved_messages(Path(path))
        try:
            session = self.engine.session(path)
        except OutOfState:  # the two don't fit side by side; what is given up here can be computed from the messages
            self.session.reset()
            self._mark = None
            session = self.engine.session(path)
        self.session.close()
        self.session, self._mark = session, None
        self.system, self.messages = system, messages


def saved_messages(path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """System message and messages of a saved conversation; StateError where there are none."""
    from safetensors import SafetensorError, safe_open

    from trueup.runtime import StateError

    try:
        with safe_open(path, framework="numpy") as f:
            about = f.metadata() or {}
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as e:
        raise StateError(f"{path}: not a saved conversation: {e}") from None
    try:
        saved = json.loads(about[MESSAGES])
        system, messages = saved["system"], [{"role": m["role"], "content": m["content"]} for m in saved["messages"]]
    except (KeyError, TypeError, ValueError):
        raise StateError(f"{path}: holds no conversation, expected the metadata {MESSAGES}") from None
    texts = [t for m in messages for t in m.values()] + ([] if system is None else [system])
    if not all(isinstance(t, str) for t in texts):
        raise StateError(f"{path}: a message is no text")
    return system, messages
