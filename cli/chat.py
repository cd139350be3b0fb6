"""`trueup chat`: a conversation in a terminal, or from lines on standard input."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trueup.cli.conversation import Conversation
from trueup.cli.drafting import Draft, DrafterName, DraftModel, Mtp, Rollback, drafting
from trueup.cli.errors import expected, one_line
from trueup.cli.generation import statistics
from trueup.cli.options import (
    Activations,
    AllowFallback,
    BackendName,
    Context,
    MaxTokens,
    MinP,
    ModelFile,
    NoFusion,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    open_engine,
)

HELP = """\
/reset      start anew; the system message stays
/save FILE  write the conversation, with the model's state, to a file
/load FILE  go on from such a file
/stats      what the last answer took
/help       this
/quit       end; so does the end of input
A backslash at the end of a line continues the message on the next. Ctrl-C ends an answer."""


def chat(
    model: ModelFile = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    stop: Stop = None,
    temp: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Seed of the choices; by default another one each time.", min=0),
    ] = None,
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
) -> None:
    """Talk with a model that has a chat template.

    Each line is a message; a backslash at its end continues it on the next line. /help lists the commands: /reset,
    /save FILE, /load FILE, /stats, /quit. What the model has read stays in its state: of a longer conversation only
    the new part is fed. Where lines come from a file or a pipe, the first error ends the command.

    Examples:

    \b
        trueup chat MODEL.gguf --system "Answer briefly."
        printf 'Hello\\n/save talk.session\\n' | trueup chat MODEL.gguf
    """
    engine = open_engine(
        model, backend=backend, context=ctx, threads=threads, allow_fallback=allow_fallback, fusion=not no_fusion,
        activations=activations,
        sequences=2, checkpoints=2, drafting=drafting(draft, drafter, draft_model, mtp, rollback),
    )  # fmt: skip
    talk = Conversation(
        engine, system, max_tokens=max_tokens, stop=stop, temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p,
        seed=seed,
    )  # fmt: skip
    if model is None:
        note("the bundled model is a base model that never saw a conversation: what it answers makes no sense")
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        note("/help lists the commands")
    while (line := read_message(terminal)) is not None:
        try:
            if line.startswith("/"):
                if not obey(line, talk):
                    break
            elif line.strip():
                say(line, talk)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print(file=sys.stderr)
        except Exception as e:
            if not terminal or not expected(e):
                raise
            note(f"error: {one_line(e)}")
    if terminal:
        print()


def say(text: str, talk: Conversation) -> None:
    """One turn: the answer on standard output as it comes."""

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    talk.answer(text, write)
    if not talk.output.text.endswith("\n"):
        print(flush=True)
    if talk.output.finish_reason != "stop":
        note({"length": "cut off: --max-tokens, or the context is full"}.get(talk.output.finish_reason, "interrupted"))


def obey(line: str, talk: Conversation) -> bool:
    """Carry out a command; False where it ends the conversation."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command in ("/save", "/load") and not argument:
        raise ValueError(f"{command} needs a file")
    if command == "/quit":
        return False
    if command == "/help":
        print(HELP, file=sys.stderr)
    elif command == "/reset":
        talk.reset()
    elif command == "/stats":
        note(statistics(talk.output, talk.engine) if talk.messages else "nothing was said yet")
    elif command == "/save":
        talk.save(argument)
        note(f"saved {len(talk.messages)} messages and {len(talk.session)} tokens of state to {argument}")
    elif command == "/load":
        talk.load(argument)
        note(f"loaded {len(talk.messages)} messages and {len(talk.session)} tokens of state from {argument}")
    else:
        raise ValueError(f"there is no {command}; /help lists the commands")
    return True


def read_message(terminal: bool) -> str | None:
    """The next message, lines that end in a backslash joined with what follows; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = read_line("… " if lines else "> ", terminal)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            lines.clear()
            continue
        if line is None:
            return "\n".join(lines) if lines else None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def read_line(prompt: str, terminal: bool) -> str | None:
    if not terminal:
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.rstrip("\r\n") if line else None
    import readline  # noqa: F401  # gives `input` editing and history

    try:
        return input(prompt)
    except EOFError:
        return None


def note(text: str) -> None:
    """A remark to the person, apart from the model's text."""
    print(f"trueup: {text.removeprefix('trueup: ')}", file=sys.stderr)
