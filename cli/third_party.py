"""Commands that plugins of third parties add. Nothing here is touched by a built-in command, so neither is a plugin."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

import typer


class PluginCommands(typer.Typer):
    """The application that plugins add commands to; a name that is taken is refused, and the plugin with it."""

    def __init__(self, taken: Iterable[str]) -> None:
        super().__init__(add_completion=False, rich_markup_mode=None)
        self._taken = set(taken)

    def command(self, name: str | None = None, **more: Any) -> Any:
        register = super().command(name, **more)

        def checked(f: Any) -> Any:
            self._take(name or f.__name__.replace("_", "-"))
            return register(f)

        return checked

    def add_typer(self, typer_instance: typer.Typer, *, name: str | None = None, **more: Any) -> None:
        if not name:
            raise ValueError("a group of commands needs a name: add_typer(…, name=…)")
        self._take(name)
        super().add_typer(typer_instance, name=name, **more)

    def _take(self, name: str) -> None:
        if name in self._taken:
            raise ValueError(f"the command '{name}' is taken")
        self._taken.add(name)


def plugin_commands(taken: Iterable[str]) -> dict[str, Any]:
    """Their commands by name. A plugin that fails is recorded as broken by the plugin host, and adds none."""
    if not any(p.dist is None or p.dist.name != "trueup" for p in entry_points(group="trueup")):
        return {}
    from trueup.core.plugins import host

    cli = PluginCommands(taken)
    host().load().add_commands(cli)
    commands: dict[str, Any] = {}
    for plugin in host().plugins:
        names = plugin.provides.get("commands", [])
        try:
            commands.update({name: _made(cli, name) for name in names})
        except KeyboardInterrupt:
            raise
        except Exception as e:  # parameters that Typer can't turn into options
            plugin.fail(f"the commands {', '.join(names)} can't be made: {type(e).__name__}: {e}")
    return commands


def _made(cli: PluginCommands, name: str) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.callback()(lambda: None)
    alone.registered_commands = [c for c in cli.registered_commands if _name(c) == name]
    alone.registered_groups = [g for g in cli.registered_groups if g.name == name]
    return typer.main.get_group(alone).commands[name]


def _name(command: Any) -> str:
    return command.name or command.callback.__name__.replace("_", "-")  # type: ignore[no-any-return]
