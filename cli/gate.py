"""`trueup gate`: whether something that should change nothing changes nothing, on a model and a backend of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trueup.cli.drafting import DrafterName, DraftModel, Mtp, Rollback, drafting
from trueup.cli.options import AsJson, BackendName, Context, ModelFile, Threads, open_engine

gate = typer.Typer(no_args_is_help=True, help="Judge speculation on a model and a backend of your own.")

PROMPTS = (
    "import os\n\ndef ",
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n",
    "for i in range(10):\n    print(",
    "with open(path) as f:\n    ",
    "import json\n\n\ndef load(path):\n",
    "try:\n    import numpy as np\nexcept ",
    "x = [1, 2, 3]\ny = ",
    '"""A module for ',
    "def test_",
    "class Node:\n",
    "import argparse\n\nparser = ",
    "async def main():\n    ",
    "@property\ndef name(self):\n",
    "assert isinstance(",
    "raise ValueError(",
    "return sorted(",
    "lambda x: ",
    "if __name__ == ",
    "from collections import ",
)
"""What is continued without --file."""


@gate.callback()
def _group() -> None:
    return None


@gate.command("spec")
def spec(
    model: ModelFile = None,
    draft: Annotated[str, typer.Option("--draft", metavar="N|auto", help="Tokens drafted before each step.")] = "4",
    drafter: DrafterName = None,
    draft_model: DraftModel = None,
    mtp: Mtp = None,
    rollback: Rollback = "auto",
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Prompts, a line each (\\n ends a line in one).", show_default=False),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", min=1, help="How many prompts, at most.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", min=2, help="Tokens after each.")] = 48,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="X", min=0.0, show_default=False,
            help="Largest gap of a logit, and relative difference of a state. By default 0 where the backend declares that its "
            "results do not depend on the batch, else 0.001.",
        ),
    ] = None,
    ctx: Context = None,
    backend: BackendName = "cpu",
    threads: Threads = None,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Is speculation exact here, and does it pay?

    Decodes greedily with drafts, then feeds the committed tokens to plain decoding: each must have the largest logit
    (exact ties are counted and pass), and after each round every state must be the one that plain decoding has. Prints
    how much was accepted at each position of a draft, and the speed beside that of plain decoding.

    Exit code 0: passed; 1: failed; 2: wrong usage.

    Examples:

    \b
        trueup gate spec
        trueup gate spec MODEL.gguf --backend opencl --draft auto --prompts 20 -n 256
    """
    from trueup.conformance.gate import spec as run

    settings = drafting(draft, drafter, draft_model, mtp, rollback)
    engine = open_engine(
        model, backend=backend, context=ctx, threads=threads, allow_fallback=False, fusion=True, sequences=2,
        drafting=settings,
    )  # fmt: skip
    texts = PROMPTS if file is None else [t.replace("\\n", "\n") for t in file.read_text().splitlines() if t]
    try:
        ids = [engine.model.tokenizer.encode(t) for t in texts[:prompts]]
        for made in run(engine, ids, tokens=max_tokens, tolerance=tolerance):
            last = made.prompts[-1]
            if not json:
                text = "same text" if last.same else "another text"
                print(
                    f"prompt {len(made.prompts)}: {len(last.tokens)} tokens, {text}, worst gap {max(last.gaps):.3g}, "
                    f"states off by {max(last.states.values(), default=0.0):.3g}",
                    file=sys.stderr,
                )
    finally:
        engine.close()
    about = made.about() | {"backend": backend, "model": model or "bundled", "drafter": settings["drafter"]}
    if json:
        from trueup.cli.show import dump

        dump(about)
    else:
        shares = ", ".join(
            f"{100 * a / d:.0f}% of {d}" for a, d in zip([*made.accepted, *[0] * 99], made.drafted, strict=False)
        )
        state, off = made.worst_state
        counts = ", ".join(
            [f"{n} ≤ {e:g}" for e, n in zip(about["gap_edges"], about["gap_counts"], strict=False) if n]
            + [f"{about['gap_counts'][-1]} above"] * bool(about["gap_counts"][-1])
        )
        print(
            f"{about['tokens']} tokens of {about['prompts']} prompts on {backend}, draft {made.depth} by {settings['drafter']}"
        )
        print(f"gap to plain decoding's largest logit: worst {made.worst:.3g} ({counts}); {about['ties']} exact ties")
        print(f"states after each round: {len(about['states'])} kinds, furthest off {state} by {off:.3g}")
        print(f"accepted by position: {shares or 'nothing was drafted'}")
        print(
            f"speed: {about['speculative_tokens_per_s']:.1f} tok/s with drafts, {about['plain_tokens_per_s']:.1f} plain, "
            f"ratio {about['speedup']:.2f}"
        )
        print(f"{'passed' if made.passed else 'FAILED'}, tolerance {made.tolerance:g}")
    if not made.passed:
        raise typer.Exit(1)
