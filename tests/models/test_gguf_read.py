"""What a sound GGUF file says is what trueup reads; the oracle is the `gguf` package's own reader and dequantizer."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize
from gguf.constants import GGML_QUANT_SIZES

from trueup.models.gguf import GGUFError, StringArray, UnsupportedTypeError, open_gguf

MODEL = Path(__file__).parents[1] / "data" / "qwen4exp-random" / "qwen4exp-random-bf16.gguf"
SCALARS = [
    ("u8", 255), ("i8", -128), ("u16", 65535), ("i16", -32768), ("u32", 2**32 - 1), ("i32", -(2**31)),
    ("f32", 0.1), ("bool", True), ("str", "naïve 漢字"), ("u64", 2**64 - 1), ("i64", -(2**63)), ("f64", 0.1),
]  # fmt: skip


def same(a: object, b: object) -> bool:
    """Bit for bit, NaN included."""
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def write(path: Path, data: bytes | bytearray) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("kind", "value"), SCALARS)
def test_scalar_of_every_type(gguf_bytes, tmp_path, kind, value, version):
    f = open_gguf(write(tmp_path / "a.gguf", gguf_bytes.build([("k", kind, value)], version=version).data))
    want = float(np.float32(value)) if kind == "f32" else value
    assert f.metadata["k"] == want and type(f.metadata["k"]) is type(want)
    assert f.version == version and f.alignment == 32
    assert f.key_offsets["k"] == 24


@pytest.mark.parametrize(("kind", "value"), [s for s in SCALARS if s[0] != "str"])
def test_array_of_every_type(gguf_bytes, tmp_path, kind, value):
    for values in ([], [value], [value, type(value)(0), value]):
        f = open_gguf(write(tmp_path / f"{len(values)}.gguf", gguf_bytes.build([("k", f"[{kind}]", values)]).data))
        a = f.metadata["k"]
        assert isinstance(a, np.ndarray) and not a.flags.writeable
        dtype = {"f": "float", "u": "uint", "i": "int"}.get(kind[0], "") + kind[1:] if kind != "bool" else "bool"
        assert same(a, np.array(values, dtype))
        assert f.value_types["k"][0] == GGUFValueType.ARRAY and len(f.value_types["k"]) == 2


def test_u64_arrays_stay_exact(gguf_bytes, tmp_path):
    values = [2**63 + 1, 2**53 + 1, 2**64 - 1]
    f = open_gguf(write(tmp_path / "a.gguf", gguf_bytes.build([("k", "[u64]", values)]).data))
    assert f.metadata["k"].tolist() == values


def test_nested_arrays(gguf_bytes, tmp_path):
    keys = [("a", "[[i32]]", [[1, 2], [], [3]]), ("s", "[[[str]]]", [[["x", ""], []]]), ("e", "[[u8]]", [])]
    f = open_gguf(write(tmp_path / "a.gguf", gguf_bytes.build(keys).data))
    assert [a.tolist() for a in f.metadata["a"]] == [[1, 2], [], [3]]
    assert f.metadata["s"] == [[["x", ""], []]]
    assert f.metadata["e"] == [] and f.value_types["e"] == (GGUFValueType.ARRAY, GGUFValueType.ARRAY)
    assert f.value_types["a"] == (GGUFValueType.ARRAY, GGUFValueType.ARRAY, GGUFValueType.INT32)


STRINGS = ["", "a", "", "Ġthe", "漢字", "😀", "\0", "x" * 300, "y" * 200, ""]


def test_string_array_behaves_as_a_list(gguf_bytes, tmp_path):
    f = open_gguf(write(tmp_path / "a.gguf", gguf_bytes.build([("k", "[str]", STRINGS), ("none", "[str]", [])]).data))
    s = f.metadata["k"]
    assert isinstance(s, StringArray) and len(s) == len(STRINGS)
    assert list(s) == STRINGS and [s[i] for i in range(len(s))] == STRINGS
    assert [s[i - len(s)] for i in range(len(s))] == STRINGS
    assert s[1:4] == STRINGS[1:4] and s[::-2] == STRINGS[::-2] and s[5:100] == STRINGS[5:]
    assert "漢字" in s and "字" not in s and s.index("Ġthe") == 3
    assert s == STRINGS and s != STRINGS[:-1]
    for i in (len(s), -len(s) - 1):
        with pytest.raises(IndexError):
            s[i]
    assert list(f.metadata["none"]) == []


def test_a_model_file_reads_as_gguf_reads_it():
    """Every key and every tensor of a small real model."""
    f, r = open_gguf(MODEL), GGUFReader(MODEL)
    assert [k for k in r.fields if not k.startswith("GGUF.")] == list(f.metadata)
    for key, value in f.metadata.items():
        field = r.fields[key]
        assert tuple(field.types) == f.value_types[key]
        want = field.contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == want, key
    assert [t.name for t in r.tensors] == list(f.tensors)
    for t in r.tensors:
        w = f.tensors[t.name]
        assert w.shape == tuple(reversed(t.shape.tolist())) and w.type.dtype == t.tensor_type.name.lower()
        want = dequantize(t.data, t.tensor_type)
        assert same(np.asarray(w), want.reshape(w.shape)), t.name
    assert f.size == MODEL.stat().st_size and f.files == (MODEL,) and f.path == MODEL


def _dequantizable() -> list[GGMLQuantizationType]:
    out = []
    for t in GGMLQuantizationType:
        try:
            with np.errstate(all="ignore"):
                dequantize(np.zeros((1, GGML_QUANT_SIZES[t][1]), np.uint8), t)
        except NotImplementedError:
            continue
        out.append(t)
    return out


def test_every_type_that_gguf_dequantizes(tmp_path):
    """Random bytes as blocks, so NaN and infinite scales too, compared bit for bit; [3, 2, two blocks]."""
    rng = np.random.default_rng(5)
    types = _dequantizable()
    assert len(types) >= 26, "the list of types has shrunk: does the test still see them?"
    w = GGUFWriter(tmp_path / "q.gguf", "test")
    for t in types:
        raw = rng.integers(0, 256, (3, 2, 2 * GGML_QUANT_SIZES[t][1]), np.uint8)
        if t in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            w.add_tensor(t.name, raw.view(np.float32 if t.name == "F32" else np.float16))
        else:
            w.add_tensor(t.name, raw, raw_dtype=t)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    f = open_gguf(tmp_path / "q.gguf")
    with np.errstate(all="ignore"):
        for t in GGUFReader(tmp_path / "q.gguf").tensors:
            got = f.tensors[t.name]
            want = dequantize(t.data, t.tensor_type)
            assert got.shape == tuple(reversed(t.shape.tolist())) == (3, 2, 2 * GGML_QUANT_SIZES[t.tensor_type][0])
            assert same(np.asarray(got), want.reshape(got.shape)), t.name
            assert same(got[1:], want[1:]) and same(got[[2, 0]], want[[2, 0]]), t.name


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "Q1_0"])
def test_types_without_dequantization_are_refused_by_name(gguf_bytes, tmp_path, name):
    t = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[t]
    path = write(tmp_path / "a.gguf", gguf_bytes.build(tensors=[("blk.0.w", [block], int(t), bytes(size))]).data)
    with pytest.raises(UnsupportedTypeError, match=rf"a.gguf: tensor 'blk.0.w' at byte \d+: .*{name}") as e:
        open_gguf(path)
    assert e.value.tensor == "blk.0.w"


@pytest.mark.parametrize("raw", [4, 5, 31, 36, 1000, 2**32 - 1])
def test_numbers_that_name_no_type_are_refused(gguf_bytes, tmp_path, raw):
    path = write(tmp_path / "a.gguf", gguf_bytes.build(tensors=[("w", [32], raw, bytes(128))]).data)
    with pytest.raises(UnsupportedTypeError, match=rf"tensor 'w' at byte \d+: .*found {raw}$"):
        open_gguf(path)


def test_integer_and_double_tensors(gguf_bytes, tmp_path):
    """Shapes of none to four dimensions, in NumPy's order."""
    cases = {"i8": (24, []), "i16": (25, [3]), "i32": (26, [2, 3]), "i64": (27, [1, 2, 3]), "f64": (28, [4, 3, 2, 1])}
    tensors = [(k, ne, code, np.arange(1, 1 + int(np.prod(ne)), dtype=k if k[0] == "f" else f"int{k[1:]}").tobytes())
               for k, (code, ne) in cases.items() if k != "f64"]  # fmt: skip
    tensors.append(("f64", cases["f64"][1], 28, np.arange(1, 25, dtype=np.float64).tobytes()))
    f = open_gguf(write(tmp_path / "a.gguf", gguf_bytes.build(tensors=tensors).data))
    for name, (_, ne) in cases.items():
        w = f.tensors[name]
        assert w.shape == tuple(reversed(ne))
        assert np.array_equal(np.asarray(w), np.arange(1, 1 + int(np.prod(ne))).reshape(w.shape)), name


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_of_the_file_counts(gguf_bytes, tmp_path, alignment):
    data = np.arange(5, dtype=np.float32)
    tensors = [("a", [5], gguf_bytes.F32, data.tobytes()), ("b", [5], gguf_bytes.F32, (-data).tobytes())]
    built = gguf_bytes.build([("general.alignment", "u32", alignment)], tensors, alignment=alignment)
    f = open_gguf(write(tmp_path / "a.gguf", built.data))
    assert f.alignment == alignment
    assert np.array_equal(f.tensors["a"][:], data) and np.array_equal(f.tensors["b"][:], -data)


def test_tensors_may_lie_in_any_order_with_gaps(gguf_bytes, tmp_path):
    one, two = np.full(8, 1, np.float32), np.full(8, 2, np.float32)
    tensors = [("a", [8], gguf_bytes.F32, one.tobytes()), ("gap", [8], gguf_bytes.F32, two.tobytes())]
    built = gguf_bytes.build(tensors=tensors, offsets={"a": 32, "gap": 0})
    f = open_gguf(write(tmp_path / "a.gguf", built.data))
    assert f.tensors["a"][0] == 2 and f.tensors["gap"][0] == 1


def test_weights_outlive_the_file(gguf_bytes, tmp_path):
    """The map lives as long as an array on it, and no longer than that."""
    data = np.arange(8, dtype=np.float32)
    path = write(tmp_path / "a.gguf", gguf_bytes.build(tensors=[("w", [8], gguf_bytes.F32, data.tobytes())]).data)
    with open_gguf(path) as f:
        w = f.tensors["w"]
    assert not f.tensors
    del f
    path.unlink()
    gc.collect()
    assert np.array_equal(np.asarray(w), data)
    assert not w.data.flags.writeable
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) in maps.read_text()
        del w
        gc.collect()
        assert str(path) not in maps.read_text()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: p.write_bytes(b""), "file is empty$"),
        (lambda p: p.mkdir(), "folder holds no .gguf file$"),
        (os.mkfifo, "not a regular file$"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path, make, match):
    path = tmp_path / "a.gguf"
    make(path)
    with pytest.raises(GGUFError, match=match):
        open_gguf(path)


def test_a_missing_file_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        open_gguf(tmp_path / "absent.gguf")
