"""How values are stored: types by tensor, exactness, and the same tensors in the same order in every type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trueup.convert import FILE_TYPES, convert
from trueup.convert.encode import encode

TYPES = sorted(FILE_TYPES)


def test_types_in_a_q8_0_file(checkpoint, converted):
    g = converted(checkpoint, type="q8_0")
    assert g.meta["general.file_type"] == 7 and g.meta["general.quantization_version"] == 2
    f32 = {n for n in g.order if g.type(n) == "F32"}
    assert f32 == {n for n in g.order if len(g.shape(n)) == 1 or any(p in n for p in (".ffn_gate_inp", ".ssm_conv1d"))}
    f16 = {n for n in g.order if g.type(n) == "F16"}  # rows of 8, 4 and 48 entries are no blocks of 32
    assert f16 == {n for n in g.order if n not in f32 and g.shape(n)[-1] % 32}
    assert {"per_layer_token_embd.weight", "blk.0.ple_conv1d.weight", "blk.0.hc_attn_up.weight"} <= f16
    assert {g.type(n) for n in g.order} == {"F32", "F16", "Q8_0"}
    assert g.type("token_embd.weight") == g.type("blk.2.nextn.eh_proj.weight") == "Q8_0"


@pytest.mark.parametrize(("type", "id"), [("f32", 0), ("f16", 1), ("bf16", 32)])
def test_float_files_keep_every_value_of_bf16_weights(checkpoint, converted, type, id):
    f32 = converted(checkpoint)
    g = converted(checkpoint, type=type)
    assert g.meta["general.file_type"] == id
    assert all((g[n] == f32[n]).all() for n in g.order)
    assert g.type("output.weight") == type.upper()
    assert g.type("blk.0.ssm_conv1d.weight") == g.type("blk.1.ffn_gate_inp.weight") == "F32"


@pytest.mark.fault("B74")
def test_quantized_tensors_go_through_the_same_rules(checkpoint, converted):
    """B74: the same names in the same order, each value within half a step of its block."""
    f32, q8 = converted(checkpoint), converted(checkpoint, type="q8_0")
    assert q8.order == f32.order
    for name in q8.order:
        assert q8.shape(name) == f32.shape(name)
        # Half a step, and the rounding of the step itself to float16; f16 holds these values exactly.
        step = np.abs(f32[name]).max() / 127 if q8.type(name) == "Q8_0" else 0
        assert np.abs(q8[name] - f32[name]).max() <= step * (0.5 + 127 * 2**-11), name


@pytest.mark.parametrize("type", TYPES)
def test_the_same_input_gives_the_same_bytes(checkpoint, tmp_path, type):
    folder = checkpoint.write(tmp_path / "checkpoint")
    for name in ("a", "b"):
        convert(folder, tmp_path / name, type=type)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_shards_and_their_order_leave_no_trace(checkpoint, tmp_path):
    whole = convert(checkpoint.write(tmp_path / "one"), tmp_path / "a", name="model").path
    checkpoint.tensors = dict(reversed(checkpoint.tensors.items()))
    parts = convert(checkpoint.write(tmp_path / "three", files=3), tmp_path / "b", name="model").path
    assert whole.read_bytes() == parts.read_bytes()


def test_bf16_checkpoints_are_read_exactly(checkpoint, converted, tmp_path):
    """NumPy has no bfloat16: the file is written with the upper halves of float32, and its header then corrected."""
    converted(checkpoint)
    checkpoint.tensors = {
        name: (x.view(np.uint32) >> 16).astype(np.uint16) if x.dtype == np.float32 else x
        for name, x in checkpoint.tensors.items()
    }
    folder = checkpoint.write(tmp_path / "bf16")
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end].replace(b'"U16"', b'"BF16"')
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    convert(folder, tmp_path / "out.gguf", type="f32", name="checkpoint")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "f32.gguf").read_bytes()


def test_what_is_reported_is_what_is_in_the_file(checkpoint, tmp_path, read):
    seen = []
    done = convert(
        checkpoint.write(tmp_path / "checkpoint"),
        tmp_path / "m.gguf",
        progress=lambda done, total: seen.append((done, total)),
    )
    g = read(done.path)
    assert done.tensors == len(g.order)
    assert done.parameters == sum(int(np.prod(g.shape(n))) for n in g.order)
    assert done.nbytes == sum(t.n_bytes for t in g.tensors.values())
    assert seen[-1] == (done.nbytes, done.nbytes) and seen == sorted(seen)


def test_general_keys(checkpoint, tmp_path, read):
    folder = checkpoint.write(tmp_path / "some-model")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Some model\n")
    g = read(convert(folder, tmp_path / "m.gguf").path)
    assert g.meta["general.architecture"] == "qwen4exp"
    assert g.meta["general.name"] == "some-model"
    assert g.meta["general.license"] == "apache-2.0"
    assert g.meta["trueup.converted_by"].startswith("trueup ")
    g = read(convert(folder, tmp_path / "m.gguf", name="Other", license="mit").path)
    assert (g.meta["general.name"], g.meta["general.license"]) == ("Other", "mit")


Q8_0 = FILE_TYPES["q8_0"].main
VALUES = st.one_of(
    st.floats(-65504, 65504, width=32),
    st.sampled_from([0.0, -0.0, 1e-40, -1e-40, 1e-38, 7.6e-6, 3.8e-6, 1e-45, 127.0, -127.0]),
)


@pytest.mark.fault("B71")
@given(st.lists(VALUES, min_size=32, max_size=32))
@example([0.0] * 32)
@example([1e-40] * 32)
@example([1e-38] + [0.0] * 31)
@example([3e-6, -1e-6] * 16)  # the scale would be 2.4e-8, less than half of float16's smallest
@example([4e-6, -1e-6] * 16)
def test_a_q8_0_block_is_within_half_a_step(values):
    """B71 among them: blocks of zeros and of values whose scale vanishes in float16 stay zero, none gets NaN.

    The bound: the scale d is rounded to float16 (2^-11 of it, or half its smallest step, 2^-25), times up to 127; and
    half of d for the rounding to integers.
    """
    x = np.array([values], np.float32)
    block = encode("x", x, Q8_0)
    scale = block[:, :2].view(np.float16)[0, 0].astype(np.float64)
    back = scale * block[0, 2:].view(np.int8).astype(np.float64)
    d = np.abs(x.astype(np.float64)).max() / 127
    assert np.isfinite(scale) and scale >= 0
    assert np.abs(back - x[0]).max() <= 0.5 * d * (1 + 1e-6) + 127.5 * max(d * 2**-11, 2**-25)
    if scale == 0:
        assert not block.any()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_bf16_is_the_nearest_or_refused(values):
    x = np.array([values], np.float32)
    largest = np.float64(2.0**128 * (1 - 2**-8))
    if np.abs(x.astype(np.float64)).max() >= largest + 2.0**119:
        with pytest.raises(ValueError, match="can't hold"):
            encode("x", x, FILE_TYPES["bf16"].main)
        return
    stored = encode("x", x, FILE_TYPES["bf16"].main)
    back = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert (np.abs(back - x) <= np.maximum(np.abs(x.astype(np.float64)) * 2**-8, 2.0**-134)).all()
