"""`trueup run`: continue a text."""

from __future__ import annotations

from typing import Annotated

import typer

from trueup.cli.options import (
    AllowFallback,
    BackendName,
    Context,
    MaxTokens,
    MinP,
    ModelFile,
    NoFusion,
    Temperature,
    Threads,
    TopK,
    TopP,
    open_engine,
)

DEMO = "import os\n\ndef "


def run(
    model: ModelFile = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue.", show_default=False),
    ] = None,
    max_tokens: MaxTokens = 128,
    temp: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the choices: the same command writes the same text.")
    ] = 0,
    ctx: Context = None,
    backend: BackendName = "cpu",
    threads: Threads = None,
    allow_fallback: AllowFallback = False,
    no_fusion: NoFusion = False,
) -> None:
    """Continue a text. Alone, the bundled model writes Python."""
    engine = open_engine(
        model, backend=backend, context=ctx, threads=threads, allow_fallback=allow_fallback, fusion=not no_fusion
    )
    pieces = engine.generate(
        DEMO if prompt is None else prompt,
        max_tokens=max_tokens, temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
    )  # fmt: skip
    if prompt is None:
        print(DEMO, end="")
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print()
