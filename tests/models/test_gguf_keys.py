"""Metadata and tensors as models ask for them: by type, bound and shape, and nothing is missing or left over unseen."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.models.gguf import GGUFError, Keys, Tensors, open_gguf

KEYS = [
    ("t.blocks", "u32", 7), ("t.big", "u64", 2**64 - 1), ("t.negative", "i16", -3), ("t.eps", "f32", 0.5),
    ("t.nan", "f64", float("nan")), ("t.flag", "bool", True), ("t.name", "str", "x"), ("t.byte", "u8", 1),
    ("t.ints", "[i32]", [3, 0, 5]), ("t.u64s", "[u64]", [2**64 - 1, 2**63]), ("t.flags", "[bool]", [True, False]),
    ("t.floats", "[f32]", [0.5, float("inf")]), ("t.strings", "[str]", ["a", ""]), ("t.nested", "[[i32]]", [[1]]),
    ("t.empty", "[i32]", []),
]  # fmt: skip


@pytest.fixture(scope="module")
def make(gguf_bytes, tmp_path_factory):
    def open_with(keys, tensors=()):
        path = tmp_path_factory.mktemp("m") / "m.gguf"
        path.write_bytes(gguf_bytes.build(keys, list(tensors)).data)
        return open_gguf(path)

    return open_with


@pytest.fixture
def keys(make):
    return Keys(make(KEYS))


def test_values_of_the_type_asked_for(keys):
    assert keys.required("t.blocks", int) == 7
    assert keys.required("t.big", int, maximum=2**64 - 1) == 2**64 - 1
    assert keys.required("t.negative", int, minimum=-3, maximum=-3) == -3
    assert keys.required("t.eps", float, minimum=0.5) == 0.5
    assert keys.required("t.flag", bool) is True
    assert keys.required("t.name", str) == "x"
    assert keys.array("t.ints", int, length=3, minimum=0, maximum=5).tolist() == [3, 0, 5]
    assert keys.array("t.u64s", int).tolist() == [2**64 - 1, 2**63]
    assert keys.array("t.flags", bool, length=2).tolist() == [True, False]
    assert list(keys.array("t.strings", str, length=2)) == ["a", ""]
    assert keys.array("t.empty", int, length=0, minimum=1).tolist() == []


def test_optional_takes_the_default_only_where_the_key_is_missing(keys):
    assert keys.optional("t.absent", int, None) is None
    assert keys.optional("t.absent", int, 3, minimum=5) == 3
    assert keys.optional("t.blocks", int, None) == 7
    with pytest.raises(GGUFError, match="'t.blocks'.*wrong type"):
        keys.optional("t.blocks", str, "")


@pytest.mark.fault("B65")
@pytest.mark.parametrize("name", [k for k, _, _ in KEYS])
def test_b65_a_missing_key_has_no_default(make, name):
    keys = Keys(make([k for k in KEYS if k[0] != name]))
    for ask in (lambda: keys.required(name, int), lambda: keys.array(name, int)):
        with pytest.raises(GGUFError, match=rf"m\.gguf: key '{name}': key is missing$") as e:
            ask()
        assert e.value.key == name


@pytest.mark.fault("B65")
@pytest.mark.parametrize(("length", "ok"), [(2, False), (3, True), (4, False), (None, True), (0, False)])
def test_b65_arrays_have_exactly_the_length_asked_for(keys, length, ok):
    if ok:
        assert len(keys.array("t.ints", int, length=length)) == 3
        return
    with pytest.raises(GGUFError, match=rf"key 't.ints' at byte \d+: .*wrong length; found 3, expected {length}$"):
        keys.array("t.ints", int, length=length)


WRONG = [
    ("t.blocks", float), ("t.blocks", bool), ("t.blocks", str), ("t.eps", int), ("t.flag", int), ("t.byte", bool),
    ("t.name", int), ("t.ints", int), ("t.flags", bool), ("t.strings", str),
]  # fmt: skip


@pytest.mark.fault("B65")
@pytest.mark.parametrize(("name", "kind"), WRONG)
def test_b65_types_are_not_bent(keys, name, kind):
    with pytest.raises(
        GGUFError, match=rf"key '{name}' at byte \d+: .*wrong type; found .*, expected one {kind.__name__}$"
    ):
        keys.required(name, kind)


@pytest.mark.fault("B65")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("t.blocks", int), ("t.name", str), ("t.ints", float), ("t.floats", int), ("t.flags", int), ("t.ints", bool),
     ("t.strings", int), ("t.nested", int)],
)  # fmt: skip
def test_b65_scalar_or_other_array_instead_of_an_array(keys, name, kind):
    with pytest.raises(GGUFError, match=rf"key '{name}' .*wrong type; found .*, expected an array of {kind.__name__}$"):
        keys.array(name, kind)


def test_bounds(keys):
    cases = [
        (lambda: keys.required("t.blocks", int, minimum=8), "found 7, expected at least 8$"),
        (lambda: keys.required("t.blocks", int, maximum=6), "found 7, expected at most 6$"),
        (lambda: keys.required("t.blocks", int, minimum=1, maximum=6), "found 7, expected 1 to 6$"),
        (lambda: keys.required("t.eps", float, minimum=1.0), "found 0.5, expected at least 1.0$"),
        (lambda: keys.required("t.nan", float), "not finite; found nan$"),
        (lambda: keys.array("t.ints", int, minimum=1), r"value\[1\] .*found 0, expected at least 1$"),
        (lambda: keys.array("t.ints", int, maximum=4), r"value\[2\] .*found 5, expected at most 4$"),
        (lambda: keys.array("t.u64s", int, maximum=2**63), r"value\[0\] .*found 18446744073709551615, "),
        (lambda: keys.array("t.floats", float), r"value\[1\] is not finite; found inf$"),
    ]
    for ask, match in cases:
        with pytest.raises(GGUFError, match=match):
            ask()


def test_keys_that_were_read_are_known(keys):
    keys.required("t.blocks", int)
    keys.array("t.ints", int)
    keys.optional("t.absent", int, None)
    keys.optional("t.name", str, None)
    assert keys.has("t.eps") and not keys.has("t.absent")
    assert keys.read == {"t.blocks", "t.ints", "t.name"}
    assert keys.unread("t.f") == ["t.flag", "t.flags", "t.floats"]
    assert set(keys.unread()) == {k for k, _, _ in KEYS} - keys.read


@pytest.mark.fault("B64")
@pytest.mark.parametrize(("kind", "value"), [("u32", 100), ("i32", -1), ("u32", 2**32 - 1), ("u64", 2**63)])
def test_b64_token_ids_lie_in_the_vocabulary(make, kind, value):
    keys = Keys(make([("tokenizer.ggml.eos_token_id", kind, value)]))
    with pytest.raises(GGUFError, match=f"'tokenizer.ggml.eos_token_id' .*found {value}, expected 0 to 99$"):
        keys.token_id("tokenizer.ggml.eos_token_id", 100)


@pytest.mark.fault("B64")
@pytest.mark.parametrize("vocab", [None, 100])
def test_b64_token_ids_with_and_without_a_vocabulary(make, vocab):
    keys = Keys(make([("mask", "u32", 7), ("first", "u32", 0), ("last", "u32", 99)]))
    assert [keys.token_id(k, vocab) for k in ("mask", "first", "last", "absent")] == [7, 0, 99, None]


@pytest.mark.fault("B64")
def test_b64_without_a_vocabulary_only_ids_are_ids(make):
    keys = Keys(make([("a", "u32", 200), ("b", "i32", -1), ("c", "u32", 2**32 - 1), ("d", "str", "7")]))
    assert keys.token_id("a") == 200
    for name in "bcd":
        with pytest.raises(GGUFError, match=f"key '{name}'"):
            keys.token_id(name)


@pytest.fixture
def tensors(make, gguf_bytes):
    data = [
        ("a.weight", [4, 2], gguf_bytes.F32, np.arange(8, dtype=np.float32).tobytes()),
        ("b.weight", [32], gguf_bytes.Q8_0, bytes(34)),
        *((f"blk.{i}.scale", [1], gguf_bytes.F32, bytes(4)) for i in range(30)),
    ]
    return Tensors(make([], data))


def test_tensors_by_name_shape_and_type(tensors):
    w = tensors.take("a.weight", shape=(2, 4), dtypes={"f32"})
    assert w.shape == (2, 4) and np.array_equal(w[1], [4, 5, 6, 7])
    assert tensors.take("a.weight", shape=(None, 4)) is w and tensors.take("a.weight") is w
    assert tensors.take_optional("absent", shape=(1,)) is None
    assert tensors.take_optional("b.weight").type.dtype == "q8_0"
    assert tensors.has("blk.0.scale") and tensors.taken == {"a.weight", "b.weight"}


def test_tensors_that_do_not_fit(tensors):
    cases = [
        (lambda: tensors.take("absent", shape=(2, None)), r"'absent': tensor is missing; expected shape \[2, \*\]$"),
        (lambda: tensors.take("a.weight", shape=(4, 2)), r"wrong shape; found \[2, 4\], expected \[4, 2\]$"),
        (lambda: tensors.take("a.weight", shape=(8,)), r"wrong shape; found \[2, 4\], expected \[8\]$"),
        (lambda: tensors.take("b.weight", dtypes=("f32", "f16")), "wrong type; found q8_0, expected f16 or f32$"),
        (lambda: tensors.take_optional("a.weight", shape=(2, 4, 1)), "wrong shape"),
    ]
    for ask, match in cases:
        with pytest.raises(GGUFError, match=match):
            ask()
    assert not tensors.taken


@pytest.mark.fault("B69")
def test_b69_a_tensor_that_no_one_took_is_an_error(tensors):
    """A second scale that the loader doesn't know, say."""
    tensors.take("a.weight")
    tensors.take("b.weight")
    for i in range(1, 30):
        tensors.take(f"blk.{i}.scale")
    assert tensors.unused() == ["blk.0.scale"]
    with pytest.raises(GGUFError, match=r"m\.gguf: .* 1 of the file's tensors nowhere: blk\.0\.scale$"):
        tensors.finish()
    with pytest.raises(GGUFError, match=r"blk\.0\.scale$"):
        tensors.finish(allowed=["blk.1*", "scale"])
    tensors.finish(allowed=["blk.?.scale"])
    tensors.take("blk.0.scale")
    tensors.finish()


@pytest.mark.fault("B69")
def test_b69_many_unused_tensors_are_counted(tensors):
    with pytest.raises(GGUFError, match=r"uses 32 of .*: a\.weight, b\.weight, .* and 12 more$"):
        tensors.finish()
