"""A short sweep of every op's kernels against the op's own body, in both shapes: vectors as on processors, lanes as on
GPUs. `trueup check --backend opencl` judges them by derived bounds and adversarial values; this finds what is broken at
once, and what the kit does not look at: stored formats bit for bit, grids beyond 65,535 rows, each regime of top_k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from trueup.backends.cuda.target import CudaTarget
from trueup.backends.simt.programs import NATIVE
from trueup.core import ops
from trueup.core.backend import Storage
from trueup.core.graph import Graph
from trueup.core.op import OPS, Op
from trueup.core.plan import build_plan
from trueup.core.state import Capacity, PerSequence, PerToken
from trueup.core.types import TensorType
from trueup.core.weight import Weight

Array = Any
EXACT = {"add", "mul", "concat", "contiguous", "repeat_streams", "take_rows", "embed", "scale_rows", "top_k", "argmax"}
EXACT |= {"delay", "paged_append", "clamp", "ngram_rows"}


@pytest.fixture(scope="module")
def target(emulated: Callable[..., CudaTarget]) -> Iterator[CudaTarget]:
    """On the emulated device, with few processors and short chunks of prompts."""
    t = emulated(prompt=7)
    yield t
    t.close()


def run(target: CudaTarget, op: Op, args: list[Array], **attrs: Any) -> tuple[list[Array], dict[str, Array]]:
    """Results and states, of `args` in the op's order: arrays, a Weight where the op takes one, lists of arrays."""
    paged = [a for p, a in zip(op.params, args, strict=False) if p.axes and p.axes[0].text == "pages"]
    slots = [a for p, a in zip(op.params, args, strict=False) if p.axes and p.axes[0].text == "slot"]
    g = Graph(Capacity(len(slots[0]) if slots else 1, *(paged[0].shape[:2] if paged else (1, 1))))
    inputs: dict[str, Array] = {}
    states: dict[str, Array] = {}

    def value(p: Any, name: str, a: Array) -> Any:
        if a is None or isinstance(a, list):
            return a and [value(p, f"{name}{i}", x) for i, x in enumerate(a)]
        if isinstance(a, Weight):
            return g.weight(a)
        dtype = TensorType.of(a).dtype
        if p.axes[0].text in ("pages", "slot"):
            states[name] = a
            kind = PerToken(a.shape[2:], 1, dtype) if p.axes[0].text == "pages" else PerSequence(a.shape[1:], dtype)
            return g.state(name, kind)
        inputs[name] = a
        return g.input(name, *a.shape, dtype=dtype)

    made = op(*(value(p, p.name, a) for p, a in zip(op.params, args, strict=False)), **attrs)
    made = () if made is None else made if isinstance(made, tuple) else (made,)
    for i, v in enumerate(made):
        g.output(str(i), v)
    handles = {n: target.memory.allocate(TensorType.of(a)) for n, a in states.items()}
    for n, h in handles.items():
        target.memory.upload(h, states[n])
    target.poison = True
    exe = target.compile(build_plan(g, target), Storage(states=handles))
    out = exe.run(inputs)
    after = {n: target.memory.download(h) for n, h in handles.items()}
    exe.close()
    for h in handles.values():
        target.memory.free(h)
    return [out[str(i)] for i in range(len(made))], after


def check(target: CudaTarget, op: Op, args: list[Array], tolerance: float = 3e-6, **attrs: Any) -> None:
    """Equal to the op's body: bit for bit where nothing is computed, else within a few roundings of the largest."""
    got, states = run(target, op, [a.copy() if isinstance(a, np.ndarray) else a for a in args], **attrs)
    own = [a.copy() if isinstance(a, np.ndarray) else tuple(a) if isinstance(a, list) else a for a in args]
    want = op.body(*own, **attrs)
    want = () if want is None else want if isinstance(want, tuple) else (want,)
    pairs = [*zip(got, want, strict=True)]
    pairs += [(states[p.name], a) for p, a in zip(op.params, own, strict=False) if p.mutates]
    for a, b in pairs:
        if op.name in EXACT:
            np.testing.assert_array_equal(a, b)
        else:
            size = np.abs(b[np.isfinite(b)]).max(initial=0)
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * size)


R = np.random.default_rng(1)


def f32(*shape: int) -> Array:
    return R.standard_normal(shape).astype(np.float32)


def i32(*values: Any) -> Array:
    return np.array(values, np.int32)


def weight(*shape: int) -> Weight:
    return Weight.of(f"w{R.integers(1 << 60)}", f32(*shape))


# Three sequences: 5 rows that begin anew, none, 3 rows after 11; then 2 rows of padding.
CU, SLOTS, KEEP = i32(0, 5, 5, 8), i32(2, -1, 0), i32(-1, 3, -1, 3, -1, -1, -1, 4, -1, -1)
PAST, TABLE = i32(0, 0, 11), i32([6, 1, -1, -1], [-1] * 4, [3, 0, 5, 2])
STEP, PAGES = [CU, SLOTS], [CU, PAST, TABLE]
PICKS = np.where(np.arange(10)[:, None] < 5, -1, i32(2, 0, 2, -1, 1)).astype(np.int32)

CASES: dict[str, Callable[[], tuple[list[Array], dict[str, Any]]]] = {
    "sigmoid": lambda: ([f32(3, 37) * 30], {}),
    "silu": lambda: ([f32(3, 37)], {"scale": 0.25}),
    "softplus": lambda: ([f32(3, 37) * 30], {}),
    "clamp": lambda: ([f32(3, 37)], {"low": -0.5, "high": 0.25}),
    "add": lambda: ([f32(3, 300), f32(3, 300)], {}),
    "mul": lambda: ([f32(3, 37), f32(3, 37)], {}),
    "swiglu": lambda: ([f32(3, 37), f32(3, 37)], {"limit": 1.0}),
    "scale_rows": lambda: ([f32(3, 37), f32(3, 1)], {}),
    "concat": lambda: ([f32(3, 2, 5), f32(3, 2, 7)], {}),
    "contiguous": lambda: ([f32(3, 4, 5)], {}),
    "repeat_streams": lambda: ([f32(3, 37)], {"streams": 4}),
    "take_rows": lambda: ([R.integers(0, 99, (4, 5)).astype(np.int64), i32(3, -1, 0, 3)], {}),
    "gdn_decay": lambda: ([f32(3, 5), weight(5), weight(5)], {}),
    "hc_read": lambda: ([f32(3, 4, 37), f32(3, 148)], {}),
    "hc_write": lambda: ([f32(3, 4, 37), f32(3, 37), f32(3, 4)], {}),
    "ple_gate": lambda: ([f32(3, 2, 37), f32(3, 2, 37), f32(3, 37)], {}),
    "rms_norm": lambda: ([f32(3, 37) * 1e25, weight(37)], {"eps": 1e-6}),
    "group_rms_norm": lambda: ([f32(3, 2, 37), weight(74)], {"eps": 1e-6}),
    "gated_rms_norm": lambda: ([f32(3, 2, 37), f32(3, 2, 37), weight(37)], {"eps": 0.0, "activation": "silu"}),
    "l2_norm": lambda: ([f32(3, 37) * 1e-30], {"eps": 0.0}),
    "softmax": lambda: ([np.where(f32(4, 37) > 1, -np.inf, f32(4, 37)).astype(np.float32)], {}),
    "normalize": lambda: ([np.abs(f32(3, 8))], {"floor": 6e-5}),
    "rope": lambda: ([f32(2, 3, 16), i32([7, 3], [262143, -9]), f32(5), i32(0, 1, 0, 0, 1)], {"start": 2}),
    "linear": lambda: ([f32(5, 37), weight(9, 37)], {}),
    "expert_linear": lambda: ([f32(5, 37), i32(*[[0, 3], [-1, 2], [3, 3], [1, -1], [0, 3]]), weight(4, 9, 37)], {}),
    "expert_combine": lambda: (
        [f32(5, 2, 37), i32(*[[0, 3], [-1, 2], [3, 3], [1, -1], [-1, -1]]), f32(5, 2), weight(4, 9, 37)],
        {},
    ),
    "embed": lambda: ([weight(7, 37), i32([0, 6], [3, 3])], {}),
    "causal_conv": lambda: ([f32(10, 21), weight(21, 3), *STEP, f32(5, 4, 21), KEEP], {"dilation": 2}),
    "trailing_mean": lambda: ([f32(10, 21), *STEP, f32(5, 3, 21), KEEP], {"every": 4}),
    "delay": lambda: (
        [R.integers(0, 99, (10, 3)).astype(np.int32), *STEP, R.integers(0, 99, (5, 2, 3)).astype(np.int32), KEEP],
        {"by": 2},
    ),
    "paged_append": lambda: ([f32(10, 2, 3), *PAGES, f32(8, 2, 2, 3)], {"every": 2}),
    "attention": lambda: (
        [f32(10, 4, 24), f32(8, 4, 2, 24), f32(8, 4, 2, 19), *PAGES, PICKS],
        {"scale": 0.2, "block": 4},
    ),
    "merge_attention": lambda: ([[f32(3, 2, 19), f32(3, 2, 19)], [f32(3, 2), f32(3, 2)], weight(2)], {}),
    "index_scores": lambda: ([f32(10, 3, 21), f32(8, 2, 21), *PAGES, f32(10, 3)], {"every": 2, "scale": 0.3}),
    "gated_delta_rule": lambda: (
        [f32(10, 2, 24) / 5, f32(10, 2, 24) / 5, f32(10, 4, 19), -np.abs(f32(10, 4)), f32(10, 4) ** 2, *STEP]
        + [f32(5, 4, 24, 19), KEEP],
        {"scale": 0.2, "tiled": True},
    ),
    "chunk_wy": lambda: (
        [f32(10, 2, 24) / 5, f32(10, 4, 19), -np.abs(f32(10, 4)), f32(10, 4) ** 2, CU],
        {"chunk": 3, "tiled": False},
    ),
    "chunk_delta_scan": lambda: (
        [f32(10, 2, 24) / 5, f32(10, 2, 24) / 5, f32(10, 4, 24) / 5, f32(10, 4, 19), -np.abs(f32(10, 4)), *STEP]
        + [f32(5, 4, 24, 19), KEEP],
        {"chunk": 3, "scale": 0.2, "tiled": False},
    ),
    "ngram_rows": lambda: (
        [R.integers(0, 9, 10).astype(np.int32), *STEP, R.integers(1, 1 << 62, 3), R.integers(0, 99, 4)]
        + [R.integers(1, 99, 4), R.integers(0, 9, (5, 2)).astype(np.int32), KEEP],
        {"eos": 3},
    ),
    "top_k": lambda: ([R.integers(0, 9, (3, 200)).astype(np.float32)], {"k": 20}),
    "argmax": lambda: ([np.array([[1, 7, 7], [-np.inf] * 3, [5, np.nan, np.nan]], np.float32)], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_its_op(target: CudaTarget, name: str) -> None:
    args, attrs = CASES[name]()
    defaults = {k: p.default for k, p in OPS[name].attributes.items() if p.default is not p.empty}
    check(target, OPS[name], args, **{**defaults, **attrs})


def test_every_op_with_a_kernel_is_swept(target: CudaTarget) -> None:
    known = {n for n in ops.__all__ if n in OPS and not OPS[n].view}
    assert {op.name for op in target.kernels.kernels} == set(CASES) == known


def test_window_and_unselected_attention(target: CudaTarget) -> None:
    args = [f32(10, 4, 24), f32(8, 4, 2, 24), f32(8, 4, 2, 24), *PAGES, None]
    for window in (0, 3):
        check(target, ops.attention, args, scale=0.2, every=1, block=1, window=window)


def test_attention_over_many_entries(target: CudaTarget) -> None:
    """More than are scored at a time; the largest scores come late, so that all before must fade."""
    q, keys, values = f32(2, 2, 16), f32(30, 8, 1, 16), f32(30, 8, 1, 19)
    keys *= np.linspace(0.1, 3, 30, dtype=np.float32)[:, None, None, None]
    table = R.permutation(30).astype(np.int32)[None]
    picks = R.permutation(59)[None, :40].repeat(2, 0).astype(np.int32)
    for selected, block in ((None, 1), (picks, 4)):
        args = [q, keys, values, i32(0, 2), i32(236), np.sort(table), selected]
        check(target, ops.attention, args, scale=1.0, every=1, block=block, window=0)


@pytest.mark.parametrize(("dk", "dv"), [(16, 40), (70, 5)])
def test_the_delta_rule_of_prompts_beside_decoding(target: CudaTarget, dk: int, dv: int) -> None:
    """Sequences on both sides of where chunks begin, whole chunks and not, snapshots within a chunk and at its end."""
    counts = [64, 1, 0, 97, 63, 6, 7]
    cu = np.cumsum([0, *counts]).astype(np.int32)
    tokens, keep = int(cu[-1]) + 3, np.full(int(cu[-1]) + 3, -1, np.int32)
    slots = np.where(np.array(counts) > 0, np.arange(7), -1).astype(np.int32)
    keep[[3, 31, 32, 64, 66, 130, 161, 240]] = [7, 8, 9, 10, 11, 2, 12, 13]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (f32(tokens, 2, dk), f32(tokens, 2, dk)))
    decay, beta = -np.abs(f32(tokens, 4)), (f32(tokens, 4) % 1).astype(np.float32)
    decay[[5, 80], 1] = -np.inf
    args = [q, k, f32(tokens, 4, dv), decay, beta, cu, slots, f32(14, 4, dk, dv), keep]
    check(target, ops.gated_delta_rule, args, 1e-5, scale=0.2, tiled=False)


# -- weights -----------------------------------------------------------------------------------------------------------


HALVES = {
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
"""Types that the gguf package can't write, and where their halves lie in a block."""


def stored(dtype: str, *shape: int) -> Weight:
    """A weight of this type, quantized by the gguf package; types that it can't write are random bytes."""
    kind, type = GGMLQuantizationType[dtype.upper()], TensorType(shape, dtype)
    if dtype in HALVES:
        raw = R.integers(0, 256, (*shape[:-1], TensorType(shape[-1:], dtype).nbytes), np.uint8)
        blocks = raw.reshape(*shape[:-1], -1, type.element.block_bytes)
        for i, at in enumerate(HALVES[dtype]):
            blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01 * (i + 1)).tobytes(), np.uint8)
        return Weight("w", type, raw)
    return Weight("w", type, quantize(f32(*shape), kind).view(np.uint8))


@pytest.mark.parametrize("dtype", [*NATIVE, "tq1_0"])
def test_rows_of_a_stored_type_are_the_gguf_package_s_bit_for_bit(target: CudaTarget, dtype: str) -> None:
    w = stored(dtype, 6, 512)
    ids = i32(5, 0, 3)
    ((got,), _) = run(target, ops.embed, [w, ids])
    np.testing.assert_array_equal(got, dequantize(w.data, GGMLQuantizationType[dtype.upper()])[ids])


@pytest.mark.parametrize("dtype", [*NATIVE, "tq2_0"])
def test_products_with_a_stored_type(target: CudaTarget, dtype: str) -> None:
    check(target, ops.linear, [f32(3, 256), stored(dtype, 10, 256)])


@pytest.mark.parametrize("columns", [8, 1024])
def test_all_halves_are_read_as_they_are(target: CudaTarget, columns: int) -> None:
    """Every float16: denormals, infinities, NaN; one by one and 16 together."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, columns)
    w = Weight("w", TensorType(bits.shape, "f16"), bits.view(np.uint8))
    ((got,), _) = run(target, ops.embed, [w, np.arange(len(bits), dtype=np.int32)])
    np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float32))


def test_a_row_is_the_same_alone_and_in_company(target: CudaTarget) -> None:
    """One row, some rows, many rows; experts one by one and put together."""
    x, w = f32(33, 96), stored("q8_0", 20, 96)
    (whole,), _ = run(target, ops.linear, [x, w])
    for n in (1, 2, 3, 5, 9):
        (some,), _ = run(target, ops.linear, [x[:n], w])
        np.testing.assert_array_equal(some, whole[:n])
    e, chosen, mix = stored("q8_0", 2, 20, 96), R.integers(-1, 2, (33, 3)).astype(np.int32), f32(33, 3)
    down, h = stored("q8_0", 2, 40, 96), f32(33, 3, 96)
    (many,), _ = run(target, ops.expert_linear, [x, chosen, e])
    (sums,), _ = run(target, ops.expert_combine, [h, chosen, mix, down])
    for t in (0, 7, 32):
        (one,), _ = run(target, ops.expert_linear, [x[t : t + 1], chosen[t : t + 1], e])
        np.testing.assert_array_equal(one[0], many[t])
        (one,), _ = run(target, ops.expert_combine, [h[t : t + 1], chosen[t : t + 1], mix[t : t + 1], down])
        np.testing.assert_array_equal(one[0], sums[t])


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [65_537])
def test_more_rows_than_an_old_grid_has(target: CudaTarget, rows: int) -> None:
    """B76."""
    x, w = f32(rows, 4), weight(2, 4)
    check(target, ops.linear, [x, w])
    check(target, ops.rms_norm, [x, None], eps=1e-6)
    check(target, ops.top_k, [x], k=2)
    check(target, ops.take_rows, [x, np.arange(rows, dtype=np.int32)[::-1].copy()])


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 5000, 1), (1, 40_000, 300), (3, 2050, 2050), (2, 3000, 2051)])
@pytest.mark.parametrize("order", ["random", "equal", "few", "zeros", "nan", "masked", "close"])
def test_top_k_of_long_rows(target: CudaTarget, rows: int, n: int, k: int, order: str) -> None:
    """B02, B03, B05: every regime, ties on both sides of every cut, values that differ in their last bits alone."""
    x = f32(rows, n)
    if order in ("equal", "few"):
        x = R.integers(0, 1 if order == "equal" else 3, (rows, n)).astype(np.float32)
    elif order in ("nan", "masked"):
        x[R.random((rows, n)) < 0.7] = np.nan if order == "nan" else -np.inf
        x[:, ::3] = np.copysign(x[:, ::3], -1)  # NaN of either sign
    elif order == "zeros":  # -0 ties with 0
        x = np.where(x > 0, np.float32(0), np.float32(-0.0))
    elif order == "close":
        x = (0x3F800000 + R.integers(0, 64, (rows, n))).astype(np.uint32).view(np.float32)
    check(target, ops.top_k, [x], k=k)


def test_nothing_is_launched_for_nothing(target: CudaTarget) -> None:
    """B09, B78: no rows, no columns, no experts chosen, no sequences."""
    check(target, ops.linear, [f32(0, 8), weight(3, 8)])
    check(target, ops.linear, [f32(2, 0), weight(3, 0)])
    check(target, ops.top_k, [f32(0, 8)], k=2)
    check(target, ops.top_k, [f32(2, 8)], k=0)
    check(target, ops.softmax, [f32(2, 0)])
    check(target, ops.expert_linear, [f32(0, 8), np.zeros((0, 2), np.int32), weight(4, 3, 8)])
    none = np.zeros(0, np.int32)
    check(target, ops.causal_conv, [f32(2, 4), weight(4, 3), i32(0), none, f32(1, 2, 4), None], dilation=1)
