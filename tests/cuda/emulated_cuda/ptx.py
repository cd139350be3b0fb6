"""PTX in asm statements, made calls of the shim's functions. Knows the instructions that kernels here use; refuses others."""

from __future__ import annotations

import re
from collections.abc import Callable

STATEMENT = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


class PtxError(ValueError):
    """An asm statement that the emulator does not know."""


def rewrite(text: str, closed: Callable[[str, int], int], split: Callable[[str], list[str]]) -> str:
    """The text with its asm statements as calls. `closed` finds the end of a parenthesis, `split` parts at commas."""
    out, last = "", 0
    while m := STATEMENT.search(text, last):
        end = closed(text, m.end() - 1)
        out += text[last : m.start()] + _call(text[m.end() : end], split)
        last = end + 1
    return out + text[last:]


def _call(inner: str, split: Callable[[str], list[str]]) -> str:
    sections = _sections(inner)
    template = "".join(STRING.findall(sections[0])).replace("\\n", "\n").replace("\\t", " ")
    operands = []
    for section in sections[1:3]:
        for part in split(section):
            if part.strip():
                operands.append(part[part.index("(") : part.rindex(")") + 1])
    lines = [
        re.sub(r"\s+", " ", i).strip() for i in re.sub(r"^\s*\{(?=\s*\.reg)|\}\s*$(?<=\n\})", "", template).split(";")
    ]
    calls = [_instruction(i, operands) for i in lines if i]
    return "do { " + " ".join(calls) + " } while (0)" + "\n" * inner.count("\n")


def _sections(inner: str) -> list[str]:
    """Parts between the colons that stand outside of strings and brackets."""
    out, depth, quoted, last, i = [], 0, False, 0, 0
    while i < len(inner):
        c = inner[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == ":" and not depth:
            if inner[i : i + 2] == "::":
                out += [inner[last:i], ""]
                i += 1
            else:
                out.append(inner[last:i])
            last = i + 1
        i += 1
    return [*out, inner[last:]]


def _instruction(line: str, operands: list[str]) -> str:
    opcode, _, rest = line.partition(" ")
    groups = [
        [_operand(x, operands) for x in re.findall(r"[^\s,{}\[\]]+", g)]
        for g in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    ]
    flat = [x for g in groups for x in g]
    for pattern, make in INSTRUCTIONS:
        if m := re.fullmatch(pattern, opcode):
            return make(m, groups, flat)
    raise PtxError(f"the emulator does not know the PTX instruction {line}")


def _operand(text: str, operands: list[str]) -> str:
    if m := re.fullmatch(r"%(\d+)", text):
        return operands[int(m[1])]
    if m := re.fullmatch(r"%%(\w+)", text):
        return {"laneid": "(emu_current->lane)"}.get(m[1], text)
    return text


Groups = list[list[str]]


def _mma(m: re.Match[str], groups: Groups, flat: list[str]) -> str:
    d, a, b, c = groups
    kind = {"f32": "float", "s32": "int"}[m["c"]]
    outs = ", ".join(f"({kind} *)&{x}" for x in d)
    words = [", ".join(f"(uint32_t){x}" for x in g) for g in (a, b)]
    return (
        f"{{ {kind} *const emu_d[4] = {{{outs}}}; const uint32_t emu_a[] = {{{words[0]}}}, emu_b[] = {{{words[1]}}}; "
        f"const {kind} emu_c[] = {{{', '.join(c)}}}; "
        f"emu::ptx::mma<emu::ptx::Form::{m['ab']}, {m['k']}, {kind}>(emu_d, emu_a, emu_b, emu_c, __LINE__); }}"
    )


def _ldmatrix(m: re.Match[str], groups: Groups, flat: list[str]) -> str:
    outs = ", ".join(f"(uint32_t *)&{x}" for x in groups[0])
    turned = "true" if m["trans"] else "false"
    return (
        f"{{ uint32_t *const emu_d[] = {{{outs}}}; "
        f"emu::ptx::ldmatrix(emu_d, {m['n']}, (unsigned){groups[1][0]}, {turned}, __LINE__); }}"
    )


def _copy(m: re.Match[str], groups: Groups, flat: list[str]) -> str:
    to, source, *sizes = flat
    return f"emu::ptx::cp_async((unsigned){to}, (const void *){source}, {', '.join(sizes)});"


def _load(m: re.Match[str], groups: Groups, flat: list[str]) -> str:
    *outs, at = flat
    count = int(m["n"] or 1)
    kind = {"u": "uint", "s": "int", "b": "uint", "f": "float"}[m["t"]]
    if m["w"] != "32":
        kind = {"f64": "double", "u8": "uchar", "s8": "schar", "u16": "ushort", "b16": "ushort"}.get(
            m["t"] + m["w"], "ulonglong"
        )
    if len(outs) != count:
        raise PtxError(f"{m[0]} gives {count} values, not {len(outs)}")
    if count == 1:
        return f"emu::ptx::put({outs[0]}, *(const {kind} *){at});"
    vector = {"schar": "char"}.get(kind, kind) + str(count)
    puts = " ".join(f"emu::ptx::put({o}, emu_v.{axis});" for o, axis in zip(outs, "xyzw", strict=False))
    return f"{{ const {vector} emu_v = *(const {vector} *){at}; {puts} }}"


def _store(m: re.Match[str], groups: Groups, flat: list[str]) -> str:
    at, *values = flat
    kind = {"u": "uint", "s": "int", "b": "uint", "f": "float"}[m["t"]]
    if len(values) == 1:
        return f"*({kind} *){at} = {values[0]};"
    vector = f"{kind}{len(values)}"
    return f"*({vector} *){at} = make_{vector}({', '.join(values)});"


INSTRUCTIONS: list[tuple[str, Callable[[re.Match[str], Groups, list[str]], str]]] = [
    (
        r"mma\.sync\.aligned\.m16n8k(?P<k>8|16|32)\.row\.col(?:\.satfinite)?\.(?P<c>f32|s32)\.(?P<ab>f16|bf16|tf32|s8|u8)\.(?P=ab)\.(?P=c)",
        _mma,
    ),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<n>[124])(?P<trans>\.trans)?\.shared(?:::cta)?\.b16", _ldmatrix),
    (r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\d+B)?", _copy),
    (r"cp\.async\.commit_group", lambda m, g, f: "emu::ptx::cp_async_commit();"),
    (r"cp\.async\.wait_group", lambda m, g, f: f"emu::ptx::cp_async_wait({f[0]});"),
    (r"cp\.async\.wait_all", lambda m, g, f: "emu::ptx::cp_async_wait_all();"),
    (r"prefetchu?\..*|griddepcontrol\..*|applypriority\..*|discard\..*", lambda m, g, f: ";"),
    (
        r"ld\.global(?:\.nc|\.relaxed|\.acquire|\.gpu|\.cs|\.cg|\.ca|\.L1::\w+|\.L2::\w+)*(?:\.v(?P<n>[24]))?\.(?P<t>[usbf])(?P<w>8|16|32|64)",
        _load,
    ),
    (r"st\.global(?:\.relaxed|\.release|\.gpu|\.cs|\.cg|\.wb|\.L1::\w+)*(?:\.v(?P<n>[24]))?\.(?P<t>[usbf])32", _store),
    (r"ex2\.approx(?:\.ftz)?\.f32", lambda m, g, f: f"{f[0]} = exp2f({f[1]});"),
    (r"lg2\.approx(?:\.ftz)?\.f32", lambda m, g, f: f"{f[0]} = log2f({f[1]});"),
    (r"rcp\.approx(?:\.ftz)?\.f32", lambda m, g, f: f"{f[0]} = 1.0f / {f[1]};"),
    (r"rsqrt\.approx(?:\.ftz)?\.f32", lambda m, g, f: f"{f[0]} = rsqrtf({f[1]});"),
    (r"tanh\.approx\.f32", lambda m, g, f: f"{f[0]} = tanhf({f[1]});"),
    (r"lop3\.b32", lambda m, g, f: f"{f[0]} = emu::ptx::lop3({f[1]}, {f[2]}, {f[3]}, {f[4]});"),
    (r"prmt\.b32", lambda m, g, f: f"{f[0]} = __byte_perm({f[1]}, {f[2]}, {f[3]});"),
    (r"mov\.[usb]32", lambda m, g, f: f"{f[0]} = {f[1]};"),
    (r"cvt\.rn\.bf16x2\.f32", lambda m, g, f: f"{f[0]} = emu::to_bfloat({f[1]}) << 16 | emu::to_bfloat({f[2]});"),
    (r"cvt\.rn\.f16x2\.f32", lambda m, g, f: f"{f[0]} = emu::to_half({f[1]}) << 16 | emu::to_half({f[2]});"),
    (
        r"cvt\.rna\.tf32\.f32",
        lambda m, g, f: f"emu::ptx::put({f[0]}, (__float_as_uint({f[1]}) + 0x1000u) & 0xffffe000u);",
    ),
]
