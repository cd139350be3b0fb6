"""Metadata read by type: what a model needs from its keys, or an error that names the key. Invents no default.

Remembers what was asked for, so that a loader can tell which keys no one read.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
from gguf.constants import GGUFValueType
from numpy.typing import NDArray

from .errors import GGUFError
from .file import GGUFFile
from .strings import StringArray

T = TypeVar("T", int, float, bool, str)
D = TypeVar("D")

_KINDS: dict[type, frozenset[GGUFValueType]] = {
    int: frozenset(
        t for t in GGUFValueType if t.name.startswith(("INT", "UINT"))
    ),
    float: frozenset({GGUFValueType.FLOAT32, GGUFValueType.FLOAT64}),
    bool: frozenset({GGUFValueType.BOOL}),
    str: frozenset({GGUFValueType.STRING}),
}  # fmt: skip


class Keys:
    """Typed access to a file's metadata. `read` holds the names of present keys that were asked for.

    Types are the file's: `int` takes every integer type and no bool, `float` only floats, which must be finite. Bounds
    are inclusive and hold for each element of an array. Everything else is a GGUFError with file, key, found, expected.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.read: set[str] = set()

    def required(self, name: str, kind: type[T], *, minimum: T | None = None, maximum: T | None = None) -> T:
        """The value of a key that must be there."""
        self._find(name)
        self._check_type(name, (kind,))
        value: T = self.file.metadata[name]
        self._check_range(name, value, minimum, maximum)
        return value

    def optional(
        self, name: str, kind: type[T], default: D, *, minimum: T | None = None, maximum: T | None = None
    ) -> T | D:
        """The value of a key, or `default` where the file lacks it; a present key must be right."""
        if name not in self.file.metadata:
            return default
        return self.required(name, kind, minimum=minimum, maximum=maximum)

    @overload
    def array(self, name: str, kind: type[str], *, length: int | None = None) -> StringArray: ...
    @overload
    def array(
        self,
        name: str,
        kind: type[int] | type[float] | type[bool],
        *,
        length: int | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> NDArray[Any]: ...
    def array(
        self,
        name: str,
        kind: type,
        *,
        length: int | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> NDArray[Any] | StringArray:
        """An array that must be there, with exactly `length` entries.

        Numbers and bools as a read-only NumPy array of the file's own type, strings as StringArray.
        """
        self._find(name)
        self._check_type(name, (list, kind))
        a: NDArray[Any] | StringArray = self.file.metadata[name]
        if length is not None and len(a) != length:
            raise self.error(name, "array is of the wrong length", found=len(a), expected=length)
        if isinstance(a, np.ndarray) and a.size:
            for i in (int(np.argmin(a)), int(np.argmax(a))):
                self._check_range(name, a[i].item(), minimum, maximum, f"[{i}]")
        return a

    def has(self, name: str) -> bool:
        """Whether the file has the key; does not count as reading it."""
        return name in self.file.metadata

    def token_id(self, name: str, vocab: int | None = None) -> int | None:
        """A special token's id, below `vocab`; None where the file lacks the key.

        Without a vocabulary every id is kept that can be one: 0 to 2^31 - 1, so -1 as i32 or u32 is none.
        """
        return self.optional(name, int, None, minimum=0, maximum=(2**31 if vocab is None else vocab) - 1)

    def unread(self, prefix: str = "") -> list[str]:
        """Keys with this prefix that no one asked for, in the file's order."""
        return [k for k in self.file.metadata if k.startswith(prefix) and k not in self.read]

    def error(self, name: str, problem: str, **contrast: object) -> GGUFError:
        """An error about a key of this file, for the caller to raise."""
        at = self.file.key_offsets.get(name)
        return GGUFError(problem, path=self.file.path, key=name, offset=at, **contrast)  # type: ignore[arg-type]

    def _find(self, name: str) -> None:
        if name not in self.file.metadata:
            raise self.error(name, "key is missing")
        self.read.add(name)

    def _check_type(self, name: str, kinds: tuple[type, ...]) -> None:
        types = self.file.value_types[name]
        want = kinds[-1]
        if len(types) == len(kinds) and types[-1] in _KINDS[want]:
            return
        found = " of ".join(t.name.lower() for t in types)
        expected = f"an array of {want.__name__}" if len(kinds) > 1 else f"one {want.__name__}"
        raise self.error(name, "value is of the wrong type", found=found, expected=expected)

    def _check_range(self, name: str, value: Any, minimum: Any, maximum: Any, where: str = "") -> None:
        if isinstance(value, float) and not np.isfinite(value):
            raise self.error(name, f"value{where} is not finite", found=value)
        low = minimum is None or value >= minimum
        if low and (maximum is None or value <= maximum):
            return
        bounds = f"at least {minimum}" if maximum is None else f"at most {maximum}"
        if minimum is not None and maximum is not None:
            bounds = f"{minimum} to {maximum}"
        raise self.error(name, f"value{where} is out of range", found=value, expected=bounds)
