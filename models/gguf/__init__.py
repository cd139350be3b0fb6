"""Reading GGUF: a bounded parser of our own, with the `gguf` package's constants and dequantization."""

from __future__ import annotations

from .errors import DraftHeadAlone, GGUFError, UnsupportedTypeError
from .file import GGUFFile, open_gguf
from .keys import Keys
from .strings import StringArray
from .table import RowTable
from .tensors import Tensors

__all__ = [
    "DraftHeadAlone",
    "GGUFError",
    "GGUFFile",
    "Keys",
    "RowTable",
    "StringArray",
    "Tensors",
    "UnsupportedTypeError",
    "open_gguf",
]
