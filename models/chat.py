"""Chat templates: messages to the prompt that the model was trained on, as text and as token ids.

Knows Jinja templates as Hugging Face writes them and the tokenizer's special tokens. A template is data of unknown
origin and runs in a sandbox. What a user wrote never becomes a special token, whatever the template does with it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2

from .template_sandbox import Sandbox, limits
from .tokenizer import Tokenizer

__all__ = ["ChatError", "ChatTemplate", "encode_chat"]

_MAX_SOURCE = 1 << 20  # characters of a template; known ones have less than 40 thousand
_MAX_DEPTH = 64  # of lists and objects in a message
_STEPS = 2_000_000
_CHARACTERS = 1 << 25
_ROLE = re.compile(r"[\w .:-]+")
# Strings under these keys steer the template and are no text of a user's.
_STRUCTURAL_KEYS = frozenset({"role", "type"})
_USER_EXTRAS = frozenset({"tools", "documents"})


class ChatError(ValueError):
    """Messages or a chat template that can't be rendered; `line` is the template's, where it is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


class ChatTemplate:
    """A compiled chat template. ChatError where `source` is no valid template.

    `now` is the clock behind the template's `strftime_now`.
    """

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        if not isinstance(source, str) or not source.strip():
            raise ChatError(f"no chat template: found {source!r}, expected Jinja source")
        if len(source) > _MAX_SOURCE:
            raise ChatError(f"the chat template has {len(source)} characters, more than {_MAX_SOURCE}")
        self.source = source
        self._sandbox = Sandbox(raise_exception=_raise_exception, strftime_now=_strftime(now))
        with limits(steps=_STEPS, characters=_CHARACTERS):
            try:
                self._template = self._sandbox.from_string(source)
            except Exception as e:
                raise _template_error(e) from e

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt as text.

        A message has a `role` and a `content`: a string, a list of text parts, or None beside `tool_calls`. `extra` are
        more variables for the template: tools, documents, bos_token, eos_token, enable_thinking, … All values are what
        JSON can carry. Raises ChatError naming the message and field, or the template's line.
        """
        return self._render(self._messages(messages), add_generation_prompt, _extras(extra))

    @cached_property
    def accepts_parts(self) -> bool:
        """Whether the template handles a content that is a list of parts; for others they are joined by newlines."""
        probe = {"role": "user", "content": [{"type": "text", "text": "needle"}]}
        try:
            text = self._render([probe], True, {})
        except ChatError:
            return False
        return "needle" in text and "'text'" not in text and '"text"' not in text

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        checked = _checked_messages(messages)
        for message in checked:
            if isinstance(message.get("content"), list) and not self.accepts_parts:
                message["content"] = "\n".join(part["text"] for part in message["content"])
        return checked

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, extra: Mapping[str, Any]) -> str:
        size = sum(map(len, _leaves(messages))) + sum(map(len, _leaves(list(extra.values()))))
        variables = {**extra, "messages": messages, "add_generation_prompt": add_generation_prompt}
        with limits(steps=_STEPS, characters=_CHARACTERS + 64 * size):
            try:
                return self._template.render(variables)
            except Exception as e:
                raise _template_error(e) from e


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> list[int]:
    """Token ids of the rendered prompt: the template's special tokens as such, all that users wrote as plain text.

    Without look-alikes of special tokens in the messages this equals encoding the rendered text with `parse_special`.
    `bos_token` and `eos_token` come from the tokenizer unless `extra` has them. Raises ChatError, also where the
    template treats text in such a way that a look-alike can't be told from a special token.
    """
    if template is None:
        raise ChatError(f"{tokenizer.source}: no chat template, so messages can't be turned into a prompt")
    own = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    variables = _extras({k: v for k, v in own.items() if v is not None} | extra)
    prompt = _Provenance(tokenizer, template, template._messages(messages), add_generation_prompt, variables)
    ids: list[int] = []
    for text, special in prompt.pieces():
        ids += [special] if special is not None else tokenizer.encode(text, parse_special=False, add_bos=False)
    return ids


class _Provenance:
    """Tells a prompt's characters from the template apart from those that users wrote.

    The template is rendered again with each user's character replaced by a twin from a private-use plane, so that no
    special token can contain one. Where turning twins back gives the first rendering, each character's origin is known
    exactly. A template that looks into the text (Qwen's for `</think>`) may render differently; then only whole
    look-alikes are marked, which disturbs no such template, and the sequence of special tokens must still be the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.messages, self.add_generation_prompt, self.extra = messages, add_generation_prompt, extra
        self.user_extra = {k: v for k, v in extra.items() if k in _USER_EXTRAS}
        self.specials = [re.escape(t) for t in sorted(tokenizer.special_texts, key=len, reverse=True)]
        self.check_fixed()
        self.twins = self.find_twins()
        self.back = {ord(t): c for c, t in self.twins.items()}

    def pieces(self) -> Iterator[tuple[str, int | None]]:
        """The prompt cut at the template's special tokens: (text, id of the special token or None)."""
        text = self.render(lambda leaf: leaf)
        marked = self.marked_rendering(text)
        at = 0
        for piece, special in self.tokenizer.split_special(marked):
            yield text[at : at + len(piece)], special
            at += len(piece)

    def marked_rendering(self, text: str) -> str:
        """`text` with twins in place of at least so many users' characters that special tokens are the template's."""
        if not self.specials:
            return text
        table = str.maketrans(self.twins)
        try:
            full = self.render(lambda leaf: leaf.translate(table))
        except ChatError:  # a template that insists on certain text
            full = None
        if full is not None and full.translate(self.back) == text:
            return full
        look_alike = re.compile("|".join(self.specials))
        whole = self.render(lambda leaf: look_alike.sub(lambda m: self.twins[m[0][0]] + m[0][1:], leaf))
        if whole.translate(self.back) != text:
            self.refuse(look_alike)
        if full is None:
            if any(map(self.may_take_part, self.user_text())):
                self.refuse(look_alike)
        elif self.special_sequence(full) != self.special_sequence(whole):
            self.refuse(look_alike)
        return whole

    def render(self, change: Callable[[str], str]) -> str:
        messages = _mapped(self.messages, change)
        extra = self.extra | _mapped(self.user_extra, change)
        return self.template._render(messages, self.add_generation_prompt, extra)

    def special_sequence(self, text: str) -> list[int]:
        return [special for _, special in self.tokenizer.split_special(text) if special is not None]

    def may_take_part(self, leaf: str) -> bool:
        """Whether this text could be a part of a special token: judged by its characters, where twins are no help."""
        texts = self.tokenizer.special_texts
        marks = {c for t in texts for c in t if not c.isalnum()} | {c for t in texts for c in (t[0], t[-1])}
        inside = leaf.strip()
        return bool(marks & set(leaf)) or bool(inside) and any(inside in t for t in texts)

    def user_text(self) -> list[str]:
        return [*_leaves(self.messages, _STRUCTURAL_KEYS), *_leaves(self.user_extra, _STRUCTURAL_KEYS)]

    def find_twins(self) -> dict[str, str]:
        """For each character of a special token one that occurs nowhere in template or messages."""
        given: tuple[Any, ...] = (self.messages, self.extra)
        used = set(self.template.source).union(*(text for v in given for text in (*_leaves(v), *_fixed(v))))
        free = (chr(c) for c in (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)) if chr(c) not in used)
        alphabet = sorted({c for text in self.tokenizer.special_texts for c in text})
        twins = dict(zip(alphabet, free, strict=False))
        if len(twins) < len(alphabet):
            raise ChatError("messages: they use so many private-use characters that special tokens can't be protected")
        return twins

    def check_fixed(self) -> None:
        """Refuse special tokens where text can't be marked: in keys, roles, types and the template's other options."""
        others = {k: v for k, v in self.extra.items() if k not in _USER_EXTRAS and k not in ("bos_token", "eos_token")}
        for text in (*_fixed(self.messages), *_fixed(self.user_extra), *_fixed(others), *_leaves(others)):
            for piece, special in self.tokenizer.split_special(text):
                if special is not None:
                    raise ChatError(f"{text!r}: a key, role, type or option may not hold the special token {piece!r}")

    def refuse(self, look_alike: re.Pattern[str]) -> NoReturn:
        for i, message in enumerate(self.messages):
            for leaf in _leaves(message, _STRUCTURAL_KEYS):
                if found := look_alike.search(leaf):
                    raise ChatError(
                        f"messages[{i}]: holds {found[0]!r}, which looks like a special token, and this chat template "
                        "changes text so that the two can't be told apart"
                    )
        raise ChatError("messages: this chat template would make special tokens out of their text")


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of `messages` made of dicts, lists, strings and numbers only, or ChatError naming index and field."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatError(f"messages: found {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise ChatError("messages: the list is empty")
    return [_checked_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatError(f"{where}: found {type(message).__name__}, expected an object with role and content")
    out: dict[str, Any] = _plain(message, where)
    if "role" not in out:
        raise ChatError(f"{where}.role: missing")
    role = out["role"]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ChatError(f"{where}.role: found {role!r}, expected a name such as 'user'")
    if out.get("content") is None:
        if not out.get("tool_calls"):
            raise ChatError(f"{where}.content: missing")
    elif isinstance(out["content"], list):
        for j, part in enumerate(out["content"]):
            _check_part(part, f"{where}.content[{j}]")
    elif not isinstance(out["content"], str):
        raise ChatError(f"{where}.content: found {type(out['content']).__name__}, expected a string or a list of parts")
    return out


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise ChatError(f"{where}: found {type(part).__name__}, expected an object with type and text")
    if part.get("type") != "text":
        raise ChatError(f"{where}.type: found {part.get('type')!r}, supported is 'text'")
    if not isinstance(part.get("text"), str):
        raise ChatError(f"{where}.text: found {type(part.get('text')).__name__}, expected a string")


def _extras(extra: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" in extra:
        raise ChatError("messages: given twice, as an argument and as a variable of the template")
    return {name: _plain(value, name) for name, value in extra.items()}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy that holds nothing but what JSON can carry, so that a template meets no object of ours."""
    if depth > _MAX_DEPTH:
        raise ChatError(f"{where[:80]}: nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ChatError(f"{where}: has the key {key!r}, expected strings as keys")
        return {str(k): _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise ChatError(f"{where}: found {type(value).__name__}, expected what JSON can carry")


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with `change` applied to every string that a user wrote."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if _structural(k, v, _STRUCTURAL_KEYS) else _mapped(v, change) for k, v in value.items()}
    return [_mapped(v, change) for v in value] if isinstance(value, list) else value


def _structural(key: str, value: Any, keys: frozenset[str]) -> bool:
    return key in keys and isinstance(value, str)


def _leaves(value: Any, leaving_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every string in `value`, keys not counted, nor strings under the keys `leaving_out`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if not _structural(key, item, leaving_out):
                yield from _leaves(item, leaving_out)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, leaving_out)


def _fixed(value: Any) -> Iterator[str]:
    """Keys, and the strings that `_mapped` leaves alone."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            if _structural(key, item, _STRUCTURAL_KEYS):
                yield item
            else:
                yield from _fixed(item)
    elif isinstance(value, list):
        for item in value:
            yield from _fixed(item)


def _raise_exception(message: Any) -> NoReturn:
    """What templates call to refuse messages."""
    raise jinja2.TemplateError(str(message))


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if len(format) > 200 or re.search(r"\d{3}", format):
            raise ChatError(f"strftime_now: {format[:40]!r} is no format of a date")
        return now().strftime(format)

    return strftime_now


def _template_error(e: Exception) -> ChatError:
    """The template's own words, and the line at which it stopped."""
    if isinstance(e, jinja2.TemplateSyntaxError):
        line: int | None = e.lineno
    else:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename in ("<template>", "<unknown>")]
        line = lines[-1] if lines else None
    kind = "" if type(e) is jinja2.TemplateError else f"{type(e).__name__}: "  # the former is raise_exception's
    at = "" if line is None else f", line {line}"
    return ChatError(f"chat template{at}: {kind}{e}", line)
