"""Options that several commands share, and the engine that they ask for. Imports nothing heavy by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trueup.runtime import Engine

ModelFile = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, any shard of a split set, or a folder that holds one model. Without it the bundled model.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        metavar="N",
        min=1,
        help="Most tokens of prompt and output together. By default the model's own limit, at most 4096.",
        show_default=False,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", min=0, help="Most tokens to write.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="End before this text; may be given several times.", show_default=False
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="The system message before the conversation.", show_default=False),
]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME[:DEVICE]",
        help="What computes; a device by number or by a part of its name. It runs there, or the command fails. "
        "auto: a GPU where there is one, else cpu.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        help="Threads of the cpu backend. By default one for each physical core.",
        show_default=False,
    ),
]
AllowFallback = Annotated[
    bool,
    typer.Option("--allow-fallback", help="Let the reference run what the backend refuses; it is counted and shown."),
]
NoFusion = Annotated[bool, typer.Option("--no-fusion", help="Use no fused kernels.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse what is outside of an op's contract, in the graph and in each step: for authors of models.",
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="reference[:every=N]",
        help="While it runs, judge every node of every Nth step on the reference; the first wrong one ends it.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]

Temperature = Annotated[
    float, typer.Option("--temp", metavar="T", help="Temperature; 0 always takes the likeliest token.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Choose among the K likeliest tokens; 0: among all.")]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", help="Choose among the likeliest tokens that together reach this probability; 1: all."
    ),
]
MinP = Annotated[
    float,
    typer.Option("--min-p", metavar="P", help="Choose among tokens at least P times as likely as the likeliest."),
]


Activations = Annotated[
    str | None,
    typer.Option(
        "--activations",
        metavar="f32|q8",
        help="To what the cpu backend may round activations: q8, int8 in blocks of 32, makes decoding of quantized models "
        "faster and its numbers less exact. By default they are not rounded.",
        show_default=False,
    ),
]


def target_options(backend: str, threads: int | None, activations: str | None = None) -> dict[str, Any]:
    """What goes to the backend; ValueError where it does not know an option."""
    given = {k: v for k, v in (("threads", threads), ("activations", activations)) if v is not None}
    if not given:
        return {}
    import inspect

    from trueup.core.plugins import host

    name = backend.partition(":")[0]
    known = inspect.signature(host().backend(name).open).parameters
    for option in given:
        if option not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise ValueError(f"--{option}: backend {name} has no {option} to set")
    return given


def must_exist(*paths: str | None) -> None:
    """FileNotFoundError, or what else the system says of it, for the first of these that can't be found."""
    for path in paths:
        if path is not None:
            os.stat(path)


def open_engine(
    model: str | None,
    *,
    backend: str,
    context: int | None,
    threads: int | None,
    allow_fallback: bool,
    fusion: bool,
    sequences: int = 1,
    checkpoints: int = 0,
    watch: Any = None,
    strict: bool = False,
    drafting: dict[str, Any] | None = None,
    activations: str | None = None,
) -> Engine:
    """The engine that a command's options describe; `drafting` comes from cli/drafting.py. Raises as `trueup.load` does."""
    from trueup.core.errors import Unavailable
    from trueup.runtime import load
    from trueup.runtime.devices import resolve

    backend = resolve(backend)
    try:
        return load(
            model, backend=backend, context=context, sequences=sequences, checkpoints=checkpoints,
            allow_fallback=allow_fallback, fusion=fusion, strict=strict, watch=watch, **(drafting or {}),
            **target_options(backend, threads, activations),
        )  # fmt: skip
    except Unavailable as e:
        if "backend" in str(e) or "drafter" in str(e):
            raise
        raise Unavailable(f"backend {backend} can't be used here: {e}") from None
