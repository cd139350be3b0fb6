"""The application: its commands, those that plugins add, and the one line that an error becomes.

Built-in commands import what is heavy when they run, and no plugin of third parties; those are asked only for the list
of commands and for a command that is not built in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trueup.cli.backends import backends
from trueup.cli.bench import bench
from trueup.cli.chat import chat
from trueup.cli.check import check
from trueup.cli.compare import compare
from trueup.cli.convert import convert
from trueup.cli.doctor import doctor
from trueup.cli.errors import expected, one_line
from trueup.cli.explain import explain
from trueup.cli.gate import gate
from trueup.cli.inspect import inspect
from trueup.cli.new_backend import new_backend
from trueup.cli.plugins import plugins
from trueup.cli.run import run
from trueup.cli.synth import synth
from trueup.cli.third_party import plugin_commands

INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes: 128 and the number of the signal that would have ended the process."""


class Commands(TyperGroup):
    """The group of all commands. Errors end here, as one line on standard error and an exit code."""

    _theirs: dict[str, Any] | None = None

    def plugin_commands(self) -> dict[str, Any]:
        """Commands of third parties by name; loads their plugins, if there are any."""
        if self._theirs is None:
            self._theirs = plugin_commands(self.commands)
        return self._theirs

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.commands.get(cmd_name) or self.plugin_commands().get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *sorted(self.plugin_commands())]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        extra["windows_expand_args"] = windows_expand_args
        if not standalone_mode:
            return super().main(args, "trueup", complete_var, standalone_mode=False, **extra)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        sys.exit(self._run(args, complete_var, extra))

    def _run(self, args: Sequence[str] | None, complete_var: str | None, extra: dict[str, Any]) -> int:
        try:
            code = super().main(args, "trueup", complete_var, standalone_mode=False, **extra)
            return code if isinstance(code, int) else 0
        except typer.Abort:
            return INTERRUPTED
        except Exception as e:
            if hasattr(e, "exit_code") and hasattr(e, "format_message"):  # a usage error of Typer's
                return usage_error(e)
            if settings["traceback"] or not expected(e):
                raise
            say_error(one_line(e))
            return 1

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and flush what it wrote while a closed pipe can still be told from an error."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:
                if sys.stdout is not None and sys.stdout is sys.__stdout__:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None


def usage_error(e: Any) -> int:
    """A wrong command line: what Typer says about it, and where to read on; without arguments the help itself."""
    if type(e).__name__ == "NoArgsIsHelpError":
        print(e.ctx.get_help())
        return 2
    message = e.format_message()
    where = getattr(getattr(e, "ctx", None), "command_path", "trueup")
    say_error(f"{' '.join(message.split()).rstrip('.')} (see {where} --help)")
    return int(e.exit_code)


def say_error(text: str) -> None:
    print(f"trueup: error: {text}", file=sys.stderr)


settings = {"traceback": False}
"""What the options before the command said."""

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        import trueup

        print(f"trueup {trueup.__version__}")
        raise typer.Exit


def _block(ctx: typer.Context, words: list[str] | None) -> None:
    """Leave plugins out until the command has ended, in the processes that it starts, too."""
    if not words:
        return
    from importlib.metadata import entry_points

    known = sorted({p.name for p in entry_points(group="trueup")})
    for word in words:
        no, _, name = word.partition(":")
        if no != "no" or not name:
            raise typer.BadParameter(f"expected no:NAME, got '{word}'", ctx, param_hint="-p")
        if name not in known:
            raise typer.BadParameter(f"there is no plugin '{name}'; there are {', '.join(known)}", ctx, param_hint="-p")
    from trueup.core.plugins import BLOCKED, host

    before = os.environ.get(BLOCKED)

    def restore() -> None:
        if before is None:
            del os.environ[BLOCKED]
        else:
            os.environ[BLOCKED] = before
        host.cache_clear()

    os.environ[BLOCKED] = ",".join([*filter(None, [before]), *(word.removeprefix("no:") for word in words)])
    host.cache_clear()
    ctx.call_on_close(restore)


@app.callback()
def trueup(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
    block: Annotated[
        list[str] | None,
        typer.Option(
            "-p", metavar="no:NAME", callback=_block, is_eager=True, show_default=False,
            help="Leave out the plugin of this name; may be given several times.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Runs hybrid mixture-of-experts models from GGUF files on any backend, proven against the CPU reference."""
    settings["traceback"] = traceback


for command in (
    run,
    chat,
    bench,
    inspect,
    explain,
    convert,
    synth,
    backends,
    plugins,
    doctor,
    check,
    compare,
    new_backend,
):
    app.command(command.__name__.replace("_", "-"))(command)
app.add_typer(gate, name="gate")
