"""Which files make up a model: one, or the shards of a split set. Reads names and `split.*` keys, no tensor data.

A set's files are named `STEM-00001-of-00003.gguf`, counted from 1; `split.no` counts from 0. All metadata stands in the
first, and `split.tensors.count` is the total of all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .errors import GGUFError, clip
from .parse import Header

_SHARD = re.compile(r"(?P<stem>.*)-(?P<no>\d{5}|[1-9]\d{5,})-of-(?P<count>\d{5}|[1-9]\d{5,})\.gguf", re.DOTALL)
_PER_FILE = ("general.alignment", "split.no")


def pick(folder: Path) -> Path:
    """The one model in a folder: its only file, or a file of its only set."""
    found: dict[tuple[str, ...], Path] = {}
    for p in sorted(folder.iterdir()):
        if p.suffix == ".gguf" and not p.is_dir():
            m = _SHARD.fullmatch(p.name)
            found.setdefault((m["stem"], m["count"]) if m else (p.name,), p)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise GGUFError("folder holds no .gguf file", path=folder)
    names = [p.name for p in found.values()]
    few = ", ".join(names[:8]) + (" and others" if len(names) > 8 else "")
    raise GGUFError("folder holds more than one model: name one", path=folder, found=few)


def load_set(path: Path, load: Callable[[Path], Header]) -> list[Header]:
    """Headers of all files of the model that `path` belongs to, in order; `load` reads one."""
    given = load(path)
    count = _number(given, "split.count") or 0
    m = _SHARD.fullmatch(path.name)
    if count <= 1:
        if m and int(m["count"]) > 1:
            raise GGUFError("name is that of a shard, the file's split.count is not", path=path, found=count)
        headers = [given]
    else:
        headers = [given if p == path else load(p) for p in _siblings(given, path, count, m)]
    for no, h in enumerate(headers):
        _check_shard(h, no, count, headers[0])
    total = _number(headers[0], "split.tensors.count")
    found = sum(len(h.tensors) for h in headers)
    if total is not None and found != total:
        raise GGUFError(
            "tensors of the whole set don't add up", path=headers[0].path, key="split.tensors.count",
            found=f"{found} in {len(headers)} files", expected=total,
        )  # fmt: skip
    _check_distinct(headers)
    return headers


def _siblings(given: Header, path: Path, count: int, m: re.Match[str] | None) -> list[Path]:
    if m is None:
        raise GGUFError(
            f"file is a shard of {count}, and its name can't tell the others'",
            path=path,
            expected=f"*-of-{count:05d}.gguf",
        )
    if int(m["count"]) != count:
        raise GGUFError(
            "file and its name disagree", path=path, key="split.count", found=count, expected=int(m["count"])
        )
    paths = []
    for no in range(1, count + 1):
        p = path.with_name(f"{m['stem']}-{no:05d}-of-{count:05d}.gguf")
        if not p.is_file():
            raise GGUFError(f"shard {no} of {count} is missing", path=p)
        paths.append(p)
    if path not in paths:
        raise GGUFError("number in the name is out of range", path=path, found=int(m["no"]), expected=f"1 to {count}")
    return paths


def _check_shard(h: Header, no: int, count: int, first: Header) -> None:
    want = {"split.no": no, "split.count": count, "split.tensors.count": _number(first, "split.tensors.count")}
    for key, expected in want.items():
        found = _number(h, key)
        if found is None and count > 1:
            raise GGUFError("key is missing", path=h.path, key=key, expected="it in every shard")
        if found is not None and found != expected:
            is_not = f"file is not shard {no + 1} of {max(count, 1)}" if key == "split.no" else "shards disagree"
            raise GGUFError(is_not, path=h.path, key=key, offset=h.offsets[key], found=found, expected=expected)
    if h is first:
        return
    for key, value in h.metadata.items():
        if key not in _PER_FILE and not (key in first.metadata and _same(value, first.metadata[key])):
            raise GGUFError(
                "shards after the first add no metadata and change none", path=h.path, key=key, offset=h.offsets[key]
            )


def _check_distinct(headers: list[Header]) -> None:
    home: dict[str, Header] = {}
    for h in headers:
        for name, t in h.tensors.items():
            if name in home:
                raise GGUFError(
                    f"tensor stands in {home[name].path} already", path=h.path, tensor=name, offset=t.record
                )
            home[name] = h


def _number(h: Header, key: str) -> int | None:
    value = h.metadata.get(key)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise GGUFError(
        "value is of no use", path=h.path, key=key, offset=h.offsets[key], found=clip(value), expected="a count"
    )


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b
