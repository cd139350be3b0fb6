"""A session: one sequence of an engine, with what a caller does to it. All state lies in the engine's bundle."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trueup.core.files import whole_file

from .state import Checkpoint, Sequence, StateError

if TYPE_CHECKING:
    from .engine import Engine

FORMAT = "1"
"""Version of saved sessions; another one is refused."""


class Session:
    """A sequence. A context manager: leaving it gives its storage back."""

    def __init__(self, engine: Engine, sequence: Sequence, tokens: Seq[int] = ()) -> None:
        self.engine, self.sequence = engine, sequence
        self.tokens = list(tokens)
        """The tokens fed so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.sequence.length

    def feed(self, tokens: Seq[int], *, logits: Literal["last", "all"] | None = "last") -> Any:
        """Append tokens: float32 [vocab] for "last", [tokens, vocab] for "all", None for None. Raises as `Engine.step`."""
        (out,) = self.engine.step([(self, tokens)], logits=logits)
        return None if logits is None else out[0] if logits == "last" else out

    def fork(self) -> Session:
        """A session that goes on from here; pages are shared until one of the two writes."""
        with self.engine._lock:
            return Session(self.engine, self.engine.bundle.fork(self.sequence), self.tokens)

    def checkpoint(self) -> Checkpoint:
        """A point to return to; OutOfState where the engine's `checkpoints` are used up."""
        with self.engine._lock:
            return self.engine.bundle.checkpoint(self.sequence)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Back to a checkpoint of this session; later ones are void then. StateError where it is void."""
        with self.engine._lock:
            self.engine.bundle.restore(self.sequence, checkpoint)
            del self.tokens[self.sequence.length :]

    def drop(self, checkpoint: Checkpoint) -> None:
        """Give a checkpoint's storage back."""
        with self.engine._lock:
            self.engine.bundle.drop(self.sequence, checkpoint)

    def reset(self) -> None:
        """Back to an empty sequence."""
        with self.engine._lock:
            self.engine.bundle.reset(self.sequence)
            self.tokens.clear()

    def close(self) -> None:
        """Give the storage back; closing twice is nothing."""
        with self.engine._lock:
            self.engine.bundle.free(self.sequence)
            self.tokens.clear()

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all states to a safetensors file, with the model's fingerprint; the file appears whole or not at all."""
        path = Path(path)
        with self.engine._lock:
            arrays = {
                f"state/{k}": np.ascontiguousarray(v) for k, v in self.engine.bundle.export(self.sequence).items()
            }
        arrays["tokens"] = np.asarray(self.tokens, np.int32)
        about = {"trueup_session": FORMAT, "model": self.engine.model.fingerprint}
        with whole_file(path) as part:
            part.write_bytes(save(arrays, metadata=about))

    @classmethod
    def load(cls, engine: Engine, path: Path) -> Session:
        """The session of a file. StateError where it is of another model or version, or not whole; nothing changes then."""
        try:
            with safe_open(path, framework="numpy") as f:
                about = f.metadata() or {}
                arrays = {name: f.get_tensor(name) for name in f.keys()}  # safe_open is no mapping
        except (OSError, TypeError, SafetensorError) as e:  # TypeError: a type that NumPy lacks
            raise StateError(f"{path}: not a saved session: {e}") from e
        if about.get("trueup_session") != FORMAT:
            raise StateError(
                f"{path}: a saved session of version {about.get('trueup_session', 'unknown')}, expected {FORMAT}"
            )
        if about.get("model") != engine.model.fingerprint:
            raise StateError(
                f"{path}: saved by another model; its fingerprint is {about.get('model', 'missing')}, "
                f"expected {engine.model.fingerprint}"
            )
        tokens = arrays.pop("tokens", None)
        if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32 or len(tokens) > engine.context:
            raise StateError(f"{path}: its tokens are missing, malformed, or more than the context of {engine.context}")
        if np.any((tokens < 0) | (tokens >= engine.vocab_size)):
            raise StateError(f"{path}: holds a token outside the vocabulary of {engine.vocab_size}")
        states: dict[str, NDArray[Any]] = {k.removeprefix("state/"): v for k, v in arrays.items()}
        try:
            return cls(engine, engine.bundle.restart(states, len(tokens)), tokens.tolist())
        except StateError as e:
            raise StateError(f"{path}: {e}") from None
