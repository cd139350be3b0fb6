"""A weight as the CPU kernels use it: the stored bytes, and float32 values for those that have no native kernel."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trueup.core.types import TensorType
from trueup.core.weight import Weight


class CpuWeight:
    """Native kernels read `data`, uint8 [..., bytes of a row], of type `dtype`. A NumPy body sees an array: rows are
    dequantized as they are asked for, the whole once, when it is first asked for."""

    def __init__(self, weight: Weight) -> None:
        self.type: TensorType = weight.type
        self.dtype = weight.type.dtype
        self.data: NDArray[np.uint8] = np.ascontiguousarray(weight.data)
        self._weight = weight

    @cached_property
    def values(self) -> NDArray[Any]:
        return np.asarray(self._weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def __len__(self) -> int:
        return self.type.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return self._weight[rows]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self.values if dtype is None else self.values.astype(dtype, copy=False)
