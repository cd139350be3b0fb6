"""`trueup bench`: how fast a model runs here, beside a check that it runs right."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli.options import Activations, BackendName, ModelFile, Threads

if TYPE_CHECKING:
    from trueup.conformance.bench import Speed
    from trueup.runtime import Engine

COLUMNS = ("model", "size", "params", "backend", "threads", "activations", "test", "t/s", "check")


def bench(
    model: ModelFile = None,
    prompts: Annotated[str, typer.Option("-p", "--prompts", metavar="N,…", help="Tokens of prompts; 0: none.")] = "512",
    outputs: Annotated[
        str, typer.Option("-n", "--outputs", metavar="N,…", help="Tokens fed one by one; 0: none.")
    ] = "128",
    depths: Annotated[
        str, typer.Option("-d", "--depths", metavar="N,…", help="Tokens that the context holds already.")
    ] = "0",
    repetitions: Annotated[
        int,
        typer.Option(
            "-r", "--repetitions", metavar="N", min=1, help="Timings of each line, after one that is not counted."
        ),
    ] = 5,
    output: Annotated[str, typer.Option("-o", "--output", metavar="md|csv|json", help="The form of the table.")] = "md",
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Judge each node of a short prompt and of a token before timing.")
    ] = True,
    backend: BackendName = "cpu",
    threads: Threads = None,
    activations: Activations = None,
) -> None:
    """Measure how fast a model runs.

    Lines are named as llama-bench names them: pp512 is a prompt of 512 tokens, tg128 are 128 tokens one by one, "@ d4096"
    says behind how many others. Figures are tokens per second, mean and standard deviation of the repetitions; ids are
    random and nothing is sampled. Before anything is timed every node of a short prompt and of a token is judged against
    the reference, within the bounds of trueup check; where one is wrong there are no figures, and the exit code is 1.

    Examples:

    \b
        trueup bench
        trueup bench MODEL.gguf --backend opencl -p 512,4096 -n 64 -r 3
        trueup bench MODEL.gguf -p 0 -n 32 -d 0,1024,8192 -o csv
    """
    from trueup.cli.options import open_engine
    from trueup.conformance.bench import Judge, measure
    from trueup.conformance.verify import Mismatch

    if output not in ("md", "csv", "json"):
        raise typer.BadParameter(f"expected md, csv or json, got {output!r}", param_hint="-o")
    sizes = {
        name: numbers(text, hint)
        for name, text, hint in (("prompts", prompts, "-p"), ("outputs", outputs, "-n"), ("depths", depths, "-d"))
    }
    wanted = {k: [n for n in v if n or k == "depths"] for k, v in sizes.items()}
    longest = max([*wanted["prompts"], *wanted["outputs"], 1]) + max(wanted["depths"], default=0)
    judge = Judge()
    engine = open_engine(
        model, backend=backend, context=max(longest, 64), threads=threads, allow_fallback=False, fusion=True,
        checkpoints=1, watch=judge, activations=activations,
    )  # fmt: skip
    try:
        if check:
            try:
                judge.check(engine)
            except Mismatch as e:
                print(f"trueup: no speed is given: {e}", file=sys.stderr)
                raise typer.Exit(1) from None
            print(judge.verifier.summary(), file=sys.stderr)
        about = facts(engine, backend, "passed" if check else "not checked")
        made = []
        for speed in measure(engine, repetitions=repetitions, **wanted):
            print(f"trueup: {speed.test}: {speed.mean:.2f} t/s", file=sys.stderr)
            made.append(speed)
    finally:
        engine.close()
    show(about, made, output)


def numbers(text: str, hint: str) -> list[int]:
    """Whole numbers from 0 on, separated by commas."""
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() for p in parts):
        raise typer.BadParameter(f"expected whole numbers separated by commas, got {text!r}", param_hint=hint)
    return [int(p) for p in parts]


def facts(engine: Engine, backend: str, check: str) -> dict[str, Any]:
    """What the lines have in common."""
    weights = engine.model.file.tensors.values()
    about: dict[str, Any] = {
        "model": engine.model.file.path.stem,
        "size": sum(w.type.nbytes for w in weights),
        "params": sum(w.type.size for w in weights),
        "backend": backend,
        "device": engine.target.device.name,
        "threads": None,
        "activations": getattr(engine.target.capabilities, "activations", "f32"),
        "check": check,
    }
    if backend.partition(":")[0] == "cpu":
        from trueup.backends.cpu import native_module

        about["threads"] = native_module().threads()
    return about


def show(about: dict[str, Any], made: list[Speed], output: str) -> None:
    from trueup.cli.show import dump, size

    if output == "json":
        lines = [{"test": s.test, "kind": s.kind, "tokens": s.tokens, "depth": s.depth, "t/s": s.mean,
                  "deviation": s.deviation, "seconds": list(s.seconds)} for s in made]  # fmt: skip
        dump(about | {"lines": lines})
        return
    common = (
        about["model"], size(about["size"]), f"{about['params'] / 1e6:.2f} M", about["backend"], about["threads"] or "",
        about["activations"],
    )  # fmt: skip
    rows = [(*common, s.test, f"{s.mean:.2f} ± {s.deviation:.2f}", about["check"]) for s in made]
    if output == "csv":
        import csv

        writer = csv.writer(sys.stdout)
        writer.writerow((*COLUMNS[:-2], "t/s", "deviation", "check"))
        for s in made:
            writer.writerow((*common, s.test, f"{s.mean:.4f}", f"{s.deviation:.4f}", about["check"]))
        return
    widths = [max(len(str(r[i])) for r in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    for row in (COLUMNS, tuple("-" * w for w in widths), *rows):
        print("| " + " | ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
