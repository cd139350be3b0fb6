"""Built programs on disk. Drivers that keep what they build (NVIDIA: ~/.nv/ComputeCache, PoCL: ~/.cache/pocl) are left to it;
for all others there is `Binaries`. What lies there damaged is built anew. Knows no kernel.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyopencl as cl
from platformdirs import user_cache_path
from pyopencl.characterize import has_src_build_cache

from trueup.core.backend.recorded.images import Images

POCL = "Portable Computing Language"


def kept_by_driver(handle: Any) -> bool:
    """Whether the device's driver keeps what it builds."""
    return bool(has_src_build_cache(handle))


class Binaries:
    """Programs as the driver gives them out, under device, driver, options and source."""

    def __init__(self, folder: Path | None = None) -> None:
        self.images = Images(folder or user_cache_path("trueup") / "opencl")

    def program(self, context: Any, handle: Any, source: str, options: list[str], build: Callable[[], Any]) -> Any:
        """The built program, from disk where it lies there whole and the driver takes it, else by `build`."""
        platform = handle.platform
        about = handle.name, handle.vendor, handle.version, handle.driver_version, platform.name, platform.version
        parts = [*about, *options, source]
        if (binary := self.images.read(parts)) is not None:
            with contextlib.suppress(cl.Error):
                return cl.Program(context, [handle], [binary]).build(options)
        made = build()
        (binary,) = made.get_info(cl.program_info.BINARIES)
        self.images.write(parts, binary)
        return made


def mend_pocl(folder: Path | None = None) -> list[Path]:
    """Take away programs of PoCL's cache of which a file is cut short: PoCL ends the process that loads one."""
    folder = folder or Path(os.environ.get("POCL_CACHE_DIR") or user_cache_path("pocl") / "kcache")
    gone = []
    for program in _folders(folder / x for x in _names(folder)):
        files = [p for kind in ("so", "bc") for p in program.rglob(f"*.{kind}")]
        if not all(map(_whole, files)):
            shutil.rmtree(program, ignore_errors=True)
            gone.append(program)
    return gone


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _folders(parents: Iterable[Path]) -> Iterable[Path]:
    for parent in parents:
        for name in _names(parent) if parent.is_dir() else ():
            if (parent / name).is_dir():
                yield parent / name


def _whole(path: Path) -> bool:
    """Whether a file begins as its kind does and, an ELF file, is as long as its table of sections says."""
    try:
        with path.open("rb") as f:
            head, size = f.read(64), os.fstat(f.fileno()).st_size
    except OSError:
        return True
    if path.suffix == ".bc":
        return head[:4] in (b"BC\xc0\xde", b"\xde\xc0\x17\x0b")
    if head[:4] != b"\x7fELF" or len(head) < 64:
        return False
    if head[4] != 2:
        return True
    start, each, count = (int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return start + each * count <= size
