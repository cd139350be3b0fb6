"""The plugin host among bad neighbours: each is listed with distribution, version and reason, and disturbs nobody.

Plugins are real distributions, a module and a `.dist-info`, in a directory of the test.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.metadata import distributions, entry_points
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import typer

from trueup.core.errors import Unavailable
from trueup.core.op import OPS
from trueup.core.plugins import BackendInfo, Plugin, PluginHost, list_backends
from trueup.core.plugins import host as the_host

NUMBER = count()
IN_TREE = {"cpu", "reference"}

GOOD = """
from trueup.core.backend import Backend, Device
from trueup.core.plugins import hookimpl

class Good(Backend):
    name = "{name}"
    API = (1, 0)
    driver = False
    def devices(self):
        return [Device("one", "gpu", memory=8, limits={{"warp": 32}}, features=frozenset(["f16", "bf16"]))]
    def open(self, device):
        raise NotImplementedError

@hookimpl
def trueup_backends():
    return [Good]
"""


class Site:
    """A directory of distributions."""

    def __init__(self, path: Path) -> None:
        self.path, self.names = path, dict[str, str]()

    def add(
        self, name: str, code: str, *, version: str = "1.2", dist: str = "", object: str = "", **points: str
    ) -> str:
        """A distribution `acme-NAME` with the plugin NAME; its module's name."""
        dist, module = dist or f"acme-{name}", f"acme_{name.replace('-', '_')}_{next(NUMBER)}"
        (self.path / f"{module}.py").write_text(textwrap.dedent(code))
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        with (info / "entry_points.txt").open("a") as f:
            f.write("[trueup]\n" * (f.tell() == 0) + f"{name} = {module}{object}\n")
        self.names[name] = module
        return module

    def host(self, *, isolate: bool = False, **kwargs: Any) -> PluginHost:
        """Three plugins of the tree, and those of this directory; imported here alone, unless told otherwise."""
        named = {*IN_TREE, "qwen4exp"}
        tree = {
            p.name: p for p in entry_points(group="trueup") if p.dist and p.dist.name == "trueup" and p.name in named
        }
        mine = [p for d in distributions(path=[str(self.path)]) for p in d.entry_points]
        return PluginHost([*tree.values(), *mine], isolate=isolate, **kwargs)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in ("TRUEUP_PLUGINS", "TRUEUP_PLUGINS_BLOCKED"):
        monkeypatch.delenv(name, raising=False)
    ops, made = dict(OPS), Site(tmp_path)
    yield made
    for module in made.names.values():
        sys.modules.pop(module, None)
    OPS.clear()
    OPS.update(ops)


def listed(host: PluginHost, name: str) -> Plugin:
    (plugin,) = [p for p in host.plugins if p.name == name]
    return plugin


# -- broken plugins ----------------------------------------------------------------------------------------------------

HOOK = "from trueup.core.plugins import hookimpl\n"
BROKEN: dict[str, tuple[str, str]] = {
    "missing-import": ("import no_such_module", "import failed: ModuleNotFoundError: No module named 'no_such_module'"),
    "import-error": ("raise ImportError('libgpu.so:\\n not found')", "import failed: ImportError: libgpu.so: not found"),
    "syntax": ("def f(:", "import failed: SyntaxError: "),
    "exit": ("import sys; sys.exit(3)", "import failed: SystemExit: 3"),
    "quiet-exit": ("raise SystemExit", "import failed: SystemExit"),
    "base": ("class Odd(BaseException): ...\nraise Odd('x')", "import failed: Odd: x"),
    "recursion": ("def f(): f()\nf()", "import failed: RecursionError: "),
    "raises": (HOOK + "@hookimpl\ndef trueup_backends(): raise OSError('no device')", "OSError: no device"),
    "exits": (HOOK + "@hookimpl\ndef trueup_backends(): raise SystemExit(1)", "SystemExit: 1"),
    "none": (HOOK + "@hookimpl\ndef trueup_backends(): return None", "trueup_backends must return a list, got NoneType"),
    "bare": (GOOD.format(name="bare").replace("[Good]", "Good"), "trueup_backends must return a list, got ABCMeta"),
    "instance": (
        GOOD.format(name="instance").replace("[Good]", "[Good()]"),
        "trueup_backends must return subclasses of trueup.core.backend.Backend, got <",
    ),
    "other-class": (
        HOOK + "@hookimpl\ndef trueup_backends(): return [int]",
        "trueup_backends must return subclasses of trueup.core.backend.Backend, got <class 'int'>",
    ),
    "abstract": (GOOD.format(name="abstract").replace("def open", "def close"), "Good lacks open"),
    "nameless": (GOOD.format(name="x").replace('name = "x"', ""), "Good.name must be an identifier, got None"),
    "odd-name": (GOOD.format(name="a b"), "Good.name must be an identifier, got 'a b'"),
    "unmarked": (GOOD.format(name="unmarked").replace("@hookimpl", ""), "trueup_backends is not marked with @hookimpl"),
    "unmarked-commands": (
        GOOD.format(name="unmarked2") + "\ndef trueup_commands(cli): ...",
        "trueup_commands is not marked with @hookimpl",
    ),
    "arguments": (
        HOOK + "@hookimpl\ndef trueup_backends(wanted): return []",
        "PluginValidationError: Plugin 'arguments' for hook 'trueup_backends'",
    ),
    "unknown-hook": (
        HOOK + "@hookimpl\ndef trueup_backend(): return []",
        "ValueError: unknown hook trueup_backend; known are trueup_architectures, trueup_backends, trueup_commands, "
        "trueup_drafters, trueup_ops",
    ),
    "takes-cpu": (GOOD.format(name="cpu"), "ValueError: the name 'cpu' is taken by plugin cpu (trueup "),
    "twice": (GOOD.format(name="twice").replace("[Good]", "[Good, Good]"), "trueup_backends returns the name 'twice' twice"),
    "next-major": (
        GOOD.format(name="x").replace("(1, 0)", "(2, 0)"),
        "ValueError: it speaks version 2.0 of the plugin contract, this trueup 1.0",
    ),
    "next-minor": (
        GOOD.format(name="x").replace("(1, 0)", "(1, 99)"),
        "ValueError: it speaks version 1.99 of the plugin contract, this trueup 1.0",
    ),
    "odd-version": (
        GOOD.format(name="x").replace("(1, 0)", "'1.0'"),
        "Good.API must be (major, minor), got '1.0'",
    ),
    "no-version": (
        GOOD.format(name="x").replace("API = (1, 0)", ""),
        "TypeError: Good declares no API: the version of the plugin contract that it was written against, as numbers; this "
        "trueup's is 1.0",
    ),
    "inherited-version": (
        "from trueup.backends.cpu import Cpu\n"
        + GOOD.format(name="x").replace("API = (1, 0)", "").replace("(Backend)", "(Cpu)"),
        "TypeError: Good declares no API: ",
    ),
    "no-ops": (HOOK + "@hookimpl\ndef trueup_ops(): return ['top_k']", "trueup_ops must return ops, got 'top_k'"),
    "no-architecture": (
        HOOK + "@hookimpl\ndef trueup_architectures(): return ['llama']",
        "expected a class with a name, got 'llama'",
    ),
    "takes-architecture": (
        HOOK + "class A:\n    name = 'qwen4exp'\n@hookimpl\ndef trueup_architectures(): return [A]",
        "the name 'qwen4exp' is taken by plugin qwen4exp (trueup ",
    ),
}  # fmt: skip


@pytest.mark.fault("B81")
def test_broken_plugins_are_listed_with_the_reason_and_the_rest_works(site: Site) -> None:
    """All of them at once, among good ones."""
    site.add("aaa", GOOD.format(name="first"), version="7.0")
    for name, (code, _) in BROKEN.items():
        site.add(name, code, version=f"0.{len(name)}")
    site.add("zzz", GOOD.format(name="last"))
    host = site.host().load()
    for name, (_, reason) in BROKEN.items():
        p = listed(host, name)
        assert (p.status, p.dist, p.version) == ("broken", f"acme-{name}", f"0.{len(name)}")
        assert reason in p.reason and "\n" not in p.reason, f"{name}: {p.reason}"
        assert p.provides == {} and not host._manager.has_plugin(name), "nothing of it stays"
    assert {p.name for p in host.plugins if p.status == "ok"} == {"cpu", "reference", "qwen4exp", "aaa", "zzz"}
    assert set(host.backends) == IN_TREE | {"first", "last"}
    assert listed(host, "aaa").provides == {"backends": ["first"]}
    for name in (*IN_TREE, "first", "last"):
        assert host.backend(name).name == name
    assert host.backend("cpu").__module__ == "trueup.backends.cpu"


@pytest.mark.fault("B81")
def test_nothing_of_a_half_broken_plugin_stays(site: Site) -> None:
    """Two good backends, an architecture, two ops, and one name that is taken."""
    code = (
        GOOD.format(name="half")
        + """
class Other(Good):
    name = "reference"
class Arch:
    name = "acme"
from trueup.core.op import op
@op("x[n] -> y[n]")
def acme_double(x):
    \"\"\"Twice.\"\"\"
    return x * 2
@hookimpl
def trueup_architectures():
    return [Arch]
@hookimpl
def trueup_ops():
    return [acme_double]
"""
    )
    site.add("half", code.replace("[Good]", "[Good, Other]"))
    site.add("late", code.replace("half", "late").replace("acme_double", "acme_triple") + "\nraise OSError('late')")
    site.add("whole", code.replace("half", "whole").replace("acme_double", "acme_four"))
    host = site.host().load()
    assert set(host.backends) == IN_TREE | {"whole"} and "acme" in host.architectures
    assert listed(host, "half").reason.startswith(
        "ValueError: the name 'reference' is taken by plugin reference (trueup"
    )
    assert listed(host, "late").reason == "import failed: OSError: late"
    assert listed(host, "whole").provides == {"backends": ["whole"], "architectures": ["acme"], "ops": ["acme_four"]}
    assert {"acme_double", "acme_triple"}.isdisjoint(OPS) and "acme_four" in OPS
    assert host.architecture("acme") is host.architectures["acme"][0] and host.architecture("half") is None


def test_ops_of_the_tree_stay_whoever_imported_them_first(site: Site) -> None:
    code = """
    from trueup.core.op import op
    def acme_of_the_tree(x):
        "The same."
        return x
    acme_of_the_tree.__module__ = "trueup.models.some"
    op("x[n] -> y[n]")(acme_of_the_tree)
    raise OSError
    """
    site.add("first", code)
    assert listed(site.host().load(), "first").status == "broken" and "acme_of_the_tree" in OPS


def test_one_plugin_name_is_one_plugin(site: Site) -> None:
    site.add("twin", GOOD.format(name="one"), dist="acme-a")
    site.add("twin", GOOD.format(name="two"), dist="acme-b")
    site.add("cpu", GOOD.format(name="mine"))
    site.add("ill", "raise OSError", dist="acme-c")
    site.add("ill", GOOD.format(name="well"), dist="acme-d")
    host = site.host().load()
    reasons = {p.dist: p.reason for p in host.plugins if p.status == "broken"}
    assert reasons.pop("acme-c") == "import failed: OSError"
    assert reasons.pop("acme-cpu") == "the plugin name 'cpu' is taken"
    assert list(reasons.values()) == ["the plugin name 'twin' is taken"]
    assert {"well"} < set(host.backends) - IN_TREE and len(host.backends) == 4


def test_a_broken_plugin_of_the_tree_gives_its_name_to_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or `--backend cpu` would run on a stranger."""
    site.add("stranger", GOOD.format(name="cpu"))
    site.add("cpu", GOOD.format(name="other"))
    monkeypatch.setitem(sys.modules, "trueup.backends.cpu", None)
    host = site.host().load()
    assert "import failed: ModuleNotFoundError" in next(p for p in host.plugins if p.name == "cpu").reason
    assert (
        listed(host, "stranger").reason == "ValueError: the name 'cpu' is taken by trueup, whose plugin cpu is broken"
    )
    assert set(host.backends) == {"reference"}
    with pytest.raises(Unavailable, match=r"backend cpu: plugin cpu \(trueup .*\) is broken: import failed: Module"):
        host.backend("cpu")


def test_metadata_that_says_little(site: Site) -> None:
    site.add("plain", GOOD.format(name="plain"))
    next(site.path.glob("*.dist-info/METADATA")).unlink()
    host = site.host().load()
    assert listed(host, "plain").status == "ok" and listed(host, "plain").version == "?"


def test_a_plugin_that_asks_for_plugins(site: Site) -> None:
    site.add("aaa", "import builtins\nbuiltins.acme_host.load()\n" + GOOD.format(name="first"))
    site.add("zzz", GOOD.format(name="last"))
    import builtins

    builtins.acme_host = host = site.host()  # type: ignore[attr-defined]
    try:
        host.load()
    finally:
        del builtins.acme_host  # type: ignore[attr-defined]
    assert set(host.backends) == IN_TREE | {"first", "last"} and len(host.plugins) == 5


def test_an_interrupt_is_none_of_the_plugins_business(site: Site) -> None:
    site.add("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.host().load()


def test_objects_are_plugins_too(site: Site) -> None:
    code = GOOD.format(name="inner").replace("@hookimpl\ndef trueup_backends():\n    return [Good]", "")
    code += "class P:\n    @hookimpl\n    def trueup_backends(self):\n        return [Good]\nplugin = P()\n"
    site.add("object", code, object=":plugin")
    site.add("nothing", "", object=":plugin")
    host = site.host().load()
    assert "inner" in host.backends
    assert listed(host, "nothing").reason.startswith("import failed: AttributeError: ")


# -- which plugins are loaded ------------------------------------------------------------------------------------------


@pytest.mark.fault("B81")
def test_names_of_the_tree_are_found_without_the_others(site: Site) -> None:
    module = site.add("slow", GOOD.format(name="slow"))
    host = site.host()
    assert host.backend("cpu").name == "cpu" and host.architecture("qwen4exp") is not None
    assert module not in sys.modules and "slow" not in {p.name for p in host.plugins}
    assert host.backend("slow").name == "slow" and module in sys.modules


def test_an_unknown_name_says_what_is_known_and_what_is_broken(site: Site) -> None:
    site.add("ill", "raise OSError('no driver')")
    host = site.host()
    with pytest.raises(Unavailable) as e:
        host.backend("gpu")
    assert str(e.value) == (
        "there is no backend 'gpu'; known are cpu, reference; plugin ill is broken: import failed: OSError: no driver"
    )
    with pytest.raises(Unavailable, match=r"^backend ill: plugin ill \(acme-ill 1.2\) is broken: import failed: OSE"):
        host.backend("ill")


def test_a_plugin_without_a_distribution_is_told_by_its_module() -> None:
    assert Plugin("mine", "my_module", "?", "?").origin == "mine (my_module)"
    assert Plugin("mine", "my_module", "acme", "1.2").origin == "mine (acme 1.2)"


@pytest.mark.parametrize(
    ("allow", "loaded"),
    [(None, {"one", "two"}), ("", set()), (" one , ", {"one"}), ("two,one", {"one", "two"}), ("three", set())],
)
@pytest.mark.parametrize("how", ["environment", "argument"])
def test_the_allow_list(
    site: Site, allow: str | None, loaded: set[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about third parties; empty, it is the safe mode. What is not on it is not even imported."""
    modules = {n: site.add(n, GOOD.format(name=n)) for n in ("one", "two")}
    if allow is not None and how == "environment":
        monkeypatch.setenv("TRUEUP_PLUGINS", allow)
    host = site.host(allow=allow if how == "argument" else None).load()
    assert set(host.backends) == IN_TREE | loaded
    for n in {"one", "two"} - loaded:
        assert (listed(host, n).status, listed(host, n).reason) == ("blocked", "not on the allow-list TRUEUP_PLUGINS")
        assert modules[n] not in sys.modules
        with pytest.raises(
            Unavailable, match=rf"backend {n}: plugin {n} \(acme-{n} 1.2\) is blocked: not on the allow"
        ):
            host.backend(n)


def test_of_third_parties_the_one_of_the_name_is_asked_first(site: Site) -> None:
    """The others are imported only where it does not bring the backend."""
    modules = {n: site.add(n, GOOD.format(name=f"{n}_card")) for n in ("aaa", "zzz")}
    modules["mine"] = site.add("mine", GOOD.format(name="mine"))
    host = site.host()
    assert host.backend("mine").name == "mine"
    assert modules["mine"] in sys.modules and modules["aaa"] not in sys.modules and modules["zzz"] not in sys.modules
    assert host.backend("zzz_card").name == "zzz_card" and modules["aaa"] in sys.modules


@pytest.mark.parametrize("how", ["environment", "argument"])
def test_plugins_are_blocked_by_name(site: Site, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever brings them, whatever the allow-list says; nobody gets the name of one of the tree."""
    modules = {n: site.add(n, GOOD.format(name=n)) for n in ("one", "two")}
    site.add("thief", GOOD.format(name="cpu"))
    if how == "environment":
        monkeypatch.setenv("TRUEUP_PLUGINS_BLOCKED", "one, cpu")
    host = site.host(allow="one,two,thief", block="one,cpu" if how == "argument" else None).load()
    assert set(host.backends) == {"reference", "two"} and modules["one"] not in sys.modules
    assert (listed(host, "one").status, listed(host, "one").reason) == ("blocked", "by its name (-p no:one)")
    assert listed(host, "thief").reason == "ValueError: the name 'cpu' is taken by trueup, whose plugin cpu is blocked"
    with pytest.raises(Unavailable, match=r"^backend cpu: plugin cpu \(trueup .*\) is blocked: by its name"):
        host.backend("cpu")


# -- what a plugin is ---------------------------------------------------------------------------------------------------


def test_a_plugin_is_listed_with_all_that_it_brings(site: Site) -> None:
    more = "\n@hookimpl\ndef trueup_ops():\n    return []\n"
    site.add("whole", GOOD.format(name="whole") + more, version="7.1")
    site.add("future", GOOD.format(name="future").replace("(1, 0)", "(3, 1)"))
    site.add("bare", HOOK)
    host = site.host().load()
    p = listed(host, "whole")
    assert (p.dist, p.version, p.status, p.reason, p.api) == ("acme-whole", "7.1", "ok", "", (1, 0))
    assert p.hooks == ["trueup_backends", "trueup_ops"] and p.provides == {"backends": ["whole"]}
    assert (listed(host, "future").api, listed(host, "future").hooks) == ((3, 1), []), "what it speaks is known"
    assert (listed(host, "bare").api, listed(host, "bare").hooks) == (None, [])
    assert listed(host, "qwen4exp").hooks == ["trueup_architectures"] and listed(host, "cpu").api == (1, 0)


# -- imports that do not come to an end -----------------------------------------------------------------------------------

FATAL: dict[str, tuple[str, str]] = {
    "segfault": ("import ctypes; ctypes.string_at(0)", "it ended the process that tried it with SIGSEGV: "),
    "abort": ("import os; os.abort()", "it ended the process that tried it with SIGABRT: "),
    "leave": (
        "import os, sys; print('no licence', file=sys.stderr, flush=True); os._exit(7)",
        "it ended the process that tried it with code 7: no licence",
    ),
    "hook": (
        HOOK + "import os\n@hookimpl\ndef trueup_backends(): os._exit(3)",
        "it ended the process that tried it with code 3: no message",
    ),
    "raises": ("raise OSError('as ever')", "OSError: as ever"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
}


@pytest.mark.fault("B81")
def test_an_import_that_ends_the_process_is_a_reason(site: Site) -> None:
    """All of them at once, tried in processes of their own; what works is there."""
    for name, (code, _) in FATAL.items():
        site.add(name, code)
    noisy = "import os, sys\nos.write(1, b'\\xff{')\nprint('trueup-probe', input() if False else '')\n"
    site.add("fine", noisy + GOOD.format(name="fine"))
    site.add("late", "import atexit, os\natexit.register(lambda: None)\n" + GOOD.format(name="late"))
    host = site.host(isolate=True)
    found = {i.name: i for i in host.info()}
    for name, (_, reason) in FATAL.items():
        p = listed(host, name)
        assert p.status == "broken" and p.reason.startswith(f"import failed: {reason}"), p
    assert found["fine"].available and found["late"].available and found["cpu"].available
    with pytest.raises(
        Unavailable, match="backend segfault: plugin segfault .* is broken: import failed: it ended the"
    ):
        host.backend("segfault")


@pytest.mark.fault("B81")
def test_an_import_that_hangs_is_given_up(site: Site) -> None:
    """Though what it has started holds on to its output; and only where it is asked for."""
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])"
    site.add("hang", f"import subprocess, sys, time\n{child}\ntime.sleep(600)")
    site.add("mine", GOOD.format(name="mine"))
    host = site.host(isolate=True, import_seconds=3)
    assert host.backend("mine").name == "mine" and "hang" not in {p.name for p in host.plugins}
    start = time.monotonic()
    with pytest.raises(
        Unavailable, match=r"backend hang: plugin hang .* is broken: import failed: not done within 3 s"
    ):
        host.backend("hang")
    host.load()
    assert time.monotonic() - start < 12, "it is tried once"
    assert listed(host, "hang").reason == "import failed: not done within 3 s"


def test_a_plugin_that_asks_for_plugins_is_tried_once(site: Site) -> None:
    """And not in processes of processes."""
    log = site.path / "log"
    count = f"import os\nwith open({str(log)!r}, 'a') as f: print(os.getpid(), file=f)\n"
    site.add("aaa", count + "from trueup.core.plugins import host\nhost().load()\n" + GOOD.format(name="first"))
    the_host.cache_clear()
    try:
        assert "first" in the_host().load().backends
    finally:
        the_host.cache_clear()
    tried, here = log.read_text().split()
    assert tried != here == str(os.getpid())


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands_are_added_wholly_or_not_at_all(site: Site) -> None:
    adds = "\n@hookimpl\ndef trueup_commands(cli):\n    @cli.command()\n    def {0}(): ...\n    {1}\n"
    site.add("fine", GOOD.format(name="fine") + adds.format("fine_one", ""))
    site.add("half", GOOD.format(name="half") + adds.format("half_one", "raise SystemExit('no')"))
    host, cli = site.host().load(), typer.Typer()
    host.add_commands(cli)
    assert [c.callback.__name__ for c in cli.registered_commands if c.callback] == ["fine_one"]
    assert listed(host, "half").reason == "trueup_commands failed: SystemExit: no"
    assert set(host.backends) == IN_TREE | {"fine"}, "a broken plugin brings nothing"
    assert listed(host, "fine").provides["commands"] == ["fine-one"] and listed(host, "half").provides == {}


# -- drivers -----------------------------------------------------------------------------------------------------------

PROBED: dict[str, tuple[str, str]] = {
    "segfault": ("import ctypes; ctypes.string_at(0)", "its driver ended the probing process with SIGSEGV: "),
    "abort": ("import os; os.abort()", "its driver ended the probing process with SIGABRT: "),
    "leave": ("import os; os._exit(7)", "its driver ended the probing process with code 7: no message"),
    "quit": ("raise SystemExit('bye')", "devices() failed: SystemExit: bye"),
    "hang": ("import time; time.sleep(600)", "its driver did not answer within "),
    "read": ("return [Device(input() or 'x', 'gpu')]", "devices() failed: EOFError"),
    "error": ("raise OSError('libgpu.so not found')", "devices() failed: OSError: libgpu.so not found"),
    "unavailable": ("raise Unavailable('no GPU in this machine')", "no GPU in this machine"),
    "silent": ("raise Unavailable()", "it gives no reason"),
    "empty": ("return []", "no device"),
    "nothing": ("return None", "devices() failed: TypeError: 'NoneType' object is not iterable"),
    "names": ("return ['gpu0']", "devices() must list trueup.core.backend.Device, got 'gpu0'"),
    "data": (
        "return [Device('a', 'gpu', limits={'x': {1}})]",
        "its driver ended the probing process with code 1: TypeError: Object of type set is not JSON serializable",
    ),
    "noise": (
        "import sys; sys.stdout.buffer.write(b'\\xff\\xfe no newline'); sys.stdout.flush()\n"
        "        import atexit; atexit.register(print, '{\"devices\": 3}')\n"
        "        return [Device('a', 'gpu', memory=2**40, limits={'x': 1}, features=frozenset('ba'), hardware='pci')]",
        "",
    ),
    "dies-late": (
        "import atexit, os; atexit.register(os.abort); return [Device('a', 'gpu')]",
        "",
    ),
}  # fmt: skip


HERE = {"quit", "error", "unavailable", "silent", "empty", "nothing", "names"}
"""Those that need no process of their own to be survived."""


def drivers(site: Site, names: set[str], driver: bool) -> None:
    for name in names:
        code = GOOD.format(name=name.replace("-", "_")).replace("driver = False", f"driver = {driver}")
        code = code.replace("import hookimpl", "import hookimpl\nfrom trueup.core.errors import Unavailable")
        head, _, rest = code.partition("        return [Device(")
        site.add(name, f"{head}        {PROBED[name][0]}\n{rest.partition(chr(10))[2]}")


def judge(info: dict[str, BackendInfo], names: set[str]) -> None:
    for name in names:
        i, reason = info[name.replace("-", "_")], PROBED[name][1]
        assert (i.plugin, i.dist, i.version) == (name, f"acme-{name}", "1.2")
        assert i.reason.startswith(reason) and i.available == (reason == "") == (not i.reason), f"{name}: {i.reason}"
        assert len(i.devices) == int(i.available)


@contextlib.contextmanager
def open_input() -> Iterator[None]:
    """Standard input that is open and says nothing, as a terminal's."""
    (r, w), kept = os.pipe(), os.dup(0)
    os.dup2(r, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for fd in (r, w, kept):
            os.close(fd)


@pytest.mark.fault("B81", "B82")
def test_drivers_are_asked_in_a_process_of_their_own(site: Site) -> None:
    """Whatever they do there is a reason, all at once; the child finds the plugin as this process does."""
    names = PROBED.keys() - HERE - {"hang"}
    drivers(site, names, driver=True)
    with open_input():
        info = {i.name: i for i in PluginHost().info(timeout=60)}
    judge(info, names)
    (device,) = info["noise"].devices
    assert (device.memory, device.limits, device.features) == (2**40, {"x": 1}, frozenset("ab"))
    assert info["reference"].available and "cpu" in info


@pytest.mark.fault("B82")
def test_a_driver_that_hangs_is_given_up(site: Site) -> None:
    drivers(site, {"hang"}, driver=True)
    host = site.host()
    start = time.monotonic()
    judge({i.name: i for i in host.info(timeout=2)}, {"hang"})
    assert time.monotonic() - start < 30


def test_backends_without_a_driver_are_asked_here(site: Site) -> None:
    drivers(site, HERE, driver=False)
    judge({i.name: i for i in site.host().info()}, HERE)


def test_a_backend_without_a_driver_is_asked_in_this_process(site: Site) -> None:
    asks = "def devices(self):\n        asked.append(1)"
    module = site.add("near", "asked = []\n" + GOOD.format(name="near").replace("def devices(self):", asks))
    info = {i.name: i for i in site.host().info()}
    assert sys.modules[module].asked == [1]
    assert info["near"].available and info["near"].devices[0].limits == {"warp": 32}


WATCH = """
import sys
touched = []
LIBRARIES = ("libcuda", "nvcuda", "libvulkan", "libOpenCL", "libnvrtc", "libmetal", "libze_loader", "libamdhip")
MODULES = {"cuda", "vulkan", "pyopencl", "mlx", "torch", "cupy", "Metal", "cffi"}
def audit(event, args):
    if event == "ctypes.dlopen" and args[0] and any(l in str(args[0]) for l in LIBRARIES):
        touched.append(f"dlopen {args[0]}")
    if event == "import" and str(args[0]).split(".")[0] in MODULES:
        touched.append(f"import {args[0]}")
sys.addaudithook(audit)
import trueup
import trueup.core.plugins as plugins
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.fault("B82")
def test_neither_import_nor_listing_touches_a_driver() -> None:
    assert run(WATCH + "assert plugins.list_backends(); print(touched)") == "[]"


def test_import_loads_little() -> None:
    heavy = "print(sorted({'numpy', 'gguf', 'pluggy', 'trueup.core'} & set(sys.modules)))"
    assert run(f"import sys, trueup; {heavy}") == "[]"


def test_the_hosts_list() -> None:
    info = {i.name: i for i in list_backends()}
    assert info["reference"].available and info["reference"].dist == "trueup" and info["reference"].api == (1, 0)
