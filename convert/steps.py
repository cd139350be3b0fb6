"""The rules of a plan laid over a checkpoint: which tensors are read for which targets, and whether anything is left.

It compares names and shapes only. No value is read but the constants', which become metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trueup.models.convert_rules import Array, Conversion, ConvertError, Dims, Named, Plan, Rule

from .checkpoint import Checkpoint


@dataclass(frozen=True)
class Step:
    """One rule at one place: checkpoint names in, GGUF names and shapes (outermost axis first) out."""

    rule: Rule
    sources: tuple[str, ...]
    targets: tuple[tuple[str, tuple[int, ...]], ...]

    def arrays(self, checkpoint: Checkpoint, dims: Dims) -> Iterator[Iterable[Array]]:
        """For each target its values as float32, in pieces along the first axis. At most one source is in memory where
        the rule only joins parts; else the rule's sources are."""
        if self.rule.transform is None:
            yield (checkpoint.floats(name) for name in self.sources)
            return
        for x in self.rule.transform(dims, *(checkpoint.floats(name) for name in self.sources)):
            yield (x,)


def lay_out(checkpoint: Checkpoint, conversion: Conversion, plan: Plan) -> tuple[list[Step], dict[str, list[int]]]:
    """Every step of a conversion, and the constants by metadata key.

    Raises ConvertError that names the tensors which are missing, of another shape, or known to no rule.
    """
    named = _canonical(checkpoint, conversion)
    used: set[str] = set()
    problems: list[str] = []
    steps: list[Step] = []
    constants: dict[str, list[int]] = {}

    def find(name: str, shape: tuple[int, ...]) -> str | None:
        used.add(name)
        if name not in named:
            problems.append(f"{name} is missing, expected {_say(shape)}")
            return None
        found = checkpoint.tensors[named[name]].shape
        if len(found) != len(shape) or any(f != s != -1 for f, s in zip(found, shape, strict=True)):
            problems.append(f"{name} is {list(found)}, expected {_say(shape)}")
            return None
        return named[name]

    for scope in plan.scopes:
        for rule in scope.rules:
            sources = [find(n, s.shape(plan.dims)) for s in rule.sources for n in _names(scope.source, s, plan.dims)]
            if None not in sources:
                names = tuple(s for s in sources if s is not None)
                total = sum(checkpoint.tensors[s].shape[0] for s in names)
                targets = tuple(
                    (scope.target + t.name, tuple(total if n == -1 else n for n in t.shape(plan.dims)))
                    for t in rule.targets
                )
                steps.append(Step(rule, names, targets))
        for constant in scope.constants:
            source = find(scope.source + constant.source.name, constant.source.shape(plan.dims))
            if source is not None:
                constants[constant.key] = checkpoint.ints(source)

    unknown = [n for n in named if n not in used and not n.startswith(tuple(plan.left_out))]
    problems += [f"{named[n]} is known to no rule" for n in sorted(unknown)]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConvertError(f"{checkpoint.path} does not fit {conversion.architecture}: {'; '.join(problems[:8])}{more}")
    plan.check(constants, {name: shape for step in steps for name, shape in step.targets})
    return steps, constants


def _names(prefix: str, source: Named, dims: Dims) -> list[str]:
    count = [*range(dims[source.parts])] if source.parts else [0]
    return [prefix + (source.name.format(i) if source.parts else source.name) for i in count]


def _say(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('any' if n == -1 else str(n) for n in shape)}]"


def _canonical(checkpoint: Checkpoint, conversion: Conversion) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in checkpoint.tensors:
        other = named.setdefault(conversion.canonical(name), name)
        if other != name:
            raise ConvertError(f"{checkpoint.path} has both {other} and {name}, which mean the same tensor")
    return named
