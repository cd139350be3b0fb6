"""Kernels from the `.cu` files beside this module: compiled by NVRTC for the device's architecture when the first of them is
asked for, and kept on disk. Knows no op."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs

from trueup.core.backend.recorded.images import Images

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


@functools.cache
def source(name: str) -> str:
    """The text of a `.cu` file."""
    return (files(__package__) / "cu" / f"{name}.cu").read_text()


def text(format: str) -> str:
    """The whole text of a program: `ops`, `gdn`, or that for a type of weight."""
    if format in ("ops", "gdn"):
        return "".join(source(name) for name in (OPS if format == "ops" else DELTA))
    return f"#define FORMAT_{format.upper()} 1\n" + "".join(source(name) for name in WEIGHTS)


@functools.cache
def home(name: str) -> str:
    """The program of a kernel that reads no weights."""
    return "gdn" if re.search(rf"\b{name}\(", source("gdn")) else "ops"


def options(arch: str) -> tuple[str, ...]:
    """What the compiler is told."""
    return f"--gpu-architecture={arch}", "--std=c++17"


def kept() -> Images:
    """Where compiled texts are kept."""
    return Images(Path(platformdirs.user_cache_dir("trueup")) / "cuda")


class Programs:
    """The kernels of one device."""

    def __init__(self, driver: Any, compiler: str, cubins: Images | None = None) -> None:
        """`compiler`: NVRTC's version, "" where images are not to be kept."""
        self.driver, self.compiler, self.cubins = driver, compiler, cubins or kept()
        a = driver.attributes
        self.arch = f"sm_{a['compute_capability_major']}{a['compute_capability_minor']}"
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}

    def kernel(self, name: str, format: str = "") -> Any:
        """A kernel; `format`: the type of weight it reads, or ""."""
        format = format or home(name)
        if (name, format) not in self._kernels:
            if format not in self._modules:
                self._modules[format] = self.driver.load(self._image(format))
            self._kernels[name, format] = self._modules[format].function(name)
        return self._kernels[name, format]

    def prepare(self, formats: Iterable[str]) -> None:
        """Compile what a plan over these types of weights needs and is not there yet, at the same time."""
        names = [n for n in ("ops", "gdn", *sorted(set(formats))) if n not in self._modules]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            for name, image in zip(names, pool.map(self._image, names), strict=True):
                self._modules[name] = self.driver.load(image)

    def _image(self, format: str) -> bytes:
        label, whole, given = f"{format}.cu", text(format), options(self.arch)

        def make() -> bytes:
            image: bytes = self.driver.compile(whole, label, given)
            return image

        return self.cubins.get([self.compiler, *given, whole], make) if self.compiler else make()
