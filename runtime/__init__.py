"""Running models: engines, sessions, the state bundle, sampling and text."""

from .engine import ContextFull, Engine, load
from .generate import Piece, Usage
from .sampling import NonFiniteLogits, Sampler
from .session import Session
from .state import Bundle, Checkpoint, OutOfState, StateError

__all__ = [
    "Bundle",
    "Checkpoint",
    "ContextFull",
    "Engine",
    "NonFiniteLogits",
    "OutOfState",
    "Piece",
    "Sampler",
    "Session",
    "StateError",
    "Usage",
    "load",
]
