"""Opening a model: the file, its architecture, its tokenizer and chat template."""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.core.plugins import host

from .architecture import Architecture
from .gguf import GGUFError, GGUFFile, Keys, Tensors, open_gguf

if TYPE_CHECKING:
    from .chat import ChatTemplate
    from .tokenizer import Tokenizer

BUNDLED = "qwen4exp-tiny-q8_0.gguf"


class Model:
    """An open model. The tokenizer is built when it is first asked for; a file may have none."""

    def __init__(self, file: GGUFFile, architecture: Architecture) -> None:
        self.file, self.architecture = file, architecture

    @cached_property
    def fingerprint(self) -> str:
        """Tells this model's saved state from another's."""
        return self.architecture.fingerprint()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer; TokenizerError where it has none or one that trueup can't read exactly."""
        from .tokenizer import Tokenizer  # here, since logits of token ids need no tokenizer library

        made = Tokenizer.from_metadata(self.file.metadata, source=str(self.file.path))
        if made.vocab_size > self.architecture.vocab_size:
            raise GGUFError(
                "tokenizer has more tokens than the model", path=self.file.path, key="tokenizer.ggml.tokens",
                found=made.vocab_size, expected=f"at most {self.architecture.vocab_size}",
            )  # fmt: skip
        return made

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        from .chat import ChatTemplate

        source = self.tokenizer.chat_template
        return None if source is None else ChatTemplate(source)


def bundled_path() -> Path:
    """The model that comes inside the package."""
    return Path(str(resources.files("trueup.models.bundled"))) / BUNDLED


def load_model(path: str | Path | None = None, *, mtp: str | Path | None = None) -> Model:
    """Open a GGUF file (any shard of a split set), or without a path the bundled model; `mtp` is a file with its draft head.

    GGUFError where it is no GGUF, or its architecture is unknown, or its keys or tensors are not what that needs, or where
    the draft head is another model's.
    """
    file = open_gguf(bundled_path() if path is None else path)
    keys = Keys(file)
    name = keys.required("general.architecture", str)
    cls = host().architecture(name)
    if cls is None:
        known = ", ".join(sorted(host().architectures))
        raise keys.error("general.architecture", "is not supported", found=name, expected=known)
    architecture: Architecture = cls.read(keys, Tensors(file))
    if mtp is not None:
        architecture = _with_head(architecture, file, open_gguf(mtp))
    return Model(file, architecture)


def _with_head(architecture: Architecture, file: GGUFFile, sidecar: GGUFFile) -> Architecture:
    """The architecture with the draft head of a sidecar, which must be of this model and speak its vocabulary."""
    keys = Keys(sidecar)
    name = keys.required("general.architecture", str)
    if name != architecture.name:
        raise keys.error("general.architecture", "is not the model's", found=name, expected=architecture.name)
    tokens = "tokenizer.ggml.tokens"
    ours, theirs = file.metadata.get(tokens), sidecar.metadata.get(tokens)
    if ours is not None and theirs is not None and list(ours) != list(theirs):
        raise keys.error(
            tokens,
            "is not the model's vocabulary",
            found=f"{len(theirs)} tokens",
            expected=f"the {len(ours)} of {file.path}",
        )
    return architecture.with_draft_head(keys, Tensors(sidecar))
