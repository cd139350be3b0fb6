"""`trueup plugins`: the entry points found, and what became of them."""

from __future__ import annotations

import typer

from trueup.cli.options import AsJson
from trueup.cli.show import dump, table


def plugins(ctx: typer.Context, json: AsJson = False) -> None:
    """List the plugins and what each provides.

    Where one did not load, the reason is shown. A plugin is an entry point of the group `trueup`; those of third parties
    are imported in a process of their own first, where one that crashes or hangs disturbs nothing. `trueup -p no:NAME`
    leaves one out. The environment variable TRUEUP_PLUGINS lists those of third parties that may load, separated by
    commas; set but empty, none may.

    Examples:

    \b
        trueup plugins
        trueup -p no:opencl backends
        TRUEUP_PLUGINS= trueup plugins --json
    """
    from dataclasses import asdict

    from trueup.core.plugins import host

    host().load()
    ctx.find_root().command.plugin_commands()  # type: ignore[attr-defined]  # so that a broken command shows, too
    found = host().plugins
    if json:
        dump([asdict(p) for p in found])
        return
    rows = []
    for p in found:
        provides = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in p.provides.items() if names)
        contract = f"{p.api[0]}.{p.api[1]}" if p.api else ""
        rows.append((p.name, p.status, f"{p.dist} {p.version}", contract, p.module, provides, p.reason))
    table(("plugin", "status", "from", "contract", "module", "provides", "reason"), rows)
