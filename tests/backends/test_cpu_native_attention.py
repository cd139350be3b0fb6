"""Native attention over a paged cache, against one float64 softmax a row over the keys that the row is told to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trueup.backends.cpu import _native as native

EPS = float(np.finfo(np.float32).eps)
F32 = NDArray[np.float32]


@pytest.fixture(autouse=True, params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    isa, threads = native.isa(), native.threads()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(isa)
    native.set_threads(threads)


@dataclass
class Case:
    """Sequences of given pasts and rows, over pages in random places; what no row may read is NaN."""

    pasts: list[int]
    rows: list[int]
    group: int = 2
    kv: int = 2
    d: int = 24
    dv: int = 40
    entries: int = 16
    padding: int = 2
    options: dict[str, int] = field(default_factory=dict)
    selected: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng(sum(self.pasts) + 7 * sum(self.rows))
        self.every = self.options.get("every", 1)
        need = [-(-((p + r) // self.every) // self.entries) for p, r in zip(self.pasts, self.rows, strict=True)]
        total, width = sum(need) + 3, max(need) + 1
        self.cu = np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int32)
        self.past = np.array(self.pasts, np.int32)
        self.table = np.full((len(need), width), -1, np.int32)
        places = list(rng.permutation(total))
        self.keys = np.full((total, self.entries, self.kv, self.d), np.nan, np.float32)
        self.values = np.full((total, self.entries, self.kv, self.dv), np.nan, np.float32)
        for s, pages in enumerate(need):
            for b in range(pages):
                self.table[s, b] = page = places.pop()
                filled = min(self.entries, (self.pasts[s] + self.rows[s]) // self.every - b * self.entries)
                self.keys[page, :filled] = rng.standard_normal((filled, self.kv, self.d))
                self.values[page, :filled] = rng.standard_normal((filled, self.kv, self.dv))
        self.q = rng.standard_normal((sum(self.rows) + self.padding, self.kv * self.group, self.d)).astype(np.float32)

    def run(self, scale: float = 0.3, **changes: Any) -> tuple[F32, F32]:
        given = {"q": self.q, "cu_seqlens": self.cu, "past": self.past, "block_table": self.table} | changes
        tokens, heads = given["q"].shape[:2]
        out, lse = np.full((tokens, heads, self.dv), np.nan, np.float32), np.full((tokens, heads), np.nan, np.float32)
        given.setdefault("selected", self.selected)
        native.attention(out, lse, keys=self.keys, values=self.values, scale=scale, **given, **self.options)
        return out, lse

    def sees(self, s: int, t: int) -> list[int]:
        """Entries of the row at t, by the words of the specification."""
        n = (self.pasts[s] + t - int(self.cu[s]) + 1) // self.every
        window, block = self.options.get("window", 0), self.options.get("block", 1)
        seen = [e for e in range(n) if not window or e >= n - window]
        if self.selected is None:
            return seen
        return [e for e in seen if e // block in self.selected[t] or e >= n // block * block]

    def judge(self, out: F32, lse: F32, scale: float = 0.3) -> None:
        for s in range(len(self.rows)):
            for t in range(int(self.cu[s]), int(self.cu[s + 1])):
                at = self.sees(s, t)
                for h in range(self.kv * self.group):
                    k = np.array(
                        [self.keys[self.table[s, e // self.entries], e % self.entries, h // self.group] for e in at]
                    )
                    v = np.array(
                        [self.values[self.table[s, e // self.entries], e % self.entries, h // self.group] for e in at]
                    )
                    if not at:
                        assert np.all(out[t, h] == 0) and lse[t, h] == -np.inf
                        continue
                    k, v, q = k.astype(np.float64), v.astype(np.float64), self.q[t, h].astype(np.float64)
                    x = scale * (k @ q)
                    p = np.exp(x - x.max())
                    # Each score is off by delta at most, which scales weights by e^±delta; sums add n eps.
                    delta = (self.d + 2) * EPS * scale * np.max(np.abs(k) @ np.abs(q))
                    relative = 2 * delta + (len(at) + 16) * EPS
                    assert np.all(np.abs(out[t, h] - p @ v / p.sum()) <= relative * (p @ np.abs(v)) / p.sum())
                    want = x.max() + np.log(p.sum())
                    assert abs(lse[t, h] - want) <= relative + 2 * EPS * abs(want)
        assert np.all(out[self.cu[-1] :] == 0) and np.all(lse[self.cu[-1] :] == 0)


def picks(rng: np.random.Generator, case: Case, count: int) -> NDArray[np.int32]:
    chosen = np.full((len(case.q), count), -1, np.int32)
    for s in range(len(case.rows)):
        for t in range(int(case.cu[s]), int(case.cu[s + 1])):
            whole = (case.pasts[s] + t - int(case.cu[s]) + 1) // case.every // case.options["block"]
            some = rng.permutation(whole)[: rng.integers(0, count + 1)]
            chosen[t, rng.permutation(count)[: len(some)]] = some
    return chosen


@pytest.mark.parametrize(
    "case",
    [
        Case([0], [1]),
        Case([0, 5, 0, 700], [3, 1, 0, 4]),
        Case([0], [300], group=1, kv=1, d=7, dv=5),
        Case([255, 256, 511], [1, 1, 2], group=8, kv=1, d=64, dv=64, entries=64),
        Case([600], [1], group=33, kv=1, d=16, dv=9),
        Case([900], [30], options={"window": 37}),
        Case([3, 0], [40, 2], options={"every": 4}),
        Case([2], [1], options={"every": 4}),
        Case([0, 0], [0, 0]),
    ],
    ids=str,
)
def test_attention_is_the_softmax_over_what_a_row_sees(case: Case) -> None:
    for threads in (1, 2):
        native.set_threads(threads)
        case.judge(*case.run())


@pytest.mark.parametrize(
    "case",
    [
        Case([200, 0, 9], [20, 5, 1], options={"block": 4}),
        Case([1100], [2], options={"block": 64}, group=1),
        Case([90], [9], options={"block": 4, "every": 2, "window": 21}),
    ],
    ids=str,
)
def test_a_selection_sees_its_blocks_and_the_unfinished_one(case: Case) -> None:
    case.selected = picks(np.random.default_rng(1), case, 12)
    out, lse = case.run()
    case.judge(out, lse)
    twice = np.concatenate([case.selected, case.selected[:, ::-1]], 1)
    for a, b in zip(case.run(selected=twice), (out, lse), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("options", [{}, {"window": 70}])
def test_a_row_has_the_same_bits_in_every_step_and_on_every_number_of_threads(options: dict[str, int]) -> None:
    case = Case([0], [600], group=2, kv=1, padding=0, options=options)
    native.set_threads(1)
    out, lse = case.run()
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for first, last in ((599, 600), (250, 260), (0, 3), (255, 257), (511, 590)):
            step = case.run(
                q=case.q[first:last], cu_seqlens=np.array([0, last - first], np.int32), past=np.array([first], np.int32)
            )
            np.testing.assert_array_equal(step[0].view(np.uint32), out[first:last].view(np.uint32))
            np.testing.assert_array_equal(step[1], lse[first:last])


def test_a_selection_of_everything_is_no_selection() -> None:
    case = Case([37], [3], options={"block": 4})
    case.selected = np.full((5, 12), -1, np.int32)
    case.selected[:, :9] = np.arange(9)
    case.selected[0, 9] = -1
    case.selected[2, 9] = 9  # position 39 ends the tenth block
    plain = case.run(selected=None)
    for a, b in zip(case.run(), plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_selection_of_nothing_in_any_row_sees_the_unfinished_block_alone() -> None:
    case = Case([0, 37, 8], [1, 3, 5], options={"block": 4})
    case.selected = np.full((len(case.q), 2), -1, np.int32)
    case.judge(*case.run())


def test_special_scores_follow_ieee_and_stay_in_their_row() -> None:
    case = Case([0], [6], group=1, kv=1, d=1, dv=2, padding=0)
    case.q[:] = 1
    case.keys[case.table[0, 0], :6, 0, 0] = [-np.inf, -np.inf, 1, np.inf, 2, 3]
    out, lse = case.run(scale=1.0)
    assert np.all(out[:2] == 0) and np.all(lse[:2] == -np.inf), "nothing but -inf"
    np.testing.assert_array_equal(out[2, 0], case.values[case.table[0, 0], 2, 0])
    assert lse[2, 0] == 1
    assert np.isnan(out[3:]).all() and np.isnan(lse[3:]).all(), "inf - inf"

    case = Case([0], [300], group=2, kv=1)
    clean = case.run()
    case.q[7, 1, 3] = np.nan
    dirty = case.run()
    assert np.isnan(dirty[0][7, 1]).all() and np.isnan(dirty[1][7, 1])
    for a, b in zip(dirty, clean, strict=True):
        a[7, 1] = b[7, 1]
        np.testing.assert_array_equal(a, b)


def test_queries_and_caches_may_be_strided() -> None:
    case = Case([40], [5])
    want = case.run()
    wide = np.full((len(case.q), 4, 100), np.nan, np.float32)
    wide[..., 30:54] = case.q
    both = np.full((*case.keys.shape[:3], 70), np.nan, np.float32)
    both[..., 2:26], both[..., 30:] = case.keys, case.values
    case.keys, case.values = both[..., 2:26], both[..., 30:]
    for a, b in zip(case.run(q=wide[..., 30:54]), want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"cu_seqlens": np.array([0, 9], np.int32)},
            {},
            r"cu_seqlens is \[0, 9\], expected to rise from 0 to at most 7",
        ),
        ({"cu_seqlens": np.array([1, 5], np.int32)}, {}, r"cu_seqlens is \[1, 5\]"),
        ({"past": np.array([-1], np.int32)}, {}, r"past\[0\] is -1"),
        ({"past": np.array([0, 0], np.int32)}, {}, "past has seqs = 2, expected 1 as in cu_seqlens"),
        ({"block_table": np.array([[-1, 0, 0, 0]], np.int32)}, {}, r"block_table\[0, 0\] is -1 where it is read"),
        ({"block_table": np.array([[0, 0, 99, 0]], np.int32)}, {}, r"block_table\[0, 2\] is 99 where it is read"),
        ({"block_table": np.array([[0]], np.int32)}, {}, "holds 1 pages, expected the 3 that entry 44 needs"),
        ({}, {"every": 0}, "every is 0, expected 1 or more"),
        ({}, {"window": -1}, "window is -1"),
        (
            {"selected": np.full((7, 1), 41, np.int32)},
            {},
            r"selected\[0, 0\] is 41, expected -1 or one of the 41 whole",
        ),
        ({"selected": np.full((7, 1), -2, np.int32)}, {}, r"selected\[0, 0\] is -2"),
        ({"selected": [1]}, {}, "selected is no array"),
        ({"q": np.zeros((7, 5, 24), np.float32)}, {}, "expected a multiple of the 2 heads of keys"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(changes: dict[str, Any], options: dict[str, int], message: str) -> None:
    case = Case([40], [5])
    case.options = options
    with pytest.raises(ValueError, match=f"attention: .*{message}"):
        case.run(**changes)


def test_pages_before_the_window_are_not_needed() -> None:
    case = Case([100], [3], options={"window": 20})
    want = case.run()
    case.table[0, :5] = -1
    for a, b in zip(case.run(), want, strict=True):
        np.testing.assert_array_equal(a, b)
