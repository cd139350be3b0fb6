"""What tensors hold: plain values, and those at which kernels break, by construction and not by luck.

Each filling is a function of a shape and a random generator, giving float32. Knows no op and no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Fill = Callable[[tuple[int, ...], np.random.Generator], Any]

POSITIVE_NAN = np.uint32(0x7FC00000).view(np.float32)
NEGATIVE_NAN = np.uint32(0xFFC00000).view(np.float32)
LIMIT = np.finfo(np.float32).max

FILLS: dict[str, Fill] = {}
"""Fillings by name."""

PLAIN = ("normal", "integers", "zeros", "equal", "spread")
"""Fillings that every op of numbers takes."""
NAN = ("nan",)
INFINITE = ("inf",)
SELECTION = ("ties", "narrow", "masked", "sorted", "falling", "onehot", "limits", "special", "allnan", "allmasked")
"""Fillings that are hard on choosing the largest."""


def fill(name: str) -> Callable[[Fill], Fill]:
    def add(f: Fill) -> Fill:
        FILLS[name] = f
        return f

    return add


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    """An array filled by name; KeyError for a name that is none."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(np.asarray(FILLS[name](shape, rng)).astype(np.float32)).reshape(shape)


def _normal(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Sums of uniforms: normal enough, and the same bits in every NumPy."""
    return rng.random((*shape, 4)).sum(-1) * np.sqrt(3.0) - 2 * np.sqrt(3.0)


def _sprinkle(a: Any, rng: np.random.Generator, share: float, specials: list[Any]) -> Any:
    """Some entries replaced by specials, at least one where there is any entry."""
    out = np.asarray(a).astype(np.float32)
    if out.size:
        hit = rng.random(out.shape) < share
        hit.reshape(-1)[rng.integers(out.size)] = True
        out[hit] = np.array(specials, np.float32)[rng.integers(len(specials), size=int(hit.sum()))]
    return out


@fill("normal")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Bell-shaped, of variance 1."""
    return _normal(shape, rng)


@fill("integers")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """-3 … 3: ties everywhere, and sums that every order of adding gives exactly."""
    return rng.integers(-3, 4, size=shape)


@fill("zeros")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Zeros of both signs."""
    return np.where(rng.random(shape) < 0.5, np.float32(0.0), np.float32(-0.0))


@fill("equal")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """One number everywhere."""
    return np.full(shape, np.float32(rng.choice([1.0, -0.625, 0.1])))


@fill("spread")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Magnitudes from 1e-4 to 1e4, so that large terms cancel and small ones drown."""
    return _normal(shape, rng) * 10 ** (8 * rng.random(shape) - 4)


@fill("narrow")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Numbers equal in their leading 16 bits: a key cut short can't tell them apart."""
    bits = np.uint32(0x3F800000) + rng.integers(0, 64, size=shape, dtype=np.uint32)
    return np.asarray(bits).view(np.float32)


@fill("denormal")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Numbers below the smallest normal one, of both signs."""
    bits = rng.integers(1, 1 << 23, size=shape, dtype=np.uint32) | (
        rng.integers(0, 2, size=shape, dtype=np.uint32) << 31
    )
    return np.asarray(bits, np.uint32).view(np.float32)


@fill("nan")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """A few NaN of both signs among numbers."""
    return _sprinkle(_normal(shape, rng), rng, 0.05, [POSITIVE_NAN, NEGATIVE_NAN])


@fill("inf")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """A few infinities of both signs among numbers."""
    return _sprinkle(_normal(shape, rng), rng, 0.05, [np.inf, -np.inf])


@fill("ties")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """A few distinct numbers, the largest most often: more copies than any small k."""
    return np.array([5.0, 5.0, 5.0, 1.0, -2.0], np.float32)[rng.integers(5, size=shape)]


@fill("masked")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Half of it -inf, as masks leave it."""
    return _sprinkle(_normal(shape, rng), rng, 0.5, [-np.inf])


@fill("allmasked")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """-inf, and here and there a row with one number."""
    out = np.full(shape, -np.inf, np.float32)
    if out.size and out.ndim:
        rows = out.reshape(-1, shape[-1])
        for r in range(1, len(rows), 2):
            rows[r, rng.integers(shape[-1])] = -1e6
    return out


@fill("allnan")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Rows of NaN alone, of either sign, among rows of numbers and one of both."""
    out = np.asarray(_normal(shape, rng)).astype(np.float32)
    if out.size and out.ndim:
        rows = out.reshape(-1, shape[-1])
        rows[::2] = np.where(rng.random(rows[::2].shape) < 0.5, POSITIVE_NAN, NEGATIVE_NAN)
        rows[1::2, 0] = NEGATIVE_NAN
    return out


@fill("special")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Everything at once: NaN, infinities, zeros of both signs, limits, denormals, sentinels that others use."""
    table = [POSITIVE_NAN, NEGATIVE_NAN, np.inf, -np.inf, 0.0, -0.0, LIMIT, -LIMIT, 1e-45, -1e-45, -5e4, -1e6, 1.0, 1.0]
    return _sprinkle(_normal(shape, rng), rng, 0.6, table)


@fill("limits")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """The largest and smallest numbers of the type, finite all."""
    return _sprinkle(_normal(shape, rng), rng, 0.5, [LIMIT, -LIMIT, np.finfo(np.float32).tiny, -1e-45])


@fill("sorted")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Rising along the last axis."""
    return np.sort(_normal(shape, rng), axis=-1) if shape else _normal(shape, rng)


@fill("falling")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Falling along the last axis."""
    return -np.sort(_normal(shape, rng), axis=-1) if shape else _normal(shape, rng)


@fill("onehot")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Zeros, and one large entry a row."""
    out = np.zeros(shape, np.float32)
    if out.size and out.ndim:
        rows = out.reshape(-1, shape[-1])
        rows[np.arange(len(rows)), rng.integers(shape[-1], size=len(rows))] = 100.0
    return out


@fill("unit")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Rows of length 1, as normalized keys and queries are."""
    a = np.asarray(_normal(shape, rng))
    return a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6) if shape else a


@fill("chance")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Between 0 and 1."""
    return rng.random(shape)


@fill("rarely")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Between 0 and 1/64: a state that is hardly written keeps what it has, errors included."""
    return rng.random(shape) / 64


@fill("binary")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """0 and 1."""
    return rng.integers(0, 2, size=shape)


@fill("decay")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """At most 0, mostly small: logarithms of a factor that forgets slowly."""
    return -(rng.random(shape) ** 4) * 4


@fill("slow")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Logarithms of about 0.999: errors stay for a thousand rows."""
    return -rng.random(shape) * 2e-3


@fill("forget")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """0 and -inf among decays: nothing is forgotten, or all is."""
    return _sprinkle(-rng.random(shape), rng, 0.3, [0.0, -np.inf, -100.0])


@fill("lse")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Logarithms of sums, some far apart, some -inf: a set that saw nothing."""
    return _sprinkle(_normal(shape, rng) * 10, rng, 0.3, [-np.inf, -80.0, 80.0])


@fill("rates")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Below 0, as -exp of a parameter is."""
    return -np.exp2(np.floor(rng.random(shape) * 9) - 4)


@fill("freqs")
def _(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Falling from 1, as rotary frequencies do."""
    n = shape[-1] if shape else 1
    return np.broadcast_to(np.float32(10000.0) ** (-np.arange(n) / max(n, 1)), shape)
