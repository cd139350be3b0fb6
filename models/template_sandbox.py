"""A Jinja environment for templates that come out of files of unknown origin.

Jinja's sandbox keeps a template from Python's internals; this one also bounds its work: loop steps, characters made,
sizes of numbers. Knows nothing of chats. Never reads files, the environment or the network.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

__all__ = ["Sandbox", "TemplateLimitError", "limits"]

_MAX_BITS = 4096  # of integers
_MAX_WIDTH = 10_000  # of padding and indents
_STEP, _CONCAT = " step", " concat"  # names of our filters; with a space no template can write them
_WIDE_FORMAT = re.compile(r"\d{5}|\*")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})
# Filters that hand containers on. All others would turn one into text, whose length is charged before.
_STRUCTURAL = frozenset(
    "attr batch count d default dictsort first groupby items last length list map max min reject rejectattr reverse "
    "select selectattr slice sort sum unique".split()
)


class TemplateLimitError(SecurityError):
    """A template that works longer, or makes more, than a chat template may."""


@dataclass
class _Budget:
    """What is left of a rendering's allowance."""

    steps: int
    characters: int

    def step(self, cost: int) -> None:
        self.steps -= cost
        if self.steps < 0:
            raise TemplateLimitError("the template loops too long")

    def make(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateLimitError("the template makes too much text")


_budget: ContextVar[_Budget] = ContextVar("template budget")


@contextmanager
def limits(*, steps: int, characters: int) -> Iterator[None]:
    """Compile and render within this: `steps` of loops and macros, `characters` made, intermediate ones included."""
    token = _budget.set(_Budget(steps, characters))
    try:
        yield
    finally:
        _budget.reset(token)


def _join(parts: Iterable[str]) -> str:
    """Joins what a macro or a `{% set %}` block made."""
    found = list(parts)
    _budget.get().make(sum(map(len, found)))
    return "".join(found)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what an assistant says for training; here only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja set up as Hugging Face does for chat templates, with limits; use it inside `limits(...)` only."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_join)

    def __init__(self, **globals_: Callable[..., Any]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_charged_output
        )
        for name in ("random", "urlize", "xmlattr", "pprint"):  # not reproducible, or costly and of no use here
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded_filter(name, f) for name, f in self.filters.items()}
        self.filters |= {_STEP: _step_filter, _CONCAT: _concat_filter}
        self.globals.update(globals_)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _count_steps(source)
        return super()._generate(source, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _charged(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        _check_call(obj, args, kwargs)
        return _charged(super().call(context, obj, *args, **kwargs))


def _count_steps(tree: nodes.Template) -> None:
    """Make turns of loops and calls of macros cost steps, about as they cost time, and `~` a filter that is charged."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        at, cost = node.lineno, 1 if isinstance(node, nodes.For) else 25
        tick = nodes.Filter(nodes.Const(cost, lineno=at), _STEP, [], [], None, None, lineno=at)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=at))  # type: ignore[attr-defined]  # all three have one
    _replace_concat(tree)
    tree.set_environment(tree.environment)  # type: ignore[arg-type]


def _replace_concat(node: nodes.Node) -> None:
    def replaced(child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        _replace_concat(child)
        if isinstance(child, nodes.Concat):
            parts = nodes.List(child.nodes, lineno=child.lineno)
            return nodes.Filter(parts, _CONCAT, [], [], None, None, lineno=child.lineno)
        return child

    for name, value in node.iter_fields():
        setattr(node, name, [replaced(v) for v in value] if isinstance(value, list) else replaced(value))


@pass_context  # a filter that wants the context is never computed ahead, at compilation
def _step_filter(context: Context, cost: int) -> None:
    _budget.get().step(cost)


@pass_context
def _concat_filter(context: Context, parts: list[Any]) -> str:
    for part in parts:
        _charge_text_of(part)
    return "".join(map(str, parts))


def _charged_output(value: Any) -> Any:
    _charge_text_of(value)
    return value


def _charged(result: Any) -> Any:
    if isinstance(result, str | list | tuple):
        _budget.get().make(len(result))
    return result


def _charge_text_of(value: Any) -> None:
    """Charge the length of str(value), without making it: containers may hold one long string many times."""
    budget = _budget.get()
    if isinstance(value, str):
        budget.make(len(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _charge_text_of(key)
            _charge_text_of(item)
    elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, range | bytes):
        for item in value:
            _charge_text_of(item)
    budget.make(8)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    make = _budget.get().make
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        _charge_text_of(right)
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateLimitError("the template computes too large a number")
    elif operator == "*":
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(sequence, str | bytes | list | tuple):
            make(len(sequence) * max(times, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * max(right, 0) > _MAX_BITS:
            raise TemplateLimitError("the template computes too large a number")


def _check_format(template: str) -> None:
    if _WIDE_FORMAT.search(template):
        raise TemplateLimitError("a format with so wide a field is not for a chat template")


def _check_call(obj: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Charge methods of strings whose result is much longer than what goes in."""
    name = getattr(obj, "__name__", "")
    text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
    if not isinstance(text, str):
        return
    if name in _PADDING:
        _check_width([*args, *kwargs.values()])
        _budget.get().make(len(text) * (max([8, *_ints(args)]) if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2:
        _charge_replace(text, args[0], args[1])
    elif name == "join":
        _charge_join(text, args[0] if args else ())
    elif name in ("format", "format_map"):
        if _WIDE_FORMAT.search(text) or re.search(r":[^{}]*\{", text):
            raise TemplateLimitError("a format with so wide a field is not for a chat template")
        _charge_text_of([*args, kwargs])
        # A field may be named many times.
        _budget.get().make(text.count("{") * sum(len(a) for a in [*args, *kwargs.values()] if isinstance(a, str)))
    elif name in ("translate", "maketrans"):
        raise TemplateLimitError(f"str.{name} is not for a chat template")


def _guarded_filter(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged for what goes in and what comes out."""
    skip = 1 if hasattr(f, "jinja_pass_arg") else 0

    @functools.wraps(f)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, options = (args[skip] if len(args) > skip else None), args[skip + 1 :]
        if name in _WIDE_FILTERS:
            _check_width([*options, *kwargs.values()])
        if name == "format":
            _check_format(str(value))
            _charge_text_of([*options, kwargs])
        elif name == "replace" and len(options) >= 2:
            _charge_replace(str(value), options[0], options[1])
        elif name == "join":
            value = list(value or ())
            args = (*args[:skip], value, *options)
            _charge_join(str(options[0] if options else kwargs.get("d", "")), value)
        elif name == "indent":
            width = max([4, *_ints([*options, *kwargs.values()])], default=4)
            _budget.get().make((str(value).count("\n") + 1) * width)
        elif name in ("batch", "slice"):
            _budget.get().make(max([0, *_ints([*options, *kwargs.values()])]))
        if name not in _STRUCTURAL:
            _charge_text_of(value)
        elif isinstance(value, str | list | tuple):
            _budget.get().make(len(value))
        return _charged(f(*args, **kwargs))

    return guarded


def _ints(values: Iterable[Any]) -> list[int]:
    return [v for v in values if isinstance(v, int)]


def _check_width(values: Iterable[Any]) -> None:
    if any(v > _MAX_WIDTH for v in _ints(values)):
        raise TemplateLimitError(f"a width above {_MAX_WIDTH} is not for a chat template")


def _charge_replace(text: str, old: Any, new: Any) -> None:
    _budget.get().make(len(text) + text.count(str(old)) * len(str(new)))


def _charge_join(separator: str, parts: Iterable[Any]) -> None:
    parts = list(parts)
    _charge_text_of(parts)
    _budget.get().make(len(separator) * len(parts))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as Hugging Face's chat templates expect: nothing escaped for HTML, keys in their own order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
