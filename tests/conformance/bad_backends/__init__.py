"""Backends over NumPy bodies: two that are right, and many that are wrong, each in one way that a real one has been.

A plugin: `trueup check --plugin bad_backends --backend wrong_tie`. The kit must pass the honest and catch the others.
"""

from __future__ import annotations

from trueup.core.backend import Backend
from trueup.core.plugins import hookimpl

from . import (  # noqa: F401  # each registers its backends
    claims,
    deep,
    honest,
    kernels,
    large,
    memory,
    processes,
    reported,
    schedules,
)
from .make import MADE


@hookimpl
def trueup_backends() -> list[type[Backend]]:
    return list(MADE.values())
