"""Hugging Face checkpoints to GGUF. `convert` does it; `ConvertError` says why not; `FILE_TYPES` are the `--type`s."""

from __future__ import annotations

from trueup.models.convert_rules import ConvertError

from .encode import FILE_TYPES
from .job import Converted, convert

__all__ = ["FILE_TYPES", "ConvertError", "Converted", "convert"]
