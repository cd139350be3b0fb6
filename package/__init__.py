"""trueup: hybrid mixture-of-experts language models from GGUF files, on any backend, proven against the CPU reference.

The public names are few: `load` opens a model, `list_backends` says what can run it. Importing trueup touches no driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "list_backends", "load"]

if TYPE_CHECKING:
    from trueup.core.plugins import list_backends
    from trueup.runtime import load


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `import trueup` stays cheap."""
    if name == "load":
        from trueup.runtime import load

        return load
    if name == "list_backends":
        from trueup.core.plugins import list_backends

        return list_backends
    raise AttributeError(f"module 'trueup' has no attribute {name!r}")
