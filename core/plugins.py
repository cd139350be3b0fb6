"""The plugin host: finds plugins by entry points of the group `trueup`, loads them one at a time, and judges what they
bring.

The backends in the tree come through the same door as anyone's. A plugin that fails to import, registers a bad hook,
takes a name that is taken, returns a wrong type or speaks another version of the contract is recorded as broken, with
its distribution, version and reason, and disturbs nobody. Names in the tree are looked up first, so that a slow or
broken third party is not even imported for `--backend cpu`. Installed third parties are imported in a process of their own
first: one that crashes or hangs there is broken, too.

`TRUEUP_PLUGINS` lists the third-party plugins that may load, by entry-point name and comma-separated; set but empty it
is the safe mode: none. `TRUEUP_PLUGINS_BLOCKED` lists plugins that may not, whoever brings them.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any

import pluggy

from .backend import API, Backend, Device
from .errors import Unavailable
from .op import OPS, Op

GROUP = "trueup"
ALLOWED, BLOCKED = "TRUEUP_PLUGINS", "TRUEUP_PLUGINS_BLOCKED"
ANSWER = "trueup-probe "
"""Begins the line on which a process that exists to be survived answers."""
PROBING = "TRUEUP_PROBING"
"""Set in the environment of such a process: there nothing is tried in yet another one."""
IMPORT_SECONDS = 30.0
"""How long the import of a third party's plugin may take."""
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a plugin's hook implementations."""


class Hooks:
    """What a plugin may implement."""

    @hookspec
    def trueup_backends(self) -> list[type[Backend]]:
        """Backend classes."""
        raise AssertionError

    @hookspec
    def trueup_ops(self) -> list[Any]:
        """Ops made by `trueup.core.op.op`. Importing the module that defines them is enough; this lists them."""
        raise AssertionError

    @hookspec
    def trueup_architectures(self) -> list[Any]:
        """Architecture classes (`trueup.models.Architecture`)."""
        raise AssertionError

    @hookspec
    def trueup_drafters(self) -> list[Any]:
        """Drafter classes, for speculative decoding."""
        raise AssertionError

    @hookspec
    def trueup_commands(self, cli: Any) -> None:
        """Add commands to the Typer application `cli`."""
        raise AssertionError


@dataclass
class Plugin:
    """An entry point and what became of it. `status` is "ok", "broken" or "blocked" (by name, or not on the allow-list).

    `hooks` are those that it implements, `provides` what they brought, by kind; `api` is the version of the contract that
    its backends speak, None where it brings none.
    """

    name: str
    module: str
    dist: str
    version: str
    status: str = "ok"
    reason: str = ""
    api: tuple[int, int] | None = None
    hooks: list[str] = field(default_factory=list)
    provides: dict[str, list[str]] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """The plugin and what it came with, for messages: its distribution, or the module alone where it has none."""
        return f"{self.name} ({self.module if self.dist == '?' else f'{self.dist} {self.version}'})"

    def fail(self, reason: str) -> None:
        self.status, self.reason, self.hooks, self.provides = "broken", " ".join(reason.split()), [], {}


@dataclass(frozen=True)
class BackendInfo:
    """A backend as `trueup backends` shows it."""

    name: str
    plugin: str
    dist: str
    version: str
    api: tuple[int, int]
    available: bool
    reason: str
    devices: tuple[Device, ...]


class PluginHost:
    """Loads plugins and keeps what they bring, by name. Tests make their own; everyone else uses `host()`."""

    def __init__(
        self,
        points: Iterable[EntryPoint] | None = None,
        *,
        allow: str | None = None,
        block: str | None = None,
        isolate: bool = True,
        import_seconds: float = IMPORT_SECONDS,
    ) -> None:
        """`points`: entry points, by default those installed; `allow`, `block`: names that may load and that may not, by
        default TRUEUP_PLUGINS and TRUEUP_PLUGINS_BLOCKED; `isolate`: whether installed third parties are imported in a
        process of their own first, which may take `import_seconds`."""
        found = list(entry_points(group=GROUP) if points is None else points)
        self._points = sorted(found, key=lambda p: (_dist(p) != "trueup", p.name))
        allowed = os.environ.get(ALLOWED) if allow is None else allow
        self._allowed = None if allowed is None else _split(allowed)
        self._blocked = _split(os.environ.get(BLOCKED, "") if block is None else block)
        self._isolate, self._import_seconds = isolate and PROBING not in os.environ, import_seconds
        self._tried: dict[tuple[str, str], str] = {}
        """By name and module: why the import failed in a process of its own, or ""."""
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(Hooks)
        self.plugins: list[Plugin] = []
        self.backends: dict[str, tuple[type[Backend], Plugin]] = {}
        self.architectures: dict[str, tuple[Any, Plugin]] = {}
        self.drafters: dict[str, tuple[Any, Plugin]] = {}

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, *, third_party: bool = True, name: str | None = None) -> PluginHost:
        """Load what is not loaded yet: the plugins in the tree, then, unless told otherwise, the others, or of these only
        those of a name."""

        def wanted(point: EntryPoint) -> bool:
            return _dist(point) == "trueup" or (third_party and name in (None, point.name))

        self._try([p for p in self._points if wanted(p)])
        left = []
        while self._points:  # a plugin may ask for plugins while it is imported
            point = self._points.pop(0)
            if wanted(point):
                self._load(point)
            else:
                left.append(point)
        self._points = left
        return self

    def _try(self, points: list[EntryPoint]) -> None:
        """Import installed third parties in processes of their own, all at once. What they raise is found again here."""
        if not self._isolate:
            return
        new = [p for p in points if p.dist and _dist(p) != "trueup" and not self._barred(p)]
        new = [p for p in new if (p.name, p.value) not in self._tried]
        if not new:
            return
        with ThreadPoolExecutor(8) as pool:
            reasons = pool.map(lambda p: _try_import(p, self._import_seconds), new)
            self._tried.update(zip([(p.name, p.value) for p in new], reasons, strict=True))

    def _barred(self, point: EntryPoint) -> str:
        """Why a plugin may not load, or ""."""
        if point.name in self._blocked:
            return f"by its name (-p no:{point.name})"
        if _dist(point) != "trueup" and self._allowed is not None and point.name not in self._allowed:
            return f"not on the allow-list {ALLOWED}"
        return ""

    def _load(self, point: EntryPoint) -> None:
        dist, version = _dist(point), (point.dist and point.dist.version) or "?"
        plugin = Plugin(point.name, point.value, dist, version)
        self.plugins.append(plugin)
        if why := self._barred(point):
            plugin.status, plugin.reason = "blocked", why
            return
        others = [p for p in self.plugins if p.name == point.name and p is not plugin]
        if any(p.status == "ok" or p.dist == "trueup" for p in others):
            plugin.fail(f"the plugin name '{point.name}' is taken")
            return
        if why := self._tried.get((point.name, point.value), ""):
            plugin.fail(f"import failed: {why}")
            return
        ops = set(OPS)
        try:
            module = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a plugin may even call sys.exit while it is imported
            _forget_ops(ops)
            plugin.fail(f"import failed: {_text(e)}")
            return
        try:
            self._manager.register(module, name=point.name)
            unknown = [n for n in dir(module) if n.startswith("trueup_") and not hasattr(Hooks, n)]
            if unknown:
                raise ValueError(
                    f"unknown hook {unknown[0]}; known are {', '.join(n for n in dir(Hooks) if n[:7] == 'trueup_')}"
                )
            hooks = [n for n in dir(module) if n.startswith("trueup_")]
            for hook in hooks:
                if self._manager.parse_hookimpl_opts(module, hook) is None:
                    raise TypeError(f"{hook} is not marked with @hookimpl")
            accepted = self._collect(plugin, module)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            _forget_ops(ops)
            self._drop(plugin, _text(e))
            return
        plugin.hooks = hooks
        for table, name, made in accepted:
            table[name] = (made, plugin)

    def _drop(self, plugin: Plugin, reason: str) -> None:
        """Record a plugin as broken and keep nothing of it."""
        if self._manager.has_plugin(plugin.name):
            self._manager.unregister(name=plugin.name)
        for table in (self.backends, self.architectures, self.drafters):
            for name in [n for n, (_, owner) in table.items() if owner is plugin]:
                del table[name]
        plugin.fail(reason)

    def _collect(self, plugin: Plugin, module: Any) -> list[tuple[dict[str, Any], str, Any]]:
        """What the plugin's hooks return, checked as a whole: a plugin brings all of it or nothing."""
        accepted: list[tuple[dict[str, Any], str, Any]] = []
        kinds: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
            ("trueup_backends", self.backends, lambda made: _check_backend(made, plugin)),
            ("trueup_architectures", self.architectures, _named),
            ("trueup_drafters", self.drafters, _named),
        ]
        tree = {p.name: p for p in self.plugins if p.dist == "trueup" != plugin.dist}
        for hook, table, check in kinds:
            for made in self._call(module, hook):
                name = check(made)
                if table is self.backends and name in tree and name not in table:
                    raise ValueError(
                        f"the name '{name}' is taken by trueup, whose plugin {name} is {tree[name].status}"
                    )
                if name in table:
                    owner = table[name][1]
                    raise ValueError(f"the name '{name}' is taken by plugin {owner.origin}")
                if any(t is table and n == name for t, n, _ in accepted):
                    raise ValueError(f"{hook} returns the name '{name}' twice")
                accepted.append((table, name, made))
                plugin.provides.setdefault(hook.removeprefix("trueup_"), []).append(name)
        for made in self._call(module, "trueup_ops"):
            if not isinstance(made, Op):
                raise TypeError(f"trueup_ops must return ops, got {made!r}")
            plugin.provides.setdefault("ops", []).append(made.name)
        return accepted

    def _call(self, module: Any, hook: str) -> list[Any]:
        if not hasattr(module, hook):
            return []
        made = getattr(module, hook)()
        if not isinstance(made, list | tuple):
            raise TypeError(f"{hook} must return a list, got {type(made).__name__}")
        return list(made)

    # -- looking up ----------------------------------------------------------------------------------------------------

    def backend(self, name: str) -> Backend:
        """The backend of this name, made; Unavailable says what is known, or why the plugin of that name is broken."""
        for plugins in ({"third_party": False}, {"name": name}, {}):  # the likeliest first: each import takes its time
            self.load(**plugins)
            if name in self.backends:
                return self.backends[name][0]()
        broken = [p for p in self.plugins if p.status != "ok" and p.name == name]
        if broken:
            p = broken[0]
            raise Unavailable(f"backend {name}: plugin {p.origin} is {p.status}: {p.reason}")
        others = "".join(f"; plugin {p.name} is {p.status}: {p.reason}" for p in self.plugins if p.status != "ok")
        raise Unavailable(f"there is no backend '{name}'; known are {', '.join(sorted(self.backends))}{others}")

    def architecture(self, name: str) -> Any:
        """The architecture class for a GGUF's `general.architecture`, or None."""
        for third_party in (False, True):
            self.load(third_party=third_party)
            if name in self.architectures:
                return self.architectures[name][0]
        return None

    def drafter(self, name: str) -> Any:
        """The drafter class of this name; Unavailable names those that there are."""
        for third_party in (False, True):
            self.load(third_party=third_party)
            if name in self.drafters:
                return self.drafters[name][0]
        raise Unavailable(f"no drafter '{name}'; there are {', '.join(sorted(self.drafters))}")

    def add_commands(self, cli: Any) -> None:
        """Let each plugin add commands to a Typer application; one that fails is recorded as broken and adds none."""
        for plugin in self.plugins:
            module = self._manager.get_plugin(plugin.name) if plugin.status == "ok" else None
            if module is None or not hasattr(module, "trueup_commands"):
                continue
            commands, groups = list(cli.registered_commands), list(cli.registered_groups)
            try:
                module.trueup_commands(cli=cli)
            except KeyboardInterrupt:
                raise
            except BaseException as e:
                self._drop(plugin, f"trueup_commands failed: {_text(e)}")
                cli.registered_commands, cli.registered_groups = commands, groups
                continue
            added = cli.registered_commands[len(commands) :] + cli.registered_groups[len(groups) :]
            plugin.provides["commands"] = [_command_name(c) for c in added]

    def info(self, *, timeout: float = 20.0) -> list[BackendInfo]:
        """Every backend, available or why not. A child process asks the driver: a crash or a hang is a reason."""
        self.load()
        with ThreadPoolExecutor(8) as pool:
            probed = pool.map(lambda name: _probe(name, *self.backends[name], timeout=timeout), self.backends)
        out = []
        for (name, (cls, plugin)), (devices, reason) in zip(self.backends.items(), probed, strict=True):
            out.append(
                BackendInfo(name, plugin.name, plugin.dist, plugin.version, cls.API, not reason, reason, tuple(devices))
            )
        return out


@functools.cache
def host() -> PluginHost:
    """The plugin host of this process."""
    return PluginHost()


def list_backends() -> list[BackendInfo]:
    """Every backend that plugins bring: its devices, or the reason why it can't be used here."""
    return host().info()


def _probe(name: str, cls: type[Backend], plugin: Plugin, *, timeout: float) -> tuple[list[Device], str]:
    """A backend's devices or the reason why there are none, asked in a child process where that may load a driver."""
    if not cls.driver:
        return ask_devices(cls)
    answer, ending = _ask_child("devices", plugin.name, plugin.module, name, timeout=timeout)
    if answer is not None:
        return [_device(d) for d in answer["devices"]], answer["reason"]
    if not ending:
        return [], f"its driver did not answer within {timeout:g} s"
    return [], f"its driver ended the probing process with {ending}"


def _try_import(point: EntryPoint, timeout: float) -> str:
    """Why a plugin's import does not come to an end in a process of its own, or ""."""
    answer, ending = _ask_child("import", point.name, point.value, timeout=timeout)
    if answer is not None:
        return ""
    return f"it ended the process that tried it with {ending}" if ending else f"not done within {timeout:g} s"


def _ask_child(*args: str, timeout: float) -> tuple[dict[str, Any] | None, str]:
    """What `trueup.core.probe` answers in a child process; else None, and how that ended, or "" where it did not in time.

    What it prints goes to files: a pipe could be held open by what it has started itself.
    """
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trueup.core.probe", *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": path, PROBING: "1"},
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        said, errors = _lines(out), _lines(err)
    for line in reversed(said):  # and print after the answer
        if line.startswith(ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return answer, ""
    return None, f"{_ending(code)}: {errors[-1] if errors else 'no message'}"


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()  # a driver may print anything


def ask_devices(cls: type[Backend]) -> tuple[list[Device], str]:
    """A backend's devices, or the reason why there are none."""
    try:
        devices = list(cls().devices())
    except Unavailable as e:
        return [], str(e) or "it gives no reason"
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return [], f"devices() failed: {_text(e)}"
    wrong = [d for d in devices if not isinstance(d, Device)]
    if wrong:
        return [], f"devices() must list trueup.core.backend.Device, got {wrong[0]!r}"
    return devices, "" if devices else "no device"


def device_json(device: Device) -> dict[str, Any]:
    """A device as JSON data."""
    return {**asdict(device), "features": sorted(device.features)}


def _device(data: Mapping[str, Any]) -> Device:
    return Device(**{**data, "features": frozenset(data["features"])})


def _check_backend(made: Any, plugin: Plugin) -> str:
    """The name of a backend class; TypeError or ValueError where it is none, or speaks another version."""
    if not inspect.isclass(made) or not issubclass(made, Backend):
        raise TypeError(f"trueup_backends must return subclasses of trueup.core.backend.Backend, got {made!r}")
    if inspect.isabstract(made):
        raise TypeError(f"{made.__name__} lacks {', '.join(sorted(made.__abstractmethods__))}")
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{made.__name__}.name must be an identifier, got {name!r}")
    own = [c for c in made.__mro__ if not c.__module__.startswith("trueup.")]
    if plugin.dist != "trueup" and not any("API" in vars(c) for c in own):
        raise TypeError(
            f"{made.__name__} declares no API: the version of the plugin contract that it was written against, as numbers; "
            f"this trueup's is {API[0]}.{API[1]}"
        )
    api = getattr(made, "API", None)
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(n, int) for n in api)):
        raise TypeError(f"{made.__name__}.API must be (major, minor), got {api!r}")
    plugin.api = max(plugin.api or api, api)
    if api[0] != API[0] or api[1] > API[1]:
        raise ValueError(f"it speaks version {api[0]}.{api[1]} of the plugin contract, this trueup {API[0]}.{API[1]}")
    return name


def _named(made: Any) -> str:
    name = getattr(made, "name", None)
    if not inspect.isclass(made) or not isinstance(name, str) or not name:
        raise TypeError(f"expected a class with a name, got {made!r}")
    return name


def _split(names: str) -> set[str]:
    return {n.strip() for n in names.split(",") if n.strip()}


def _dist(point: EntryPoint) -> str:
    return (point.dist and point.dist.name) or "?"


def _forget_ops(known: set[str]) -> None:
    """Take back what a plugin defined. Ops of the tree stay: a plugin may have been the first to import them."""
    for name in OPS.keys() - known:
        if not OPS[name].body.__module__.startswith("trueup."):
            del OPS[name]


def _ending(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code}"


def _command_name(registered: Any) -> str:
    """The name under which Typer registers a command or a group."""
    return registered.name or getattr(registered.callback, "__name__", "?").replace("_", "-")


def _text(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
