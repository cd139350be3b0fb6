"""`trueup explain`: the plan of one step, node by node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli.options import AsJson, BackendName, Context, ModelFile, NoFusion, Strict, Threads, open_engine
from trueup.cli.show import console, dump, lines, size, table

if TYPE_CHECKING:
    from trueup.cli.plan_view import Row
    from trueup.core.plan import Plan
    from trueup.models.architecture import StepShape
    from trueup.runtime import Engine

STYLES = {"fallback": "bold red", "view": "dim", "prologue": "magenta", "reference body": "yellow", "device": ""}


def explain(
    model: ModelFile = None,
    backend: BackendName = "cpu",
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="Tokens in the step.")] = 1,
    seqs: Annotated[int, typer.Option("--seqs", metavar="N", min=1, help="Sequences that they belong to.")] = 1,
    ctx: Context = None,
    threads: Threads = None,
    no_fusion: NoFusion = False,
    strict: Strict = False,
    views: Annotated[
        bool, typer.Option("--views", help="Show views, too, which have no kernel and no memory.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page that draws the graph: one file, no network.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the plan of a step.

    Each node in order: where it runs and by which kernel, what it takes and gives; for a node that the backend refuses
    the reason. Then memory, and for each fused kernel how often it was used, or what kept it from being. Nothing is
    run.

    `#12` is the result of node 12, `~#12` a view of it, `&name` a state that the node writes, `name` one that it reads.

    Examples:

    \b
        trueup explain --backend cpu
        trueup explain MODEL.gguf --tokens 512 --html plan.html
        trueup explain MODEL.gguf --json | jq '.nodes[] | select(.where == "fallback")'
    """
    from trueup.cli.plan_view import rows

    engine = open_engine(
        model, backend=backend, context=ctx, threads=threads, allow_fallback=True, fusion=not no_fusion, sequences=seqs,
        strict=strict,
    )  # fmt: skip
    shape = engine.shape(tokens, seqs)
    plan = engine.plan(shape)
    listed = rows(plan)
    about = describe(engine, shape, plan)
    if html is not None:
        from trueup.cli.plan_page import page

        html.write_text(page(about, plan, listed, views=views), encoding="utf-8")
    if json:
        dump(about | {"nodes": [r.as_json() for r in listed]})
    elif html is None:
        show(about, listed, views=views)


def describe(engine: Engine, shape: StepShape, plan: Plan) -> dict[str, Any]:
    """What is shown of a plan besides its nodes, as JSON data."""
    from dataclasses import asdict

    from trueup.cli.plan_view import memory, states

    return {
        "model": str(engine.model.file.path),
        "architecture": engine.model.architecture.name,
        "layers": list(engine.model.architecture.summary().layers),
        "backend": engine.target.name,
        "device": engine.target.device.name,
        "shape": asdict(shape),
        "capacity": asdict(engine.capacity),
        "counts": plan.counts(),
        "memory": memory(plan),
        "states": states(plan),
        "fusion": engine.options.fusion,
        "fusions": [asdict(f) for f in plan.fusions],
    }


def title(about: dict[str, Any]) -> str:
    """One sentence: the model, the device, the step."""
    s = about["shape"]
    return (
        f"{about['architecture']} on {about['backend']} ({about['device']}): a step of {s['tokens']} "
        f"token{'s' * (s['tokens'] != 1)} of {s['seqs']} sequence{'s' * (s['seqs'] != 1)}, block tables of "
        f"{s['blocks']}, {s['outs']} row{'s' * (s['outs'] != 1)} of logits"
    )


def verdict(about: dict[str, Any]) -> str:
    """What the plan says of the backend: how many nodes run where."""
    counts = dict(about["counts"])
    refused, total = counts.get("fallback", 0), sum(counts.values())
    spread = f"{total} nodes: " + ", ".join(f"{n} {where}" for where, n in sorted(counts.items(), key=lambda c: -c[1]))
    if not refused:
        return spread
    return f"{spread}. {about['backend']} refuses {refused}: it runs this model only with --allow-fallback"


def show(about: dict[str, Any], listed: list[Row], *, views: bool) -> None:
    """Print the plan."""
    from rich.text import Text

    from trueup.cli.plan_view import group_title

    out = console()
    out.print(Text(title(about)), soft_wrap=True)
    out.print(Text(verdict(about)), soft_wrap=True)
    shown = [r for r in listed if views or r.placement.where != "view"]
    where = max((len(r.placement.where) for r in shown), default=0)
    kernel = max((len(r.kernel) + 2 for r in shown if r.kernel), default=0)
    group = ""
    for r in shown:
        if r.group != group:
            group = r.group
            out.print(Text(f"\n{group_title(group, about['layers'])}", "bold"))
        p = r.placement
        line = f"  {'#' + str(r.node.id):>5}  {p.where:{where}}  {r.kernel:{kernel}}{r.call(views=views)}"
        if r.results:
            line += f" → {r.gives}"
        out.print(Text(line.rstrip(), STYLES.get(p.where, "")), soft_wrap=True)
        if p.reason:
            out.print(Text(f"         refused: {p.reason}; up to {size(p.bytes)} move", "red"), soft_wrap=True)
    if not views:
        hidden = len(listed) - len(shown)
        out.print(Text(f"\n{hidden} views are left out; --views shows them", "dim"))
    show_memory(about)
    show_fusions(about)


def show_memory(about: dict[str, Any]) -> None:
    m = about["memory"]
    per = {p: [s for s in about["states"] if s["per"] == p] for p in ("token", "sequence")}
    c = about["capacity"]
    print("\nmemory")
    lines(
        [
            (
                "arena",
                f"{size(m['arena'])}; {size(m['total_without_reuse'])} without reuse, {size(m['peak'])} alive at most",
            ),
            ("weights", size(m["weights"])),
            (
                "states",
                f"{size(m['states'])}: {len(per['token'])} per token, {size(sum(s['bytes'] for s in per['token']))} in "
                f"{c['pages']} pages of {c['page']} tokens; {len(per['sequence'])} per sequence, "
                f"{size(sum(s['bytes'] for s in per['sequence']))} in {c['slots']} slots",
            ),
        ]
    )


def show_fusions(about: dict[str, Any]) -> None:
    print("\nfusions")
    if not about["fusions"]:
        lines([("", f"{about['backend']} offers none" if about["fusion"] else "switched off")])
        return
    rows = [(f"  {f['name']}", f["fused"] or "", "; ".join(f["declined"]), f["difference"]) for f in about["fusions"]]
    table(("  pattern", "fused", "declined because", "matched nowhere: first difference"), rows, right=("fused",))
