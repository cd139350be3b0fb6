"""A plan as one HTML page that stands alone: rows in order, data edges as arcs on the left, states as lanes by them.

The page loads nothing, from nowhere; its policy forbids it. All positions are computed here; the script only lights up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from html import escape
from importlib import resources
from math import log2
from typing import Any

from trueup.cli.explain import title, verdict
from trueup.cli.plan_view import Row, group_title, is_view, through_views
from trueup.cli.show import size
from trueup.core.graph import Node
from trueup.core.plan import Plan

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
HINT = "Move over a node to see what it takes and gives. A click keeps it, Escape lets go."

ROW, HEAD, GAP = 20, 32, 10
"""Heights in pixels: a row, a group's title, the space after a group."""
ARCS, LANE = 150, 15
"""Widths in pixels: the room for arcs, a state's lane."""

COLOURS = {"device": "device", "reference body": "body", "fallback": "fallback", "prologue": "prologue", "view": "view"}
WHERE = {
    "device": "kernel of the backend",
    "reference body": "the op's own NumPy body, on the host",
    "fallback": "refused by the backend, runs on the reference",
    "prologue": "on the host, before the step",
    "view": "a view: no kernel, no memory",
}


def page(about: dict[str, Any], plan: Plan, listed: list[Row], *, views: bool) -> str:
    """The page's HTML. `views` draws views as rows; without, edges run through them."""
    drawn = [r for r in listed if views or not is_view(r.node)]
    made = _Drawing(about, plan, drawn, views)
    data = json.dumps([made.details(r) for r in drawn]).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(about["architecture"])} on {escape(about["backend"])}</title>
<style>
{_file("plan.css")}</style>
<header>
{_header(about)}
{_key(about)}
</header>
<nav>{made.links()}</nav>
<div class="plan" style="height:{made.height}px">
{made.svg()}
{made.html()}
</div>
<aside id="about">{HINT}</aside>
<script type="application/json" id="nodes">{data}</script>
<script>
{_file("plan.js")}</script>
</html>
"""


class _Drawing:
    """Where everything lies."""

    def __init__(self, about: dict[str, Any], plan: Plan, rows: list[Row], views: bool) -> None:
        self.about, self.plan, self.rows, self.views = about, plan, rows, views
        self.index = {r.node: i for i, r in enumerate(rows)}
        self.per = {s["name"]: s["per"] for s in about["states"]}
        self.y: list[int] = []
        self.groups: list[tuple[str, int, int]] = []
        at = 0
        for r in rows:
            if not self.groups or r.group != self.groups[-1][0]:
                at += GAP * bool(self.groups)
                self.groups.append((r.group, at, at))
                at += HEAD
            self.y.append(at + ROW // 2)
            at += ROW
            self.groups[-1] = (*self.groups[-1][:2], at)
        self.height = at + GAP
        self.lanes = self._lanes()
        self.left = ARCS + LANE * (1 + max((lane for lane, _ in self.lanes.values()), default=-1)) + 14

    def _lanes(self) -> dict[str, tuple[int, list[tuple[int, bool]]]]:
        """For each state its lane and the rows that touch it, with whether they write. Lanes are used again below."""
        touched: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        for i, r in enumerate(self.rows):
            for s, writes in r.node.effects:
                touched[s.root.name].append((i, writes))
        lanes: dict[str, tuple[int, list[tuple[int, bool]]]] = {}
        busy: list[int] = []  # by lane the last row that it is taken to
        for name, marks in sorted(touched.items(), key=lambda item: item[1][0][0]):
            lane = next((i for i, last in enumerate(busy) if last < marks[0][0]), len(busy))
            busy[lane : lane + 1] = [marks[-1][0]]
            lanes[name] = lane, marks
        return lanes

    # -- the graph -----------------------------------------------------------------------------------------------------

    def before(self, node: Node) -> list[int]:
        """Rows whose results a node takes."""
        found = [v.node for v in node.values if v.node is not None] if self.views else through_views(node)
        return sorted({self.index[n] for n in found})

    def svg(self) -> str:
        """Arcs and lanes."""
        out = []
        for i, r in enumerate(self.rows):
            for j in self.before(r.node):
                a, b, far = self.y[j], self.y[i], 10 + 17 * log2(i - j) if i > j else 10
                x, dx = ARCS, min(far, ARCS - 8)
                out.append(
                    f'<path class="edge" data-from="{j}" data-to="{i}" d="M{x} {a}C{x - dx * 4 / 3:.0f} {a} '
                    f'{x - dx * 4 / 3:.0f} {b} {x} {b}"/>'
                )
        for name, (lane, marks) in self.lanes.items():
            x, kind = ARCS + 12 + lane * LANE, self.per[name]
            first, last = self.y[marks[0][0]], self.y[marks[-1][0]]
            if last > first:
                out.append(f'<line class="lane {kind}" x1="{x}" y1="{first}" x2="{x}" y2="{last}"/>')
            out += [_mark(x, self.y[i], kind, writes) for i, writes in marks]
        width = self.left
        return f'<svg width="{width}" height="{self.height}" aria-hidden="true">{"".join(out)}</svg>'

    def html(self) -> str:
        """Titles and rows."""
        out = []
        for k, (group, top, bottom) in enumerate(self.groups):
            name = escape(group_title(group, self.about["layers"]))
            place = f"top:{top}px;height:{bottom - top + GAP}px;padding-left:{self.left + 12}px"
            out.append(f'<div class="group{" odd" * (k % 2)}" id="g{k}" style="{place}">{name}</div>')
        for i, r in enumerate(self.rows):
            colour = COLOURS[r.placement.where]
            touched = "".join(self._state(s.root.name, writes) for s, writes in r.node.effects)
            rest = r.call(views=self.views).removeprefix(r.node.op.name)
            gives = f" → {r.gives}" if r.results else ""
            kernel = f" <i>by {escape(r.kernel)}</i>" if r.kernel else ""
            out.append(
                f'<div class="row {colour}" id="n{i}" tabindex="0" style="top:{self.y[i] - ROW // 2}px;'
                f'left:{self.left}px;height:{ROW}px"><span class="id">#{r.node.id}</span>'
                f'<span class="dot" style="background:var(--{colour})"></span><b>{escape(r.node.op.name)}</b>'
                f"{touched}<i>{escape(rest)}</i>{escape(gives)}{kernel}</div>"
            )
        return "\n".join(out)

    def _state(self, name: str, writes: bool) -> str:
        short = name.split(".")[-1] if name.startswith("blk.") else name
        kind = self.per[name]
        return f' <span class="{kind}">{"■ writes" if writes else "□ reads"} {escape(short)}</span> '

    def links(self) -> str:
        titles = (group_title(group, self.about["layers"]) for group, _, _ in self.groups)
        return "".join(f'<a href="#g{k}">{escape(t)}</a>' for k, t in enumerate(titles))

    # -- details -------------------------------------------------------------------------------------------------------

    def details(self, r: Row) -> dict[str, Any]:
        """What the panel says of a node."""
        n, p = r.node, r.placement
        edges = self.edges[n]
        effects = edges - {v.node for v in n.values if v.node is not None}
        return {
            "id": n.id,
            "op": n.op.name,
            "says": (n.op.__doc__ or "").strip().split("\n\n")[0],
            "where": p.where,
            "kernel": p.kernel,
            "reason": f"{p.reason}; up to {size(p.bytes)} move in a step" if p.reason else "",
            "takes": [f"{a.parameter}: {a.short(views=True)}{_typed(a)}" for a in r.arguments],
            "attributes": [f"{k} = {v}" for k, v in r.attributes.items()],
            "gives": [
                f"{name}: {type}, {size(nbytes)}" + ("" if at is None else f" at {at} of the arena")
                for name, type, nbytes, at in r.results
            ],
            "states": [
                f"{'writes' if writes else 'reads'} {s.name}: {s.type}, per {self.per[s.root.name]}"
                for s, writes in n.effects
            ],
            "waits": [f"{m} (state)" for m in sorted(effects, key=lambda m: m.id)],
        }

    @property
    def edges(self) -> dict[Node, set[Node]]:
        if not hasattr(self, "_edges"):
            self._edges = self.plan.graph.edges()
        return self._edges


def _typed(argument: Any) -> str:
    return "" if argument.kind == "weight" else f" {argument.value.type}"


def _mark(x: int, y: int, kind: str, writes: bool) -> str:
    how = "writes" if writes else "reads"
    return f'<rect class="mark {kind} {how}" x="{x - 4}" y="{y - 4}" width="8" height="8"/>'


def _header(about: dict[str, Any]) -> str:
    m = about["memory"]
    refused = about["counts"].get("fallback", 0)
    warning = ' class="warning"' if refused else ""
    memory = (
        f"Arena {size(m['arena'])} ({size(m['total_without_reuse'])} without reuse, {size(m['peak'])} alive at most), "
        f"weights {size(m['weights'])}, states {size(m['states'])}."
    )
    return f"""<h1>{escape(title(about))}</h1>
<p>{escape(about["model"])}</p>
<p{warning}>{escape(verdict(about))}.</p>
<p>{escape(memory)}</p>
{_states(about)}
{_fusions(about)}"""


def _states(about: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="{s["per"]}">{escape(s["name"])}</td><td>{escape(s["type"])}</td><td>per {s["per"]}</td>'
        f'<td class="number">{size(s["bytes"])}</td><td>{s["on"]}</td></tr>'
        for s in about["states"]
    )
    return f"<details><summary>{len(about['states'])} states</summary><table>{rows}</table></details>"


def _fusions(about: dict[str, Any]) -> str:
    if not about["fusions"]:
        return ""
    rows = "".join(
        f'<tr><td>{escape(f["name"])}</td><td class="number">{f["fused"]}</td>'
        f"<td>{escape('; '.join(f['declined']))}</td><td>{escape(f['difference'])}</td></tr>"
        for f in about["fusions"]
    )
    head = "<tr><th>pattern</th><th>fused</th><th>declined because</th><th>first difference</th></tr>"
    used = sum(bool(f["fused"]) for f in about["fusions"])
    return (
        f"<details><summary>{len(about['fusions'])} fusions, {used} of them used</summary>"
        f"<table>{head}{rows}</table></details>"
    )


def _key(about: dict[str, Any]) -> str:
    """What colours and marks mean, and how many nodes there are of each place."""
    counts, parts = about["counts"], []
    for where, meaning in WHERE.items():
        if counts.get(where):
            dot = f'<span class="dot" style="background:var(--{COLOURS[where]})"></span>'
            parts.append(f"<span>{dot}{counts[where]} {escape(meaning)}</span>")
    for kind in ("token", "sequence"):
        line = f'<line class="lane {kind}" x1="6" y1="7" x2="28" y2="7"/>'
        marks = line + _mark(6, 7, kind, True) + _mark(28, 7, kind, False)
        parts.append(f'<span><svg width="34" height="14">{marks}</svg>state per {kind}: ■ written, □ read</span>')
    arc = '<svg width="34" height="14"><path class="edge" d="M32 2C8 2 8 12 32 12"/></svg>'
    parts.append(f"<span>{arc}data, from a node down to one that takes it</span>")
    return f'<div class="key">{"".join(parts)}</div>'


def _file(name: str) -> str:
    return resources.files("trueup.cli").joinpath("page", name).read_text(encoding="utf-8")
