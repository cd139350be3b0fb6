"""Sessions on disk: a file brings back every state, or is refused and changes nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from trueup.runtime import Engine, OutOfState, Session, StateError

Make = Callable[..., Engine]


def header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, read by the format's own description: a length, then JSON."""
    with path.open("rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        about: dict[str, str] = json.loads(f.read(n))["__metadata__"]
        return about


def rewrite(path: Path, arrays: dict[str, NDArray[Any]] | None = None, **about: str) -> None:
    old = load_file(path)
    save_file(old if arrays is None else arrays, path, metadata=header(path) | about)


@pytest.fixture
def saved(make: Make, ids: list[int], tmp_path: Path) -> tuple[Engine, Session, Path]:
    e = make()
    s = e.session()
    s.feed(ids[:43])
    s.save(tmp_path / "session")
    return e, s, tmp_path / "session"


@pytest.mark.fault("B27")
def test_next_logits_are_the_same_bits(saved: Any, make: Make, ids: list[int]) -> None:
    """Into another engine, of other pages and slots, and behind another session."""
    e, s, path = saved
    other = make(page=16, context=100, sequences=2)
    other.session().feed(ids[:20])
    t = other.session(path)
    assert t.tokens == s.tokens == ids[:43] and len(t) == 43
    assert other.plans_built == 1, "loading runs nothing"
    a, b = e.bundle.export(s.sequence), other.bundle.export(t.sequence)
    assert a.keys() == b.keys() == e.bundle.kinds.keys()
    assert all(a[n].tobytes() == b[n].tobytes() for n in a)
    for n in (1, 7, 30):
        rows = ids[len(s) : len(s) + n]
        assert np.array_equal(s.feed(rows, logits="all"), t.feed(rows, logits="all"))


@pytest.mark.fault("B29")
def test_a_step_after_loading_runs_its_own_rows_only(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    e, _, path = saved
    t = e.session(path)
    shapes = []
    executable = e.executable
    monkeypatch.setattr(e, "executable", lambda shape: shapes.append(shape) or executable(shape))
    t.feed([1])
    assert [s.tokens for s in shapes] == [1]


@pytest.mark.parametrize("length", [0, 1, 4, 8])
def test_lengths_on_page_borders(make: Make, ids: list[int], tmp_path: Path, length: int) -> None:
    e = make()
    s = e.session()
    s.feed(ids[:length], logits=None)
    s.save(tmp_path / "s")
    t = e.session(tmp_path / "s")
    assert np.array_equal(
        s.feed(ids[length : length + 9], logits="all"), t.feed(ids[length : length + 9], logits="all")
    )


def test_a_saved_session_may_be_forked_and_restored(saved: Any, ids: list[int]) -> None:
    e, s, path = saved
    t = e.session(path)
    c = t.checkpoint()
    f = t.fork()
    t.feed([1, 2, 3])
    t.restore(c)
    want = s.feed(ids[43:50], logits="all")
    assert np.array_equal(t.feed(ids[43:50], logits="all"), want)
    assert np.array_equal(f.feed(ids[43:50], logits="all"), want)


def parts_of(path: Path) -> list[str]:
    return sorted(load_file(path))


def without(path: Path, name: str) -> None:
    arrays = load_file(path)
    del arrays[name]
    rewrite(path, arrays)


def other(path: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    arrays = load_file(path)
    arrays[name] = np.ascontiguousarray(change(arrays[name]))
    rewrite(path, arrays)


REFUSED = {
    "another model": (lambda p: rewrite(p, model="0" * 64), "saved by another model; its fingerprint is 0000"),
    "no model": (lambda p: save_file(load_file(p), p, metadata={"trueup_session": "1"}), "its fingerprint is missing"),
    "another version": (lambda p: rewrite(p, trueup_session="2"), "a saved session of version 2, expected 1"),
    "no version": (lambda p: save_file(load_file(p), p), "a saved session of version unknown, expected 1"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "not a saved session"),
    "half": (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "not a saved session"),
    "empty": (lambda p: p.write_bytes(b""), "not a saved session"),
    "text": (lambda p: p.write_text("hello"), "not a saved session"),
    "missing": (lambda p: p.unlink(), "not a saved session"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "not a saved session"),
    "no tokens": (lambda p: without(p, "tokens"), "tokens are missing"),
    "fewer tokens": (lambda p: other(p, "tokens", lambda a: a[:-1]), r"expected float32\[42, 2, 64\]"),
    "tokens of 64 bits": (lambda p: other(p, "tokens", lambda a: a.astype(np.int64)), "malformed"),
    "tokens in rows": (lambda p: other(p, "tokens", lambda a: a[None]), "malformed"),
    "too many tokens": (lambda p: other(p, "tokens", lambda a: np.ones(257, np.int32)), "more than the context of 256"),
    "token outside": (lambda p: other(p, "tokens", lambda a: a + 1000), "a token outside the vocabulary of 1024"),
    "part too many": (lambda p: rewrite(p, load_file(p) | {"state/more": np.zeros(3)}), "has the unknown more"),
    "stray array": (lambda p: rewrite(p, load_file(p) | {"more": np.zeros(3)}), "has the unknown more"),
    "wrong type": (lambda p: other(p, "state/blk.2.k", lambda a: a.astype(np.float16)), "state blk.2.k is float16"),
    "wrong shape": (lambda p: other(p, "state/blk.0.conv", lambda a: a[1:]), "state blk.0.conv is float32"),
}


@pytest.mark.fault("B27")
@pytest.mark.parametrize("what", REFUSED)
def test_refused_files_change_nothing(saved: Any, what: str) -> None:
    e, _, path = saved
    change, message = REFUSED[what]
    change(path)
    books = e.bundle.free_slots[:], e.bundle.free_pages[:], e.bundle.references[:]
    with pytest.raises(StateError, match=message) as caught:
        e.session(path)
    assert str(path) in str(caught.value)
    assert (e.bundle.free_slots, e.bundle.free_pages, e.bundle.references) == books


def test_a_type_that_numpy_lacks_is_refused(saved: Any) -> None:
    """A header that says BF16 of a state's bytes."""
    e, _, path = saved
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    about = json.loads(raw[8 : 8 + n])
    about["state/blk.0.conv"] |= {"dtype": "BF16", "shape": [6, 1024]}
    text = json.dumps(about).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + n :])
    with pytest.raises(StateError, match=str(path)):
        e.session(path)


@pytest.mark.fault("B27")
def test_every_part_is_asked_for(saved: Any) -> None:
    e, _, path = saved
    whole = path.read_bytes()
    assert parts_of(path) == sorted(["tokens", *(f"state/{n}" for n in e.bundle.kinds)])
    for name in e.bundle.kinds:
        without(path, f"state/{name}")
        with pytest.raises(StateError, match=f"lacks {name}"):
            e.session(path)
        path.write_bytes(whole)
    e.session(path)


def test_a_full_engine_refuses_and_keeps_its_slots(saved: Any, make: Make, ids: list[int]) -> None:
    _, _, path = saved
    e = make(context=48, sequences=1, checkpoints=1)
    e.session().feed(ids[:40], logits=None)
    books = e.bundle.free_slots[:], e.bundle.free_pages[:], e.bundle.references[:]
    with pytest.raises(OutOfState, match="pages"):
        e.session(path)
    assert (e.bundle.free_slots, e.bundle.free_pages, e.bundle.references) == books


def test_a_save_that_fails_leaves_the_old_file(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, s, path = saved
    old = path.read_bytes()

    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        write(self, data[: len(data) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        s.save(path)
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_saving_takes_nothing_from_the_session(saved: Any, ids: list[int], make: Make) -> None:
    e, s, path = saved
    s.save(str(path))
    assert e.session(str(path)).tokens == ids[:43]
    assert np.array_equal(s.feed(ids[43:46], logits="all"), make().logits(ids[:46])[43:])


def test_sessions_close_themselves(make: Make, ids: list[int]) -> None:
    e = make()
    with e.session() as s:
        s.feed(ids[:9])
        assert len(s) == 9 == len(s.tokens)
    assert len(e.bundle.free_slots) == e.capacity.slots and len(e.bundle.free_pages) == e.capacity.pages
    s.close()
    assert len(e.bundle.free_slots) == e.capacity.slots
    with pytest.raises(StateError, match="freed"):
        s.feed([1])
    with pytest.raises(RuntimeError, match="inside"), e.session() as s:
        raise RuntimeError("inside")
    assert len(e.bundle.free_slots) == e.capacity.slots
