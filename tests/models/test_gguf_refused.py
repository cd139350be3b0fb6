"""Hostile and broken GGUF files: one typed error that says where and what, fast, and without believing a size."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from trueup.models.gguf import GGUFError, open_gguf

HUGE = (2**63, 2**48, 2**64 - 1, 2**32)


def refused(tmp_path: Path, data: bytes | bytearray, match: str, *, peak: int = 1 << 20) -> GGUFError:
    """The error on opening these bytes; it names the file, comes fast, and nothing much was allocated on the way."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    took, most = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600, message
    assert re.search(match, message), f"{match!r} is not in {message!r}"
    assert took < 0.25 and most < peak, (took, most)
    return caught.value


def header(n_tensors: int, n_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


# --- B59: counts and lengths


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", [*HUGE, 3])
@pytest.mark.parametrize("which", ["key", "tensor"])
def test_b59_count_beyond_the_file(tmp_path, which, n):
    data = header(*((n, 0) if which == "tensor" else (0, n)), bytes(24))
    e = refused(tmp_path, data, rf"{which} count exceeds the file; found {n}, expected at most [01]$")
    assert e.offset == (8 if which == "tensor" else 16)


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", [*HUGE, 40])
def test_b59_length_of_a_key(tmp_path, n):
    refused(tmp_path, header(0, 1, string(b"key", n) + bytes(30)), rf"at byte 32: key name runs .* expected {n} bytes$")


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", [*HUGE, 8])
def test_b59_length_of_a_string(tmp_path, n):
    data = header(0, 1, string(b"k") + struct.pack("<I", 8) + string(b"value", n))
    refused(tmp_path, data, rf"key 'k' at byte 45: string runs past the end; found 5 bytes left, expected {n} bytes$")


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", [*HUGE, 11])
@pytest.mark.parametrize(("code", "least"), [(0, 1), (7, 1), (3, 2), (6, 4), (10, 8), (8, 8), (9, 12)])
def test_b59_length_of_an_array(tmp_path, code, least, n):
    data = header(0, 1, string(b"k") + struct.pack("<IIQ", 9, code, n) + bytes(10))
    assert len(data) < 64
    refused(tmp_path, data, rf"key 'k' at byte 41: array of \w+ runs .*found {n}, expected at most {10 // least}$")


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", [*HUGE, 9])
def test_b59_length_inside_an_array_of_strings(tmp_path, n):
    body = struct.pack("<IIQ", 9, 8, 2) + string(b"ab") + string(b"cd", n)
    data = header(0, 1, string(b"k") + body)
    refused(tmp_path, data, rf"key 'k' at byte 59: string 1 of 2 runs .*found 2 bytes left, expected {n} bytes$")


@pytest.mark.fault("B59")
def test_b59_array_of_strings_that_ends_early(tmp_path):
    data = header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 8, 2) + string(b"abcdefgh") + b"\0\0\0")
    refused(tmp_path, data, r"length of string 1 of 2 runs past the end; found 3 bytes left")


@pytest.mark.fault("B59")
def test_b59_nesting_is_bounded(tmp_path):
    nest = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500
    refused(tmp_path, header(0, 1, string(b"k") + nest), r"key 'k' at byte 73: arrays nest too deep; expected .* 4$")


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", HUGE)
def test_b59_length_of_a_nested_array(tmp_path, n):
    data = header(0, 1, string(b"k") + struct.pack("<IIQIQ", 9, 9, 1, 4, n))
    refused(tmp_path, data, rf"key 'k' at byte 53: array of uint32 .* found {n}, expected at most 0$")


@pytest.mark.fault("B59")
@pytest.mark.parametrize("n", [*HUGE, 40])
def test_b59_length_of_a_tensor_name(tmp_path, n):
    refused(tmp_path, header(1, 0, string(b"w", n) + bytes(24)), rf"at byte 32: tensor name runs .*expected {n} bytes$")


@pytest.mark.fault("B59")
@pytest.mark.parametrize("kind", ["key", "tensor"])
def test_b59_empty_name(tmp_path, kind):
    data = header(*((0, 1) if kind == "key" else (1, 0)), string(b"") + bytes(40))
    refused(tmp_path, data, f"at byte 24: {kind} name is empty$")


def test_a_hostile_name_does_not_fill_the_screen(gguf_bytes, tmp_path):
    for key in ("\n" * 100_000, "\U0010ffff" * 100_000):
        refused(tmp_path, gguf_bytes.build([(key, "u8", 1), (key, "u8", 1)]).data, "key stands twice", peak=8 << 20)


def test_every_truncation_is_refused(gguf_bytes, tmp_path):
    """Whatever byte a download stopped at."""
    keys = [("a", "str", "text"), ("b", "[str]", ["x", "yz"]), ("c", "[u16]", [1, 2, 3]), ("d", "f64", 1.0)]
    data = gguf_bytes.build(keys, [("w", [2, 4], gguf_bytes.F32, bytes(32))]).data
    for n in range(len(data)):
        refused(tmp_path, data[:n], "" if n else "empty")


# --- B57: dimensions


@pytest.mark.fault("B57")
@pytest.mark.parametrize(
    ("ne", "code"),
    [
        ([2**33, 2**31], 0), ([2**42 + 1, 1152], 0), ([2**63, 2], 0), ([1, 1, 1, 2**62], 0), ([2**32, 2**32], 24),
        ([2**33, 2**31], 8), ([2**63, 2], 2), ([2**64 - 32, 2**64 - 1, 2**64 - 1, 2**64 - 1], 8), ([2**62], 30),
        ([32, 2**59], 8), ([2**61, 2, 2, 2], 0),
    ],
)  # fmt: skip
def test_b57_product_of_dimensions_wraps_nowhere(gguf_bytes, tmp_path, ne, code):
    data = gguf_bytes.build(tensors=[("blk.0.w", ne, code, bytes(64))]).data
    e = refused(tmp_path, data, r"tensor 'blk.0.w' at byte 24: data of \w+\[.*\] runs past the end; found \d+ bytes")
    assert e.tensor == "blk.0.w"


@pytest.mark.fault("B57")
@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize("ne", [[0], [32, 0], [0, 2**63], [32, 2**63, 0]])
def test_b57_a_zero_hides_no_other_dimension(gguf_bytes, tmp_path, ne, code):
    data = gguf_bytes.build(tensors=[("w", ne, code, b"")]).data
    refused(tmp_path, data, r"tensor 'w' at byte 37: a dimension is zero; found \[")


@pytest.mark.parametrize("n", [5, 2**16, 2**32 - 1])
def test_number_of_dimensions(tmp_path, n):
    data = header(1, 0, string(b"w") + struct.pack("<I", n) + bytes(100))
    refused(tmp_path, data, rf"tensor 'w' at byte 33: too many dimensions; found {n}, expected at most 4$")


@pytest.mark.parametrize(("ne", "code", "block"), [([33, 32], 8, 32), ([16], 2, 32), ([128, 2], 12, 256), ([], 8, 32)])
def test_rows_hold_whole_blocks(gguf_bytes, tmp_path, ne, code, block):
    data = gguf_bytes.build(tensors=[("w", ne, code, bytes(4096))]).data
    refused(tmp_path, data, rf"tensor 'w' .*fill their blocks; found {ne[0] if ne else 1}, .* multiple of {block}$")


# --- places of tensors


def two(gguf_bytes, **offsets: int) -> bytearray:
    tensors = [("a", [16], gguf_bytes.F32, bytes(64)), ("b", [16], gguf_bytes.F32, bytes(64))]
    return gguf_bytes.build(tensors=tensors, offsets=offsets).data


@pytest.mark.parametrize("offset", [96, 128, 2**63, 2**64 - 32])
def test_data_past_the_end(gguf_bytes, tmp_path, offset):
    match = rf"tensor 'b' at byte 57: data .* found 64 bytes from byte {96 + offset}, .* the file's 224 bytes$"
    refused(tmp_path, two(gguf_bytes, b=offset), match)


@pytest.mark.parametrize("offset", [0, 32])
def test_overlapping_data(gguf_bytes, tmp_path, offset):
    refused(tmp_path, two(gguf_bytes, b=offset), "tensor 'b' at byte 57: data overlaps that of tensor 'a'; found")


@pytest.mark.parametrize("offset", [1, 4, 65])
def test_unaligned_offset(gguf_bytes, tmp_path, offset):
    match = rf"tensor 'a' at byte 24: offset is not aligned; found {offset}, expected a multiple of 32$"
    refused(tmp_path, two(gguf_bytes, a=offset), match)


@pytest.mark.parametrize("n", [0, 1, 4, 12, 33, 2**32 - 1])
def test_alignment_is_a_power_of_two(gguf_bytes, tmp_path, n):
    data = gguf_bytes.build([("general.alignment", "u32", n)]).data
    refused(tmp_path, data, rf"key 'general.alignment' at byte 24: .* found {n}, expected a power of two, 8 or more$")


@pytest.mark.parametrize(("kind", "value"), [("u64", 32), ("i32", 32), ("str", "32"), ("[u32]", [32]), ("bool", True)])
def test_alignment_is_of_one_type(gguf_bytes, tmp_path, kind, value):
    data = gguf_bytes.build([("general.alignment", kind, value)]).data
    refused(tmp_path, data, r"key 'general.alignment' at byte 24: .*wrong type; found .*, expected uint32$")


def test_alignment_past_the_end(gguf_bytes, tmp_path):
    tensors = [("a", [16], gguf_bytes.F32, bytes(64))]
    data = gguf_bytes.build([("general.alignment", "u32", 2**31)], tensors).data
    refused(tmp_path, data, rf"tensor 'a' .* found 64 bytes from byte {2**31}")


# --- B62: byte order, version, duplicates


@pytest.mark.fault("B62")
def test_b62_big_endian_file_is_refused_by_name(gguf_bytes, tmp_path):
    data = gguf_bytes.build([("k", "u32", 1)], [("w", [4], gguf_bytes.F32, bytes(16))], order=">").data
    refused(tmp_path, data, "at byte 4: file is big-endian.*gguf-convert-endian.*found version 3 in swapped byte order")


@pytest.mark.fault("B62")
@pytest.mark.parametrize("version", [1, 2, 4])
def test_b62_wrong_version_in_swapped_order_says_so(tmp_path, version):
    data = b"GGUF" + struct.pack(">IQQ", version, 0, 0)
    refused(tmp_path, data, rf"big-endian.*found version {version} in swapped byte order, expected 2 or 3$")


@pytest.mark.fault("B62")
@pytest.mark.parametrize("version", [0, 1, 4, 65535, 2**32 - 1])
def test_b62_other_versions(tmp_path, version):
    refused(
        tmp_path,
        b"GGUF" + struct.pack("<IQQ", version, 0, 0),
        rf"at byte 4: version .*found {version}, expected 2 or 3$",
    )


@pytest.mark.fault("B62")
@pytest.mark.parametrize("magic", [b"GGML", b"gguf", b"\0\0\0\0", b"PK\3\4", b"FUGG"])
def test_b62_magic(tmp_path, magic):
    data = magic + bytes(60)
    refused(
        tmp_path, data, "at byte 0: " + ("file is big-endian" if magic == b"FUGG" else "not a GGUF file; found magic")
    )


@pytest.mark.fault("B62")
def test_b62_key_that_stands_twice(gguf_bytes, tmp_path):
    data = gguf_bytes.build([("a.b", "u32", 1), ("c", "u8", 1), ("a.b", "u32", 2)]).data
    refused(tmp_path, data, "key 'a.b' at byte 57: key stands twice; found it first at byte 24$")


@pytest.mark.fault("B62")
def test_b62_tensor_that_stands_twice(gguf_bytes, tmp_path):
    tensors = [(n, [8], gguf_bytes.F32, bytes(32)) for n in ("w", "v", "w")]
    data = gguf_bytes.build(tensors=tensors).data
    refused(tmp_path, data, r"tensor 'w' at byte \d+: tensor stands twice; found it first at byte 24$")


# --- values


@pytest.mark.parametrize("code", [13, 255, 2**31])
def test_unknown_type_of_a_value(tmp_path, code):
    data = header(0, 1, string(b"k") + struct.pack("<IQ", code, 0))
    refused(tmp_path, data, rf"key 'k' at byte 33: value type is unknown; found {code}, expected 0 to 12$")
    data = header(0, 1, string(b"k") + struct.pack("<IIQ", 9, code, 0))
    refused(tmp_path, data, rf"key 'k' at byte 37: element type is unknown; found {code}, expected 0 to 12$")


@pytest.mark.parametrize("byte", [2, 255])
def test_bool_is_zero_or_one(tmp_path, byte):
    data = header(0, 1, string(b"k") + struct.pack("<IB", 7, byte))
    refused(tmp_path, data, rf"key 'k' at byte 37: bool is neither true nor false; found {byte}, expected 0 or 1$")
    data = header(0, 1, string(b"k") + struct.pack("<IIQ3B", 9, 7, 3, 1, 0, byte))
    refused(tmp_path, data, rf"key 'k' at byte 51: bool 2 is neither true nor false; found {byte}, expected 0 or 1$")


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xe6\xad", b"\xf4\x90\x80\x80"])
def test_text_is_utf8(gguf_bytes, tmp_path, bad):
    """Stray, overlong, surrogate, cut off, beyond Unicode; in names, strings and arrays."""
    refused(tmp_path, gguf_bytes.build([(b"k" + bad, "u8", 1)]).data, "at byte 24: key name is not UTF-8")
    refused(tmp_path, gguf_bytes.build([("k", "str", bad)]).data, "key 'k' at byte 37: string is not UTF-8")
    refused(tmp_path, gguf_bytes.build(tensors=[(bad, [4], 0, bytes(16))]).data, "at byte 24: tensor name is not UTF-8")
    data = gguf_bytes.build([("k", "[str]", ["ok", b"x" + bad, "ok"])]).data
    refused(tmp_path, data, "key 'k' at byte 68: string 1 of 3 is not UTF-8")


def test_a_character_is_not_whole_across_two_strings(gguf_bytes, tmp_path):
    data = gguf_bytes.build([("k", "[str]", ["a", b"\xe6\xad", b"\xaa"])]).data
    refused(tmp_path, data, "string 1 of 3 is not UTF-8")
