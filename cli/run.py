"""`trueup run`: continue a text."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli.drafting import Draft, DrafterName, DraftModel, Mtp, Rollback, drafting
from trueup.cli.generation import Output, as_json, generate, statistics
from trueup.cli.options import (
    Activations,
    AllowFallback,
    AsJson,
    BackendName,
    Context,
    MaxTokens,
    MinP,
    ModelFile,
    NoFusion,
    Stop,
    Strict,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verify,
    must_exist,
    open_engine,
)
from trueup.cli.prompt import chat_ids, read_prompt

if TYPE_CHECKING:
    from trueup.conformance.verify import Verifier

INTERRUPTED = 130


def run(
    model: ModelFile = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue.", show_default=False),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="The file with the text; - for standard input."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a message, and the model answers it: uses its chat template.")
    ] = False,
    system: System = None,
    max_tokens: MaxTokens = 128,
    stop: Stop = None,
    temp: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the choices: the same command writes the same text.")
    ] = 3,
    ctx: Context = None,
    backend: BackendName = "cpu",
    threads: Threads = None,
    activations: Activations = None,
    allow_fallback: AllowFallback = False,
    no_fusion: NoFusion = False,
    draft: Draft = None,
    drafter: DrafterName = None,
    draft_model: DraftModel = None,
    mtp: Mtp = None,
    rollback: Rollback = "auto",
    verify: Verify = None,
    strict: Strict = False,
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt first.")] = False,
    as_json_: AsJson = False,
) -> None:
    """Continue a text.

    The text goes to standard output as it comes; at its end one line on standard error says what it took.

    The prompt comes from --prompt, --file or standard input; as it stands, with no template around it, unless --chat
    says so. Alone, `trueup run` lets the bundled model write Python. Tokens are drawn at temperature 0.7 from the
    likeliest 95% with a fixed seed, since a small model that always takes the likeliest token soon repeats itself;
    --temp 0 takes that one.

    --verify reference judges each node as it runs, on what the device gave it, within the bounds of trueup check:
    fused kernels and states included. A step takes many times as long; reference:every=50 does so with one in 50.

    --draft 4 lets the model's own draft head (or another --drafter) propose 4 tokens, which one step verifies: each token
    written is the one that the model would have chosen anyway, so the text stays the same.

    It ends at an end token, a stop text, --max-tokens, or where the context is full. Ctrl-C ends it with exit code 130.

    Examples:

    \b
        trueup run
        trueup run MODEL.gguf -p "def fibonacci(n):" -n 64 --temp 0
        trueup run MODEL.gguf --chat -p "Name three rivers." --system "Be brief."
        git diff | trueup run MODEL.gguf --stop "diff --git" --json
    """
    must_exist(model)  # before anyone is asked for a prompt
    if draft and drafter in (None, "mtp", "model"):  # what contradicts itself is told as that
        must_exist(draft_model, mtp)
    text, demo = read_prompt(prompt, file, demo=model is None and not chat)
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    verifier = open_verifier(verify)
    out = Output()
    try:
        started = time.perf_counter()
        engine = open_engine(
            model, backend=backend, context=ctx, threads=threads, allow_fallback=allow_fallback, fusion=not no_fusion,
            strict=strict, watch=verifier, drafting=drafting(draft, drafter, draft_model, mtp, rollback),
            activations=activations,
        )  # fmt: skip
        if chat:
            said = [{"role": "user", "content": text}]
            ids = chat_ids(engine.model, [{"role": "system", "content": system}, *said] if system else said)
        else:
            ids = engine.model.tokenizer.encode(text)
        bos = engine.model.tokenizer.bos_id
        ids = ids or ([] if bos is None else [bos])
        loaded = time.perf_counter() - started
        pieces = generate(
            engine, engine.session(), ids, out,
            max_tokens=max_tokens, stop=stop, temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        )  # fmt: skip
        echoed = text if demo or echo else ""
        with closing(pieces):  # an interrupt may come while a piece is written
            for piece in pieces:  # the first comes when nothing can be refused any more
                if not as_json_:
                    write(echoed + piece)
                    echoed = ""
    except KeyboardInterrupt:
        if not out.prompt_tokens:  # nothing to report yet
            raise typer.Exit(INTERRUPTED) from None
    if as_json_:
        name = str(engine.model.file.path) if model is not None else "bundled"
        about = as_json(out, engine, model=name, load_time=loaded, seed=seed)
        if verifier is not None:
            about["verified"] = verifier.about()
        json.dump(about, sys.stdout, allow_nan=False)
        print()
    else:
        if sys.stdout.isatty():
            print(flush=True)
        else:
            sys.stdout.flush()
        print(statistics(out, engine), file=sys.stderr)
        if verifier is not None:
            print(verifier.summary(), file=sys.stderr)
    if out.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


def open_verifier(text: str | None) -> Verifier | None:
    """What --verify asks for; a usage error where it can't be read."""
    if text is None:
        return None
    from trueup.conformance.errors import KitError
    from trueup.conformance.verify import Verifier

    try:
        return Verifier.read(text)
    except KitError as e:
        raise typer.BadParameter(f"--verify: {e}") from None


def write(text: str) -> None:
    """Text on standard output, at once and exactly."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
