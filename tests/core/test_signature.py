"""Signatures: what is refused when an op is defined, what at a call and in which words, and sizes solved as defined."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trueup.core.errors import ArgumentError, SignatureError
from trueup.core.graph import Graph
from trueup.core.op import OPS, Op, op
from trueup.core.signature import Signature
from trueup.core.state import Capacity, PerSequence
from trueup.core.types import TensorType
from trueup.core.weight import Weight

CAPACITY = Capacity(slots=4, pages=4, page=4)


def define(signature: str, function: str, **kwargs: Any) -> Op:
    """An op of this signature from `def f(…)`, outside the registry."""
    scope: dict[str, Any] = {}
    exec(f"def f({function}): ...", scope)
    return Op(signature, scope["f"], **kwargs)


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def i32(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.int32)


# -- refused at definition ---------------------------------------------------------------------------------------------

REFUSED = [
    # the grammar
    ("x[rows]", "x", "f: a signature needs '->', got 'x[rows]'"),
    ("", "", "f: a signature needs '->', got ''"),
    ("x[rows] y[rows] -> z[rows]", "x, y", "f: can't read 'y[rows]' in the arguments; expected name[axes] with & * ?"),
    ("x[rows], -> y[rows]", "x", "f: can't read '' in the arguments"),
    ("x -> y[]", "x", "f: can't read 'x' in the arguments"),
    ("x[rows -> y[rows]", "x", "f: can't read 'x[rows' in the arguments"),
    ("x[rows]] -> y[rows]", "x", "f: can't read ']' in the arguments"),
    ("3x[rows] -> y[rows]", "x", "f: can't read '3x[rows]' in the arguments"),
    ("x?&[rows] -> y[rows]", "x", "f: can't read 'x?&[rows]' in the arguments"),
    ("&*x[rows] -> y[]", "x", "f: can't read '&*x[rows]' in the arguments"),
    ("x[rows] -> y[rows] -> z[rows]", "x", "f: can't read '-> z[rows]' in the results"),
    ("x[rows] -> y[rows] and more", "x", "f: can't read 'and more' in the results"),
    # types
    ("x[rows]:f99 -> y[rows]", "x", "f: x has the unknown type :f99"),
    ("x[rows]:F32 -> y[rows]", "x", "f: x has the unknown type :F32"),
    ("x[rows] -> y[rows]:f99", "x", "f: y has the unknown type :f99"),
    ("x[rows] -> y[rows]:float", "x", "f: the result y can't be marked & * ? or be of a class of types"),
    ("x[rows] -> y[rows]:any", "x", "f: the result y can't be marked"),
    ("x[rows] -> y[rows]:weight", "x", "f: the result y can't be marked"),
    ("x[rows]:weight -> y[rows]", "x", "f: result y follows a :weight, so it must say its type"),
    # marks
    ("x[rows] -> &y[rows]", "x", "f: the result y can't be marked"),
    ("x[rows] -> *y[rows]", "x", "f: the result y can't be marked"),
    ("x[rows] -> y?[rows]", "x", "f: the result y can't be marked"),
    ("&s?[slot] -> y[]", "s", "f: s is mutated, so it can't be optional"),
    ("*x?[n] -> y[]", "x", "f: x is a list, which may be empty, so it can't be optional"),
    # axes
    ("x[rows n] -> y[rows]", "x", "f: x: 'rows n' is not an axis expression"),
    ("x[rows,] -> y[rows]", "x", "f: x: '' is not an axis expression"),
    ("x[(rows] -> y[rows]", "x", "f: x: '(rows' is not an axis expression"),
    ("x[rows\0] -> y[rows]", "x", "is not an axis expression"),
    ("x[" + "(" * 500 + "n" + ")" * 500 + "] -> y[n]", "x", "is not an axis expression"),
    ("x[rows/2] -> y[rows]", "x", "f: x: 'rows/2' may hold only names, integers, + - and *"),
    ("x[rows//2] -> y[rows]", "x", "f: x: 'rows//2' may hold only names, integers, + - and *"),
    ("x[2.5*n] -> y[n]", "x", "f: x: '2.5*n' may hold only"),
    ("x[-n] -> y[n]", "x", "f: x: '-n' may hold only"),
    ("x[True] -> y[]", "x", "f: x: 'True' may hold only"),
    ("x['n'] -> y[n]", "x", "f: x: ''n'' may hold only"),
    ("x[n.m] -> y[n]", "x", "f: x: 'n.m' may hold only"),
    ("x[n**2, n] -> y[n]", "x", "f: x: 'n**2' may hold only"),
    ("x[..., n, ...] -> y[n]", "x", "f: x has two '...'"),
    ("x[n] -> y[..., n, ...]", "x", "f: y has two '...'"),
    ("x[...+1] -> y[n]", "x", "f: x: '...+1' may hold only"),
    # what can't be solved
    ("x[a*b] -> y[a]", "x", "f: axis 'a*b' of x can't be solved for a, b"),
    ("x[a+b], y[a-b] -> z[]", "x, y", "f: axis 'a+b' of x can't be solved for a, b"),
    ("x[n*n] -> y[]", "x", "f: axis 'n*n' of x can't be solved for n"),
    ("x[rows, (2+streams)*streams] -> y[rows]", "x", "f: axis '(2+streams)*streams' of x can't be solved for streams"),
    ("x[rows, k] -> y[rows]", "x, *, k: float", None),  # a float attribute is no size: k is solved
    ("x[rows, k*n] -> y[rows]", "x, *, k: float", "f: axis 'k*n' of x can't be solved for k, n"),
    # results
    ("x[rows] -> y[k]", "x", "f: axis 'k' of y is not known from required arguments and attributes"),
    ("x[rows] -> y[rows+k]", "x", "f: axis 'rows+k' of y is not known from required arguments and attributes"),
    ("x[n], b?[m] -> y[m]", "x, b=None", "f: axis 'm' of y is not known from required arguments and attributes"),
    ("x[n] -> y[..., n]", "x", "f: '...' of y stands in no required argument"),
    ("x[n], b?[..., n] -> y[..., n]", "x, b=None", "f: '...' of y stands in no required argument"),
    ("x[n], b?[m], c?[k*m*j] -> y[n]", "x, b=None, c=None", "f: axis 'k*m*j' of c can't be solved for j, k"),
    # names
    ("x[n], x[n] -> y[n]", "x", "f: 'x' is named twice"),
    ("x[n] -> y[n], y[n]", "x", "f: two results have one name"),
    ("x[n], y[n] -> z[n]", "x", "f: the signature names ['x', 'y'], the function ['x']"),
    ("x[n] -> z[n]", "x, y", "f: the signature names ['x'], the function ['x', 'y']"),
    ("x[n], y[n] -> z[n]", "y, x", "f: the signature names ['x', 'y'], the function ['y', 'x']"),
    ("x[n], b?[n] -> y[n]", "x, b", "f: b must be 'name?' with '= None', or neither"),
    ("x[n], b[n] -> y[n]", "x, b=None", "f: b must be 'name?' with '= None', or neither"),
    ("x[n], b[n] -> y[n]", "x, b=3", "f: b must be 'name?' with '= None', or neither"),
    ("x[n], b?[n] -> y[n]", "x, b=3", "f: b must be 'name?' with '= None', or neither"),
    ("*x[n] -> y[n]", "*x", "f: tensors are plain positional parameters; a list is one parameter"),
    ("x[n] -> y[n]", "x, /", "f: tensors are plain positional parameters"),
    ("x[n] -> y[n]", "x, **rest", "f: tensors are plain positional parameters"),
    # attributes
    ("x[n] -> y[k]", "x, *, k", "f: attribute k must be annotated int, float, bool or str"),
    ("x[n] -> y[n]", "x, *, k: list", "f: attribute k must be annotated int, float, bool or str"),
    ("x[n] -> y[n]", "x, *, k: int | None = None", "f: attribute k must be annotated int, float, bool or str"),
    ("x[n] -> y[n]", "x, *, k: Missing", "f: its annotations can't be read: name 'Missing' is not defined"),
    ("x[n] -> y[n]", "x, *, k: int = 1.5", "f: attribute k is int, its default is 1.5"),
    ("x[n] -> y[n]", "x, *, k: int = None", "f: attribute k is int, its default is None"),
    ("x[n] -> y[n]", "x, *, k: int = True", "f: attribute k is int, its default is True"),
]  # fmt: skip


@pytest.mark.parametrize(("signature", "function", "message"), REFUSED, ids=[s[:40] for s, _, _ in REFUSED])
def test_refused_at_definition(signature: str, function: str, message: str | None) -> None:
    if message is None:
        define(signature, function)
        return
    with pytest.raises(SignatureError) as e:
        define(signature, function)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("signature", "function", "message"),
    [
        ("x[n] -> y[n], z[n]", "x", "f: a view has one result and mutates nothing"),
        ("x[n] ->", "x", "f: a view has one result and mutates nothing"),
        ("x[n], &s[n] -> y[n]", "x, s", "f: a view has one result and mutates nothing"),
        ("-> y[3]", "", "f: a view is of its first argument, which must be one tensor"),
        ("*x[n] -> y[n]", "x", "f: a view is of its first argument, which must be one tensor"),
        ("x?[n] -> y[3]", "x=None", "f: a view is of its first argument, which must be one tensor"),
    ],
)
def test_views_are_refused_at_definition(signature: str, function: str, message: str) -> None:
    with pytest.raises(SignatureError, match=re.escape(message)):
        define(signature, function, view=True)


@pytest.mark.parametrize(
    ("signature", "function"),
    [
        ("x[rows, (2+streams)*streams] -> y[rows, streams]", "x, *, streams: int"),
        ("x[rows, (2+streams)*streams], y[streams] -> z[rows]", "x, y"),
        ("x[n*n], y[n+1] -> z[n]", "x, y"),
        ("cu[seqs+1]:i32, x[n] -> y[n, seqs]", "cu, x"),
        ("x[a, b*a] -> y[b]", "x"),
        ("x[...] -> y[...]", "x"),
        ("x[] -> y[]", "x"),
        ("&s[slot, n], x[n]:any ->", "s, x"),
        ("*outs[n, m], *lses[n], sinks?[m] -> out[n, m]", "outs, lses, sinks=None"),
        ("  x [ n , 2*( n+1 ) ] ->   y[ 2*(n+1) ] ".replace("x [", "x["), "x"),
    ],
)
def test_accepted_at_definition(signature: str, function: str) -> None:
    define(signature, function)


def test_the_registry_takes_a_name_once_and_wants_a_specification() -> None:
    @op("x[n] -> y[n]")
    def only_in_this_test(x: Any) -> Any:
        """The same."""
        return x

    try:
        assert OPS["only_in_this_test"] is only_in_this_test
        with pytest.raises(SignatureError, match="op only_in_this_test is defined twice"):
            op("x[n] -> y[n]")(only_in_this_test.body)

        def no_docstring(x: Any) -> Any:
            return x

        with pytest.raises(SignatureError, match="op no_docstring has no docstring, which is its specification"):
            op("x[n] -> y[n]")(no_docstring)

        def bad(x: Any) -> Any:
            """Never an op."""

        with pytest.raises(SignatureError):
            op("x[n] -> y[m]")(bad)
        assert "bad" not in OPS and "no_docstring" not in OPS
    finally:
        del OPS["only_in_this_test"]


# -- refused at the call -----------------------------------------------------------------------------------------------

top = define("scores[rows, candidates] -> values[rows, k], indices[rows, k]:i32", "scores, *, k: int")
scale = define("x[rows, n], scale[rows, 1] -> out[rows, n]", "x, scale")
both = define("a[...], b[...] -> out[...]", "a, b")
linear = define("x[..., n], weight[m, n]:weight -> out[..., m]", "x, weight")
delta = define(
    "q[tokens, kheads, dk], v[tokens, rep*kheads, dv], cu_seqlens[seqs+1]:i32, slots[seqs]:i32, "
    "&state[slot, rep*kheads, dk, dv], keep?[tokens]:i32 -> out[tokens, rep*kheads, dv]",
    "q, v, cu_seqlens, slots, state, keep=None, *, scale: float = 1.0, tiled: bool = False, kind: str = 'a'",
)
merge = define("*outs[tokens, dv], *lses[tokens], sinks?[dv] -> out[tokens, dv]", "outs, lses, sinks=None")
tail = define("x[tokens, n] -> out[tokens-taps, n]", "x, *, taps: int")
half = define("x[tokens]:float -> out[tokens]", "x")


def good(**changed: Any) -> dict[str, Any]:
    given = {
        "q": f32(5, 2, 8), "v": f32(5, 4, 3), "cu_seqlens": i32(3), "slots": i32(2), "state": f32(4, 4, 8, 3),
    }  # fmt: skip
    return {**given, **changed}


CALLS: list[tuple[str, Callable[[], Any], str]] = [
    ("axis", lambda: scale(f32(4, 6), f32(3, 1)), "f: axis 'rows' is 4 in x but 3 in scale"),
    ("rank", lambda: top(f32(2, 3, 4), k=1), "f: scores must have the axes [rows, candidates], got f32[2, 3, 4]"),
    ("rank 0", lambda: top(f32(), k=1), "f: scores must have the axes [rows, candidates], got f32[]"),
    ("rank with ...", lambda: linear(f32(), f32(2, 2)), "f: x must have the axes [..., n], got f32[]"),
    ("dtype", lambda: top(i32(2, 3), k=1), "f: scores must be f32, got i32[2, 3]"),
    ("dtype i32", lambda: delta(**good(slots=f32(2))), "f: slots must be i32, got f32[2]"),
    ("dtype f64", lambda: top(np.zeros((2, 3)), k=1), "f: scores must be f32, got f64[2, 3]"),
    ("class of types", lambda: half(i32(3)), "f: x must be float, got i32[3]"),
    (
        "no such type",
        lambda: top(np.zeros((2, 3), bool), k=1),
        "f: scores must be f32[rows, candidates], got no trueup type for NumPy's bool",
    ),
    ("ragged", lambda: top([[1.0], [1.0, 2.0]], k=1), "f: scores must be f32[rows, candidates], got setting an array"),
    (
        "byte order",
        lambda: top(np.zeros((2, 3), ">f4"), k=1),
        "f: scores must be f32[rows, candidates], got no trueup type for NumPy's >f4",
    ),
    (
        "argument missing",
        lambda: scale(f32(4, 6)),
        "f: missing a required argument: 'scale'; signature: x[rows, n], scale[rows, 1] -> out[rows, n]",
    ),
    (
        "too many",
        lambda: scale(f32(4, 6), f32(4, 1), f32(1)),
        "f: too many positional arguments; signature: x[rows, n], scale[rows, 1] -> out[rows, n]",
    ),
    ("no None", lambda: scale(f32(4, 6), None), "f: scale is not optional"),
    (
        "attribute missing",
        lambda: top(f32(2, 3)),
        "f: missing a required argument: 'k'; signature: scores[rows, candidates] -> values[rows, k], "
        "indices[rows, k]:i32",
    ),
    (
        "attribute by place",
        lambda: top(f32(2, 3), 2),
        "f: too many positional arguments (k by keyword only); signature: scores[rows, candidates] -> "
        "values[rows, k], indices[rows, k]:i32",
    ),
    ("attribute unknown", lambda: top(f32(2, 3), k=1, j=2), "f: got an unexpected keyword argument 'j'; signature: "),
    ("attribute float", lambda: top(f32(2, 3), k=2.0), "f: the attribute k must be int, got 2.0"),
    ("attribute bool", lambda: top(f32(2, 3), k=True), "f: the attribute k must be int, got True"),
    ("attribute str", lambda: top(f32(2, 3), k="2"), "f: the attribute k must be int, got '2'"),
    ("attribute tensor", lambda: top(f32(2, 3), k=f32(1)), "f: the attribute k must be int, got array("),
    ("bool from int", lambda: delta(**good(), tiled=1), "f: the attribute tiled must be bool, got 1"),
    ("float from str", lambda: delta(**good(), scale="1"), "f: the attribute scale must be float, got '1'"),
    ("str from int", lambda: delta(**good(), kind=1), "f: the attribute kind must be str, got 1"),
    ("literal axis", lambda: scale(f32(4, 6), f32(4, 2)), "f: axis '1' of scale[rows, 1] must be 1, got 2"),
    (
        "expression of known names",
        lambda: delta(**good(cu_seqlens=i32(4))),
        "f: axis 'seqs+1' of cu_seqlens must be 3 (seqs is 2 in slots), got 4",
    ),
    (
        "expression that divides nothing",
        lambda: delta(**good(v=f32(5, 3, 3))),
        "f: axis 'rep*kheads' of v is 3, which does not fit (kheads is 2 in q)",
    ),
    (
        "expression with all names known",
        lambda: delta(**good(state=f32(4, 5, 8, 3))),
        "f: axis 'rep*kheads' of state must be 4 (kheads is 2 in q, rep is 2 in v), got 5",
    ),
    (
        "expression below 0",
        lambda: define("x[n+3] -> y[n]", "x")(f32(2)),
        "f: axis 'n+3' of x is 2, which does not fit (any natural number)",
    ),
    ("... of other sizes", lambda: both(f32(4, 6), f32(3, 6)), "f: axes '...' are [4, 6] in a but [3, 6] in b"),
    ("... of other rank", lambda: both(f32(4, 6), f32(6)), "f: axes '...' are [4, 6] in a but [6] in b"),
    ("no list", lambda: merge(f32(3, 2), [f32(3)]), "f: outs is a list of tensors, got ndarray"),
    ("None for a list", lambda: merge(None, [f32(3)]), "f: outs is not optional"),
    (
        "lists of different length",
        lambda: merge([f32(3, 2), f32(3, 2)], [f32(3)]),
        "f: the lists differ in length: {'outs': 2, 'lses': 1}",
    ),
    (
        "lists of different shapes",
        lambda: merge([f32(3, 2), f32(3, 4)], [f32(3), f32(3)]),
        "f: axis 'dv' is 2 in outs[0] but 4 in outs[1]",
    ),
    (
        "None in a list",
        lambda: merge([f32(3, 2), None], [f32(3)] * 2),
        "f: outs must be f32[tokens, dv], got no trueup",
    ),
    (
        "empty lists",
        lambda: merge([], []),
        "f: axis 'tokens' of the result out is not known: outs and lses is empty",
    ),
    ("optional, wrong", lambda: delta(**good(keep=i32(4))), "f: axis 'tokens' is 5 in q but 4 in keep"),
    ("negative size", lambda: tail(f32(3, 2), taps=5), "f: axis 'tokens-taps' of the result out would be -2"),
    (
        "attribute against axis",
        lambda: define("x[k] -> y[k]", "x, *, k: int")(f32(3), k=2),
        "f: axis 'k' is 2 in the attribute but 3 in x",
    ),
    (
        "weights count elements",
        lambda: linear(f32(3, 8), Weight.of("w", f32(5, 4))),
        "f: axis 'n' is 8 in x but 4 in weight",
    ),
]


@pytest.mark.parametrize(("call", "message"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_refused_at_the_call(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError) as e:
        call()
    assert str(e.value) == message or (str(e.value).startswith(message) and len(message) < len(str(e.value)))


def graph_values() -> tuple[Graph, dict[str, Any]]:
    g = Graph(CAPACITY)
    values: dict[str, Any] = {
        k: g.input(k, *a.shape, dtype="i32" if a.dtype == np.int32 else "f32")
        for k, a in good().items()
        if k != "state"
    }
    return g, values | {"state": g.state("state", PerSequence((4, 8, 3)))}


def test_refused_among_graph_values() -> None:
    g, values = graph_values()
    other = Graph(CAPACITY).input("slots", 2, dtype="i32")
    x = g.input("x", 4, 8, 4, 3)
    for changed, message in [
        ({"state": x}, "f: state is mutated, so it must be a state; got %x: f32[4, 8, 4, 3]"),
        ({"slots": other}, "f: slots (%slots: i32[2]) is a value of another graph"),
        ({"slots": i32(2)}, "f: slots is ndarray, among graph values; use graph.constant or graph.weight"),
        ({"slots": None}, "f: slots is not optional"),
        ({"v": g.input("v3", 5, 3, 3)}, "f: axis 'rep*kheads' of v is 3, which does not fit (kheads is 2 in q)"),
        ({"scale": "x"}, "f: the attribute scale must be float, got 'x'"),
    ]:
        before = len(g.nodes)
        with pytest.raises(ArgumentError) as e:
            delta(**{**values, **changed})
        assert str(e.value) == message
        assert len(g.nodes) == before, "a refused call leaves no node"
    with pytest.raises(ArgumentError, match=r"f: outs is ndarray, among graph values"):
        merge([g.input("o", 3, 2), f32(3, 2)], [g.input("l", 3), g.input("m", 3)])
    out = delta(**values)
    assert str(out.type) == "f32[5, 4, 3]"
    (node,) = g.nodes
    assert [(s.name, writes) for s, writes in node.effects] == [("state", True)]


def test_bodies_are_held_to_their_types() -> None:
    for returned, text in [
        (f32(2), "f32[2]"), (i32(3), "i32[3]"), (np.zeros(3), "f64[3]"), (None, "nothing"),
        ((f32(3), f32(3)), "f32[3], f32[3]"),
    ]:  # fmt: skip
        wrong = Op("x[n] -> y[n]", _named("wrong", lambda x, r=returned: r))
        with pytest.raises(ArgumentError) as e:
            wrong(f32(3))
        assert str(e.value) == f"wrong: the body returned {text} where the signature gives f32[3]"


def _named(name: str, returns: Callable[[Any], Any]) -> Callable[..., Any]:
    def body(x: Any) -> Any:
        return returns(x)

    body.__name__ = name
    return body


def test_numpy_numbers_are_attributes() -> None:
    k = Op("x[n] -> y[k]", _k_zeros)
    assert k(f32(3), k=np.int64(2)).shape == (2,)
    g = Graph()
    k(g.input("x", 3), k=np.int32(2))
    assert g.nodes[0].attrs == {"k": 2} and type(g.nodes[0].attrs["k"]) is int


def _k_zeros(x: Any, *, k: int) -> Any:
    return f32(k)


def test_an_int_is_a_float_attribute() -> None:
    g, values = graph_values()
    delta(**values, scale=2)
    assert repr(g.nodes[0].attrs["scale"]) == "2.0"


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "shapes", "results"),
    [
        # plain names first, whatever the order of arguments
        ("cu[seqs+1], slots[seqs] -> y[seqs]", [(4,), (3,)], [(3,)]),
        # a square is no equation to solve, however it is written
        ("x[n*n], y[n+1] -> z[n]", [(9,), (4,)], [(3,)]),
        ("x[(2+s)*s], y[s+1] -> z[s]", [(24,), (5,)], [(4,)]),
        # 0 times anything: another axis says which
        ("x[a, n*a, n+1] -> y[n]", [(0, 0, 5)], [(4,)]),
        ("x[a], y[n*a], z[n+m], w[m+1] -> r[n]", [(0,), (0,), (7,), (3,)], [(5,)]),
        # and where none says, 0
        ("x[a, n*a] -> y[n]", [(0, 0)], [(0,)]),
        ("x[7-n] -> y[n]", [(3,)], [(4,)]),
        ("x[2*n+m-3, m] -> y[n, 10-m]", [(8, 5)], [(3, 5)]),
        ("x[..., n], y[...] -> z[n, ...]", [(2, 3, 4), (2, 3)], [(4, 2, 3)]),
        ("x[n, ..., m], y[...] -> z[...]", [(2, 4), ()], [()]),
    ],
)
def test_solved(signature: str, shapes: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> None:
    s = Signature.parse("f", signature, frozenset())
    assert [t.shape for t in s.infer([TensorType(shape) for shape in shapes], {})] == results


NAMES = "abc"


@st.composite
def expressions(draw: st.DrawFn, names: str = NAMES, depth: int = 2) -> str:
    """An axis expression, as text; products only of things that can't be 0 for positive names."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(names)) if draw(st.integers(0, 3)) else str(draw(st.integers(1, 4)))
    kind = draw(st.sampled_from("++-**"))
    a, b = draw(expressions(names, depth - 1)), draw(expressions(names, depth - 1))
    if kind == "*":
        a, b = (f"({e})" if "+" in e or "-" in e else e for e in (a, b))
        assume("-" not in a + b)
    elif kind == "-" and ("+" in b or "-" in b):
        b = f"({b})"
    space = draw(st.sampled_from(["", " "]))
    return f"{a}{space}{kind}{space}{b}"


@given(st.data())
def test_inference_agrees_with_arithmetic(data: st.DataObject) -> None:
    """Whatever sizes the names have, shapes made with Python's own arithmetic are accepted and give them back."""
    sizes = {n: data.draw(st.integers(1, 6), n) for n in NAMES}
    arguments = data.draw(
        st.lists(st.lists(expressions(), min_size=1, max_size=3), min_size=1, max_size=3), "arguments"
    )
    results = data.draw(st.lists(expressions(), min_size=1, max_size=3), "results")
    known = {n for n in NAMES if data.draw(st.booleans(), f"{n} is an attribute")}
    attrs = {n: sizes[n] for n in known}
    text = ", ".join(f"x{i}[{', '.join(a)}]" for i, a in enumerate(arguments)) + f" -> y[{', '.join(results)}]"
    shapes = [tuple(eval(e, {}, sizes) for e in a) for a in arguments]
    assume(all(n >= 0 for shape in shapes for n in shape))
    try:
        signature = Signature.parse("f", text, frozenset(known))
    except SignatureError as e:
        assert "can't be solved" in str(e) or "is not known" in str(e)
        return
    types = [TensorType(shape) for shape in shapes]
    want = tuple(eval(e, {}, sizes) for e in results)
    if min(want) < 0:
        with pytest.raises(ArgumentError, match="would be -"):
            signature.infer(types, attrs)
    else:
        assert signature.infer(types, attrs)[0].shape == want


@given(st.data())
def test_what_is_accepted_is_a_solution(data: st.DataObject) -> None:
    """Any shapes: those accepted have sizes that give them, those refused have none among small ones."""
    arguments = data.draw(st.lists(expressions("ab"), min_size=2, max_size=4), "axes")
    text = f"x[{', '.join(arguments)}] -> y[a, b]"
    try:
        signature = Signature.parse("f", text, frozenset())
    except SignatureError:
        assume(False)
    shape = tuple(data.draw(st.integers(0, 9)) for _ in arguments)
    a, b = np.meshgrid(np.arange(40), np.arange(40))
    fits = [eval(e, {}, {"a": a, "b": b}) + 0 * a == n for e, n in zip(arguments, shape, strict=True)]
    solutions = np.argwhere(np.logical_and.reduce(fits))
    try:
        (result,) = signature.infer([TensorType(shape)], {})
    except ArgumentError:
        assert len(solutions) != 1
    else:
        a, b = result.shape
        assert tuple(eval(e, {}, {"a": a, "b": b}) for e in arguments) == shape


ALPHABET = st.text(st.sampled_from("abx_01[](),:?&*+-. \n\0é>"), max_size=30)


@given(ALPHABET, ALPHABET)
def test_wild_text_is_a_signature_error_or_a_signature(left: str, right: str) -> None:
    try:
        parsed = Signature.parse("f", f"{left}->{right}", frozenset())
    except SignatureError as e:
        assert str(e).startswith("f: ")
    else:
        assert all(p.name.isidentifier() for p in (*parsed.params, *parsed.results))
