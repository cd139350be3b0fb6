"""The names of the kit's levels, from the smallest part to the whole. Imports nothing."""

from __future__ import annotations

LEVELS = ("ops", "effects", "graph", "model", "speculative")
