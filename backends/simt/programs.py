"""Kernels from a backend's files: compiled for the device when the first of a program is asked for, and kept on disk."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs

from trueup.core.backend.recorded.images import Images

from .driver import Driver

OPS = ("common", "elementwise", "norm", "rows", "rope", "conv", "attention", "topk")
"""The files of the program `ops`, of kernels that know no type of weight."""
DELTA = ("common", "gdn")
"""The files of the program `gdn`."""
WEIGHTS = ("common", "formats", "linear", "moe")
"""The files of the programs that there is one of for each type of weight."""
NATIVE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
NATIVE += ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4")
"""Types of weights that kernels read as they are stored; all others are expanded to float32."""
PROGRAMS = ("ops", "gdn", *NATIVE)
"""All programs of a device."""


@dataclass(frozen=True)
class Texts:
    """Where a backend's kernels lie: `folder` in `package`, files that end in its name (`cu/linear.cu`)."""

    package: str
    folder: str

    @functools.cache  # noqa: B019  (there is one for each backend)
    def source(self, name: str) -> str:
        """The text of a file."""
        return (files(self.package) / self.folder / f"{name}.{self.folder}").read_text()

    def text(self, program: str) -> str:
        """The whole text of a program: `ops`, `gdn`, or that for a type of weight."""
        if program in ("ops", "gdn"):
            return "".join(self.source(name) for name in (OPS if program == "ops" else DELTA))
        return f"#define FORMAT_{program.upper()} 1\n" + "".join(self.source(name) for name in WEIGHTS)

    @functools.cache  # noqa: B019
    def home(self, kernel: str) -> str:
        """The program of a kernel that reads no weights."""
        return "gdn" if re.search(rf"\b{kernel}[(,]", self.source("gdn")) else "ops"

    def kept(self) -> Images:
        """Where compiled texts are kept."""
        return Images(Path(platformdirs.user_cache_dir("trueup")) / self.package.rpartition(".")[2])


class Programs:
    """The kernels of one device."""

    def __init__(
        self, driver: Driver, texts: Texts, options: Sequence[str], compiler: str, images: Images | None = None
    ) -> None:
        """`compiler`: its version, "" where images are not to be kept."""
        self.driver, self.texts, self.options, self.compiler = driver, texts, tuple(options), compiler
        self.images = images or texts.kept()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}

    def kernel(self, name: str, format: str = "") -> Any:
        """A kernel; `format`: the type of weight it reads, or ""."""
        program = format or self.texts.home(name)
        if (name, program) not in self._kernels:
            if program not in self._modules:
                self._modules[program] = self.driver.load(self._image(program))
            self._kernels[name, program] = self._modules[program].function(name)
        return self._kernels[name, program]

    def prepare(self, formats: Iterable[str]) -> None:
        """Compile what a plan over these types of weights needs and is not there yet, at the same time."""
        names = [n for n in ("ops", "gdn", *sorted(set(formats))) if n not in self._modules]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            for name, image in zip(names, pool.map(self._image, names), strict=True):
                self._modules[name] = self.driver.load(image)

    def _image(self, program: str) -> bytes:
        label, whole = f"{program}.{self.texts.folder}", self.texts.text(program)

        def make() -> bytes:
            return self.driver.compile(whole, label, self.options)

        return self.images.get([self.compiler, *self.options, whole], make) if self.compiler else make()
