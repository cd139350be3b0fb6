"""What is to be continued: text from an option, a file or standard input, as token ids; and how a long prompt is fed.

Knows models and sessions; chooses no token.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from trueup.models import Model
    from trueup.runtime import Session

DEMO = "import os\n\ndef "
"""What the bundled model continues when it is given nothing."""

PATIENCE = 1.0
"""Seconds before a progress bar appears."""


def read_prompt(text: str | None, file: str | None, *, demo: bool) -> tuple[str, bool]:
    """The prompt, and whether it is the demo's, which stands in where nothing is given and `demo` allows it.

    A usage error where there is no prompt, or two; ValueError where a file is no UTF-8.
    """
    if text is not None and file is not None:
        raise typer.BadParameter("give --prompt or --file, not both")
    if text is not None:
        return text, False
    if file is not None and file != "-":
        with open(file, "rb") as f:
            return decode(f.read(), file), False
    piped = sys.stdin is not None and not sys.stdin.isatty()
    given = decode(sys.stdin.buffer.read(), "standard input") if piped or file == "-" else ""
    if given or file == "-":
        return given, False
    if demo:
        return DEMO, True
    raise typer.BadParameter("there is no prompt: give --prompt, --file, or text on standard input")


def decode(data: bytes, where: str) -> str:
    """Bytes of a text file as text, with its line ends as they are."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{where}: not UTF-8 text, at byte {e.start}") from None


def chat_ids(model: Model, messages: list[dict[str, str]]) -> list[int]:
    """A conversation as the model's chat template renders it, up to where the answer begins.

    ChatError where the model has no template, or the template does not take these messages.
    """
    from trueup.models.chat import ChatError, encode_chat

    if model.tokenizer.chat_template is None:
        raise ChatError(f"{model.file.path} has no chat template (tokenizer.chat_template), so it can't chat")
    return encode_chat(model.tokenizer, model.chat_template, messages)


def feed(session: Session, ids: list[int]) -> None:
    """Feed tokens whose logits nobody wants; on a terminal a bar shows how far it is, if that takes a while."""
    batch, start = session.engine.batch, time.perf_counter()
    bar = None
    try:
        for at in range(0, len(ids), batch):
            session.feed(ids[at : at + batch], logits=None)
            done = min(at + batch, len(ids))
            if bar is None and done < len(ids) and sys.stderr.isatty() and time.perf_counter() - start > PATIENCE:
                bar = progress_bar()
                task = bar.add_task("prompt", total=len(ids))
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()


def progress_bar(*, bytes: bool = False) -> Progress:
    """A bar on standard error that vanishes when it is done; draws nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
