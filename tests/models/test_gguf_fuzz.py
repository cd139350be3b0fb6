"""Mutants of a sound GGUF file: refused with a GGUFError, or read as the `gguf` package's own reader reads them.

Never a crash, a hang or a large allocation. The number of mutants follows hypothesis' profile: twenty times its
max_examples.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.models.gguf import GGUFError, GGUFFile, StringArray, open_gguf

MUTANTS = 20 * settings.default.max_examples
KEYS = [
    ("general.alignment", "u32", 32), ("general.architecture", "str", "test"), ("a.u8", "u8", 1), ("a.i64", "i64", -1),
    ("a.f32", "f32", 0.5), ("a.bool", "bool", True), ("a.flags", "[bool]", [True, False, True]),
    ("a.tokens", "[str]", ["", "Ġthe", "漢字", "x" * 40]), ("a.u64s", "[u64]", [2**64 - 1, 0]),
    ("a.f64s", "[f64]", [0.5, -0.0]), ("a.nested", "[[i16]]", [[1, 2], []]), ("a.deep", "[[[str]]]", [[["y"]]]),
    ("a.empty", "[u32]", []), ("split.no", "u16", 0), ("split.count", "u16", 1), ("split.tensors.count", "i32", 5),
]  # fmt: skip
TENSORS = [
    ("f32", [4, 3], 0, bytes(48)), ("q8_0", [32, 2], 8, bytes(68)), ("q4_k", [256], 12, bytes(144)),
    ("bf16", [2, 2, 2, 2], 30, bytes(32)), ("scalar", [], 26, bytes(4)),
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 8, 9, 12, 13, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**48, 2**63, 2**63 - 1, 2**64 - 1]


@dataclass(frozen=True)
class Base:
    data: bytes
    fields: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def base(gguf_bytes) -> Base:
    w = gguf_bytes.build(KEYS, TENSORS)
    return Base(bytes(w.data), w.fields)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Callable[[bytes], Path]:
    """A file of these bytes under a name not used before, the one before it gone: no map ever sees its file shrink."""
    folder, numbers, last = tmp_path_factory.mktemp("mutants"), count(), []

    def write(data: bytes) -> Path:
        path = folder / f"{next(numbers)}.gguf"
        path.write_bytes(data)
        last.append(path)
        if len(last) > 1:
            last.pop(0).unlink()
        return path

    return write


place = st.integers(0, 2**16 - 1)
edits = st.one_of(
    st.tuples(st.just("bit"), place, st.integers(0, 7)),
    st.tuples(st.just("byte"), place, st.integers(0, 255)),
    st.tuples(st.just("cut"), place, st.just(0)),
    st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=24)),
    st.tuples(st.just("remove"), place, st.integers(1, 64)),
    st.tuples(st.just("copy"), place, st.tuples(place, st.integers(1, 64))),
    st.tuples(st.just("field"), place, st.sampled_from(NUMBERS)),
    st.tuples(st.just("near"), place, st.integers(-9, 9)),
    st.tuples(st.just("swap"), place, place),
)


def mutate(base: Base, todo: list[tuple[str, int, object]]) -> bytes:
    data = bytearray(base.data)
    for kind, at, what in todo:
        field, offset, width = base.fields[at % len(base.fields)]
        at %= len(data) or 1
        if kind == "bit" and data:
            data[at] ^= 1 << what
        elif kind == "byte" and data:
            data[at] = what
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = what
        elif kind == "remove":
            del data[at : at + what]
        elif kind == "copy":
            start = what[0] % (len(data) or 1)
            piece = data[start : start + what[1]]
            data[at : at + len(piece)] = piece
        elif kind in ("field", "near"):
            n = what if kind == "field" else int.from_bytes(data[offset : offset + width], "little") + what
            data[offset : offset + width] = (n % 256**width).to_bytes(width, "little")
        elif kind == "swap":
            _, other, other_width = base.fields[what % len(base.fields)]
            if other_width == width:
                a, b = data[offset : offset + width], data[other : other + width]
                data[offset : offset + width], data[other : other + width] = b, a
    return bytes(data)


def read_alike(f: GGUFFile, path: Path) -> None:
    """What we took is what the other author's reader sees."""
    r = GGUFReader(path)
    assert [k for k in r.fields if not k.startswith("GGUF.")] == list(f.metadata)
    for key, value in f.metadata.items():
        types = tuple(r.fields[key].types)  # an empty array's element type is missing there
        assert f.value_types[key][: len(types)] == types
        if len(f.value_types[key]) < 3:
            want = r.fields[key].contents()
            if isinstance(value, str | StringArray):
                assert value == want, key
            else:
                np.testing.assert_array_equal(value, want, key)  # NaN equals NaN
    assert [t.name for t in r.tensors] == list(f.tensors)
    for t in r.tensors:
        w = f.tensors[t.name]
        assert w.shape == tuple(reversed(t.shape.tolist())) and w.type.dtype == t.tensor_type.name.lower()
        assert w.data.tobytes() == t.data.tobytes()


def judge(data: bytes, path: Path) -> bool:
    """Whether the file was read; fails unless it was read well or refused well."""
    tracemalloc.start()
    try:
        f = open_gguf(path)
    except GGUFError as e:
        message = str(e)
        assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (1 << 19) + 64 * len(data), peak
    read_alike(f, path)
    with np.errstate(all="ignore"):
        for w in f.tensors.values():
            assert np.asarray(w).shape == w.shape
    return True


def test_the_sound_file_is_read(base, fresh):
    assert judge(base.data, fresh(base.data))


@settings(max_examples=MUTANTS, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(todo=st.lists(edits, min_size=1, max_size=4))
def test_mutants_are_read_right_or_refused(base, fresh, todo):
    data = mutate(base, todo)
    judge(data, fresh(data))


def test_every_field_at_every_odd_value(base, fresh):
    """All counts, lengths, types, dimensions, offsets and values in turn, each at each of the numbers that hurt."""
    read = 0
    for kind, offset, width in base.fields:
        for n in {n % 256**width for n in NUMBERS}:
            data = bytearray(base.data)
            data[offset : offset + width] = n.to_bytes(width, "little")
            ok = judge(bytes(data), fresh(bytes(data)))
            read += ok
            if kind == "count" and data != base.data:
                assert not ok, (kind, offset, n)
    assert read > 50, "values that may be anything are still read"


def test_every_byte_flipped(base, fresh):
    """In the header; what the data holds is anyone's."""
    for at in range(base.fields[-1][1] + 8):
        data = bytearray(base.data)
        data[at] ^= 0xFF
        judge(bytes(data), fresh(bytes(data)))


@settings(max_examples=MUTANTS // 10, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rest=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_noise_behind_a_right_beginning(fresh, rest, counts):
    data = b"GGUF\3\0\0\0" + counts[0].to_bytes(8, "little") + counts[1].to_bytes(8, "little") + rest
    judge(data, fresh(data))
