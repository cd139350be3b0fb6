"""Tensors taken by name and shape: what a model needs, or an error that names the tensor. Reads no tensor's data.

Remembers what was taken: a tensor that no one consumed (a scale, a second projection) is an error, not a surprise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from trueup.core.weight import Weight

from .errors import GGUFError
from .file import GGUFFile

_SHOWN = 20


class Tensors:
    """Access to a file's tensors; `taken` holds the names of those that were taken."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.taken: set[str] = set()

    def take(
        self, name: str, *, shape: Sequence[int | None] | None = None, dtypes: Collection[str] | None = None
    ) -> Weight:
        """The weight of this name, which must be there, of this shape and one of these types.

        A shape is in NumPy's order, None in it admits any number. GGUFError with the file, the tensor, what was found
        and what was expected. A weight may be taken twice, as tied ones are.
        """
        w = self.take_optional(name, shape=shape, dtypes=dtypes)
        if w is None:
            raise self.error(name, "tensor is missing", expected=None if shape is None else f"shape {_show(shape)}")
        return w

    def take_optional(
        self, name: str, *, shape: Sequence[int | None] | None = None, dtypes: Collection[str] | None = None
    ) -> Weight | None:
        """As `take`, but None where the file lacks the tensor; a present one must be right."""
        w = self.file.tensors.get(name)
        if w is None:
            return None
        if shape is not None and not _fits(w.shape, shape):
            raise self.error(name, "tensor is of the wrong shape", found=_show(w.shape), expected=_show(shape))
        if dtypes is not None and w.type.dtype not in dtypes:
            raise self.error(
                name, "tensor is of the wrong type", found=w.type.dtype, expected=" or ".join(sorted(dtypes))
            )
        self.taken.add(name)
        return w

    def has(self, name: str) -> bool:
        """Whether the file has the tensor; does not count as taking it."""
        return name in self.file.tensors

    def unused(self, allowed: Iterable[str] = ()) -> list[str]:
        """Tensors that no one took, in the file's order; `allowed` are names or patterns (`*`, `?`, `[…]`) left out."""
        patterns = tuple(allowed)
        left = (name for name in self.file.tensors if name not in self.taken)
        return [name for name in left if not any(fnmatchcase(name, p) for p in patterns)]

    def finish(self, allowed: Iterable[str] = ()) -> None:
        """GGUFError that lists the tensors no one took, if there are any."""
        left = self.unused(allowed)
        if left:
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            names = ", ".join(left[:_SHOWN])
            raise GGUFError(f"model uses {len(left)} of the file's tensors nowhere: {names}{more}", path=self.file.path)

    def error(self, name: str, problem: str, **contrast: object) -> GGUFError:
        """An error about a tensor of this file, for the caller to raise."""
        return GGUFError(problem, path=self.file.path, tensor=name, **contrast)  # type: ignore[arg-type]


def _fits(shape: tuple[int, ...], want: Sequence[int | None]) -> bool:
    return len(shape) == len(want) and all(b is None or a == b for a, b in zip(shape, want, strict=True))


def _show(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('*' if n is None else str(n) for n in shape)}]"
