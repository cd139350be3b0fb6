"""Failures that are expected, each with its reason: a file of lines `level/op/property: reason`.

`#` begins a comment line. A line that matches no failure is reported: it passes unexpectedly where the property was
judged
and held, and matches nothing where it was not even met.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import KitError
from .results import Result, Run

Key = tuple[str, str, str]


@dataclass
class Judged:
    """Failures sorted into those that count and those that were expected, and lines of the file that are out of date."""

    failed: list[tuple[Key, str]] = field(default_factory=list)
    expected: list[tuple[Key, str]] = field(default_factory=list)
    passing: list[Key] = field(default_factory=list)
    unmatched: list[Key] = field(default_factory=list)

    def green(self, *, strict: bool = False) -> bool:
        return not self.failed and not (strict and (self.passing or self.unmatched))


@dataclass
class Expected:
    """Expected failures with their reasons."""

    reasons: dict[Key, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Expected:
        """The lines of a file; KitError with file and line for one that is malformed or gives no reason."""
        found: dict[Key, str] = {}
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            head, _, reason = line.partition(":")
            parts = tuple(p.strip() for p in head.split("/"))
            if len(parts) != 3 or not all(parts):
                raise KitError(f"{path}:{number}: expected level/op/property: reason, found {line!r}")
            if not reason.strip():
                raise KitError(f"{path}:{number}: {head.strip()} has no reason")
            key = (parts[0], parts[1], parts[2])
            if key in found:
                raise KitError(f"{path}:{number}: {head.strip()} is listed twice")
            found[key] = reason.strip()
        return cls(found)

    def judge(self, run: Run) -> Judged:
        """Sort the failures of a run."""
        return self.sort(run.results)

    def sort(self, results: Iterable[Result]) -> Judged:
        out = Judged()
        met: set[Key] = set()
        for r in results:
            met.update((r.level, r.name, p) for p in r.properties)
            for name in r.failed:
                key = (r.level, r.name, name)
                (out.expected if key in self.reasons else out.failed).append((key, self.reasons.get(key, "")))
        hit = {key for key, _ in out.expected}
        for key in self.reasons:
            if key not in hit:
                (out.passing if key in met else out.unmatched).append(key)
        return out
