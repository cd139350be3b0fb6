"""One definition per operation: the `@op` decorator, and what calling an op does. Knows graphs; knows no backend.

    @op("scores[rows, candidates] -> values[rows, k], indices[rows, k]:i32")
    def top_k(scores, *, k: int):
        '''The k largest entries of each row, in falling order. …'''
        …NumPy…

The function is the signature (every axis named), the semantics (its body, in NumPy) and the specification (its
docstring). Called on arrays it computes, called on graph values it records a node; both calls are checked alike.
Positional parameters are tensors, keyword-only ones attributes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import ArgumentError, ContractError, SignatureError
from .graph import Graph, Input, State, Value
from .signature import Param, Signature
from .types import TensorType
from .weight import Weight

OPS: dict[str, Op] = {}
"""Every op, by name."""


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: floating-point operations, and bytes read and written once each."""

    flops: int
    bytes: int


class Operation(Protocol):
    """What a node calls: an op, or a fusion of several (`passes.fuse.Pattern`)."""

    name: str
    params: tuple[Param, ...]
    results: tuple[Param, ...]
    view: bool
    body: Callable[..., Any]
    decomposition: Callable[..., Any] | None

    @property
    def signature_text(self) -> str: ...

    def layout(self, type: TensorType, attrs: Mapping[str, Any]) -> tuple[int, tuple[int, ...]] | None: ...


class Op:
    """An operation, made by `@op`."""

    def __init__(self, signature: str, body: Callable[..., Any], *, view: bool = False) -> None:
        self.name, self.body, self.view = body.__name__, body, view
        self.__doc__ = inspect.getdoc(body)
        self.decomposition: Callable[..., Any] | None = None
        self._cost: Callable[..., Cost] | None = None
        self._required: Callable[..., bool | str] | None = None
        self._conditions: Callable[..., None] | None = None
        try:
            self._python = inspect.signature(body, eval_str=True)
        except Exception as e:  # an annotation may be any expression
            raise SignatureError(f"{self.name}: its annotations can't be read: {e}") from e
        parameters = list(self._python.parameters.values())
        self.attributes = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
        for p in self.attributes.values():
            if p.annotation not in (int, float, bool, str):
                raise SignatureError(f"{self.name}: attribute {p.name} must be annotated int, float, bool or str")
            if p.default is not p.empty and not _fits(p.default, p.annotation):
                want = p.annotation.__name__
                raise SignatureError(f"{self.name}: attribute {p.name} is {want}, its default is {p.default!r}")
        integers = frozenset(p.name for p in self.attributes.values() if p.annotation is int)
        self.signature = Signature.parse(self.name, signature, integers)
        self.params, self.results = self.signature.params, self.signature.results
        self._agree([p for p in parameters if p.kind is not p.KEYWORD_ONLY])

    def _agree(self, tensors: list[inspect.Parameter]) -> None:
        """The Python function and the signature name the same things."""
        if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in tensors):
            raise SignatureError(f"{self.name}: tensors are plain positional parameters; a list is one parameter")
        if [p.name for p in tensors] != [p.name for p in self.params]:
            named, has = [p.name for p in self.params], [p.name for p in tensors]
            raise SignatureError(f"{self.name}: the signature names {named}, the function {has}")
        for p, declared in zip(tensors, self.params, strict=True):
            if declared.optional != (p.default is None) or (p.default is not None and p.default is not p.empty):
                raise SignatureError(f"{self.name}: {p.name} must be 'name?' with '= None', or neither")
        first = self.params[0] if self.params else None
        if self.view and (len(self.results) != 1 or any(p.mutates for p in self.params)):
            raise SignatureError(f"{self.name}: a view has one result and mutates nothing")
        if self.view and (first is None or first.optional or first.variadic):
            raise SignatureError(f"{self.name}: a view is of its first argument, which must be one tensor")

    @property
    def signature_text(self) -> str:
        return self.signature.text

    def decompose(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the op in terms of smaller ops: the same parameters, called on graph values."""
        self.decomposition = function
        return function

    def costs(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Register the cost: the same parameters, called on types."""
        self._cost = function
        return function

    def requires(self, function: Callable[..., bool | str]) -> Callable[..., bool | str]:
        """Register what a call must meet besides its signature: the same parameters, called on types; True or a sentence.

        Asked for every call, on arrays and when a node is recorded; a sentence is a ContractError.
        """
        self._required = function
        return function

    def conditions(self, function: Callable[..., None]) -> Callable[..., None]:
        """Register what integer arguments must hold (indices, lengths): the same parameters, called on arrays.

        Arrays of other types hold zeros: only their shapes count. ValueError says what is wrong. The body refuses what
        it can't do anyway; this may refuse more, and is asked only where a step runs strictly.
        """
        self._conditions = function
        return function

    @property
    def has_conditions(self) -> bool:
        return self._conditions is not None

    def check_data(self, args: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        """ValueError where integer arguments break the op's conditions. `args`: arrays of them, types of all others."""
        if self._conditions is None:
            return

        def dummy(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(dummy, x))
            return np.broadcast_to(np.zeros((), np.float32), x.shape) if isinstance(x, TensorType) else x

        self._conditions(*map(dummy, args), **attrs)

    def cost(self, types: Sequence[Any], attrs: Mapping[str, Any]) -> Cost:
        """At least what the op must do; by default each argument and result once, and no arithmetic."""
        if self._cost is not None:
            return self._cost(*types, **attrs)
        flat = [t for g in types if g is not None for t in (g if isinstance(g, tuple) else (g,))]
        return Cost(0, sum(t.nbytes for t in (*flat, *self.signature.infer(types, attrs))))

    # -- calling -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors, attrs = self._bind(args, kwargs)
        values = [
            (p, v)
            for p, given in zip(self.params, tensors, strict=True)
            if given is not None
            for v in (given if p.variadic else (given,))
        ]
        graph = next((v.graph for _, v in values if isinstance(v, Value)), None)
        if graph is None:
            return self._compute(tensors, attrs)
        for p, v in values:
            if not isinstance(v, Value):
                raise ArgumentError(
                    f"{self.name}: {p.name} is {type(v).__name__}, among graph values; "
                    "use graph.constant or graph.weight"
                )
            if v.graph is not graph:
                raise ArgumentError(f"{self.name}: {p.name} ({v!r}) is a value of another graph")
            if p.mutates and not isinstance(v, State) and not graph.pattern:
                raise ArgumentError(f"{self.name}: {p.name} is mutated, so it must be a state; got {v!r}")
        return self._record(graph, tensors, attrs)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        try:
            bound = self._python.bind(*args, **kwargs)
        except TypeError as e:
            hint = ""
            if len(args) > len(self.params) and self.attributes:
                hint = f" ({', '.join(self.attributes)} by keyword only)"
            raise ArgumentError(f"{self.name}: {e}{hint}; signature: {self.signature.text}") from None
        bound.apply_defaults()
        tensors = []
        for p in self.params:
            given = bound.arguments[p.name]
            if given is None and not p.optional:
                raise ArgumentError(f"{self.name}: {p.name} is not optional")
            if p.variadic and not isinstance(given, list | tuple):
                raise ArgumentError(f"{self.name}: {p.name} is a list of tensors, got {type(given).__name__}")
            tensors.append(tuple(given) if p.variadic else given)
        lists = {p.name: len(t) for p, t in zip(self.params, tensors, strict=True) if p.variadic}
        if len(set(lists.values())) > 1:
            raise ArgumentError(f"{self.name}: the lists differ in length: {lists}")
        return tensors, {k: bound.arguments[k] for k in self.attributes}

    def _attributes(self, attrs: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for k, v in attrs.items():
            want = self.attributes[k].annotation
            if isinstance(v, np.integer | np.floating | np.bool_):
                v = v.item()
            if not _fits(v, want):
                raise ArgumentError(f"{self.name}: the attribute {k} must be {want.__name__}, got {v!r}")
            out[k] = want(v)
        return out

    def _compute(self, tensors: list[Any], attrs: dict[str, Any]) -> Any:
        attrs = self._attributes(attrs)
        tensors = [
            tuple(self._array(p, x) for x in t) if p.variadic else None if t is None else self._array(p, t)
            for p, t in zip(self.params, tensors, strict=True)
        ]
        types = [
            tuple(map(TensorType.of, t)) if isinstance(t, tuple) else t if t is None else TensorType.of(t)
            for t in tensors
        ]
        expected = self._infer(types, attrs)
        out = self.body(*tensors, **attrs)
        check_results(self, expected, out)
        return out

    def _infer(self, types: Sequence[Any], attrs: dict[str, Any]) -> tuple[TensorType, ...]:
        """The results' types of a call that the signature and the op's requirements allow."""
        results = self.signature.infer(types, attrs)
        answer = True if self._required is None else self._required(*types, **attrs)
        if answer is not True:
            raise ContractError(f"{self.name}: {answer}")
        return results

    def _array(self, p: Param, x: Any) -> Any:
        """What NumPy makes of an argument; ArgumentError where trueup has no type for it."""
        try:
            array = x if isinstance(x, Weight) and p.dtype == "weight" else np.asarray(x)
            TensorType.of(array)
        except (TypeError, ValueError) as e:
            raise ArgumentError(f"{self.name}: {p.name} must be {p.dtype or 'f32'}{p.axes_text}, got {e}") from None
        return array

    def _record(self, graph: Graph, tensors: list[Any], attrs: dict[str, Any]) -> Any:
        inputs: tuple[Input, ...] = tuple(tensors)
        if graph.pattern:
            types: Sequence[Any] = [None] * len(self.results)
        else:
            attrs = self._attributes(attrs)
            types = self._infer(
                [tuple(x.type for x in t) if isinstance(t, tuple) else t and t.type for t in tensors], attrs
            )
        outs = graph.record(self, inputs, attrs, types)
        return outs[0] if len(outs) == 1 else tuple(outs) if outs else None

    def layout(self, type: TensorType, attrs: Mapping[str, Any]) -> tuple[int, tuple[int, ...]] | None:
        """For a view: offset and strides of the result in the argument's storage, in elements; None: a copy is due."""
        return _layout(self.body, type.shape, type.strides or type.row_major(), tuple(attrs.items()))

    def __repr__(self) -> str:
        return f"{self.name}({self.signature.text})"


def op(signature: str, *, view: bool = False) -> Callable[[Callable[..., Any]], Op]:
    """Define an op; see the module. `view`: the result is the first argument's storage, reshaped or sliced."""

    def make(body: Callable[..., Any]) -> Op:
        if body.__name__ in OPS:
            raise SignatureError(f"op {body.__name__} is defined twice")
        if not inspect.getdoc(body):
            raise SignatureError(f"op {body.__name__} has no docstring, which is its specification")
        OPS[body.__name__] = made = Op(signature, body, view=view)
        return made

    return make


def _fits(value: Any, want: type) -> bool:
    return type(value) is want or (want is float and type(value) is int)


def body_arguments(op: Operation, args: Sequence[Any]) -> list[Any]:
    """Arguments as an op's body takes them: a stored weight where the signature says `:weight`, else arrays."""
    if not isinstance(op, Op):  # a fusion's body calls ops, which see to it themselves
        return list(args)

    def plain(x: Any) -> Any:
        return tuple(map(plain, x)) if isinstance(x, tuple) else x if x is None else np.asarray(x)

    return [x if p.dtype == "weight" else plain(x) for p, x in zip(op.params, args, strict=True)]


def check_results(op: Operation, expected: Sequence[TensorType], out: Any) -> tuple[Any, ...]:
    """The results of a body as a tuple; ArgumentError where they are not of the inferred types."""
    results = () if out is None else out if isinstance(out, tuple) else (out,)
    found = [TensorType.of(r) for r in results]
    if list(expected) != found:
        raise ArgumentError(
            f"{op.name}: the body returned {', '.join(map(str, found)) or 'nothing'} "
            f"where the signature gives {', '.join(map(str, expected)) or 'nothing'}"
        )
    return results


@functools.lru_cache(maxsize=4096)
def _layout(
    body: Callable[..., Any], shape: tuple[int, ...], strides: tuple[int, ...], attrs: tuple[tuple[str, Any], ...]
) -> tuple[int, tuple[int, ...]] | None:
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    first = -sum(s for s in steps if s < 0)  # negative strides lead to elements before the first
    # one byte an element: strides in bytes are strides in elements
    storage = np.empty(1 + sum(map(abs, steps)) if 0 not in shape else 0, np.uint8)
    source = np.lib.stride_tricks.as_strided(storage[first:], shape, strides)
    result = body(source, **dict(attrs))
    if result.size == 0:
        return 0, TensorType(result.shape).row_major()
    if not np.may_share_memory(result, storage):
        return None
    return result.ctypes.data - source.ctypes.data, result.strides
