"""CUDA C++ text to a shared object of the host: preprocessed without the host's headers, shared memory rewritten into requests
to the engine, then compiled with the shim in front. Objects are kept on disk by all that they are made of. Runs nothing."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import ptx

RUNTIME = Path(__file__).parent / "runtime"
CHECKS = ("-fsanitize=alignment,bounds,shift-exponent", "-fno-sanitize-recover=all")
HOOKS = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1")
TLS = "-ftls-model=initial-exec"
FLAGS = (TLS, "-O2", "-std=c++17", "-fPIC", "-w", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-threadsafe-statics")
FLAGS += ("-fstack-clash-protection", "-fno-strict-aliasing", "-fwrapv", "-fno-math-errno", "-fno-trapping-math")
IGNORED = (
    "-std=",
    "--std=",
    "-default-device",
    "-lineinfo",
    "--generate-line-info",
    "-use_fast_math",
    "--use_fast_math",
)
IGNORED += ("--ptxas-options", "-Xptxas", "--device-as-default", "-extra-device-vectorization", "--maxrregcount", "-w")


class TextError(RuntimeError):
    """The text is no kernel that the emulator can compile; the message is the compiler's."""


@dataclass(frozen=True)
class Image:
    """A compiled text: the shared object's path, and the names of its kernels."""

    path: Path
    kernels: tuple[str, ...]


def cache() -> Path:
    """Where objects are kept."""
    folder = Path(tempfile.gettempdir()) / f"trueup-emulated-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def _machine() -> tuple[str, ...]:
    """Flags for this processor: fused multiply-adds as a GPU has, where there are any."""
    if platform.machine() == "x86_64":
        try:
            flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n")[0]))
        except (OSError, IndexError):
            flags = set()
        return tuple(f"-m{f}" for f in ("fma", "f16c", "avx2", "bmi2", "popcnt") if f in flags)
    return ()


@functools.cache
def engine() -> Path:
    """The engine's shared object, compiled where it is not yet."""
    parts = [RUNTIME / n for n in ("engine.cpp", "engine.h", "memory.h", "race.h")]
    flags = ("-O2", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-strict-aliasing", TLS)
    return _made("engine", "".join(p.read_text() for p in parts), [*flags, str(parts[0])], ())


def compile_kernels(
    source: str, name: str = "kernels.cu", options: Sequence[str] = (), *, checked: bool = False
) -> Image:
    """An image of a CUDA C++ text. `options` are NVRTC's. `checked`: every access of memory is reported to the engine."""
    defines, flags = _options(options)
    text = preprocess(source, name, defines)
    text, kernels = translate(text)
    shim = "".join((RUNTIME / n).read_text() for n in ("shim.h", "halves.h", "ptx.h", "engine.h"))
    flags = [*FLAGS, *_machine(), *flags, *CHECKS]
    if checked:
        flags += [*HOOKS, "-DEMU_CHECKED"]
    path = _made(Path(name).stem, shim + text, ["-I", str(RUNTIME), *flags], ('#include "shim.h"\n', text))
    return Image(path, tuple(kernels))


def _options(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """What NVRTC's options are to the preprocessor, and to the compiler."""
    defines, flags, contract = ["-D__CUDACC__", "-D__CUDACC_RTC__", "-D__NVCC__"], [], "fast"
    arch = "900"
    rest = iter(options)
    for o in rest:
        if o in ("-D", "--define-macro", "-I", "--include-path"):
            o = o[:2].replace("--", "-D" if "define" in o else "-I") + next(rest)
        if o.startswith(("-D", "-I", "-U")):
            defines.append(o)
        elif o.startswith("--define-macro="):
            defines.append("-D" + o.partition("=")[2])
        elif o.startswith(("-arch=", "--gpu-architecture=")):
            arch = re.sub(r"\D", "", o) + "0"
        elif o in ("-fmad=false", "--fmad=false"):
            contract = "off"
        elif o in ("-fmad=true", "--fmad=true") or o.startswith(IGNORED):
            continue
        else:
            raise TextError(f"the option {o} means nothing to the emulator")
    return [*defines, f"-D__CUDA_ARCH__={arch}"], [*flags, f"-ffp-contract={contract}"]


def preprocess(source: str, name: str, defines: Sequence[str]) -> str:
    """The text without macros and comments, with marks of its lines."""
    command = ["g++", "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-I", str(RUNTIME / "include"), *defines, "-"]
    done = subprocess.run(command, input=f'#line 1 "{name}"\n{source}', capture_output=True, text=True)
    if done.returncode:
        raise TextError(done.stderr)
    return done.stdout


SHARED = re.compile(r"(\bextern\s+)?\b__shared__\b([^;]*);")
NAME = re.compile(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$")
ALIGNED = re.compile(r"(?:__align__|alignas)\s*\(([^()]*)\)")


def translate(text: str) -> tuple[str, list[str]]:
    """Preprocessed text with its shared memory asked of the engine and its kernels' entry points behind; and their names."""
    count = 0

    def asked(m: re.Match[str]) -> str:
        nonlocal count
        outside = not _inside_function(text, m.start())
        if outside and not m[1]:
            raise TextError(f"shared memory outside of a function: {m[0]}")
        aligns = ALIGNED.findall(m[2])
        align = aligns[0] if aligns else "0"
        body = re.sub(r"^\s*(static|volatile)\s", " ", ALIGNED.sub(" ", m[2]))
        out, type = "", ""
        for i, part in enumerate(_split(body)):
            found = NAME.search(part)
            if found is None:
                raise TextError(f"not understood: {m[0]}")
            name, dims = found[1], found[2]
            type = type if i else part[: found.start()].strip()
            if m[1]:
                aligned = f"{align} > alignof({type}) ? {align} : alignof({type})"
                value = f'static_cast<{type} *>(emu_dynamic("{name}", {aligned}))'
                out += f"\n#define {name} ({value})\n" if outside else f"{type} *{name} = {value};"
                continue
            count += 1
            made, aligned = (
                f"emu_type_{count}",
                f"{align} > alignof(emu_type_{count}) ? {align} : alignof(emu_type_{count})",
            )
            out += (
                f"using {made} = {type}{dims}; static emu::Shared emu_shared_{count}; {made} &{name} = "
                f"*static_cast<{made} *>(emu_shared(&emu_shared_{count}, sizeof({made}), {aligned}, "
                f'"{name}"));'
            )
        return out + "\n" * m[0].count("\n")

    kernels = list(_kernels(text))
    try:
        text = ptx.rewrite(text, _closed, _split)
    except ptx.PtxError as e:
        raise TextError(str(e)) from None
    out = SHARED.sub(asked, text)
    for name, bound in kernels:
        out += (
            f'\nextern "C" EMU_API const emu::Entry *emu_entry_{name}() {{ static const emu::Entry e = emu::entry(&{name}, '
            f"(int)({bound or 0})); return &e; }}"
        )
    return out + "\n", [n for n, _ in kernels]


def _kernels(text: str) -> Iterator[tuple[str, str]]:
    """Kernels that a driver finds by name, `extern "C"`, with the expression of their launch bound."""
    for m in re.finditer(r"\b__global__\b", text):
        before = re.split(r"[;}]", text[: m.start()])[-1]
        if "template" in before or not re.search(r'extern\s*"C"', before) and not _in_c_block(text, m.start()):
            continue
        at, bound = m.end(), ""
        while found := re.compile(r"\s*(\w+)\s*").match(text, at):
            at = found.end()
            if text[at : at + 1] != "(":
                continue
            inner = _closed(text, at)
            if found[1] == "__launch_bounds__":
                bound = _split(text[at + 1 : inner])[0]
                at = inner + 1
                continue
            if text[inner + 1 :].lstrip().startswith("{"):
                yield found[1], bound
            break


def _in_c_block(text: str, at: int) -> bool:
    return any(re.search(r'extern\s*"C"\s*$', text[:i]) for i in _open_braces(text, at))


def _inside_function(text: str, at: int) -> bool:
    heads = [text[:i].rstrip() for i in _open_braces(text, at)]
    return any(not re.search(r'(namespace(\s+\w+)?|extern\s*"C")$', h) for h in heads)


def _open_braces(text: str, at: int) -> list[int]:
    stack: list[int] = []
    for m in re.compile(r"[{}]").finditer(text, 0, at):
        if m[0] == "{":
            stack.append(m.start())
        elif stack:
            stack.pop()
    return stack


def _closed(text: str, at: int) -> int:
    """Where the parenthesis that opens at `at` closes."""
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i
    raise TextError("a parenthesis that is never closed")


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket."""
    out, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and not depth:
            out.append(text[last:i])
            last = i + 1
    return [p.strip() for p in [*out, text[last:]]]


def _made(label: str, key: str, flags: list[str], text: tuple[str, ...]) -> Path:
    """The shared object of these flags and this text, compiled where it is not kept yet."""
    digest = hashlib.sha256("\0".join([key, *flags, *_machine(), _compiler()]).encode()).hexdigest()[:20]
    path = cache() / f"{label}-{digest}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=cache()) as work:
        made = Path(work, "made.so")
        if not text:
            _run(["g++", *flags, "-o", str(made)])
        else:  # linked apart, since the checks' handlers are the engine's and not a library's
            source, linked = Path(work, "text.cpp"), Path(work, "text.o")
            source.write_text("".join(text))
            _run(["g++", *flags, "-c", str(source), "-o", str(linked)])
            _run(["g++", "-shared", str(linked), "-o", str(made)])
        os.replace(made, path)
    return path


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TextError(done.stderr[:8000])
