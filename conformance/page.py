"""A report as one page of HTML, whole in itself: no script, nothing loaded. Knows only the report's data."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #888; --bad: #c62828; --good: #2e7d32; --warn: #b26a00 }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600; color: var(--soft); position: sticky; top: 0; background: Canvas }
td.n, th.n { text-align: right } code { font-size: .85em; overflow-wrap: anywhere }
.bad { color: var(--bad); font-weight: 600 } .good { color: var(--good) } .warn { color: var(--warn) } .soft { color:
var(--soft) }
.bar { display: inline-block; width: 5rem; height: .6rem; background: var(--line); border-radius: .3rem; overflow:
hidden }
.bar i { display: block; height: 100%; background: currentColor }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem } dt { color: var(--soft) } dd { margin:
0 }
details { margin: .2rem 0 } summary { cursor: pointer }
.wide { overflow-x: auto }
.matrix td, .matrix th { white-space: nowrap } .matrix td { padding-block: .15rem }
th.p { vertical-align: bottom; padding-inline: .3rem } th.p span { writing-mode: vertical-rl; transform: rotate(180deg) }
td.p { text-align: center }
"""

MARKS = {"passed": ("good", "✓"), "failed": ("bad", "✗"), "measured": ("warn", "~"), "n/a": ("soft", "–")}


def page(data: dict[str, Any]) -> str:
    """The page of a report."""
    backend = data["backend"]
    verdict = '<span class="good">all right</span>' if data["green"] else '<span class="bad">failed</span>'
    head = f"<h1>trueup check · {escape(backend['name'])}: {verdict}</h1>"
    parts = [head, _about(data), _failures(data), _matrix(data), _refusals(data), _bounds(data)]
    title = f"trueup check {escape(backend['name'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _about(data: dict[str, Any]) -> str:
    b = data["backend"]
    device, claims = b["device"], b["claims"]
    facts = {
        "device": f"{device['name']} ({device['kind']})" + "".join(f", {k} {v}" for k, v in device["versions"].items()),
        "memory": b["memory"],
        "claims": ", ".join(k.replace("_", " ") for k in ("deterministic", "batch_invariant") if claims[k]) or "none",
        "cases": f"{data['cases']} in {data['seconds']:.0f} s, seed {data['options']['seed']}, {data['options']['examples']} examples an op",
        "trueup": data["trueup"],
    }
    if data["copy_bandwidth"]:
        facts["copy bandwidth"] = f"{data['copy_bandwidth'] / 1e9:.1f} GB/s, read and written, measured on the device"
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items()) + "</dl>"


def _matrix(data: dict[str, Any]) -> str:
    out = []
    for level in dict.fromkeys(r["level"] for r in data["results"]):
        results = [r for r in data["results"] if r["level"] == level]
        names = list(dict.fromkeys(p for r in results for p in r["properties"]))
        timed = any(r["speed"] for r in results)
        head = '<th>name<th>runs as<th class="n">cases<th class="n">worst / bound'
        head += '<th class="n">GB/s<th class="n">of copy' if timed else ""
        head += "".join(f'<th class="p"><span>{escape(n)}</span>' for n in names)
        rows = "".join(_row(r, names, timed) for r in results)
        out.append(
            f'<h2>{escape(level)}</h2><div class="wide"><table class="matrix"><tr>{head}</tr>{rows}</table></div>'
        )
    return "".join(out) + (
        '<p class="soft">✓ holds in every case · ✗ fails · ~ not claimed, measured · – can’t be seen on this kind of target. '
        "Worst / bound: the largest error as a share of what the op’s bound allows; “bits” where results must be equal "
        "bit for bit. Of copy: bytes a second as a share of what the device copies.</p>"
    )


def _row(r: dict[str, Any], names: list[str], timed: bool) -> str:
    status = {"passed": "good", "failed": "bad", "refused": "soft"}[r["status"]]
    cells = [f'<td class="{status}">{escape(r["name"])}']
    cells.append(f"<td>{escape(', '.join(r['where']) or r['status'])}")
    cells.append(f'<td class="n">{r["cases"]}')
    worst = r["worst"] or 0.0
    color = "bad" if worst > 1 else "good"
    bar = f'<span class="bar {color}"><i style="width:{min(worst, 1) * 100:.0f}%"></i></span>'
    exact = r["exact"] and not worst
    cells.append(f'<td class="n">{"bits" if exact else f"{worst:.3g} {bar}"}')
    if timed:
        s = r["speed"]
        cells.append(f'<td class="n">{s["gb_s"]:.2f}<td class="n">{s["share"] * 100:.0f} %' if s else "<td><td>")
    for name in names:
        found = r["properties"].get(name)
        if found is None:
            cells.append("<td>")
            continue
        kind = next(k for k in ("failed", "measured", "passed", "n/a") if found.get(k) or k == "n/a")
        css, mark = MARKS[kind]
        detail = escape(found.get("detail", ""), quote=True)
        cells.append(f'<td class="p {css}" title="{escape(name)}: {kind} {detail}">{mark}')
    return f"<tr>{''.join(cells)}</tr>"


def _failures(data: dict[str, Any]) -> str:
    expected = {e["key"]: e["reason"] for e in data["expected_failures"]}
    items = []
    for r in data["results"]:
        for f in r["failures"]:
            for name, detail in f["properties"].items():
                why = expected.get(f"{r['level']}/{r['name']}/{name}")
                mark = f' <span class="warn">expected: {escape(why)}</span>' if why else ""
                items.append(
                    f"<tr><td>{escape(r['level'])}/{escape(r['name'])}<td class=bad>{escape(name)}<td>{escape(detail)}{mark}"
                    + (f"<br><code>{escape(f['replay'])}</code>" if f["case"] else "")
                )
    stale = [f"<p class=warn>{escape(k)}: expected to fail, but passes</p>" for k in data["unexpectedly_passing"]]
    stale += [f"<p class=warn>{escape(k)}: expected to fail, but was not met</p>" for k in data["unmatched"]]
    if not items and not stale:
        return ""
    table = (
        f"<table><tr><th>where<th>property<th>what, and how to replay it</tr>{''.join(items)}</table>" if items else ""
    )
    return f"<h2>Failures</h2>{table}{''.join(stale)}"


def _refusals(data: dict[str, Any]) -> str:
    rows = [
        f'<tr><td>{escape(r["level"])}/{escape(r["name"])}<td class="n">{n}<td>{escape(why)}'
        for r in data["results"]
        for why, n in r["refusals"].items()
    ]
    return (
        f'<h2>Refusals</h2><table><tr><th>op<th class="n">cases<th>reason</tr>{"".join(rows)}</table>' if rows else ""
    )


def _bounds(data: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(r['name'])}<td>{escape(r['bound'])}<td><code>{escape(r['worst_case'])}</code>"
        for r in data["results"]
        if r["bound"]
    ]
    if not rows:
        return ""
    head = "<tr><th>op<th>bound, and why<th>case of the worst error</tr>"
    return f"<h2>Bounds</h2><details><summary>What each error is judged by</summary><table>{head}{''.join(rows)}</table></details>"
