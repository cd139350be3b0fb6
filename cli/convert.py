"""`trueup convert`: a Hugging Face checkpoint to GGUF."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trueup.cli.options import AsJson
from trueup.cli.show import dump, size


def convert(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="The checkpoint's folder, with safetensors files.")],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The GGUF file to write.", show_default=False)
    ],
    type: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="How large tensors are stored: f32, f16, bf16 or q8_0.")
    ] = "q8_0",
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="Keep the multi-token-prediction block.")] = True,
    mtp_only: Annotated[
        bool,
        typer.Option("--mtp-only", help="Write that block alone: a draft head, for --mtp beside a file without one."),
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="TEXT", help="The model's name; by default the folder's.")
    ] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="Its licence; by default the one that README.md names."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Convert a Hugging Face checkpoint to GGUF.

    The file appears when it is whole, or not at all; the same input gives the same bytes. What the converter does not
    know it refuses: a tensor, a setting, a checkpoint that was converted or quantized before.

    Examples:

    \b
        trueup convert qwen4exp-tiny -o qwen4exp-tiny-q8_0.gguf
        trueup convert HF_DIR -o OUT.gguf --type bf16 --no-mtp
        trueup convert HF_DIR -o HEAD.gguf --type bf16 --mtp-only
    """
    from dataclasses import asdict

    if mtp_only and not mtp:
        raise typer.BadParameter("--mtp-only and --no-mtp leave nothing", param_hint="--mtp-only")
    from trueup.cli.prompt import progress_bar
    from trueup.convert import convert as run

    with progress_bar(bytes=True) as bar:
        task = bar.add_task("convert", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        made = run(
            hf_dir, out, type=type, mtp="only" if mtp_only else mtp, name=name, license=license, progress=progress
        )
    if json:
        dump(asdict(made))
    else:
        text = f"{made.tensors} tensors, {made.parameters:,} parameters, {size(made.nbytes)} of weights"
        print(f"trueup: {made.path}: {made.architecture}, {text}", file=sys.stderr)
