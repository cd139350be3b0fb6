"""The kit's own exceptions. None of them judges a backend: they say that the kit was asked for something it can't do."""

from __future__ import annotations


class KitError(ValueError):
    """A request that can't be carried out: an unknown level or op, a replay line or an xfail file that can't be read."""
