"""Host memory as a Memory: handles are NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.core.types import TensorType

from .contract import row_array


class HostMemory:
    """Memory of the host; a handle is an array, read and written in place."""

    def allocate(self, type: TensorType) -> NDArray[Any]:
        if type.element.numpy is None:
            return np.empty(type.nbytes, np.uint8)
        return np.empty(type.shape, type.element.numpy)

    def free(self, handle: NDArray[Any]) -> None:
        return None

    def upload(self, handle: NDArray[Any], array: NDArray[Any]) -> None:
        handle[...] = array

    def download(self, handle: NDArray[Any]) -> NDArray[Any]:
        return handle.copy()

    def read_rows(self, handle: NDArray[Any], rows: Sequence[int]) -> NDArray[Any]:
        out: NDArray[Any] = handle[row_array(rows)]
        return out

    def write_rows(self, handle: NDArray[Any], rows: Sequence[int], array: NDArray[Any]) -> None:
        handle[row_array(rows)] = array

    def copy_rows(self, handle: NDArray[Any], to: Sequence[int], source: Sequence[int]) -> None:
        handle[row_array(to)] = handle[row_array(source)]

    def fill_rows(self, handle: NDArray[Any], rows: Sequence[int], value: float) -> None:
        handle[row_array(rows)] = value
