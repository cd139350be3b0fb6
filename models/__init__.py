"""Models: reading GGUF files, one file an architecture, tokenizers and chat templates."""

from .architecture import Architecture, StepInputs, StepShape
from .model import Model, bundled_path, load_model

__all__ = ["Architecture", "Model", "StepInputs", "StepShape", "bundled_path", "load_model"]
