"""The cpu backend beside llama.cpp on the same files and threads, in one run.

    python benchmarks/cpu.py --llama-bench PATH [--model FILE …] [--threads N] [-p 512] [-n 128] [--rounds 5] [--json FILE]

`PATH` is a `llama-bench` built on this machine (its CPU backend, GGML_NATIVE=ON). Each round runs both, one after the other, so
that what else the machine does falls on both; figures are medians over rounds, ratios those of the medians. trueup runs with
float32 activations, and with `--activations q8`, which is what llama.cpp always does; each after a check of every node. Without
a model: the bundled one. Others: `trueup synth qwen4exp --preset 1b --type q4_k -o FILE`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueup.models import bundled_path

Speeds = dict[str, float]
"""Tokens per second by test: pp512, tg128."""


def trueup(model: str, a: argparse.Namespace, activations: str, *, check: bool) -> Speeds:
    """One run of `trueup bench`; RuntimeError where its check fails."""
    command = [
        sys.executable, "-c", "from trueup.cli import main; main()", "bench", model, "-p", str(a.prompt), "-n",
        str(a.tokens), "-r", "1", "-o", "json", "--activations", activations, "--check" if check else "--no-check",
        *(["--threads", str(a.threads)] if a.threads else []),
    ]  # fmt: skip
    made = json.loads(_output(command))
    return {line["test"]: line["t/s"] for line in made["lines"]}


def llama(model: str, a: argparse.Namespace) -> Speeds:
    """One run of `llama-bench`."""
    threads = a.threads or _cores()
    command = [a.llama_bench, "-m", model, "-p", str(a.prompt), "-n", str(a.tokens), "-t", str(threads), "-r", "1"]
    made: list[dict[str, Any]] = json.loads(_output([*command, "-o", "json"]))
    return {f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}": float(r["avg_ts"]) for r in made}


def _cores() -> int:
    from trueup.backends.cpu import native_module

    return int(native_module().physical_cores())


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def medians(rounds: list[Speeds]) -> Speeds:
    return {test: statistics.median(r[test] for r in rounds) for test in rounds[0]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama-bench", required=True, metavar="PATH")
    p.add_argument("--model", action="append", metavar="FILE")
    p.add_argument("--threads", type=int, metavar="N", help="by default one for each physical core")
    p.add_argument("-p", "--prompt", type=int, default=512)
    p.add_argument("-n", "--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", type=Path, metavar="FILE")
    a = p.parse_args()
    found: list[dict[str, Any]] = []
    print("| model | test | llama.cpp | trueup | ratio | trueup, q8 | ratio |\n|---|---|---|---|---|---|---|")
    for model in a.model or [str(bundled_path())]:
        kinds = ("f32", "q8")
        for kind in kinds:  # the check, once
            trueup(model, a, kind, check=True)
        sides: dict[str, Callable[[], Speeds]] = {"llama.cpp": lambda m=model: llama(m, a)}  # type: ignore[misc]
        sides |= {k: lambda m=model, k=k: trueup(m, a, k, check=False) for k in kinds}  # type: ignore[misc]
        rounds: dict[str, list[Speeds]] = {side: [] for side in sides}
        for _ in range(a.rounds):
            for side, run in sides.items():
                rounds[side].append(run())
        made = {side: medians(r) for side, r in rounds.items()}
        found.append({"model": Path(model).name, "medians": made, "rounds": rounds})
        for test, base in made["llama.cpp"].items():
            cells = [f"{made[k][test]:.1f} | {made[k][test] / base:.2f}" for k in kinds]
            print(f"| {Path(model).stem} | {test} | {base:.1f} | {' | '.join(cells)} |", flush=True)
    if a.json:
        a.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
