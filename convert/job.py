"""`convert`: one Hugging Face checkpoint to one GGUF file, from configuration to bytes.

Here the pieces meet: the checkpoint, its architecture's table, the tokenizer's keys, the encoders and the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from gguf import GGML_QUANT_VERSION
from gguf.utility import size_label

import trueup
from trueup.models.convert_rules import Conversion, ConvertError, Key, Mtp
from trueup.models.qwen4exp_convert import QWEN4EXP

from .checkpoint import Checkpoint
from .encode import FILE_TYPES, encode
from .steps import lay_out
from .tokenizer import tokenizer_keys
from .write import Header, output

CONVERSIONS: tuple[Conversion, ...] = (QWEN4EXP,)


@dataclass(frozen=True)
class Converted:
    """What was written: the file, its architecture, and the numbers of tensors, parameters and bytes of weights."""

    path: Path
    architecture: str
    tensors: int
    parameters: int
    nbytes: int


def convert(
    hf_dir: str | PathLike[str],
    out: str | PathLike[str],
    *,
    type: str = "q8_0",
    mtp: Mtp = True,
    name: str | None = None,
    license: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Converts the checkpoint folder `hf_dir` to the GGUF file `out`, replacing it.

    `type` is one of FILE_TYPES. `mtp=False` leaves the multi-token-prediction block out; with `mtp="only"` the file holds
    that alone, a draft head to be used beside its model (`load(mtp=…)`). `name` (else the folder's) and
    `license` (else that of README.md's front matter) go to the metadata. `progress` gets bytes done and bytes in all.
    The same input gives the same bytes. Raises ConvertError, and leaves no file, where the checkpoint is not whole, has
    a tensor or a setting that GGUF can't say, or is no raw export.
    """
    if type not in FILE_TYPES:
        raise ConvertError(f"unknown type {type!r}; known are {', '.join(FILE_TYPES)}")
    file_type, path = FILE_TYPES[type], Path(out)
    checkpoint = Checkpoint(Path(hf_dir))
    conversion = _conversion(checkpoint)
    plan = conversion.plan(checkpoint.config, mtp)
    steps, constants = lay_out(checkpoint, conversion, plan)
    keys = plan.keys + [Key(key, "u64[]", values) for key, values in constants.items()]
    tokenizer = tokenizer_keys(checkpoint, plan.vocab_size)
    headers = {
        target: Header(target, shape, file_type.of(target, shape, conversion.f32))
        for step in steps
        for target, shape in step.targets
    }
    done, total = 0, sum(h.nbytes for h in headers.values())

    with output(path, conversion.architecture) as file:
        file.declare(headers.values())
        parameters = file.parameters()
        for key in _general(checkpoint, name, license, size_label(*parameters), int(file_type.id)):
            file.key("general", key)
        file.key("trueup", Key("converted_by", "str", f"trueup {trueup.__version__}"))
        for key in keys:
            file.key(conversion.architecture, key)
        for key in tokenizer:
            file.key("tokenizer", key)
        file.begin()
        for step in steps:
            for (target, _), pieces in zip(step.targets, step.arrays(checkpoint, plan.dims), strict=True):
                header = headers[target]
                file.write(header, (encode(target, x, header.type) for x in pieces))
                done += header.nbytes
                if progress is not None:
                    progress(done, total)
    return Converted(path, conversion.architecture, len(headers), parameters[0], total)


def _conversion(checkpoint: Checkpoint) -> Conversion:
    found = checkpoint.config.get("model_type")
    for conversion in CONVERSIONS:
        if found in conversion.model_types:
            return conversion
    known = sorted(t for c in CONVERSIONS for t in c.model_types)
    raise ConvertError(f"{checkpoint.path / 'config.json'}: model_type is {found!r}; known are {', '.join(known)}")


def _general(checkpoint: Checkpoint, name: str | None, license: str | None, size: str, file_type: int) -> list[Key]:
    license = license or _front_matter_license(checkpoint)
    return [
        Key("type", "str", "model"),
        Key("name", "str", name or checkpoint.path.resolve().name),
        Key("size_label", "str", size),
        *([Key("license", "str", license)] if license else []),
        Key("file_type", "u32", file_type),
        Key("quantization_version", "u32", GGML_QUANT_VERSION),
    ]


def _front_matter_license(checkpoint: Checkpoint) -> str | None:
    front = re.match(r"---\r?\n(.*?)\r?\n---", checkpoint.optional_text("README.md") or "", re.DOTALL)
    found = re.search(r"^license:[ \t]*([\w.+-]+)[ \t]*\r?$", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
