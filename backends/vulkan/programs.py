"""The texts of this backend's kernels, and what their compiler is told."""

from __future__ import annotations

import re

from trueup.backends.simt.programs import Texts
from trueup.backends.simt.tuning import SIDE, Tuning

TEXTS = Texts("trueup.backends.vulkan", "slang")
FIXED = 4 * (32 * 32 + 3 * 32 + 2 * SIDE)
"""Bytes of shared memory that the delta rule's kernels have besides the columns they hold; see `Tuning.columns_held`."""


def entries(text: str) -> list[str]:
    """The kernels of a program's text: uses of KERNEL, and of macros that expand to it."""
    found = re.findall(r"^KERNEL\((\w+), ", text, re.M)
    for macro in re.findall(r"^#define (\w+)\((?:name|COUNT)(?:, \w+)*\)[^\n]*\n\s+KERNEL\(", text, re.M):
        made = re.search(rf"^#define {macro}\((\w+).*?KERNEL\(([\w#]+),", text, re.M | re.S)
        pattern = made[2] if made else ""
        for used in re.findall(rf"^{macro}\((\w+)", text, re.M):
            found.append(pattern.replace("##COUNT", used) if "##" in pattern else used)
    return found


def options(tuning: Tuning) -> tuple[str, ...]:
    """What the compiler is told of a device."""
    return (
        "-profile", "spirv_1_5", "-O2",
        f"-DROOM={max(1, (tuning.room - FIXED) // 4)}", f"-DNEAR_KEYS={max(1, tuning.near // 8)}",
    )  # fmt: skip
