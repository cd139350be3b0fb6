"""The texts of this backend's kernels, and what their compiler is told."""

from __future__ import annotations

from collections.abc import Mapping

from trueup.backends.simt.programs import Texts

TEXTS = Texts("trueup.backends.cuda", "cu")


def architecture(attributes: Mapping[str, int]) -> str:
    """A device's, as NVRTC names it."""
    return f"sm_{attributes['compute_capability_major']}{attributes['compute_capability_minor']}"


def options(arch: str) -> tuple[str, ...]:
    """What the compiler is told."""
    return f"--gpu-architecture={arch}", "--std=c++17"
