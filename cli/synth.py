"""`trueup synth`: a model file with random weights in any proportions."""

from __future__ import annotations

import json as jsons
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli.options import AsJson
from trueup.cli.show import dump, size


def synth(
    architecture: Annotated[str, typer.Argument(metavar="ARCH", help="The architecture, as GGUF names it.")],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The GGUF file to write.", show_default=False)
    ],
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="Proportions to start from.")] = "tiny",
    type: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="f32, f16, bf16, q8_0, q4_0, q4_k, q5_k or q6_k.")
    ] = "q8_0",
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", min=1, help="Layers of the trunk.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", metavar="N", min=1, help="Experts of a layer.")] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", metavar="N", min=1, help="Tokens, 258 at least.")] = None,
    ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="N", min=1, help="The context that the file names.")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, by its name in config.json; a number or JSON."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="What the weights follow from.")] = 0,
    json: AsJson = False,
) -> None:
    """Write a model file with random weights.

    For benchmarks and bug reports: the names, shapes and keys of a real file in proportions of your choice, weights of
    sensible size, and a tokenizer of bytes. The text that such a model writes means nothing. The file appears when it is
    whole, or not at all; the same arguments give the same bytes.

    Examples:

    \b
        trueup synth qwen4exp -o tiny.gguf
        trueup synth qwen4exp --preset 1b --type q4_k -o 1b-q4_k.gguf
        trueup synth qwen4exp --preset wide --layers 2 --set num_experts_per_tok=6 -o wide.gguf
    """
    from dataclasses import asdict

    from trueup.cli.prompt import progress_bar
    from trueup.convert import synth as run
    from trueup.convert.synth import ARCHITECTURES

    known = ARCHITECTURES.get(architecture)
    settings: dict[str, Any] = {}
    if known is not None and known.proportions is not None:
        p = known.proportions
        named = {p.layers: layers, p.experts: experts, p.vocab: vocab, p.context: ctx}
        settings = {k: v for k, v in named.items() if v is not None}
    for text in set or ():
        key, equals, value = text.partition("=")
        try:
            settings[key] = jsons.loads(value)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no KEY=VALUE with a number or JSON", param_hint="--set") from None
    with progress_bar(bytes=True) as bar:
        task = bar.add_task("synth", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        made = run(architecture, out, preset=preset, settings=settings, type=type, seed=seed, progress=progress)
    if json:
        dump(asdict(made))
    else:
        text = f"{made.tensors} tensors, {made.parameters:,} parameters, {size(made.nbytes)} of weights"
        print(f"trueup: {made.path}: {made.architecture}, {text}", file=sys.stderr)
