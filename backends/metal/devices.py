"""What MLX can compute on here, as data. Imports MLX when asked, and computes nothing."""

from __future__ import annotations

import os
from types import ModuleType

from trueup.core.backend import Device
from trueup.core.errors import Unavailable

TEST_DEVICE = "MLX's CPU build: a test device, not a GPU"
"""What a device that is no GPU is called wherever devices are listed: it shows that kernels are right, never their speed."""


def mlx() -> ModuleType:
    """`mlx.core`; Unavailable with what to do where it can't be imported."""
    # Newer GPUs would round float32 to 11 bits before a product. MLX reads this at its first one.
    os.environ["MLX_ENABLE_TF32"] = "0"
    try:
        import mlx.core
    except Exception as e:  # a broken installation raises whatever its libraries raise
        raise Unavailable(
            f"MLX can't be imported ({type(e).__name__}: {e}); pip install 'trueup[metal]' brings it"
        ) from e
    return mlx.core


def find() -> list[Device]:
    """The Apple GPU, or, where MLX has no Metal, its CPU build, of kind "cpu": `auto` takes no device of that kind.

    `memory` of a GPU is what Metal recommends as the most to be in use at once, in bytes.
    """
    mx = mlx()
    versions = {"mlx": mx.__version__}
    if not mx.metal.is_available():
        return [Device(TEST_DEVICE, "cpu", versions=versions, hardware="host")]
    about = mx.device_info(mx.gpu)
    return [
        Device(
            str(about.get("device_name", "Apple GPU")),
            "gpu",
            memory=int(about["max_recommended_working_set_size"]),
            limits={"buffer": int(about["max_buffer_length"])},
            features=frozenset({"unified_memory"}),
            versions=versions | {"architecture": str(about.get("architecture", "unknown"))},
            hardware="apple-gpu",
        )
    ]
