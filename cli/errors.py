"""Which exceptions are answers to the user, and the one line that they become. Prints nothing."""

from __future__ import annotations


def expected(e: BaseException) -> bool:
    """Whether an exception is an answer to the user (a wrong file, option, backend), not a fault to be reported."""
    from trueup.core.errors import ArgumentError

    known = ValueError | RuntimeError | OSError | MemoryError | ArgumentError
    return isinstance(e, known) and not isinstance(e, NotImplementedError | RecursionError)


def one_line(e: BaseException) -> str:
    """An exception's message as one line: a file's name first, where the system gives one; notes on it last."""
    notes = "".join(f" ({' '.join(note.split())})" for note in getattr(e, "__notes__", ()))
    return _message(e) + notes


def _message(e: BaseException) -> str:
    if isinstance(e, OSError) and e.strerror:
        where = ": ".join(str(f) for f in (e.filename, e.filename2) if f is not None)
        return f"{where}: {e.strerror}" if where else e.strerror
    return " ".join(str(e).split()) or type(e).__name__
