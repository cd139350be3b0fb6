"""What a call must meet besides its signature is asked on arrays and where a node is recorded, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.core.errors import ArgumentError, ContractError
from trueup.core.graph import Graph
from trueup.core.ops import (
    argmax,
    attention,
    causal_conv,
    chunk_wy,
    delay,
    embed,
    expert_linear,
    gated_rms_norm,
    index_scores,
    paged_append,
    rope,
    take_rows,
    top_k,
)
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType

Array = np.ndarray[Any, Any]


def f32(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def i32(*values: Any) -> Array:
    return np.array(values, np.int32)


CU, PAST, TABLE, SLOTS = i32(0, 2), i32(0), i32([0, 1]), i32(0)
CALLS: list[tuple[Any, list[Any], dict[str, Any], str]] = [
    (top_k, [f32(2, 3)], {"k": 4}, "k is 4, which exceeds the 3 candidates"),
    (argmax, [f32(2, 0)], {}, "2 rows of 0 candidates"),
    (delay, [i32([1], [2]), CU, SLOTS, f32(3, 2, 1)], {"by": 2}, "tail must be of x's type, i32, got f32"),
    (paged_append, [i32([1], [2]), CU, PAST, TABLE, f32(4, 2, 1)], {}, "cache must be of the rows' type, i32, got f32"),
    (paged_append, [f32(2, 1), CU, PAST, TABLE, f32(4, 2, 1)], {"every": 0}, "every must be at least 1, got 0"),
    (index_scores, [f32(2, 1, 4), f32(4, 2, 4), CU, PAST, TABLE], {"every": 0, "scale": 1.0}, "every must be at least 1"),
    (attention, [f32(2, 1, 4), f32(4, 2, 1, 4), f32(4, 2, 1, 4), CU, PAST, TABLE], {"scale": 1.0, "block": 0}, "block must"),
    (attention, [f32(2, 1, 4), f32(4, 2, 1, 4), f32(4, 2, 1, 4), CU, PAST, TABLE], {"scale": 1.0, "window": -1}, "window must"),
    (causal_conv, [f32(2, 3), f32(3, 1), CU, SLOTS, f32(3, 0, 3)], {"dilation": 0}, "dilation must be at least 1, got 0"),
    (chunk_wy, [f32(2, 1, 4), f32(2, 1, 4), f32(2, 1), f32(2, 1), CU], {"chunk": 0, "tiled": True}, "chunk must be"),
    (rope, [f32(2, 1, 4), i32([0], [1]), f32(2), i32(0, 0)], {"start": 1}, "2 pairs from dim 1 on leave a head of 4"),
    (gated_rms_norm, [f32(2, 3), f32(2, 3), f32(3)], {"eps": 0.0, "activation": "tanh"}, "activation must be 'silu' or"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "attrs", "said"), CALLS, ids=[f"{c[0].name}-{i}" for i, c in enumerate(CALLS)])
def test_it_is_refused_on_arrays_and_when_recorded(op: Any, args: list[Any], attrs: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match=f"^{op.name}: .*{said}") as computed:
        op(*args, **attrs)
    g = Graph(Capacity(3, 4, 2))
    values = []
    for p, a in zip(op.params, args, strict=False):
        paged = p.axes[0].text == "pages"
        if paged or p.mutates:
            kind = PerToken(a.shape[2:]) if paged else PerSequence(a.shape[1:])
            values.append(g.state(p.name, kind))
        else:
            values.append(g.input(p.name, *a.shape, dtype=TensorType.of(a).dtype))
    with pytest.raises(ContractError) as recorded:
        op(*values, **attrs)
    assert str(recorded.value) == str(computed.value)
    assert g.nodes == []
    assert isinstance(recorded.value, ArgumentError) and isinstance(recorded.value, ValueError)


def given(op: Any, *args: Any, **attrs: Any) -> Callable[[], None]:
    """The op's conditions asked, types standing for all that is no integer."""
    seen = [TensorType.of(a) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in args]
    known = {k: p.default for k, p in op.attributes.items()} | attrs
    return lambda: op.check_data(seen + [None] * (len(op.params) - len(seen)), known)


CACHE, KV = f32(4, 2, 1), f32(4, 2, 1, 4)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (given(take_rows, f32(3, 2), i32(0, 3)), "the index 3 is not in -1:3"),
        (given(embed, f32(3, 2), i32(-1)), "the id -1 is not in 0:3"),
        (given(expert_linear, f32(1, 2), i32([0, 5]), f32(5, 2, 2)), r"experts\[0, 1\] is 5, of 5 experts"),
        (given(rope, f32(2, 1, 4), i32([0], [1]), f32(2), i32(0, 1)), r"component \[0, 1\] of 1 components"),
        (given(delay, f32(2, 1), i32(0, 3), SLOTS, f32(3, 2, 1), by=2), "must rise from 0 to at most 2"),
        (given(delay, f32(2, 1), i32(0, 2, 1), i32(0, 1), f32(3, 2, 1), by=2), "must rise from 0"),
        (given(delay, f32(2, 1), i32(0, 1, 2), i32(0, 3), f32(3, 2, 1), by=2), "slot 3, of 3 slots"),
        (given(delay, f32(2, 1), i32(0, 1, 2), i32(1, 1), f32(3, 2, 1), by=2), "two sequences of one step have slot 1"),
        (given(delay, f32(2, 1), i32(0, 2), i32(1), f32(3, 2, 1), i32(2, 1), by=2), r"keep\[1\] names slot 1, which seq"),
        (given(delay, f32(2, 1), i32(0, 2), i32(1), f32(3, 2, 1), i32(2, 2), by=2), r"keep\[1\] names slot 2, which keep\[0\]"),
        (given(paged_append, f32(2, 1), CU, i32(3), TABLE, CACHE), "needs page 2 of a table of 2"),
        (given(paged_append, f32(2, 1), CU, i32(-1), TABLE, CACHE), "a past of -1 tokens"),
        (given(paged_append, f32(2, 1), CU, i32(1), i32([0, -1]), CACHE), "page 1 is -1, of 4 pages"),
        (given(paged_append, f32(2, 1), i32(0, 1, 2), i32(0, 0), i32([2], [2]), CACHE), "write to one page, 2"),
        (given(attention, f32(2, 1, 4), KV, KV, CU, PAST, TABLE, i32([-1], [2]), scale=1.0), "row 1 selects"),
    ],
)  # fmt: skip
def test_what_integers_must_hold(ask: Callable[[], None], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ask()


@pytest.mark.parametrize(
    "ask",
    [
        given(take_rows, f32(3, 2), i32(0, 2, -1)),
        given(delay, f32(3, 1), i32(0, 1, 1, 2), i32(1, -1, 2), f32(4, 2, 1), i32(3, 0, 99), by=2),
        given(paged_append, f32(2, 1), i32(0, 1, 2), i32(2, 2), i32([0, 1], [0, 2]), CACHE),
        given(paged_append, f32(2, 1), CU, i32(2), i32([7, 1])[:, ::-1] % 4, CACHE, every=2),
        given(
            attention,
            f32(2, 1, 4),
            f32(4, 2, 1, 4),
            f32(4, 2, 1, 4),
            CU,
            PAST,
            TABLE,
            i32([-1], [0]),
            scale=1.0,
            block=2,
        ),
        given(top_k, f32(2, 3), k=2),
    ],
)
def test_what_is_right_passes(ask: Callable[[], None]) -> None:
    """Among it: padding, a sequence without rows, a page that two sequences share as read."""
    ask()
