"""`--draft` and its companions: the same text, what came of it on the last line, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Run = Any
GREEDY = ("--temp", "0")
PROMPT = "import os\n\ndef "


@pytest.fixture(scope="module")
def random_file() -> Path:
    return Path(__file__).parents[1] / "data/qwen4exp-random/qwen4exp-random-bf16.gguf"


@pytest.mark.parametrize("options", [("4",), ("auto",), ("3", "--drafter", "lookup"), ("2", "--rollback", "replay")])
def test_the_text_is_that_of_plain_decoding(trueup: Run, options: tuple[str, ...]) -> None:
    plain = json.loads(trueup("run", "-p", PROMPT, "-n", 24, *GREEDY, "--json").out)
    done = json.loads(trueup("run", "-p", PROMPT, "-n", 24, *GREEDY, "--json", "--draft", *options).out)
    assert done["tokens"] == plain["tokens"]
    assert done["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)
    assert plain["speculation"] is None and done["speculation"]["given_up"] is None


def test_the_last_line_says_what_came_of_it(trueup: Run) -> None:
    done = trueup("run", "-p", PROMPT, "-n", 24, *GREEDY, "--draft", "2")
    assert done.code == 0
    assert "; mtp drafted " in done.err and "% by position)" in done.err


@pytest.mark.parametrize(
    "options, said",
    [
        (("--draft", "0"), "--draft must be auto or a number of tokens of at least 1, got '0'"),
        (("--draft", "many"), "got 'many'"),
        (("--drafter", "lookup"), "--drafter needs --draft N or --draft auto"),
        (("--mtp", "x.gguf"), "--mtp needs --draft"),
        (("--draft", "2", "--rollback", "hope"), "--rollback must be auto, snapshots or replay, got 'hope'"),
        (("--draft", "2", "--drafter", "nobody"), "no drafter 'nobody'; there are lookup, model, mtp"),
        (("--draft", "2", "--drafter", "lookup", "--draft-model", "x.gguf"), "--draft-model is for --drafter model"),
        (("--draft", "2", "--drafter", "model"), "takes a draft model (--draft-model FILE)"),
    ],
)
def test_refusals_are_one_line(trueup: Run, options: tuple[str, ...], said: str) -> None:
    done = trueup("run", "-n", 2, *options)
    assert done.code != 0 and done.out == ""
    assert said in done.err and len(done.err.strip().splitlines()) == 1


def test_a_draft_model_of_another_vocabulary(trueup: Run, random_file: Path) -> None:
    done = trueup("run", "-n", 2, "--draft", "2", "--draft-model", str(random_file))
    assert done.code != 0 and "its vocabulary of 1024 tokens is not the model's of 4096" in done.err
