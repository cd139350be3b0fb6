"""The signature of an op: its grammar, and the solving of axis sizes. Knows types of tensors, but no graph and no
array.

    signature := arguments "->" results                  both comma-separated
    argument  := ["&" | "*"] name ["?"] "[" axes "]" [":" type]
    axes      := comma-separated axis expressions; "..." at most once in an argument

`&` marks an argument that the op mutates (a state), `*` a list of tensors of one shape, `?` an argument that may be
None. An axis expression is made of names, integers and + - *; integer attributes of the op are known names. `...`
stands for the same axes wherever it appears. Sizes are solved in a fixed order, so that an error blames the plain name
first: attributes, then plain names, then each expression for its one unknown, in which it must be linear.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .dtypes import DTYPES, FLOATS
from .errors import ArgumentError, SignatureError
from .types import TensorType

CLASSES = frozenset({"float", "any", "weight"})
"""Type classes of arguments: `float` (f32, f16, bf16), `any`, `weight` (any GGUF type, computes as float32)."""

_ARGUMENT = re.compile(
    r"\s*(?P<kind>[&*]?)(?P<name>[A-Za-z_]\w*)(?P<opt>\??)\[(?P<axes>[^\]]*)\](?::(?P<dtype>\w+))?\s*"
)

ArgumentTypes = Sequence["TensorType | tuple[TensorType, ...] | None"]
"""One entry per parameter: a type, None where it is absent, a tuple where it is a list."""


@dataclass(frozen=True)
class Axis:
    """A size as a polynomial in names with integer coefficients: `(seqs+1)` is {(): 1, ("seqs",): 1}."""

    text: str
    terms: tuple[tuple[tuple[str, ...], int], ...]

    @classmethod
    def parse(cls, text: str, where: str) -> Axis:
        text = text.strip()
        if text == "...":
            return cls(text, ())
        try:
            tree = ast.parse(text, mode="eval").body
            terms = _polynomial(tree, text, where)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:  # what ast.parse raises on wild text
            if isinstance(e, SignatureError):
                raise
            raise SignatureError(f"{where}: '{text}' is not an axis expression") from None
        return cls(text, tuple(sorted(terms.items())))

    @property
    def dots(self) -> bool:
        return self.text == "..."

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(n for term, _ in self.terms for n in term)

    @property
    def plain(self) -> bool:
        """Whether it is a name by itself."""
        return self.text in self.names

    def degree(self, name: str) -> int:
        return max((term.count(name) for term, _ in self.terms), default=0)

    def value(self, sizes: Mapping[str, int]) -> int:
        total = 0
        for term, coefficient in self.terms:
            for n in term:
                coefficient *= sizes[n]
            total += coefficient
        return total

    def solve(self, size: int, sizes: Mapping[str, int], unknown: str) -> tuple[int | None, bool]:
        """The natural number that `unknown` must be for the axis to have this size, or None where there is none.

        False where any number would do, as `heads` in `rep*heads` with `rep` 0; it then is 0 unless another axis says.
        """
        at_0, at_1 = (self.value({**sizes, unknown: i}) for i in (0, 1))
        step = at_1 - at_0
        if step == 0:
            return (0, False) if size == at_0 else (None, True)
        found, rest = divmod(size - at_0, step)
        return (found if rest == 0 and found >= 0 else None), True


def _polynomial(node: ast.expr, text: str, where: str) -> dict[tuple[str, ...], int]:
    match node:
        case ast.Constant(value=int() as n) if type(n) is int:
            return {(): n}
        case ast.Name(id=name):
            return {(name,): 1}
        case ast.BinOp(left=a, op=ast.Add() | ast.Sub() | ast.Mult() as kind, right=b):
            left, right = _polynomial(a, text, where), _polynomial(b, text, where)
            out: dict[tuple[str, ...], int] = {}
            if isinstance(kind, ast.Mult):
                for t, c in left.items():
                    for u, d in right.items():
                        key = tuple(sorted(t + u))
                        out[key] = out.get(key, 0) + c * d
            else:
                sign = -1 if isinstance(kind, ast.Sub) else 1
                out = dict(left)
                for u, d in right.items():
                    out[u] = out.get(u, 0) + sign * d
            return {t: c for t, c in out.items() if c}
    raise SignatureError(f"{where}: '{text}' may hold only names, integers, + - and *")


@dataclass(frozen=True)
class Param:
    """An argument or a result of an op."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str | None = None
    mutates: bool = False
    variadic: bool = False
    optional: bool = False

    @property
    def axes_text(self) -> str:
        return f"[{', '.join(a.text for a in self.axes)}]"

    def admits(self, dtype: str) -> bool:
        want = self.dtype or "f32"
        return want in ("any", "weight") or want == dtype or (want == "float" and dtype in FLOATS)


@dataclass(frozen=True)
class Signature:
    """What an op takes and gives. `infer` is its type rule."""

    op: str
    text: str
    params: tuple[Param, ...]
    results: tuple[Param, ...]

    @classmethod
    def parse(cls, op: str, text: str, integers: frozenset[str]) -> Signature:
        """`integers`: the op's integer attributes, known before any axis."""
        text = " ".join(text.split())
        left, arrow, right = text.partition("->")
        if not arrow:
            raise SignatureError(f"{op}: a signature needs '->', got '{text}'")
        out = cls(op, text, _side(left, "arguments", op), _side(right, "results", op))
        out._check(integers)
        return out

    def _check(self, integers: frozenset[str]) -> None:
        """Every axis can be solved, and every result is known, whatever the sizes."""
        seen: set[str] = set()
        for p in (*self.params, *self.results):
            if p.name in seen and p in self.params:
                raise SignatureError(f"{self.op}: '{p.name}' is named twice")
            seen.add(p.name)
        if len({p.name for p in self.results}) < len(self.results):
            raise SignatureError(f"{self.op}: two results have one name")
        known = set(integers)
        for optional in (False, True):
            params = [p for p in self.params if p.optional == optional]
            axes = [(a, p) for p in params for a in p.axes if not a.dots]
            while axes:
                left = []
                for a, p in axes:
                    unknown = [n for n in a.names if n not in known]
                    if len(unknown) == 1 and a.degree(unknown[0]) == 1:
                        known.update(unknown)
                    elif unknown:
                        left.append((a, p))
                if len(left) == len(axes):
                    a, p = left[0]
                    unknown = sorted(n for n in a.names if n not in known)
                    raise SignatureError(
                        f"{self.op}: axis '{a.text}' of {p.name} can't be solved for {', '.join(unknown)}"
                    )
                axes = left
            if not optional:
                self._check_results(known)

    def _check_results(self, known: set[str]) -> None:
        dotted = any(a.dots for p in self.params if not p.optional for a in p.axes)
        for r in self.results:
            for a in r.axes:
                if a.dots and not dotted:
                    raise SignatureError(f"{self.op}: '...' of {r.name} stands in no required argument")
                if a.names - known:
                    raise SignatureError(
                        f"{self.op}: axis '{a.text}' of {r.name} is not known from required arguments and attributes"
                    )
            if r.dtype is None and self.params and self.params[0].dtype == "weight":
                raise SignatureError(f"{self.op}: result {r.name} follows a :weight, so it must say its type")

    # -- inference ---------------------------------------------------------------------------------------------------

    def infer(self, types: ArgumentTypes, attrs: Mapping[str, object]) -> tuple[TensorType, ...]:
        """The results' types; ArgumentError naming op, argument and axis, what was found and what was expected."""
        found = _Sizes(self, attrs)
        for p, given in zip(self.params, types, strict=True):
            if given is None:
                continue
            if given == ():
                found.empty.append(p.name)
            for i, t in enumerate(given if isinstance(given, tuple) else (given,)):
                label = f"{p.name}[{i}]" if p.variadic else p.name
                if not p.admits(t.dtype):
                    raise ArgumentError(f"{self.op}: {label} must be {p.dtype or 'f32'}, got {t}")
                found.read(p, label, t)
        found.solve()
        first = next((t for t in types if t is not None), None)
        first = first[0] if isinstance(first, tuple) and first else first
        default = first.dtype if isinstance(first, TensorType) else "f32"
        return tuple(TensorType(found.shape(r), r.dtype or default) for r in self.results)


class _Sizes:
    """Axis sizes as they become known, and where each was first seen."""

    def __init__(self, signature: Signature, attrs: Mapping[str, object]) -> None:
        self.op = signature.op
        self.sizes = {k: v for k, v in attrs.items() if type(v) is int}
        self.origin = dict.fromkeys(self.sizes, "the attribute")
        self.dots: tuple[int, ...] | None = None
        self.dots_origin = ""
        self.pending: list[tuple[Axis, int, str, Param]] = []
        self.empty: list[str] = []

    def read(self, p: Param, label: str, t: TensorType) -> None:
        axes, shape = list(p.axes), list(t.shape)
        dots = next((i for i, a in enumerate(axes) if a.dots), None)
        named = len(axes) - (dots is not None)
        if len(shape) < named or (dots is None and len(shape) != named):
            raise ArgumentError(f"{self.op}: {label} must have the axes {p.axes_text}, got {t}")
        if dots is not None:
            n = len(shape) - named
            rest = tuple(shape[dots : dots + n])
            if self.dots is None:
                self.dots, self.dots_origin = rest, label
            elif self.dots != rest:
                raise ArgumentError(
                    f"{self.op}: axes '...' are {list(self.dots)} in {self.dots_origin} but {list(rest)} in {label}"
                )
            del shape[dots : dots + n], axes[dots]
        self.pending += [(a, s, label, p) for a, s in zip(axes, shape, strict=True)]

    def solve(self) -> None:
        pending = sorted(self.pending, key=lambda e: not e[0].plain)
        settle = False  # whether a name that may be any number is made 0: only when nothing else is left to solve
        while pending:
            left = []
            for entry in pending:
                axis, size, label, p = entry
                unknown = [n for n in axis.names if n not in self.sizes]
                if not unknown:
                    if axis.value(self.sizes) != size:
                        raise ArgumentError(self._mismatch(axis, size, label, p))
                elif len(unknown) > 1 or axis.degree(unknown[0]) > 1:
                    left.append(entry)
                else:
                    value, certain = axis.solve(size, self.sizes, unknown[0])
                    if value is None:
                        raise ArgumentError(self._mismatch(axis, size, label, p))
                    if not certain and not settle:
                        left.append(entry)
                        continue
                    self.sizes[unknown[0]], self.origin[unknown[0]] = value, label
                    settle = False
            if len(left) == len(pending):
                if settle:
                    axis, size, label, _ = left[0]
                    raise ArgumentError(f"{self.op}: axis '{axis.text}' of {label}, which is {size}, can't be solved")
                settle = True
            pending = left

    def _mismatch(self, axis: Axis, size: int, label: str, p: Param) -> str:
        if axis.plain:
            first = self.origin[axis.text]
            return f"{self.op}: axis '{axis.text}' is {self.sizes[axis.text]} in {first} but {size} in {label}"
        known = {n: self.sizes[n] for n in sorted(axis.names) if n in self.sizes}
        if not axis.names:
            return f"{self.op}: axis '{axis.text}' of {label}{p.axes_text} must be {axis.value({})}, got {size}"
        if set(known) == axis.names:
            have = ", ".join(f"{n} is {v} in {self.origin[n]}" for n, v in known.items())
            return f"{self.op}: axis '{axis.text}' of {label} must be {axis.value(self.sizes)} ({have}), got {size}"
        have = ", ".join(f"{n} is {v} in {self.origin[n]}" for n, v in known.items()) or "any natural number"
        return f"{self.op}: axis '{axis.text}' of {label} is {size}, which does not fit ({have})"

    def shape(self, r: Param) -> tuple[int, ...]:
        out: list[int] = []
        for a in r.axes:
            unknown = self.dots is None if a.dots else any(n not in self.sizes for n in a.names)
            if unknown:
                lists = " and ".join(self.empty)
                raise ArgumentError(f"{self.op}: axis '{a.text}' of the result {r.name} is not known: {lists} is empty")
            if a.dots:
                out += self.dots or ()
                continue
            n = a.value(self.sizes)
            if n < 0:
                raise ArgumentError(f"{self.op}: axis '{a.text}' of the result {r.name} would be {n}")
            out.append(n)
        return tuple(out)


def _side(text: str, side: str, op: str) -> tuple[Param, ...]:
    out: list[Param] = []
    position = 0
    while text.strip():
        m = _ARGUMENT.match(text, position)
        if not m or (m.end() < len(text) and text[m.end()] != ","):
            rest = text[m.end() if m else position :].strip()
            raise SignatureError(
                f"{op}: can't read '{rest[:24]}' in the {side}; expected name[axes] with & * ? before or :type after"
            )
        name, dtype, kind = m["name"], m["dtype"], m["kind"]
        if dtype and dtype not in CLASSES and dtype not in DTYPES:
            raise SignatureError(f"{op}: {name} has the unknown type :{dtype}")
        if side == "results" and (kind or m["opt"] or dtype in CLASSES):
            raise SignatureError(f"{op}: the result {name} can't be marked & * ? or be of a class of types")
        if kind == "&" and m["opt"]:
            raise SignatureError(f"{op}: {name} is mutated, so it can't be optional")
        if kind == "*" and m["opt"]:
            raise SignatureError(f"{op}: {name} is a list, which may be empty, so it can't be optional")
        axes = tuple(Axis.parse(a, f"{op}: {name}") for a in m["axes"].split(",")) if m["axes"].strip() else ()
        if sum(a.dots for a in axes) > 1:
            raise SignatureError(f"{op}: {name} has two '...'")
        out.append(Param(name, axes, dtype, kind == "&", kind == "*", bool(m["opt"])))
        if m.end() >= len(text):
            break
        position = m.end() + 1
    return tuple(out)
