"""A worker seen from outside: asked with a time limit, ended when it hangs, started anew when it died."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from trueup.core.errors import Unavailable

from .errors import KitError
from .harness import Spec
from .properties import FAILED, Property, Verdict

START = 60.0
"""Seconds that opening a backend may take."""

WHOLE = 10
"""Times as long as another case one of a whole model may take, wherever it is judged."""


class Died(RuntimeError):
    """The worker is gone; says how. `hung`: it was ended because it did not answer."""

    def __init__(self, how: str, *, hung: bool = False) -> None:
        super().__init__(how)
        self.hung = hung


class Worker:
    """One worker process and its pipes. A context manager: leaving it ends the process."""

    def __init__(self, spec: Spec, timeout: float) -> None:
        """`timeout`: seconds that a case may take; one of a whole model `WHOLE` times that."""
        self.spec, self.timeout = spec, timeout
        self.process: subprocess.Popen[bytes] | None = None
        self.about: dict[str, Any] = {}
        self._buffer = b""

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and open the backend in it. Unavailable with the reason where that fails."""
        ask_r, ask_w = os.pipe()
        answer_r, answer_w = os.pipe()
        self._errors = tempfile.TemporaryFile()
        given = {
            "asked": ask_r, "answered": answer_w, "name": self.spec.name, "plugins": self.spec.plugins,
            "options": dict(self.spec.options),
        }  # fmt: skip
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trueup.conformance.worker", json.dumps(given)],
            pass_fds=(ask_r, answer_w), stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        os.close(ask_r)
        os.close(answer_w)
        self._ask, self._answer, self._buffer = ask_w, answer_r, b""
        try:
            hello = self._read(START)
        except Died as e:
            raise Unavailable(f"backend {self.spec.name} can't be opened: {e}") from None
        if "error" in hello:
            self.stop()
            raise Unavailable(hello["error"])
        self.about = hello

    def stop(self) -> None:
        """End the process and close the pipes; twice is nothing."""
        if self.process is None:
            return
        for fd in (self._ask, self._answer):
            with contextlib.suppress(OSError):
                os.close(fd)
        try:
            self.process.wait(0.5 if self.process.poll() is None else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()
        self.process = None

    def ask(self, request: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """The answer to a request; Died where there is none. A worker that died before is started anew."""
        if self.process is None:
            self.start()
        try:
            os.write(self._ask, json.dumps(request).encode() + b"\n")
            return self._read(timeout or self.timeout)
        except BrokenPipeError:
            raise self._died() from None

    def judge(self, case: str) -> Verdict:
        """The verdict on a case. A crash and a hang are verdicts too; an error of the kit itself is raised."""
        start = time.monotonic()
        try:
            answer = self.ask(
                {"case": case}, self.timeout * (WHOLE if case.startswith(("model/", "speculative/")) else 1)
            )
        except Died as e:
            name = "hang" if e.hung else "crash"
            return Verdict(case, FAILED, seconds=time.monotonic() - start, properties={name: Property(FAILED, str(e))})
        if "verdict" in answer:
            return Verdict.of(answer["verdict"])
        if "error" in answer:
            raise KitError(answer["error"])
        raise RuntimeError(f"the kit failed on {case}:\n{answer['fault']}")

    def _read(self, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answer], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                assert self.process is not None
                self.process.kill()
                self.stop()
                raise Died(f"no answer within {timeout:g} s", hung=True)
            got = os.read(self._answer, 1 << 16)
            if not got:
                raise self._died()
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> Died:
        assert self.process is not None
        code = self.process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self.stop()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = _why(said)
        return Died(f"the process ended by {how}" + (f": {why}" if why else ""))


def _why(said: list[str]) -> str:
    """The line of what a dead process wrote that says why: the fault, the exception (not the source line that raised it), or
    else the last."""
    fatal = [s for s in said if "Fatal" in s]
    errors = [s for s in said if "rror" in s and not s.startswith(" ")]
    return (fatal[0] if fatal else errors[-1] if errors else said[-1] if said else "").strip()
