"""`trueup chat`: a turn feeds only what is new, and answers what a conversation read from the start would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import trueup as package
from trueup.cli.conversation import Conversation
from trueup.cli.prompt import chat_ids
from trueup.runtime import ContextFull, Engine, StateError

Run = Callable[..., Any]
SYSTEM = "Write Python."


@cache
def engine() -> Engine:
    return package.load(backend="cpu", sequences=2, checkpoints=2)


@pytest.fixture
def talk() -> Iterator[Conversation]:
    made = Conversation(engine(), SYSTEM, max_tokens=6)
    yield made
    made.session.close()


def said(conversation: Conversation, text: str) -> str:
    pieces: list[str] = []
    conversation.answer(text, pieces.append)
    return "".join(pieces)


def anew(messages: list[dict[str, str]], n: int = 6) -> str:
    """The answer of the engine that reads the whole conversation."""
    ids = chat_ids(engine().model, [{"role": "system", "content": SYSTEM}, *messages])
    return "".join(p.text for p in engine().generate(ids, max_tokens=n))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_turn_feeds_only_what_is_new(talk: Conversation) -> None:
    first = said(talk, "import os")
    assert first == anew([user("import os")])
    assert talk.output.fed == talk.output.prompt_tokens
    second = said(talk, "more")
    assert second == anew([user("import os"), {"role": "assistant", "content": first}, user("more")])
    assert talk.output.fed < talk.output.prompt_tokens - 6
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


def test_an_answer_that_is_rendered_in_other_tokens_is_read_again_from_the_mark(talk: Conversation) -> None:
    said(talk, "import os")
    prompt = talk.output.prompt_tokens
    talk.messages[-1]["content"] = "something else"
    told = [*talk.messages, user("more")]
    assert said(talk, "more") == anew(told)
    assert talk.output.fed == talk.output.prompt_tokens - (prompt - 1), "the mark lies before the prompt's last token"


def test_a_beginning_that_changed_is_read_anew(talk: Conversation) -> None:
    said(talk, "import os")
    talk.messages[0]["content"] = "import sys"
    told = [*talk.messages, user("more")]
    assert said(talk, "more") == anew(told)
    assert talk.output.fed == talk.output.prompt_tokens


@pytest.mark.fault("B31")
def test_reset_forgets_all_but_the_system_message(talk: Conversation) -> None:
    said(talk, "import os")
    talk.reset()
    assert talk.messages == [] and len(talk.session) == 0
    assert said(talk, "class A") == anew([user("class A")])


def test_an_interrupted_answer_stays_and_the_conversation_goes_on(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine().generate

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        pieces = real(*args, **options)
        yield next(pieces)
        yield next(pieces)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine(), "generate", interrupted)
        cut = said(talk, "import os")
    assert talk.output.finish_reason == "interrupted" and len(talk.output.tokens) == 2
    assert talk.messages[-1] == {"role": "assistant", "content": cut}
    told = [*talk.messages, user("more")]
    assert said(talk, "more") == anew(told)


def test_an_interrupt_while_a_piece_is_written_ends_the_answer(talk: Conversation) -> None:
    written: list[str] = []

    def write(piece: str) -> None:
        written.append(piece)
        if len(written) == 3:
            raise KeyboardInterrupt

    talk.answer("import os", write)
    assert talk.output.finish_reason == "interrupted" and talk.output.output_time > 0
    assert talk.messages[-1]["content"] == "".join(written)
    told = [*talk.messages, user("more")]
    assert said(talk, "more") == anew(told)


def test_a_failed_step_is_not_trusted(talk: Conversation) -> None:
    said(talk, "import os")
    talk.session.sequence.fault = "a kernel failed"
    told = [*talk.messages, user("more")]
    assert said(talk, "more") == anew(told)


def test_a_conversation_that_fills_the_context_is_refused_and_kept() -> None:
    small = package.load(backend="cpu", sequences=2, checkpoints=2, context=40)
    conversation = Conversation(small, None, max_tokens=2)
    said(conversation, "a")
    before = list(conversation.messages)
    with pytest.raises(ContextFull, match="exceed the context of 40"):
        said(conversation, "many words " * 20)
    assert conversation.messages == before
    assert said(conversation, "b")


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("B29")
def test_a_saved_conversation_goes_on_elsewhere(talk: Conversation, tmp_path: Path) -> None:
    said(talk, "import os")
    talk.save(tmp_path / "talk.session")
    expected = said(talk, "more")
    other = Conversation(engine(), None, max_tokens=6)
    try:
        other.load(tmp_path / "talk.session")
        assert other.system == SYSTEM and len(other.messages) == 2
        assert said(other, "more") == expected
        assert other.output.fed < other.output.prompt_tokens, "its state was loaded, not computed"
    finally:
        other.session.close()
    assert [p.name for p in tmp_path.iterdir()] == ["talk.session"]


def test_what_is_no_saved_conversation_changes_nothing(talk: Conversation, tmp_path: Path) -> None:
    said(talk, "import os")
    before = list(talk.messages), list(talk.session.tokens)
    (tmp_path / "text").write_text("no conversation")
    talk.session.save(tmp_path / "session")
    save_file(
        {"tokens": np.zeros(1, np.int32)}, tmp_path / "others", {"trueup_chat": '{"system": null, "messages": []}'}
    )
    save_file({}, tmp_path / "odd", {"trueup_chat": '{"system": null, "messages": [{"role": "user", "content": 1}]}'})
    for name, why in (
        ("text", "not a saved"),
        ("session", "holds no conversation"),
        ("others", "version unknown"),
        ("odd", "no text"),
    ):
        with pytest.raises(StateError, match=why):
            talk.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        talk.load(tmp_path / "missing")
    assert (talk.messages, talk.session.tokens) == before


def test_a_conversation_too_large_to_lie_beside_the_present_one_is_loaded(tmp_path: Path) -> None:
    small = package.load(backend="cpu", sequences=2, checkpoints=2, context=256)
    long = Conversation(small, "x = 1\n" * 45, max_tokens=1)
    said(long, "a")
    assert len(long.session) > 192, "of six pages it holds four"
    long.save(tmp_path / "long")
    long.load(tmp_path / "long")
    said(long, "b")
    assert long.output.fed < 100 < long.output.prompt_tokens


# -- the command -------------------------------------------------------------------------------------------------------


def test_lines_are_messages_and_answers_go_to_standard_output(trueup: Run, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    lines = [
        "import \\",
        "os",
        "/stats",
        f"/save {file}",
        "/reset",
        f"/load {file}",
        "/help",
        "",
        "more",
        "/quit",
        "never said",
    ]
    done = trueup("chat", "--system", SYSTEM, "-n", 6, "--temp", 0, input="\n".join(lines))
    assert done.code == 0, done.err
    first = anew([user("import \nos")])
    second = anew([user("import \nos"), {"role": "assistant", "content": first}, user("more")])
    ended = [t if t.endswith("\n") else f"{t}\n" for t in (first, second)]
    assert done.out == "".join(ended)
    assert "base model" in done.err and "/save FILE" in done.err
    assert "saved 2 messages" in done.err and "loaded 2 messages" in done.err
    assert "output 6 tokens" in done.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/lod x", "there is no /lod; /help lists the commands"),
        ("/save", "/save needs a file"),
        ("/load missing", "No such file or directory"),
        ("/save {folder}/missing/x", "No such file or directory"),
    ],
)
def test_without_a_terminal_the_first_error_ends_it(trueup: Run, tmp_path: Path, line: str, said: str) -> None:
    done = trueup("chat", input=line.format(folder=tmp_path) + "\n/help\n")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("trueup: error: ") and said in done.err.splitlines()[-1]


def test_the_end_of_input_ends_it(trueup: Run) -> None:
    assert trueup("chat", input="").code == 0
