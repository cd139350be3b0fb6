"""Types of tensors: a shape, an element type and, for views, strides. Knows no graph, no op and no backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from .dtypes import DTYPES, DType


@dataclass(frozen=True)
class TensorType:
    """`shape` counts elements (never bytes or blocks); `dtype` is a name in `dtypes.DTYPES`.

    `strides` are in elements, None where the tensor is contiguous (row-major). They do not take part in equality: two
    tensors of one type may lie differently in memory.
    """

    shape: tuple[int, ...]
    dtype: str = "f32"
    strides: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"there is no element type '{self.dtype}'")
        for n in self.shape:
            if not isinstance(n, int | np.integer) or n < 0:
                raise ValueError(f"a shape is made of natural numbers, got {list(self.shape)}")

    @property
    def element(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, lying contiguously. Blocks never straddle rows."""
        e = self.element
        if e.plain:
            return self.size * e.block_bytes
        if not self.shape or self.shape[-1] % e.block:
            raise ValueError(f"rows of {e.name} hold a multiple of {e.block} elements, not shape {list(self.shape)}")
        return self.size // e.block * e.block_bytes

    @property
    def contiguous(self) -> bool:
        return self.strides is None

    def with_strides(self, strides: tuple[int, ...] | None) -> TensorType:
        """The same type lying with these strides (in elements); row-major strides are stored as None."""
        if strides is not None and (self.size == 0 or _same_layout(strides, self)):
            strides = None
        return TensorType(self.shape, self.dtype, strides)

    def row_major(self) -> tuple[int, ...]:
        """The strides, in elements, of a contiguous tensor of this shape."""
        out, step = [], 1
        for n in reversed(self.shape):
            out.append(step)
            step *= n
        return tuple(reversed(out))

    def __str__(self) -> str:
        lies = "" if self.strides is None else f" strides {list(self.strides)}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{lies}"

    @classmethod
    def of(cls, array: object) -> TensorType:
        """The type of a NumPy array (or of anything with a `type`, as a Weight); TypeError where trueup has none."""
        known = getattr(array, "type", None)
        if isinstance(known, TensorType):
            return known
        a = np.asarray(array)
        name = _OF_NUMPY.get(a.dtype.str.lstrip("<|="))
        if name is None:
            raise TypeError(f"no trueup type for NumPy's {a.dtype}")
        t = cls(a.shape, name)
        if a.flags.c_contiguous:
            return t
        return t.with_strides(tuple(s // a.itemsize for s in a.strides))


def _same_layout(strides: tuple[int, ...], t: TensorType) -> bool:
    """Whether strides address the elements in row-major order; the stride of an axis of one entry never matters."""
    return all(n == 1 or a == b for n, a, b in zip(t.shape, strides, t.row_major(), strict=True))


_OF_NUMPY = {np.dtype(d.numpy).str.lstrip("<|="): d.name for d in DTYPES.values() if d.numpy is not None}
