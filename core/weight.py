"""A weight as it is stored: bytes of any GGUF type, read as float32 where they are needed. Knows no file and no op."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import DTypeLike, NDArray

from .dtypes import ggml_type
from .types import TensorType


class Weight:
    """A tensor of stored bytes whose meaning is its dequantized float32 values.

    `type` counts elements. `data` holds the bytes as uint8 `[*shape[:-1], bytes of a row]`, often a memory map: nothing
    is read until asked for. `np.asarray(weight)` is the whole as float32; `weight[rows]`, with an integer, a slice or
    an integer array on the first axis, reads and dequantizes only those rows. Op bodies need to know no more than that.
    """

    __slots__ = ("data", "name", "type")

    def __init__(self, name: str, type: TensorType, data: NDArray[np.uint8]) -> None:
        if type.shape:
            row = TensorType(type.shape[-1:], type.dtype).nbytes
            want = (*type.shape[:-1], row)
        else:
            want = (type.nbytes,)
        if data.dtype != np.uint8 or data.shape != want:
            raise ValueError(f"weight {name}: {type} takes uint8{list(want)}, got {data.dtype}{list(data.shape)}")
        self.name, self.type, self.data = name, type, data

    @classmethod
    def of(cls, name: str, array: NDArray[Any]) -> Weight:
        """A plain array as a weight; no copy where it is contiguous."""
        plain = np.asarray(array, order="C")
        t = TensorType.of(plain)
        last = t.shape[-1] if t.shape else 1
        return cls(name, t, plain.reshape(-1).view(np.uint8).reshape(*t.shape[:-1], last * plain.itemsize))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def __len__(self) -> int:
        if not self.type.shape:
            raise TypeError(f"weight {self.name} is a scalar, without a length")
        return self.type.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        """Rows along the first axis, dequantized; IndexError for one out of range, and for indices of further axes."""
        if isinstance(rows, tuple) or rows is None or not self.type.shape:
            raise IndexError(f"weight {self.name}: {self.type} takes one index, of its first axis, got {rows!r}")
        if self.ndim == 1:
            some: NDArray[Any] = self._read(self.data, self.type.shape)[rows]
            return some
        part = self.data[rows]
        return self._read(part, (*part.shape[:-1], self.type.shape[-1]))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        a = self._read(self.data, self.type.shape)
        a = a if dtype is None else a.astype(dtype, copy=False)
        shares = np.may_share_memory(a, self.data)
        if copy is False and not shares and a.size:
            raise ValueError(f"weight {self.name}: {self.type} can't be read without a copy")
        return a.copy() if copy and shares else a

    def _read(self, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        e = self.type.element
        if e.numpy is not None:
            a: NDArray[Any] = np.ascontiguousarray(raw).view(e.numpy).reshape(shape)
            return a.astype(np.float32) if e.name in ("f16", "f64") else a
        if raw.size == 0:
            return np.zeros(shape, np.float32)
        try:
            return dequantize(np.ascontiguousarray(raw), ggml_type(e.name)).reshape(shape)
        except NotImplementedError:
            raise ValueError(f"weight {self.name}: {self.type} can't be dequantized") from None

    def __repr__(self) -> str:
        return f"Weight({self.name}: {self.type})"
