"""Running models: engines, sessions, the state bundle, sampling and text."""

from .engine import ContextFull, Engine, load
from .session import Session
from .state import Bundle, Checkpoint, OutOfState, StateError

__all__ = ["Bundle", "Checkpoint", "ContextFull", "Engine", "OutOfState", "Session", "StateError", "load"]
