"""`trueup run`: its text is the engine's, its endings and refusals are what it says they are."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import trueup as package
from trueup.models.chat import encode_chat
from trueup.runtime import Engine, Piece, Session

Run = Callable[..., Any]
GREEDY = ("--temp", 0)


@cache
def engine() -> Engine:
    return package.load(backend="cpu", sequences=1)


def written(prompt: str, n: int, **options: Any) -> str:
    """What the engine itself writes."""
    return "".join(p.text for p in engine().generate(prompt, max_tokens=n, **options))


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_text_is_the_engines_and_nothing_else_is_on_standard_output(trueup: Run) -> None:
    done = trueup("run", "-p", "class Stack:\n", "-n", 6, *GREEDY)
    assert done.code == 0
    assert done.out == written("class Stack:\n", 6)
    assert done.err.count("\n") == 1
    assert "prompt 4 tokens" in done.err and "output 6 tokens" in done.err and "finish: length" in done.err
    assert "cpu on " in done.err and "fell back" not in done.err


def test_sampling_options_reach_the_engine(trueup: Run) -> None:
    options = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 7}
    args = ("--temp", 1.5, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--seed", 7)
    assert trueup("run", "-p", "def ", "-n", 8, *args).out == written("def ", 8, **options)


def test_alone_it_writes_python_after_its_prompt(trueup: Run) -> None:
    done = trueup("run", "-n", 4)
    assert done.out.startswith("import os\n\ndef ")
    assert done.out == trueup("run", "-n", 4).out, "the default seed is fixed"


def test_the_prompt_may_come_from_a_file_or_standard_input(trueup: Run, tmp_path: Path) -> None:
    text = "def größe(x):\r\n    "
    expected = written(text, 4)
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    assert trueup("run", "-f", file, "-n", 4, *GREEDY).out == expected
    assert trueup("run", "-f", "-", "-n", 4, *GREEDY, input=text).out == expected
    assert trueup("run", "-n", 4, *GREEDY, input=text).out == expected
    assert trueup("run", "-n", 4, *GREEDY, "--echo", input=text).out.encode() == (text + expected).encode()


def test_a_prompt_of_several_batches_is_fed_as_the_engine_feeds_it(
    trueup: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "x = [1, 2, 3]\n" * 60
    tokens = engine().model.tokenizer.encode(prompt)
    batch = engine().batch
    assert batch < len(tokens) < 2 * batch
    fed: list[int] = []
    feed = Session.feed
    monkeypatch.setattr(Session, "feed", lambda self, ids, **more: (fed.append(len(ids)), feed(self, ids, **more))[1])
    done = json.loads(trueup("run", "-n", 2, *GREEDY, "--json", input=prompt).out)
    assert fed == [batch, len(tokens) - batch, 1, 1]
    assert done["usage"]["prompt_tokens"] == len(tokens)
    assert done["tokens"] == [t for p in engine().generate(prompt, max_tokens=2) for t in p.tokens]


def test_chat_renders_the_template(trueup: Run) -> None:
    model = engine().model
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
    ids = encode_chat(model.tokenizer, model.chat_template, messages)
    done = json.loads(
        trueup("run", "--chat", "--system", "Be brief.", "-p", "Hi <|im_end|>", "-n", 3, *GREEDY, "--json").out
    )
    assert done["usage"]["prompt_tokens"] == len(ids)
    assert done["text"] == "".join(p.text for p in engine().generate(ids, max_tokens=3))


# -- endings -----------------------------------------------------------------------------------------------------------


def test_json_is_one_object_and_all_there_is(trueup: Run) -> None:
    done = trueup("run", "-p", "def ", "-n", 5, *GREEDY, "--json")
    assert done.code == 0 and done.err == ""
    said = json.loads(done.out)
    names = "model text tokens logprobs finish_reason stop seed usage timings backend speculation placements"
    assert set(said) == set(names.split())
    assert said["text"] == engine().model.tokenizer.decode(said["tokens"]) == written("def ", 5)
    assert len(said["logprobs"]) == len(said["tokens"]) == said["usage"]["completion_tokens"] == 5
    assert all(p <= 0 for p in said["logprobs"])
    assert said["finish_reason"] == "length" and said["stop"] is None and said["seed"] == 3
    assert said["backend"]["name"] == "cpu" and said["backend"]["kind"] == "cpu"
    assert all(t > 0 for t in said["timings"].values())
    assert said["placements"]["fallbacks"] == [] and sum(said["placements"]["nodes"].values()) > 100


def test_the_end_of_the_context_is_a_length(trueup: Run) -> None:
    prompt = engine().model.tokenizer.encode("def f(x):")
    said = json.loads(trueup("run", "-p", "def f(x):", "--ctx", len(prompt) + 3, "--json", *GREEDY).out)
    assert said["finish_reason"] == "length"
    assert said["usage"]["completion_tokens"] == 3
    full = json.loads(trueup("run", "-p", "def f(x):", "--ctx", len(prompt), "--json").out)
    assert full["finish_reason"] == "length" and full["tokens"] == []


def test_it_ends_before_a_stop_text(trueup: Run) -> None:
    free = written("import os\n\ndef ", 16)
    stop = free[5:7]
    said = json.loads(
        trueup("run", "-p", "import os\n\ndef ", "-n", 16, "--stop", "@@", "--stop", stop, "--json", *GREEDY).out
    )
    assert said["finish_reason"] == "stop" and said["stop"] == stop
    assert said["text"] == free[: free.index(stop)]


def test_no_tokens_are_asked_for(trueup: Run) -> None:
    done = trueup("run", "-p", "def ", "-n", 0)
    assert done.code == 0 and done.out == ""
    assert "output 0 tokens; finish: length" in done.err


def test_a_reader_that_closes_the_pipe_is_no_error(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("run", "-n", 400)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == "imp"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_with_the_statistics(start: Callable[..., subprocess.Popen[str]]) -> None:
    # Who runs tests in the background may ignore the signal, and children inherit that.
    process = start("run", "-n", 100_000, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finish: interrupted" in err and err.count("\n") == 1


def test_ctrl_c_leaves_whole_json(trueup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Engine, *args: Any, **options: Any) -> Iterator[Piece]:
        yield Piece("x", (1,), (-0.5,))
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    done = trueup("run", "-p", "def ", "--json")
    said = json.loads(done.out)
    assert done.code == 130 and done.err == ""
    assert said["finish_reason"] == "interrupted" and said["text"] == "x" and said["tokens"] == [1]


def test_ctrl_c_before_anything_is_fed_says_nothing(trueup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setattr("trueup.cli.run.open_engine", interrupted)
    done = trueup("run", "-p", "def ")
    assert (done.code, done.out, done.err) == (130, "", "")


# -- backends ----------------------------------------------------------------------------------------------------------


def test_the_reference_writes_the_same(trueup: Run) -> None:
    done = trueup("run", "-p", "def ", "-n", 4, "--backend", "reference", *GREEDY)
    assert done.out == written("def ", 4)
    assert "reference on NumPy" in done.err


@pytest.mark.fault("B83")
def test_a_backend_that_refuses_runs_only_where_that_is_asked_for_and_is_counted(trueup: Run, acme: None) -> None:
    line = trueup("run", "-p", "def ", "-n", 1, "--backend", "acme").refused()
    assert "backend acme refuses #" in line and "--allow-fallback" in line
    done = trueup("run", "-p", "def ", "-n", 2, "--backend", "acme:1", "--allow-fallback", *GREEDY)
    assert done.out == written("def ", 2)
    assert "acme on Acme Two" in done.err and "nodes of a step fell back to the reference" in done.err
    said = json.loads(trueup("run", "-p", "def ", "-n", 1, "--backend", "acme", "--allow-fallback", "--json").out)
    fallbacks = said["placements"]["fallbacks"]
    assert len(fallbacks) == said["placements"]["nodes"]["fallback"] > said["placements"]["nodes"]["device"] > 0
    assert {f["reason"] for f in fallbacks} >= {"this card has no q8_0"}


SAD = """
    from trueup.core.backend import AddressedTarget, Backend, Device, KernelTable
    from trueup.core.ops import linear
    from trueup.core.plugins import hookimpl

    kernels = KernelTable()


    @kernels.implements(linear)
    def product(ctx, x, weight):
        raise OSError("gone")


    class Sad(Backend):
        name = "sad"
        API = (1, 0)
        driver = False

        def devices(self):
            return [Device("Sad One", "cpu")]

        def open(self, device):
            return AddressedTarget("sad", device, kernels)


    @hookimpl
    def trueup_backends():
        return [Sad]
"""


def test_what_a_kernel_raises_is_told_with_kernel_and_node(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin("sad", SAD)
    line = trueup("run", "-p", "def ", "-n", 1, "--backend", "sad", "--allow-fallback").refused()
    assert re.fullmatch(r"gone \(in kernel product of sad, #\d+ linear\(x: f32\[.*, weight: .*\]\)\)", line)


def test_a_device_is_chosen_by_name(trueup: Run, acme: None) -> None:
    assert (
        "acme has no device 'three'; it has 0: Acme One, 1: Acme Two"
        in trueup("run", "--backend", "acme:three").refused()
    )


@pytest.mark.fault("B81")
def test_a_broken_plugins_reason_is_given(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin("sad", "raise OSError('libsad.so is not there')")
    line = trueup("run", "--backend", "sad").refused()
    assert line == "backend sad: plugin sad (acme 1.2) is broken: import failed: OSError: libsad.so is not there"


@pytest.mark.fault("B82", "B83")
def test_a_backend_that_is_not_available_names_itself(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin(
        "gone",
        """
        from trueup.core.backend import Backend
        from trueup.core.errors import Unavailable
        from trueup.core.plugins import hookimpl


        class Gone(Backend):
            name = "gone"
            API = (1, 0)

            def devices(self):
                raise Unavailable("no driver\\nof version 12")

            def open(self, device):
                raise AssertionError


        @hookimpl
        def trueup_backends():
            return [Gone]
        """,
    )
    assert trueup("run", "--backend", "gone").refused() == "backend gone can't be used here: no driver of version 12"


@pytest.mark.fault("B81")
def test_no_plugin_is_imported_for_what_is_built_in(trueup: Run, plugin: Callable[[str, str], None]) -> None:
    plugin("tattler", "raise SystemExit(9)")
    assert trueup("run", "-p", "def ", "-n", 1).code == 0
    assert trueup("inspect").code == 0
    assert trueup("explain", "--json").code == 0
    assert "tattler" not in sys.modules


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["missing.gguf", "-p", "x"], "missing.gguf: No such file or directory"),
        (["{garbage}", "-p", "x"], "not a GGUF file"),
        (["{folder}", "-p", "x"], "folder holds no .gguf file"),
        (["-f", "missing.txt"], "missing.txt: No such file or directory"),
        (["missing.gguf"], "missing.gguf: No such file or directory"),
        (["missing.gguf", "--chat"], "missing.gguf: No such file or directory"),
        (["--chat", "--draft", "2", "--draft-model", "less.gguf"], "less.gguf: No such file or directory"),
        (["--chat", "--draft", "2", "--mtp", "head.gguf"], "head.gguf: No such file or directory"),
        (["-f", "{folder}"], "Is a directory"),
        (["-f", "{garbage}"], "not UTF-8 text, at byte 1"),
        (["--backend", "abacus", "-p", "x"], "there is no backend 'abacus'; known are cpu, "),
        (["--backend", "cpu:9", "-p", "x"], "has no device '9'"),
        (["--backend", "reference", "--threads", "2", "-p", "x"], "--threads: backend reference has no threads to set"),
        (["--temp", "-1", "-p", "x"], "temperature: found -1.0"),
        (["--temp", "nan", "-p", "x"], "temperature: found nan"),
        (["--top-p", "1.5", "-p", "x"], "top_p: found 1.5"),
        (["--seed", "-1", "-p", "x"], "seed: found -1"),
        (["--stop", "", "-p", "x"], "an empty stop string"),
        (["--ctx", "4097", "-p", "x"], "context must lie in 1 … 4096"),
        (["--ctx", "2", "-p", "a b c d"], "exceed the context of 2"),
        (["-p", "\ud800"], "lone surrogate U+D800"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_1(trueup: Run, tmp_path: Path, args: list[str], said: str) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"G\xff" * 500)
    folder = tmp_path / "empty"
    folder.mkdir()
    done = trueup("run", *(a.format(garbage=garbage, folder=folder) for a in args))
    assert said in done.refused()
    assert done.out == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--tempp", "1"], "No such option: --tempp"),
        (["--temp", "warm"], "Invalid value for '--temp'"),
        (["-n", "-1"], "Invalid value for '--max-tokens' / '-n'"),
        (["-p", "x", "-f", "y"], "give --prompt or --file, not both"),
        (["{model}"], "there is no prompt"),
        (["--chat"], "there is no prompt"),
        (["-p", "x", "--system", "y"], "--system needs --chat"),
        (["a.gguf", "b.gguf"], "unexpected extra argument"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    trueup: Run, tmp_path: Path, args: list[str], said: str
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    line = trueup("run", *(a.format(model=model) for a in args)).refused(2)
    assert said in line
    assert "(see trueup run --help)" in line


def test_a_model_without_a_template_cannot_chat(trueup: Run, altered: Callable[..., Path]) -> None:
    path = altered(b"tokenizer.chat_template", b"tokenizer.chat_templatf")
    assert "has no chat template" in trueup("run", path, "--chat", "-p", "hi").refused()
    assert "has no chat template" in trueup("chat", path).refused()


def test_traceback_shows_where_an_error_arose(trueup: Run) -> None:
    with pytest.raises(FileNotFoundError):
        trueup("--traceback", "run", "missing.gguf", "-p", "x")
