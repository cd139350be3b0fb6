"""The command as a whole: help that leaves nothing out, commands of plugins, and a start that loads little."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

import trueup as package
from trueup.cli.app import app
from trueup.convert import FILE_TYPES

Run = Callable[..., Any]


def leaves(group: Any, prefix: str = "") -> dict[str, Any]:
    """The commands that run something, those of groups by both names."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= leaves(command, f"{prefix}{name} ") if hasattr(command, "commands") else {prefix + name: command}
    return found


COMMANDS: dict[str, Any] = leaves(typer.main.get_command(app))


def options(command: Any) -> list[str]:
    return [o for p in command.params if p.param_type_name == "option" for o in (*p.opts, *p.secondary_opts)]


def test_the_version(trueup: Run) -> None:
    assert trueup("--version").out == f"trueup {package.__version__}\n"


def test_help_lists_every_command(trueup: Run) -> None:
    text = trueup("--help").out
    for name in ("run", "chat", "inspect", "explain", "convert", "backends", "plugins", "doctor"):
        assert re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE), name
    assert trueup("-h").out == text


def test_without_a_command_it_shows_the_help(trueup: Run) -> None:
    done = trueup()
    assert done.code == 2 and done.out == trueup("--help").out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_mentions_every_option_and_has_examples(trueup: Run, name: str) -> None:
    text = trueup(*name.split(), "--help").out
    for option in options(COMMANDS[name]):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), option
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name
    examples = [
        line.strip() for line in text.splitlines() if re.search(rf"trueup {name}\b", line) and "Usage" not in line
    ]
    assert examples
    for used in re.findall(r"(?<=\s)--?[a-z][a-z-]*", " ".join(e.partition(f"trueup {name}")[2] for e in examples)):
        assert used in (*options(COMMANDS[name]), "--git"), used


def test_an_unknown_command_is_one_line(trueup: Run) -> None:
    assert trueup("rum").refused(2) == "No such command 'rum'. Did you mean 'run'? (see trueup --help)"


def test_an_unexpected_exception_is_not_hidden(trueup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.cli.options.target_options", lambda *_: {}["fault"])
    with pytest.raises(KeyError, match="fault"):
        trueup("run", "-p", "x")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom trueup.cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'gguf', 'tokenizers', 'rich', 'pluggy', 'trueup.runtime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_is_quick() -> None:
    command = [sys.executable, "-c", "import sys; sys.argv[1:] = ['--help']; from trueup.cli import main; main()"]
    bare = [sys.executable, "-c", "pass"]

    def best(what: list[str]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(what, capture_output=True, check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(command) - best(bare) < 1.0, "0.2 s where nothing else runs"


# -- commands of plugins -----------------------------------------------------------------------------------------------

HELLO = """
    import typer

    from trueup.core.plugins import hookimpl

    tools = typer.Typer()


    @tools.command()
    def one():
        print("one of several")


    @tools.command()
    def two():
        pass


    @hookimpl
    def trueup_commands(cli):
        @cli.command("hello")
        def hello(name: str = "you"):
            '''Say hello.'''
            if name == "nobody":
                raise ValueError("nobody is not greeted")
            print("hello", name)

        cli.add_typer(tools, name="tools")
"""


def test_commands_of_plugins_are_listed_and_run(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin("hello", HELLO)
    assert re.search(r"^  hello +Say hello\.$", trueup("--help").out, re.MULTILINE)
    assert trueup("hello", "--name", "Ada").out == "hello Ada\n"
    assert trueup("tools", "one").out == "one of several\n"
    assert trueup("hello", "--name", "nobody").refused() == "nobody is not greeted"


@pytest.mark.fault("B81")
def test_a_plugin_whose_commands_fail_adds_none(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin("hello", HELLO)
    plugin("half", HELLO.replace('"hello")', '"early")').replace('name="tools"', 'name="doctor"'))
    assert "No such command 'early'" in trueup("early").refused(2)
    assert trueup("hello").code == 0


def test_a_command_that_typer_can_not_make_disturbs_no_other(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin("hello", HELLO)
    plugin(
        "odd",
        HELLO.replace('"hello")', '"odd")')
        .replace('name="tools"', 'name="odds"')
        .replace("name: str", "name: 'Missing'"),
    )
    assert trueup("hello").code == 0
    assert "No such command 'odd'" in trueup("odd").refused(2)
    assert re.search(r"odd +broken .*the commands odd, odds can't be made", trueup("plugins").out)


# -- convert -----------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    path: Path
    architecture: str = "qwen4exp"
    tensors: int = 3
    parameters: int = 1200
    nbytes: int = 4800


def test_convert_hands_its_options_on(trueup: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def convert(folder: Path, out: Path, *, progress: Callable[[int, int], None], **more: Any) -> Made:
        asked.update(more, folder=folder, out=out)
        progress(1, 2)
        progress(2, 2)
        return Made(out)

    monkeypatch.setattr("trueup.convert.convert", convert)
    done = trueup(
        "convert", tmp_path, "-o", tmp_path / "o.gguf", "--type", "bf16", "--no-mtp", "--name", "N", "--license", "mit"
    )
    assert done.code == 0 and done.out == ""
    assert asked == {
        "folder": tmp_path, "out": tmp_path / "o.gguf", "type": "bf16", "mtp": False, "name": "N", "license": "mit",
    }  # fmt: skip
    assert done.err == f"trueup: {tmp_path / 'o.gguf'}: qwen4exp, 3 tensors, 1,200 parameters, 4.7 KiB of weights\n"
    assert '"tensors": 3' in trueup("convert", tmp_path, "-o", "x", "--json").out


def test_convert_refuses_in_one_line_and_writes_nothing(trueup: Run, tmp_path: Path) -> None:
    assert "has no config.json" in trueup("convert", tmp_path, "-o", tmp_path / "o.gguf").refused()
    assert "unknown type 'q9'" in trueup("convert", tmp_path, "-o", tmp_path / "o.gguf", "--type", "q9").refused()
    assert "Missing option" in trueup("convert", tmp_path).refused(2)
    assert list(tmp_path.iterdir()) == []


def test_converts_help_names_every_type(trueup: Run) -> None:
    text = trueup("convert", "--help").out
    assert all(t in text for t in FILE_TYPES)
