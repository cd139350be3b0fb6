"""What the bodies share: float64 in, float32 out. Knows NumPy only; holds no op."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def wide(x: Any) -> F64:
    """`x`, an array or a Weight, in float64 and contiguous, so that a sum on its last axis sees that row alone."""
    return np.asarray(x, np.float64, order="C")


def narrow(x: F64) -> F32:
    """`x` rounded to float32, once; what float32 can't hold becomes an infinity, of which NumPy warns where it may."""
    return np.asarray(x).astype(np.float32)
