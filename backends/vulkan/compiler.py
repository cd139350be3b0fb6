"""Slang, from the library inside the wheel `slangpy`: text to one SPIR-V module with all entry points of a program. Importing
this loads nothing."""

from __future__ import annotations

import ctypes as c
import functools
import importlib.util
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trueup.backends.simt.driver import CompileError
from trueup.core.errors import Unavailable

HINT = "pip install 'trueup[vulkan]' brings it"

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "spCreateSession": (c.c_void_p, [c.c_char_p]),
    "spCreateCompileRequest": (c.c_void_p, [c.c_void_p]),
    "spProcessCommandLineArguments": (c.c_int, [c.c_void_p, c.POINTER(c.c_char_p), c.c_int]),
    "spCompile": (c.c_int, [c.c_void_p]),
    "spGetDiagnosticOutput": (c.c_char_p, [c.c_void_p]),
    "spGetCompileRequestCode": (c.c_void_p, [c.c_void_p, c.POINTER(c.c_size_t)]),
    "spDestroyCompileRequest": (None, [c.c_void_p]),
    "spGetBuildTagString": (c.c_char_p, []),
}

_lock = threading.Lock()  # a session is for one thread at a time


@functools.cache
def slang() -> Any:
    """The library; Unavailable where it can't be loaded."""
    spec = importlib.util.find_spec("slangpy")  # not imported: it would bring up a renderer
    folders = list(spec.submodule_search_locations or ()) if spec else []
    names = ("libslang-compiler.so*", "slang-compiler.dll", "libslang-compiler*.dylib")
    found = [p for folder in folders for name in names for p in sorted(Path(folder).glob(name))]
    if not found:
        raise Unavailable(f"the Slang compiler (libslang-compiler in slangpy) is not there; {HINT}")
    try:
        library = c.CDLL(str(found[0]))
    except OSError as e:
        raise Unavailable(f"the Slang compiler can't be loaded ({e}); {HINT}") from e
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def _session() -> Any:
    return slang().spCreateSession(None)


def version() -> str:
    """The compiler's, and that of what is done to its code; kept images are known by it."""
    text: bytes = slang().spGetBuildTagString()
    return f"{text.decode()} as_written {AS_WRITTEN}"


def compile_text(source: str, name: str, entries: Sequence[str], options: Sequence[str]) -> bytes:
    """SPIR-V of a Slang text, which keeps the names of its entry points; CompileError with the compiler's log."""
    library = slang()
    with _lock, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(source)
        given = [str(path), "-target", "spirv", "-fvk-use-entrypoint-name", *options]
        for entry in entries:
            given += ["-entry", entry, "-stage", "compute"]
        request = library.spCreateCompileRequest(_session())
        try:
            words = (c.c_char_p * len(given))(*[g.encode() for g in given])
            refused = library.spProcessCommandLineArguments(request, words, len(given)) < 0
            refused = refused or library.spCompile(request) < 0
            size = c.c_size_t()
            code = None if refused else library.spGetCompileRequestCode(request, c.byref(size))
            if not code or not size.value:
                log = (library.spGetDiagnosticOutput(request) or b"no code").decode(errors="replace")
                raise CompileError(f"{name}: {log.replace(folder + '/', '').strip()}")
            return as_written(c.string_at(code, size.value))
        finally:
            library.spDestroyCompileRequest(request)


AS_WRITTEN = 2
"""Counts the changes of `as_written`."""
SUMS_AND_PRODUCTS = {129, 131, 133}  # OpFAdd, OpFSub, OpFMul
SOURCE, DECORATE, NO_CONTRACTION = 3, 71, 42


def as_written(image: bytes) -> bytes:
    """SPIR-V with every sum and product marked NoContraction, so that a driver neither fuses nor regroups them (Slang drops
    `precise`), and without its OpSource, whose language older validation layers do not know."""
    words = np.frombuffer(image, "<u4")
    parts, marks, place, at = [words[:5]], [], 0, 5
    while at < len(words):
        opcode, length = int(words[at]) & 0xFFFF, int(words[at]) >> 16
        if opcode == DECORATE and not place:
            place = len(parts)
        if opcode in SUMS_AND_PRODUCTS:
            marks += [3 << 16 | DECORATE, int(words[at + 2]), NO_CONTRACTION]
        if opcode != SOURCE:
            parts.append(words[at : at + length])
        at += length
    parts.insert(place or len(parts), np.array(marks, "<u4"))
    return np.concatenate(parts).astype("<u4").tobytes()
