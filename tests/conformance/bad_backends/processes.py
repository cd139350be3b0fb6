"""Kernels that take the process with them, or never come back."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from trueup.core.ops import add, mul, sigmoid, softplus

from .make import wrong


@wrong(add)
def segfault(ctx: Any, a: Any, b: Any) -> None:
    """Reads address 8 where the arguments have more than 20 entries."""
    if a.size > 20:
        ctypes.string_at(8)
    ctx.out[...] = a + b


@wrong(mul)
def hang(ctx: Any, a: Any, b: Any) -> None:
    """B06: never ends where the arguments have more than 30 entries."""
    while a.size > 30:
        time.sleep(1)
    ctx.out[...] = mul.body(a, b)


@wrong(sigmoid)
def exits(ctx: Any, x: Any) -> None:
    """Ends the process, as a driver's fatal error does."""
    os._exit(7)


@wrong(softplus)
def prints(ctx: Any, x: Any) -> None:
    """Right, and talkative on standard output."""
    os.write(1, b'{"verdict": "nonsense"}\n')
    print("softplus at work", flush=True)
    ctx.out[...] = softplus.body(x)
