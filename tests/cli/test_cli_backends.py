"""`trueup backends`, `plugins`, `doctor`: what is broken is named with its reason, and disturbs nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.cli import checkup
from trueup.cli.doctor import try_device

Run = Callable[..., Any]
Install = Callable[[str, str], None]

BACKEND = """
    import os
    import time

    import numpy as np

    from trueup.core.backend import Backend, Device, KernelTable, ManagedTarget
    from trueup.core.errors import Unavailable
    from trueup.core.ops import linear, top_k
    from trueup.core.plugins import hookimpl

    kernels = KernelTable()


    @kernels.implements(linear)
    def _(x, w):
        {kernel}


    class Card(Backend):
        name = "card"
        API = (1, 0)

        def devices(self):
            {devices}

        def open(self, device):
            return ManagedTarget("card", device, kernels)


    @hookimpl
    def trueup_backends():
        return [Card]
"""
RIGHT = "return x @ np.asarray(w).T"
ONE = "return [Device('Card', 'gpu', memory=3 << 29, features=frozenset({'b', 'a'}))]"


@pytest.fixture
def card(plugin: Install) -> Callable[..., None]:
    """Installs a backend `card` with this body of `linear` and of `devices`."""

    def install(kernel: str = RIGHT, devices: str = ONE) -> None:
        plugin("card", BACKEND.format(kernel=kernel, devices=devices))

    return install


def test_backends_in_json(trueup: Run, card: Callable[..., None]) -> None:
    card()
    said = {b["name"]: b for b in json.loads(trueup("backends", "--json").out)}
    for b in said.values():
        assert set(b) == {"name", "available", "reason", "plugin", "dist", "version", "api", "devices"}
        assert b["available"] == (b["reason"] == "") == bool(b["devices"]) and b["api"] == [1, 0]
    assert all(said[name]["available"] for name in ("cpu", "reference", "card"))
    assert said["card"]["dist"] == "acme" and said["card"]["version"] == "1.2"
    (device,) = said["card"]["devices"]
    assert device == {
        "name": "Card",
        "kind": "gpu",
        "memory": 3 << 29,
        "limits": {},
        "features": ["a", "b"],
        "versions": {},
        "hardware": None,
    }
    assert said["cpu"]["devices"][0]["versions"]["isa"]


@pytest.mark.fault("B82")
def test_a_backend_that_can_not_be_used_says_why(trueup: Run, card: Callable[..., None]) -> None:
    card(devices="raise Unavailable('libcard.so.1 is not there')")
    (found,) = (b for b in json.loads(trueup("backends", "--json").out) if b["name"] == "card")
    assert not found["available"] and found["reason"] == "libcard.so.1 is not there" and found["devices"] == []
    text = trueup("backends").out
    assert any(
        line.split()[:2] == ["card", "no"] and line.endswith("libcard.so.1 is not there") for line in text.splitlines()
    )


@pytest.mark.fault("B82")
def test_a_driver_that_crashes_is_a_reason(trueup: Run, card: Callable[..., None]) -> None:
    card(devices="os._exit(11)")
    (found,) = (b for b in json.loads(trueup("backends", "--json").out) if b["name"] == "card")
    assert not found["available"] and "code 11" in found["reason"]


@pytest.mark.fault("B81")
def test_broken_plugins_are_listed_and_everything_else_works(trueup: Run, plugin: Install) -> None:
    plugin("sad", "import a_module_that_is_not_there")
    plugin("leaver", "import sys\nsys.exit(3)")
    plugin(
        "thief",
        "from trueup.core.plugins import hookimpl\n@hookimpl\ndef trueup_commands(cli):\n    cli.command('run')(print)",
    )
    said = {p["name"]: p for p in json.loads(trueup("plugins", "--json").out)}
    for p in said.values():
        assert set(p) == {"name", "module", "dist", "version", "status", "reason", "api", "hooks", "provides"}
    assert said["sad"]["status"] == said["leaver"]["status"] == said["thief"]["status"] == "broken"
    assert "a_module_that_is_not_there" in said["sad"]["reason"]
    assert "SystemExit: 3" in said["leaver"]["reason"]
    assert "the command 'run' is taken" in said["thief"]["reason"]
    assert said["cpu"]["status"] == "ok" and said["cpu"]["provides"] == {"backends": ["cpu"]}
    assert said["cpu"]["api"] == [1, 0] and said["cpu"]["hooks"] == ["trueup_backends"]
    assert said["qwen4exp"]["provides"] == {"architectures": ["qwen4exp"]}
    text = trueup("plugins").out
    assert any(line.startswith("sad") and "broken" in line and "acme 1.2" in line for line in text.splitlines())
    assert "trueup: plugins that did not load: leaver, sad" in trueup("backends").err
    assert trueup("--help").code == 0


def test_plugins_that_are_not_allowed_do_not_load(
    trueup: Run, plugin: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("sad", "raise AssertionError")
    monkeypatch.setenv("TRUEUP_PLUGINS", "")
    said = {p["name"]: p for p in json.loads(trueup("plugins", "--json").out)}
    assert said["sad"]["status"] == "blocked"


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_what_is_expected_is_numpys() -> None:
    product = checkup.X @ checkup.W.T
    order = np.argsort(-product, axis=1)[:, :2]
    assert checkup.INDICES == order.tolist()
    assert np.take_along_axis(product, order, 1).tolist() == checkup.VALUES


@pytest.mark.fault("B23")
def test_doctor_runs_every_device(trueup: Run) -> None:
    done = trueup("doctor", "--json")
    said = json.loads(done.out)
    assert done.code == (0 if all(d["ok"] for d in said["devices"]) else 1)
    outcomes = {d["backend"]: d for d in said["devices"]}
    for name in ("cpu", "reference"):
        d = outcomes[name]
        assert d["ok"] and d["reason"] == "" and 0 < d["seconds"] < 60 and sum(d["nodes"].values()) == 2
    assert said["system"]["numpy"] == np.__version__ and "in use: " in said["system"]["instruction sets"]
    assert {u["backend"] for u in said["unusable"]}.isdisjoint(outcomes)


def test_doctor_shows_what_a_person_needs(trueup: Run, card: Callable[..., None], plugin: Install) -> None:
    card()
    plugin("sad", "raise ImportError('no libsad')")
    done = trueup("doctor")
    assert done.code == 0, "a device that is right is ok, though it refuses some; a broken plugin is no backend"
    lines = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert " ok " in lines["cpu"] and " ok " in lines["reference"]
    assert "1 device, 1 fallback" in lines["card"] and "refuses top_k: no kernel for top_k" in lines["card"]
    assert "broken" in lines["plugin"] or "no libsad" in done.out


@pytest.mark.fault("B23")
def test_a_device_that_is_wrong_is_exit_code_1(trueup: Run, card: Callable[..., None]) -> None:
    card("return x @ np.asarray(w).T + 1")
    done = trueup("doctor", "--json")
    assert done.code == 1
    outcomes = {d["backend"]: d for d in json.loads(done.out)["devices"]}
    assert not outcomes["card"]["ok"] and outcomes["cpu"]["ok"] and outcomes["reference"]["ok"]
    assert outcomes["card"]["reason"] == "values are [[7.0, 6.0], [1.75, 1.0]], expected [[6, 5], [0.75, 0]]"


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("os._exit(139)", "its process ended with code 139"),
        ("raise RuntimeError('the card fell off')", "RuntimeError: the card fell off"),
    ],
)
def test_a_device_that_fails_gives_the_reason(card: Callable[..., None], kernel: str, why: str) -> None:
    card(kernel)
    outcome = try_device("card", 0)
    assert not outcome["ok"] and why in outcome["reason"]


def test_a_device_that_refuses_everything_is_not_ok(card: Callable[..., None], plugin: Install) -> None:
    plugin("card", BACKEND.format(kernel=RIGHT, devices=ONE).replace("@kernels.implements(linear)", ""))
    assert try_device("card", 0)["reason"].startswith("it refuses everything: linear: ")


def test_a_device_that_hangs_is_given_up(card: Callable[..., None]) -> None:
    card("time.sleep(60)")
    assert try_device("card", 0, timeout=1.5)["reason"] == "no result within 1.5 s"


# -- plugins left out --------------------------------------------------------------------------------------------------


def test_a_plugin_is_left_out_for_a_run(trueup: Run, card: Callable[..., None], plugin: Install) -> None:
    """In this process and in those that it starts; the next run has it again."""
    card()
    plugin("sad", "raise AssertionError")
    said = {p["name"]: p for p in json.loads(trueup("-p", "no:sad", "-p", "no:cpu", "plugins", "--json").out)}
    assert {n: p["status"] for n, p in said.items() if p["status"] != "ok"} == {"sad": "blocked", "cpu": "blocked"}
    assert said["sad"]["reason"] == "by its name (-p no:sad)" and said["card"]["status"] == "ok"
    assert "is blocked: by its name (-p no:card)" in trueup("-p", "no:card", "run", "--backend", "card").refused()
    names = {b["name"] for b in json.loads(trueup("-p", "no:card", "backends", "--json").out)}
    assert "cpu" in names and "card" not in names
    listed = trueup("-p", "no:card", "backends")
    assert listed.err == "trueup: plugins that did not load: sad; see trueup plugins\n"
    assert trueup("-p", "no:card", "-p", "no:sad", "backends").err == "", "nobody is told what he asked for"
    assert "TRUEUP_PLUGINS_BLOCKED" not in os.environ
    again = {p["name"]: p["status"] for p in json.loads(trueup("plugins", "--json").out)}
    assert (again["card"], again["cpu"], again["sad"]) == ("ok", "ok", "broken")


def test_the_kit_leaves_it_out_too(trueup: Run, plugin: Install) -> None:
    """The processes that a command starts have the same plugins: here one that would end them."""
    plugin("fatal", "import os\nos._exit(9)")
    done = trueup("-p", "no:fatal", "check", "--backend", "fatal", "--level", "ops", "--op", "add")
    assert "plugin fatal (acme 1.2) is blocked: by its name" in done.refused()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("cpu", "expected no:NAME, got 'cpu'"),
        ("no:", "expected no:NAME, got 'no:'"),
        ("yes:cpu", "expected no:NAME, got 'yes:cpu'"),
        ("no:gpu", "there is no plugin 'gpu'; there are cpu, "),
    ],
)
def test_what_can_not_be_left_out(trueup: Run, word: str, why: str) -> None:
    assert why in trueup("-p", word, "plugins").refused(2)


def test_commands_of_a_plugin_left_out_are_not_there(trueup: Run, plugin: Install) -> None:
    plugin(
        "hello",
        """
        from trueup.core.plugins import hookimpl
        @hookimpl
        def trueup_commands(cli):
            cli.command("hello")(lambda: None)
        """,
    )
    assert trueup("hello").code == 0 and "  hello" in trueup("--help").out
    assert "No such command 'hello'" in trueup("-p", "no:hello", "hello").refused(2)
    assert "  hello" not in trueup("-p", "no:hello", "--help").out


@pytest.mark.fault("B81")
def test_a_plugin_that_ends_the_process_disturbs_no_command(trueup: Run, plugin: Install) -> None:
    plugin("fatal", "import ctypes\nctypes.string_at(0)")
    for command in (("--help",), ("plugins",), ("backends",), ("run", "--backend", "reference", "-n", 1)):
        assert trueup(*command).code == 0
    (found,) = (p for p in json.loads(trueup("plugins", "--json").out) if p["name"] == "fatal")
    assert found["status"] == "broken" and "ended the process that tried it with SIGSEGV" in found["reason"]
    assert "broken: import failed: it ended the process" in trueup("run", "--backend", "fatal").refused()
