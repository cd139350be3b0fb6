"""The options of speculative decoding, and what they mean to `trueup.load`. Imports nothing heavy by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from trueup.runtime import Engine

Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="N|auto",
        help="Draft N tokens before each step and verify them in it, or as many as pay; what is written is the same.",
        show_default=False,
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="Who drafts: mtp, the model's own head; lookup, repetition in the text; model; or a plugin's.",
        show_default="mtp, or model with --draft-model",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option("--draft-model", metavar="FILE", help="A small model of the same vocabulary that drafts."),
]
Mtp = Annotated[
    str | None,
    typer.Option("--mtp", metavar="FILE", help="The model's draft head, where it is in a GGUF file of its own."),
]
Rollback = Annotated[
    str,
    typer.Option(
        "--rollback",
        metavar="auto|snapshots|replay",
        help="How drafted tokens that the model did not confirm are undone; auto measures which is faster.",
    ),
]


def drafting(
    draft: str | None, drafter: str | None, draft_model: str | None, mtp: str | None, rollback: str
) -> dict[str, Any]:
    """Arguments for `trueup.load`; BadParameter where the options don't go together."""
    if draft is None:
        for name, given in (("--drafter", drafter), ("--draft-model", draft_model), ("--mtp", mtp)):
            if given is not None:
                raise typer.BadParameter(f"{name} needs --draft N or --draft auto")
        return {}
    if rollback not in ("auto", "snapshots", "replay"):
        raise typer.BadParameter(f"--rollback must be auto, snapshots or replay, got {rollback!r}")
    if drafter not in (None, "model") and draft_model is not None:
        raise typer.BadParameter(f"--draft-model is for --drafter model, not for {drafter}")
    import warnings

    from trueup.runtime.speculation import SpeculationWarning

    warnings.simplefilter("ignore", SpeculationWarning)  # `summary` says it
    return {
        "draft": depth(draft),
        "drafter": drafter or ("mtp" if draft_model is None else "model"),
        "drafter_options": {} if draft_model is None else {"model": draft_model},
        "mtp": mtp,
        "rollback": rollback,
    }


def depth(text: str) -> int | Literal["auto"]:
    """--draft as `trueup.load` takes it."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"--draft must be auto or a number of tokens of at least 1, got {text!r}")
    return int(text)


def tally(engine: Engine) -> dict[str, Any] | None:
    """What speculation did so far, for reports; None where there was none."""
    s = engine.speculator
    if s is None:
        return None
    return {
        "drafter": s.drafter.name,
        "rounds": s.tally.rounds,
        "drafted": s.tally.drafted,
        "accepted": s.tally.accepted,
        "given_up": s.given_up or None,
    }


def summary(engine: Engine) -> str | None:
    """The same in a few words: `mtp drafted 90, accepted 71 (78, 64, 40% by position)`."""
    s = engine.speculator
    if s is None:
        return None
    drafted, accepted = sum(s.tally.drafted), sum(s.tally.accepted)
    shares = ", ".join(
        f"{100 * a / d:.0f}" for a, d in zip([*s.tally.accepted, *[0] * 99], s.tally.drafted, strict=False)
    )
    text = f"{s.drafter.name} drafted {drafted}, accepted {accepted}" + (f" ({shares}% by position)" if drafted else "")
    return f"{text}; {s.given_up}" if s.given_up else text
