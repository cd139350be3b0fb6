"""Hugging Face checkpoints to GGUF. `convert` does it; `ConvertError` says why not; `FILE_TYPES` are the `--type`s. `synth`
writes files of random weights."""

from __future__ import annotations

from trueup.models.convert_rules import ConvertError

from .encode import FILE_TYPES
from .job import Converted, convert
from .synth import SYNTH_TYPES, synth

__all__ = ["FILE_TYPES", "SYNTH_TYPES", "ConvertError", "Converted", "convert", "synth"]
