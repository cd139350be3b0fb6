"""Text piece by piece equals the text at once, however bytes fall into tokens and text into pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trueup.runtime.text import StopStrings, TextStream


class Pieces:
    """A tokenizer whose token i is `pieces[i]`; `special` ones are skipped."""

    def __init__(self, pieces: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self.pieces, self.special = pieces, special

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special


def streamed(pieces: list[bytes]) -> list[str]:
    stream = TextStream(Pieces(pieces))
    return [*(stream.push(i) for i in range(len(pieces))), stream.finish()]


# Bytes that are nearly UTF-8: whole characters, their halves, overlong forms, surrogates, stray continuation bytes.
fragments = st.one_of(
    st.text(max_size=3).map(lambda s: s.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"\xe6", b"\xaa", b"\xf0\x9f", b"\x98\xb8", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90", b"\xff"]),
    st.binary(max_size=3),
)


@pytest.mark.fault("B86")
@given(st.lists(fragments))
@example([b"\xe6", b"\xad", b"\xaa"])
@example([b"\xf0\x9f\x98", b"\xb8"])
@example([b"\xf0\x9f\x98", b"a"])
@example([b"\xc0", b"\x80"])
@example([b"\xed", b"\xa0", b"\x80"])
def test_pieces_joined_equal_decoding_all_bytes_at_once(pieces: list[bytes]) -> None:
    assert "".join(streamed(pieces)) == b"".join(pieces).decode("utf-8", errors="replace")


@given(st.text(min_size=1), st.data())
def test_valid_text_is_never_split_within_a_character(text: str, data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    out = streamed(pieces)
    whole = 0
    for i, _ in enumerate(pieces):  # as much as is whole by now
        whole += len(pieces[i])
        assert "".join(out[: i + 1]) == raw[:whole].decode("utf-8", errors="ignore")


@pytest.mark.fault("B86")
@pytest.mark.parametrize("tail", [b"\xe6", b"\xe6\xad", b"\xf0\x9f\x98", b"\xc3"])
def test_an_unfinished_tail_is_held_then_one_replacement_character(tail: bytes) -> None:
    stream = TextStream(Pieces([b"ok" + tail]))
    assert stream.push(0) == "ok"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        stream.push(0)


def test_special_tokens_give_no_text_unless_asked() -> None:
    tokenizer = Pieces([b"\xc3", b"<|x|>", b"\xa9"], special=frozenset({1}))
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in range(3)] == ["", "", "é"]
    stream = TextStream(tokenizer, skip_special=False)
    assert [stream.push(i) for i in range(3)] == ["", "\ufffd<|x|>", "\ufffd"]


def cut_reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: grow the text until it ends with a stop; of several the longest."""
    for end in range(len(text) + 1):
        hit = max((s for s in stops if text[:end].endswith(s)), key=len, default=None)
        if hit is not None:
            return text[: end - len(hit)], hit
    return text, None


def held_reference(text: str, stops: list[str]) -> int:
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


few_letters = st.text(alphabet="ab€", max_size=12)


@pytest.mark.fault("B87")
@given(st.lists(few_letters), st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=4))
@example(["The", " quick", " br", "own fox"], ["own fox"])
@example(["The", " quick", " br", "own fox"], ["wn f"])
@example(["The", " quick", " br", "own fox"], ["fox", "x"])
@example(["aaab"], ["aab"])
@example(["a", "a", "a", "b"], ["aab"])
@example(["a", "b", "c", "d"], ["abcd", "bc"])
@example(["abcd"], ["abcd", "bc"])
@example(["x\n", "\n"], ["\n"])
def test_streamed_text_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    want, stop = cut_reference("".join(pieces), stops)
    streaming, out, seen = StopStrings(stops), "", ""
    for piece in pieces:
        out += streaming.push(piece)
        seen += piece
        if streaming.stopped is None:  # no more is held back than may still become a stop
            assert len(seen) - len(out) == held_reference(seen, stops)
    assert (out + streaming.finish(), streaming.stopped) == (want, stop)
    at_once = StopStrings(stops)
    assert (at_once.push("".join(pieces)) + at_once.finish(), at_once.stopped) == (want, stop)


@pytest.mark.fault("B87")
def test_nothing_comes_after_a_stop() -> None:
    stops = StopStrings("\n")
    assert stops.push("a\nb") == "a"
    assert stops.stopped == "\n"
    assert stops.push("c") == "" and stops.finish() == ""


def test_without_stops_everything_passes() -> None:
    for none in (None, [], ()):
        stops = StopStrings(none)
        assert stops.push("abc") == "abc" and stops.finish() == "" and stops.stopped is None


@pytest.mark.parametrize(("stops", "says"), [("", r"stop\[0\]: an empty"), (["a", ""], r"stop\[1\]: an empty")])
def test_an_empty_stop_is_refused(stops: str | list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StopStrings(stops)


def test_a_stop_that_is_no_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop\[1\]: found int, expected a string"):
        StopStrings(["a", 7])  # type: ignore[list-item]
