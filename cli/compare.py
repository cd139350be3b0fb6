"""`trueup compare`: two backends on the same steps, and the first node that leaves its bound."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli.options import AllowFallback, AsJson, Context, ModelFile, NoFusion
from trueup.cli.show import dump, lines, printable, table

if TYPE_CHECKING:
    from trueup.conformance.harness import Spec
    from trueup.conformance.verify import Finding
    from trueup.conformance.versus import Compared, Outcome

DIFFERS, WRONG_REQUEST = 1, 2
"""Exit codes: a node leaves its bound; nothing was compared."""


def compare(
    model: ModelFile = None,
    backend: Annotated[str, typer.Option("--backend", metavar="NAME[:DEVICE]", help="The backend to look at.")] = "cpu",
    against: Annotated[
        str,
        typer.Option("--against", metavar="NAME[:DEVICE]", help="The other one. It is judged too, after the first."),
    ] = "reference",
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The text of the first step.", show_default=False),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="The file with the text; - for standard input."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N,N,…", help="Token ids in place of a text.", show_default=False),
    ] = None,
    more: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", min=0, help="Steps of one token after that.")
    ] = 2,
    ctx: Context = None,
    allow_fallback: AllowFallback = False,
    no_fusion: NoFusion = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin", metavar="MODULE", show_default=False, help="Load this module as a plugin, though not installed."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            show_default=False,
            help="Where the replay file goes. By default named by the node.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="FILE",
            show_default=False,
            help="Run the node of a replay file by itself, on --backend.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Find the first node by which two backends differ.

    Both run the same steps, each by its own plan. At every node the reference gets just what the device gave that node,
    and the result must lie within the bound that follows from the op, as in trueup check; states too. So errors do not
    accumulate, and one pass finds the first wrong node of a plan, fused or not. What a step gives must not depend on
    whether it is stopped at its nodes either; where it does, the node is found by bisection.

    Of a wrong node it shows where it comes from, what it was given and its worst entry, writes a file with all that it
    was given, and the command that runs it again alone.

    Exit code 0: all nodes are within their bounds. 1: one is not. 2: nothing could be compared.

    Examples:

    \b
        trueup compare --backend opencl --against reference
        trueup compare MODEL.gguf --backend opencl --against cpu --prompt "def fib(n):" -n 8
        trueup compare --replay compare-linear-322.safetensors --backend opencl
    """
    from trueup.cli.errors import expected

    try:
        code = _compare(
            model, backend, against, prompt, file, tokens, more, ctx, allow_fallback, not no_fusion, tuple(plugin or ()),
            write, replay, json,
        )  # fmt: skip
    except Exception as e:
        from trueup.cli.app import settings
        from trueup.cli.errors import one_line

        if not expected(e) or settings["traceback"]:
            raise
        print(f"trueup: error: {one_line(e)}", file=sys.stderr)
        code = WRONG_REQUEST
    raise typer.Exit(code)


def _compare(
    model: str | None, backend: str, against: str, prompt: str | None, file: str | None, tokens: str | None, more: int,
    ctx: int | None, allow_fallback: bool, fusion: bool, plugins: tuple[str, ...], write: Path | None, replay: Path | None,
    json: bool,
) -> int:  # fmt: skip
    from trueup.conformance import replay as files
    from trueup.conformance import versus
    from trueup.conformance.harness import Spec
    from trueup.core.plan import PlanOptions

    options = PlanOptions(allow_fallback, fusion)
    spec = Spec(backend, plugins)
    if replay is not None:
        if any(x is not None for x in (model, prompt, file, tokens, write)):
            raise typer.BadParameter("--replay takes no model, no text and no --write")
        saved = files.read(replay)
        outcome, finding = versus.replay(spec, saved, options)
        if json:
            dump(
                {
                    "equal": finding is None,
                    "backend": outcome.backend,
                    "from": saved.about,
                    "finding": finding and finding.about(),
                }
            )
        else:
            _show_replay(outcome, finding, saved.about)
        return 0 if finding is None else DIFFERS
    from trueup.models import load_model

    opened = load_model(model)
    ids = _ids(opened, prompt, file, tokens)

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    done = versus.compare(
        opened, spec, Spec(against, plugins), ids, more, options=options, context=ctx, say=say
    )  # fmt: skip
    path = _write(done, write)
    command = None if path is None else _command(done, path, spec, against)
    if json:
        dump(_data(done, path, command, opened))
    else:
        _show(done, path, command, opened)
    return 0 if done.wrong is None else DIFFERS


def _ids(model: Any, prompt: str | None, file: str | None, tokens: str | None) -> list[int]:
    """The tokens to run; a usage error where they can't be read."""
    from trueup.cli.prompt import DEMO, read_prompt

    if tokens is None:
        given = prompt is not None or file is not None
        text = read_prompt(prompt, file, demo=True)[0] if given else DEMO
        found: list[int] = model.tokenizer.encode(text)
        return found
    if prompt is not None or file is not None:
        raise typer.BadParameter("give --tokens or a text, not both")
    try:
        return [int(t) for t in tokens.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"--tokens: {tokens!r} is no list of numbers") from None


def _write(done: Compared, path: Path | None) -> Path | None:
    from trueup.conformance.replay import write
    from trueup.conformance.versus import saved

    if done.wrong is None or done.wrong.finding is None:
        return None
    file = saved(done.wrong.finding, done.wrong.backend)
    if file is None:
        return None
    path = path or Path(f"compare-{done.wrong.finding.op}-{done.wrong.finding.node.id}.safetensors")
    write(path, file)
    return path


def _command(done: Compared, path: Path, spec: Spec, against: str) -> str:
    name = spec.name if done.wrong is done.sides[0] else against
    words = ["trueup", "compare", "--replay", str(path), "--backend", name]
    for p in spec.plugins:
        words += ["--plugin", p]
    return shlex.join(words)


# -- showing -----------------------------------------------------------------------------------------------------------


def _place(outcome: Outcome, finding: Finding, model: Any) -> str:
    """The layer of a node, as `explain` groups them."""
    from trueup.cli.plan_view import group_title, rows

    if outcome.plan is None:
        return ""
    group = next((r.group for r in rows(outcome.plan) if r.node is finding.node), "")
    return group_title(group, model.architecture.summary().layers) if group else ""


def _origin(outcome: Outcome, finding: Finding, model: Any) -> list[str]:
    """The recorded nodes that a node descends from, as `#12 linear`; by number where the graph can't be built again."""
    ids = sorted(finding.node.origin)
    plan = outcome.plan
    names: dict[int, str] = {}
    if plan is not None and plan.graph.capacity is not None and (shape := _shape(plan)) is not None:
        names = {n.id: n.op.name for n in model.architecture.build(shape, plan.graph.capacity).nodes}
    return [f"#{i} {names[i]}" if i in names else f"#{i}" for i in ids]


def _shape(plan: Any) -> Any:
    from trueup.models.architecture import StepShape

    types = {n: v.type.shape for n, v in plan.graph.inputs.items()}
    try:
        return StepShape(
            types["ids"][0], types["slots"][0], types["block_table"][1], types["out_rows"][0]
        )  # fmt: skip
    except KeyError:
        return None


def _data(done: Compared, path: Path | None, command: str | None, model: Any) -> dict[str, Any]:
    wrong = done.wrong
    finding: dict[str, Any] | None = None
    if wrong is not None and wrong.finding is not None:
        finding = {
            "backend": wrong.backend, "layer": _place(wrong, wrong.finding, model), **wrong.finding.about(),
            "origin": _origin(wrong, wrong.finding, model), "peer": _peer_entry(done), "replay": path and str(path),
            "command": command,
        }  # fmt: skip
    return {
        "equal": wrong is None, "steps": [len(s) for s in done.steps],
        "sides": [
            {"backend": s.backend, "device": s.device, "how": s.how, "nodes": s.tally.nodes, "unwatched": s.unwatched,
             "worst": {op: float(w) if w < float("inf") else "inf" for op, (w, _) in sorted(s.tally.worst.items())}}
            for s in done.sides
        ],
        "logits": [{"difference": d if d == d and d < float("inf") else str(d), "same_argmax": a} for d, a in done.distance],
        "finding": finding,
    }  # fmt: skip


def _peer_entry(done: Compared) -> Any:
    """What the other backend gives at the worst entry, for what the wrong node was given."""
    import numpy as np

    finding = done.wrong and done.wrong.finding
    if done.peer is None or not finding or finding.part is None:
        return None
    if done.peer.refused:
        return done.peer.refused
    name = finding.part.name
    arrays = done.peer.states if name.startswith("state ") else done.peer.results
    found = arrays.get(name.removeprefix("state "))
    if found is None or not finding.part.at:
        return None
    entry = found[tuple(finding.part.at)].item()
    return entry if np.isfinite(entry) else str(entry)


def _show(done: Compared, path: Path | None, command: str | None, model: Any) -> None:
    said = ", ".join(f"{len(s)} token{'s' * (len(s) != 1)}" for s in done.steps)
    a, b = done.sides
    print(f"{a.backend} ({a.device}) against {b.backend} ({b.device}): steps of {said}")
    table(
        ["backend", "judged", "nodes", "nearest to their bounds"],
        [
            (s.backend, s.how if s.tally.nodes else "is the reference", s.tally.nodes or "", _nearest(s))
            for s in done.sides
        ],
        right=("nodes",),
    )
    for s in done.sides:
        if s.unwatched:
            print(f"{s.backend} does not claim to be deterministic; {s.unwatched}")
    wrong = done.wrong
    if wrong is None or wrong.finding is None:
        far = max((d for d, _ in done.distance), default=0.0)
        same = sum(s for _, s in done.distance)
        print(
            f"logits differ by at most {far:.3g}; the likeliest token is the same in {same} of {len(done.distance)} steps"
        )
        print("equal: every node is within its bound")
        return
    f = wrong.finding
    where = "the step as a whole" if f.whole else printable(f.node.describe())
    print(f"\n{wrong.backend} is wrong at step {f.step}, {where}")
    _show_finding(wrong, wrong.finding, _place(wrong, wrong.finding, model), _origin(wrong, wrong.finding, model))
    peer = _peer_entry(done)
    if peer is not None:
        other = b if wrong is a else a
        print(f"  {other.backend}, given the same: {_entry(peer)}")
    if command:
        print(f"\nall that it was given is in {path}; it runs alone by\n  {command}")


def _nearest(s: Outcome) -> str:
    worst = sorted(((w, op) for op, (w, _) in s.tally.worst.items() if w), reverse=True)[:4]
    return ", ".join(f"{op} {w:.2g}" for w, op in worst)


def _show_finding(outcome: Outcome, finding: Finding, place: str, origin: list[str]) -> None:
    about = finding.about()
    facts = [] if finding.whole else [("layer", place), ("kernel", finding.kernel), ("recorded as", ", ".join(origin))]
    facts += [("fused of", ", ".join(about["fused"])), ("wrong", finding.wrong)]
    if finding.part is not None and finding.part.at:
        p = finding.part
        facts.append(("worst entry", f"{p.name}{p.at}: {p.got:.9g}, expected {p.expected:.9g} ± {p.bound:.3g}"))
    facts.append(("its bound", finding.reason))
    lines([(k, v) for k, v in facts if v])
    _show_inputs(about["inputs"])


def _show_inputs(inputs: list[dict[str, Any]]) -> None:
    if not inputs:
        return
    print()
    rows = []
    for i in inputs:
        numbers = [_short(i[k]) for k in ("min", "max", "mean")]
        lies = f" strides {i['strides']}" if i["strides"] else ""
        rows.append((f"  {i['name']}", f"{i['dtype']}{i['shape']}{lies}", *numbers, i["nan"] or "", i["inf"] or ""))
    table(["  given", "type", "min", "max", "mean", "NaN", "inf"], rows, right=("min", "max", "mean", "NaN", "inf"))


def _entry(x: Any) -> str:
    return printable(x) if isinstance(x, str) else f"{x:.9g}"


def _short(x: float | None) -> str:
    return "" if x is None else f"{x:.6g}"


def _show_replay(outcome: Outcome, finding: Finding | None, about: dict[str, Any]) -> None:
    print(
        f"{printable(str(about.get('call', 'a node')))} of step {about.get('step', '?')}, by itself on {outcome.backend}"
    )
    if finding is None:
        (worst, _), *_ = outcome.tally.worst.values()
        print(f"equal: within its bound, at {worst:.2g} of it")
        return
    print("wrong")
    _show_finding(outcome, finding, "", [f"#{i}" for i in about.get("origin", [])])
