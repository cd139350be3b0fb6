"""`synth`: a GGUF file of an architecture in any proportions, with random weights, for benchmarks and bug reports.

Names, shapes and keys are those of the architecture's conversion; only the values have no meaning. A file is written as it is
drawn, tensor by tensor in groups of rows, and the same arguments give the same bytes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod, sqrt
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType, TokenType
from gguf.quants import quantize
from gguf.utility import size_label
from numpy.typing import NDArray

import trueup
from trueup.models.convert_rules import Conversion, ConvertError, Key, Plan
from trueup.models.qwen4exp_convert import QWEN4EXP

from .blocks import BLOCKS
from .encode import FILE_TYPES, FileType, encode
from .job import Converted
from .write import Header, output

ARCHITECTURES: Mapping[str, Conversion] = {c.architecture: c for c in (QWEN4EXP,)}
PIECE = 1 << 22
"""Elements that are drawn at a time."""


def _types() -> dict[str, FileType]:
    """`--type`: those of `convert`, and the quantized ones whose blocks can be drawn or made."""
    q = GGMLQuantizationType
    more = {
        "q4_0": FileType(q.Q4_0, q.F16, LlamaFileType.MOSTLY_Q4_0),
        "q4_k": FileType(q.Q4_K, q.Q8_0, LlamaFileType.MOSTLY_Q4_K_M),
        "q5_k": FileType(q.Q5_K, q.Q8_0, LlamaFileType.MOSTLY_Q5_K_M),
        "q6_k": FileType(q.Q6_K, q.Q8_0, LlamaFileType.MOSTLY_Q6_K),
    }
    return {**FILE_TYPES, **more}


SYNTH_TYPES = _types()


def synth(
    architecture: str,
    out: str | PathLike[str],
    *,
    preset: str = "tiny",
    settings: Mapping[str, Any] | None = None,
    type: str = "q8_0",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Writes the GGUF file `out`, replacing it.

    `preset` names proportions of the architecture; `settings` are entries of a `config.json` that replace theirs. `type` is one
    of SYNTH_TYPES; rows that are no whole number of its blocks get a type that they are. Blocks of the k-quants are drawn as
    they are stored. `progress` gets bytes done and bytes in all. Raises ConvertError for names that there are not and for
    proportions that the architecture can't have, and leaves no file then.
    """
    conversion = ARCHITECTURES.get(architecture)
    if conversion is None or conversion.proportions is None:
        raise ConvertError(f"unknown architecture {architecture!r}; known are {', '.join(ARCHITECTURES)}")
    presets = conversion.proportions.presets
    if preset not in presets:
        raise ConvertError(f"unknown preset {preset!r}; {architecture} has {', '.join(presets)}")
    if type not in SYNTH_TYPES:
        raise ConvertError(f"unknown type {type!r}; known are {', '.join(SYNTH_TYPES)}")
    unknown = sorted(set(settings or {}) - set(presets[preset]) - conversion.proportions.more)
    if unknown:
        raise ConvertError(f"unknown setting {unknown[0]!r}; {architecture} has {', '.join(sorted(presets[preset]))}")
    config = {**presets[preset], **(settings or {})}
    plan, file_type, path = conversion.plan(config, True), SYNTH_TYPES[type], Path(out)
    headers = _headers(plan, file_type, conversion)
    done, total = 0, sum(h.nbytes for h in headers)
    with output(path, architecture) as file:
        file.declare(headers)
        parameters = file.parameters()
        general = [
            Key("type", "str", "model"),
            Key("name", "str", f"{architecture} {preset}, random weights"),
            Key("size_label", "str", size_label(*parameters)),
            Key("file_type", "u32", int(file_type.id)),
            Key("quantization_version", "u32", GGML_QUANT_VERSION),
        ]
        for prefix, keys in (
            ("general", general),
            ("trueup", [Key("made_by", "str", f"trueup {trueup.__version__} synth, seed {seed}")]),
            (architecture, plan.keys),
            ("tokenizer", tokenizer(plan.vocab_size)),
        ):
            for key in keys:
                file.key(prefix, key)
        file.begin()
        for h in headers:
            file.write(h, _drawn(h, conversion, seed))
            done += h.nbytes
            if progress is not None:
                progress(done, total)
    return Converted(path, architecture, len(headers), parameters[0], total)


def _headers(plan: Plan, file_type: FileType, conversion: Conversion) -> list[Header]:
    shapes = {
        scope.target + t.name: t.shape(plan.dims) for scope in plan.scopes for rule in scope.rules for t in rule.targets
    }
    if any(-1 in s for s in shapes.values()):
        raise ConvertError("n-gram tables have sizes of their own and can't be drawn: leave ple_layer_ids out")
    return [Header(n, s, file_type.of(n, s, conversion.f32)) for n, s in shapes.items()]


def _drawn(h: Header, conversion: Conversion, seed: int) -> Iterator[NDArray[Any]]:
    """The tensor's bytes, some rows at a time."""
    assert conversion.proportions is not None
    rng = np.random.default_rng([seed, zlib.crc32(h.name.encode())])
    rows, n = prod(h.shape[:-1]), h.shape[-1]
    draw = next((d for pattern, d in conversion.proportions.draws if re.search(pattern, h.name)), None)
    step = max(1, PIECE // n)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        if draw is None and h.type in BLOCKS:
            yield BLOCKS[h.type](rng, count * n // GGML_QUANT_SIZES[h.type][0], 1 / sqrt(n))
            continue
        x = draw(rng, (count, n)) if draw else rng.standard_normal((count, n), np.float32) * np.float32(1 / sqrt(n))
        if h.type in BLOCKS:  # drawn by a rule of its own, which says its size
            yield BLOCKS[h.type](rng, count * n // GGML_QUANT_SIZES[h.type][0], float(x.std()))
        elif h.type == GGMLQuantizationType.Q4_0:
            yield quantize(x, h.type)
        else:
            yield encode(h.name, x.reshape(h.shape) if len(h.shape) == 1 else x, h.type)


def tokenizer(size: int) -> list[Key]:
    """A byte-level tokenizer of so many tokens: the 256 bytes, one merge, an end token, and names that text never makes."""
    if size < 258:
        raise ConvertError(f"vocab_size is {size}, expected at least the 256 bytes, a merge and an end token")
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = (chr(256 + i) for i in range(256))
    letters = [chr(b) if b in printable else next(rest) for b in range(256)]
    tokens = ["<|end|>", *letters, "th", *(f"<|{i}|>" for i in range(258, size))]
    types = [TokenType.CONTROL, *[TokenType.NORMAL] * 257, *[TokenType.UNUSED] * (size - 258)]
    return [
        Key("ggml.model", "str", "gpt2"),
        Key("ggml.pre", "str", "qwen2"),
        Key("ggml.tokens", "str[]", tokens),
        Key("ggml.token_type", "i32[]", [int(t) for t in types]),
        Key("ggml.merges", "str[]", ["t h"]),
        Key("ggml.eos_token_id", "u32", 0),
        Key("ggml.add_bos_token", "bool", False),
    ]
