"""`trueup inspect`: what a GGUF file holds, and what it takes to run it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli.options import AsJson, ModelFile
from trueup.cli.show import clip, dump, lines, printable, size, table

if TYPE_CHECKING:
    from trueup.models.architecture import Architecture
    from trueup.models.gguf import GGUFFile


def inspect(
    file: ModelFile = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx", metavar="N", min=1, help="Tokens for which to reckon memory; by default the model's limit."
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="List every metadata key.")] = False,
    json: AsJson = False,
) -> None:
    """Show what a GGUF file holds.

    Architecture and hyper-parameters, layers, tensors by type, the tokenizer, and the memory that running takes. Of a
    model that can't be run here the metadata is shown, and the reason.

    Examples:

    \b
        trueup inspect MODEL.gguf --ctx 32768
        trueup inspect MODEL-00001-of-00003.gguf --tensors
        trueup inspect MODEL.gguf --json
    """
    from trueup.models import bundled_path
    from trueup.models.gguf import open_gguf

    with open_gguf(bundled_path() if file is None else file) as opened:
        about = describe(opened, ctx)
        if tensors:
            about["tensor_list"] = [
                {"name": n, "type": w.type.dtype, "shape": list(w.shape), "bytes": w.type.nbytes}
                for n, w in opened.tensors.items()
            ]
        if json:
            dump(about)
        else:
            show(about, metadata=metadata or not about["runnable"])


def describe(file: GGUFFile, context: int | None) -> dict[str, Any]:
    """All that is shown, as JSON data."""
    name = file.metadata.get("general.architecture")
    model, reason, role = read(file, name)
    about: dict[str, Any] = {
        "file": str(file.path),
        "files": [str(p) for p in file.files],
        "bytes": file.size,
        "gguf_version": file.version,
        "alignment": file.alignment,
        "architecture": name if isinstance(name, str) else None,
        "runnable": model is not None,
        "role": role,
        "reason": reason,
        "hyperparameters": {},
        "layers": [],
        "tensors": count_tensors(file),
        "tokenizer": describe_tokenizer(file),
        "memory": {"weights": sum(w.type.nbytes for w in file.tensors.values())},
    }
    if model is not None:
        summary = model.summary()
        about["hyperparameters"] = plain(dict(summary.hyperparameters))
        about["layers"] = list(summary.layers)
        about["memory"] |= memory(model, context)
    about["metadata"] = {
        k: {"type": " of ".join(t.name.lower() for t in file.value_types[k]), "value": plain(v)}
        for k, v in file.metadata.items()
    }
    return about


def read(file: GGUFFile, name: Any) -> tuple[Architecture | None, str, str]:
    """The model in a file, or the reason why trueup can't run it; and whether the file is a "model" or a "draft head"."""
    from trueup.core.plugins import host
    from trueup.models.gguf import DraftHeadAlone, GGUFError, Keys, Tensors

    if not isinstance(name, str):
        return None, "the file names no architecture (general.architecture)", "model"
    cls = host().architecture(name)
    if cls is None:
        known = ", ".join(sorted(host().architectures))
        return None, f"the architecture {clip(name, 80)!r} is unknown; known are {known}", "model"
    try:
        model: Architecture = cls.read(Keys(file), Tensors(file))
    except GGUFError as e:
        return None, str(e), "draft head" if isinstance(e, DraftHeadAlone) else "model"
    return model, "", "model"


def count_tensors(file: GGUFFile) -> dict[str, Any]:
    """Number, parameters and bytes of the tensors, in all and by type; the type with most bytes first."""
    types: dict[str, dict[str, int]] = {}
    for w in file.tensors.values():
        t = types.setdefault(w.type.dtype, {"count": 0, "parameters": 0, "bytes": 0})
        t["count"] += 1
        t["parameters"] += w.type.size
        t["bytes"] += w.type.nbytes
    total = {k: sum(t[k] for t in types.values()) for k in ("count", "parameters", "bytes")}
    return {**total, "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"]))}


def describe_tokenizer(file: GGUFFile) -> dict[str, Any]:
    """What the metadata says of the tokenizer, and whether trueup can read it; empty where there is none."""
    from trueup.models.tokenizer import Tokenizer, TokenizerError

    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in file.metadata.items() if k.startswith("tokenizer.ggml.")}
    if not keys:
        return {}
    about = {
        "model": plain(keys.get("model")),
        "pre": plain(keys.get("pre")),
        "tokens": length(keys.get("tokens")),
        "merges": length(keys.get("merges")),
        "special": {k.removesuffix("_token_id"): plain(v) for k, v in keys.items() if k.endswith("_token_id")},
        "add_bos": plain(keys.get("add_bos_token")),
        "chat_template": "tokenizer.chat_template" in file.metadata,
        "readable": True,
        "reason": "",
    }
    try:
        made = Tokenizer.from_metadata(file.metadata, source=str(file.path))
        about["ends"] = [made.token_text(i) for i in sorted(made.eos_ids)]
    except TokenizerError as e:
        about |= {"readable": False, "reason": str(e)}
    return about


def memory(model: Architecture, context: int | None) -> dict[str, Any]:
    """Bytes of state for each token and each sequence, and in all for a sequence of `context` tokens.

    `host_weights` are those that only the prologue reads; they stay on the host whatever the backend.
    """
    from trueup.core.state import Capacity, PerToken
    from trueup.models import StepShape

    graph = model.build(StepShape(1, 1, 1, 1), Capacity(slots=1, pages=1, page=model.page_multiple))
    states: list[dict[str, Any]] = []
    for name, s in graph.states.items():
        if s.kind is None:  # only in patterns
            continue
        paged = isinstance(s.kind, PerToken)
        about = {
            "name": name,
            "type": s.type.dtype,
            "width": list(s.kind.width),
            "per": "token" if paged else "sequence",
        }
        states.append(about | {"bytes": s.type.nbytes / model.page_multiple if paged else s.type.nbytes})
    token, sequence = (sum(s["bytes"] for s in states if s["per"] == per) for per in ("token", "sequence"))
    on_device = {v for n in graph.nodes if not n.host for v in n.values}
    on_host = {v for n in graph.nodes if n.host for v in n.values} - on_device
    n = model.context_length if context is None else context
    return {
        "host_weights": sum(v.type.nbytes for v in on_host if v.leaf == "weight"),
        "state_per_token": token,
        "state_per_sequence": sequence,
        "context": n,
        "state": int(token * n) + sequence,
        "states": states,
    }


def plain(value: Any) -> Any:
    """Metadata as JSON data; long arrays by their beginning."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if hasattr(value, "ndim") and value.ndim == 0:
        return plain(value.item())
    if len(value) <= 64:
        return [plain(v) for v in value]
    return {"length": len(value), "first": [plain(v) for v in value[:8]]}


def length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") and not isinstance(value, str) else None


# -- for a person ------------------------------------------------------------------------------------------------------


def show(about: dict[str, Any], *, metadata: bool) -> None:
    """Print the description."""
    general = {k: v["value"] for k, v in about["metadata"].items()}
    facts = {
        "file": about["file"],
        "size": f"{size(about['bytes'])} in {len(about['files'])} file{'s' * (len(about['files']) > 1)}",
        "format": f"GGUF {about['gguf_version']}, alignment {about['alignment']}",
        "architecture": str(about["architecture"]),
        "name": str(general.get("general.name", "")),
        "licence": str(general.get("general.license", "")),
    }
    if about["role"] == "draft head":
        facts["role"] = f"a draft head (MTP): trueup run MODEL --draft auto --mtp {about['file']}"
    elif not about["runnable"]:
        facts["can't be run"] = about["reason"]
    lines([(k, v) for k, v in facts.items() if v], indent=0)
    if len(about["files"]) > 1:
        section("files")
        lines([("", f) for f in about["files"]])
    if about["layers"]:
        section("layers", f"{len(about['layers'])}: " + of_each(Counter(about["layers"])))
        lines([("", ", ".join(f"{i} {kind}" for i, kind in enumerate(about["layers"])))])
        section("hyper-parameters")
        lines([(k, text(v)) for k, v in about["hyperparameters"].items()])
    t = about["tensors"]
    section("tensors", f"{t['count']}, {t['parameters']:,} parameters, {size(t['bytes'])}")
    table(
        ("  type", "tensors", "parameters", "bytes"),
        [(f"  {k}", v["count"], f"{v['parameters']:,}", size(v["bytes"])) for k, v in t["types"].items()],
        right=("tensors", "parameters", "bytes"),
    )
    show_tokenizer(about["tokenizer"])
    show_memory(about["memory"])
    if metadata:
        section("metadata")
        table(
            ("  key", "type", "value"),
            [(f"  {k}", v["type"], clip(text(v["value"]), 200)) for k, v in about["metadata"].items()],
        )
    if "tensor_list" in about:
        section("all tensors")
        table(
            ("  name", "type", "shape", "bytes"),
            [(f"  {w['name']}", w["type"], str(w["shape"]), size(w["bytes"])) for w in about["tensor_list"]],
            right=("bytes",),
        )


def show_tokenizer(t: dict[str, Any]) -> None:
    if not t:
        section("tokenizer", "none")
        return
    section("tokenizer", "" if t["readable"] else f"can't be used: {t['reason']}")
    lines(
        [
            ("kind", f"{t['model']}, pre-tokenizer {t['pre']}, {t['tokens']} tokens, {t['merges']} merges"),
            ("special ids", ", ".join(f"{k} {v}" for k, v in t["special"].items()) or "none"),
            ("text ends at", ", ".join(t.get("ends", ()))),
            ("begins with bos", "yes" if t["add_bos"] else "no"),
            ("chat template", "yes" if t["chat_template"] else "no"),
        ]
    )


def show_memory(m: dict[str, Any]) -> None:
    section("memory")
    rows = [("weights, as stored", size(m["weights"]))]
    if "state" in m:
        rows += [
            ("of these on the host", size(m["host_weights"]) if m["host_weights"] else ""),
            ("state for each token", size(m["state_per_token"])),
            ("state for each sequence", size(m["state_per_sequence"])),
            (f"state of a sequence of {m['context']} tokens", size(m["state"])),
        ]
    lines([r for r in rows if r[1]])


def section(title: str, rest: str = "") -> None:
    print(f"\n{title}{': ' if rest else ''}{printable(rest)}")


def of_each(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items())


def text(value: Any) -> str:
    """A metadata value on one line."""
    if isinstance(value, dict) and "length" in value:
        return f"{value['length']} entries: {', '.join(map(text, value['first']))}, …"
    if isinstance(value, list):
        return ", ".join(map(text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
