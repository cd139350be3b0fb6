"""`trueup explain`: every node once and in order, reasons where a backend refuses, and a page that stands alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trueup.models import load_model

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def kinds() -> tuple[str, ...]:
    return load_model().architecture.summary().layers


def test_json_names_every_node_once_after_what_it_takes(trueup: Run, kinds: tuple[str, ...]) -> None:
    said = json.loads(trueup("explain", "--json", "--tokens", 6, "--seqs", 2).out)
    assert said["shape"] == {"tokens": 6, "seqs": 2, "blocks": 64, "outs": 2, "draft": ""}
    assert said["counts"] == dict(Counter(n["where"] for n in said["nodes"]))
    seen: set[int] = set()
    for n in said["nodes"]:
        assert {a["node"] for a in n["arguments"] if a["kind"] == "node"} <= seen, n
        assert n["id"] not in seen
        seen.add(n["id"])
    groups = list(dict.fromkeys(n["group"] for n in said["nodes"]))
    trunk = [str(i) for i, kind in enumerate(kinds) if kind != "mtp"]
    assert groups == ["prologue", "input", *trunk, "output"]
    for n in said["nodes"]:
        for a in n["arguments"]:
            if found := re.match(r"blk\.(\d+)\.", a["name"]):
                assert n["group"] == found[1]
    written = {a["name"] for n in said["nodes"] for a in n["arguments"] if a["writes"]}
    assert written == {s["name"] for s in said["states"]}, "each step writes every state"
    assert {s["name"] for s in said["states"] if s["on"] == "host"} == {"ngram"}
    m = said["memory"]
    assert m["peak"] <= m["arena"] <= m["total_without_reuse"]
    assert m["states"] == sum(s["bytes"] for s in said["states"])
    last = said["nodes"][-1]
    assert last["op"] == "linear" and last["results"][0]["type"] == "f32[2, 4096]"


def test_text_has_a_line_for_every_node_but_views(trueup: Run) -> None:
    said = json.loads(trueup("explain", "--json").out)
    views = said["counts"]["view"]
    for args, expected in (((), len(said["nodes"]) - views), (("--views",), len(said["nodes"]))):
        done = trueup("explain", *args)
        assert done.code == 0 and done.err == ""
        assert len(re.findall(r"^ +#\d+  ", done.out, re.MULTILINE)) == expected
    text = trueup("explain").out
    assert "qwen4exp on cpu" in text and "a step of 1 token of 1 sequence" in text
    assert "blk.1 gdn+ngram" in text and "blk.7 qsa" in text
    assert re.search(r"paged_append\(~?#\d+, cu_seqlens, past, block_table, &k; every=1\)", text)
    assert re.search(r"linear\(#\d+, attn_qkv q8_0\[512, 256\]\) → f32\[1, 512\]", text)
    assert f"{views} views are left out" in text and "without reuse" in text


@pytest.mark.fault("B03", "B83")
def test_what_a_backend_refuses_is_shown_with_the_reason(trueup: Run, acme: None) -> None:
    said = json.loads(trueup("explain", "--backend", "acme", "--json").out)
    refused = [n for n in said["nodes"] if n["where"] == "fallback"]
    assert len(refused) == said["counts"]["fallback"] > 0 and said["counts"]["device"] > 0
    assert all(n["reason"] for n in refused)
    assert {n["reason"] for n in refused if n["op"] == "linear"} == {"this card has no q8_0"}
    text = trueup("explain", "--backend", "acme").out
    assert f"acme refuses {len(refused)}: it runs this model only with --allow-fallback" in text
    assert "refused: this card has no q8_0; up to " in text


def test_fusions_that_were_not_used_say_why(trueup: Run, acme: None) -> None:
    said = json.loads(trueup("explain", "--backend", "acme", "--json").out)
    by_name = {f["name"]: f for f in said["fusions"]}
    assert by_name["silu_linear"]["fused"] == 0 and by_name["silu_linear"]["declined"] == ["rows too long"]
    assert "where the pattern has silu" in by_name["silu_twice"]["difference"]
    text = trueup("explain", "--backend", "acme").out
    assert re.search(r"silu_linear +rows too long", text) and "where the pattern has silu" in text
    assert "switched off" in trueup("explain", "--backend", "acme", "--no-fusion").out


def test_a_step_that_is_none_is_refused(trueup: Run) -> None:
    assert "a step of 1 tokens can't be one of 2 sequences" in trueup("explain", "--seqs", 2).refused()


def test_a_page_that_cannot_be_written_is_one_line(trueup: Run, tmp_path: Path) -> None:
    assert "No such file or directory" in trueup("explain", "--html", tmp_path / "missing" / "plan.html").refused()


class Page(HTMLParser):
    """Elements with their attributes, text of scripts, and a check that all that opens closes."""

    VOID = frozenset({"meta", "path", "line", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.elements if name in (a.get("class") or "").split()]


@pytest.mark.parametrize("views", [False, True])
def test_the_page_stands_alone_and_draws_every_edge(trueup: Run, tmp_path: Path, views: bool) -> None:
    file = tmp_path / "plan.html"
    said = json.loads(trueup("explain", "--html", file, "--json", *(["--views"] if views else [])).out)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not re.search(r"https?:|//[a-z]|url\(|@import", re.sub(r"//.*", "", text.partition("<header>")[0]))
    for _, attributes in page.elements:
        assert not {"src", "srcset", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert any("default-src 'none'" in (a.get("content") or "") for _, a in page.elements)

    shown = [n for n in said["nodes"] if views or n["where"] != "view"]
    rows = page.of("row")
    assert [r["id"] for r in rows] == [f"n{i}" for i in range(len(shown))]
    details = json.loads(page.scripts[0])
    assert [d["id"] for d in details] == [n["id"] for n in shown]

    index, at = {n["id"]: i for i, n in enumerate(shown)}, {n["id"]: n for n in said["nodes"]}

    def sources(n: dict[str, Any]) -> set[int]:
        found: set[int] = set()
        for a in n["arguments"]:
            if a["kind"] == "node":
                found |= {index[a["node"]]} if a["node"] in index else sources(at[a["node"]])
        return found

    drawn = [(int(e["data-from"] or -1), int(e["data-to"] or -1)) for e in page.of("edge") if "data-from" in e]
    assert sorted(drawn) == sorted((j, i) for i, n in enumerate(shown) for j in sources(n))
    touched = Counter(
        "writes" if a["writes"] else "reads" for n in shown for a in n["arguments"] if a["kind"] == "state"
    )
    marks = Counter(next(k for k in ("writes", "reads") if k in str(m["class"])) for m in page.of("mark"))
    assert marks == touched + Counter(writes=2, reads=2), "two of each explain themselves"
    attention = next(d for d in details if d["op"] == "attention")
    assert [w.partition(" ")[2] for w in attention["waits"]] == ["paged_append (state)"] * 2


def test_the_page_escapes_what_others_named(trueup: Run, tmp_path: Path, plugin: Callable[[str, str], None]) -> None:
    plugin(
        "evil",
        """
        from trueup.core.backend import Backend, Device, KernelTable, ManagedTarget
        from trueup.core.ops import linear
        from trueup.core.plugins import hookimpl

        kernels = KernelTable()


        @kernels.implements(linear, when=lambda x, w: "<script>alert(1)</script>")
        def _(x, w):
            raise AssertionError


        class Evil(Backend):
            name = "evil"
            API = (1, 0)

            def devices(self):
                return [Device("<img src=x onerror=alert(2)>", "gpu")]

            def open(self, device):
                return ManagedTarget("evil", device, kernels)


        @hookimpl
        def trueup_backends():
            return [Evil]
        """,
    )
    file = tmp_path / "plan.html"
    assert trueup("explain", "--backend", "evil", "--html", file).code == 0
    text = file.read_text(encoding="utf-8")
    assert "alert(1)" in text and "alert(2)" in text
    assert "<script>alert" not in text and "<img" not in text
    assert Page(text).open == []
