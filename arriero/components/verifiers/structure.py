"""The parts of an answer in normal spelling: lists, intervals, tuples, matrices, named values. Text only."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\([A-Za-z, ]*\))?|[A-Za-z]_\{[^{}]*\}(?::[A-Za-z])?"
_NAMED = re.compile(rf"({_NAME})(?:=|:=)(.+)", re.S)
_AND = re.compile(r",?\s*\\text\{\s*,?\s*(?:and|or)\s*\}\s*|,?\s+(?:and|or)\s+|\\(?:vee|lor)(?![A-Za-z])")
_ORDER = re.compile(r"(\\(?:le|ge)(?![A-Za-z])|<|>)")
_MATRIX = re.compile(r"\\begin\{([pbvB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.S)
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\w)?")
_INFINITY = r"\infty"


@dataclass(frozen=True)
class Bracketed:
    """At least two parts in round or square brackets."""

    opening: str
    closing: str
    parts: list[str]


@dataclass(frozen=True)
class Interval:
    """`opening` and `closing` are brackets, `low` and `high` text."""

    opening: str
    low: str
    high: str
    closing: str


@dataclass(frozen=True)
class Intervals:
    """A union; `stated`: written so that it can't be a point (an inequality, `\\in`, square brackets)."""

    parts: list[Interval]
    stated: bool


def split(text: str, at: str = ",") -> list[str]:
    """The parts between the commas that stand in no bracket."""
    parts, depth, start, i = list[str](), 0, 0, 0
    while i < len(text):
        if text[i] == "\\" and text[i + 1 : i + 2] in ("{", "}"):
            depth += 1 if text[i + 1] == "{" else -1
            i += 1
        elif text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        elif not depth and text.startswith(at, i):
            parts.append(text[start:i].strip())
            start = i = i + len(at)
            continue
        i += 1
    return [*parts, text[start:].strip()]


def alternatives(text: str) -> list[str]:
    """The values of an answer that gives several; one for any other."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    parts = [p for p in split(_AND.sub(",", text)) if p]
    if len(parts) > 1 and (name := named(parts[0])[0]):
        # "x = 1, 2" names the values once.
        parts = [named(p)[1] if named(p)[0] in ("", name) else p for p in parts]
    return parts or [text]


def expanded(parts: list[str]) -> list[str]:
    """Both values of each part that has one `\\pm`."""
    found: list[str] = []
    for part in parts:
        if part.count(r"\pm") != 1:
            found.append(part)
            continue
        before, _, after = part.partition(r"\pm")
        after = after.strip()
        found += [f"{before}+{after}" if before else after, f"{before}-{after}"]
    return found


def bracketed(text: str) -> Bracketed | None:
    """A tuple, a point or an interval as written."""
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts = split(text[1:-1])
    balanced = all(p and _balanced(p) for p in parts)
    return Bracketed(text[0], text[-1], parts) if len(parts) > 1 and balanced else None


def intervals(text: str) -> Intervals | None:
    """A union of intervals, from brackets or from inequalities of one variable."""
    pieces = [p for p in re.split(r"\\cup(?![A-Za-z])", text) if p]
    stated = len(pieces) > 1
    found: list[Interval] = []
    for piece in pieces:
        membership = re.fullmatch(rf"(?:{_VARIABLE.pattern})\s*\\in(?![A-Za-z])\s*(.+)", piece.strip())
        stated = stated or membership is not None
        inside = membership[1] if membership else piece.strip()
        if (brackets := bracketed(inside)) and len(brackets.parts) == 2:
            stated = stated or _INFINITY in inside or (brackets.opening, brackets.closing) != ("(", ")")
            low, high = brackets.parts
            found.append(_interval(brackets.opening, low, high, brackets.closing))
            continue
        ranges = [_range(p) for p in _AND.split(inside)] if not membership else []
        if not ranges or any(r is None for r in ranges):
            return None
        found += [r for r in ranges if r]
        stated = True
    return Intervals(found, stated) if found else None


def matrix(text: str) -> list[list[str]]:
    """The rows of a matrix; empty if it is none."""
    found = _MATRIX.fullmatch(text)
    if found is None:
        return []
    rows = [r.strip() for r in re.split(r"\\\\(?:\[[^\]]*\])?", found[2])]
    return [[c.strip() for c in r.split("&")] for r in rows if r]


def named(text: str) -> tuple[str, str]:
    """Name and value of `name = value`; an empty name for anything else."""
    found = _NAMED.fullmatch(text)
    if found is None or "=" in found[2]:
        return "", text
    return found[1], found[2].strip()


def chained(text: str) -> list[str]:
    """The sides of `a = b = c`, without a name in front."""
    sides = split(text, "=")
    return sides[1:] if len(sides) > 2 and re.fullmatch(_NAME, sides[0]) else sides


def _range(text: str) -> Interval | None:
    parts = _ORDER.split(text.strip())
    sides, signs = [p.strip() for p in parts[::2]], parts[1::2]
    if len(sides) == 2 and len(signs) == 1:
        if _VARIABLE.fullmatch(sides[1]) and not _VARIABLE.fullmatch(sides[0]):
            sides, signs = sides[::-1], [_turned(signs[0])]
        if not _VARIABLE.fullmatch(sides[0]) or not sides[1]:
            return None
        closed = signs[0] in (r"\le", r"\ge")
        if signs[0] in ("<", r"\le"):
            return _interval("(", "-" + _INFINITY, sides[1], "]" if closed else ")")
        return _interval("[" if closed else "(", sides[1], _INFINITY, ")")
    if len(sides) == 3 and _VARIABLE.fullmatch(sides[1]) and sides[0] and sides[2]:
        if signs[0] in (">", r"\ge"):
            sides, signs = sides[::-1], [_turned(s) for s in signs[::-1]]
        if any(s in (">", r"\ge") for s in signs):
            return None
        low, high = ("[" if signs[0] == r"\le" else "("), ("]" if signs[1] == r"\le" else ")")
        return _interval(low, sides[0], sides[2], high)
    return None


def _interval(opening: str, low: str, high: str, closing: str) -> Interval:
    return Interval(opening, low.removeprefix("+"), high.removeprefix("+"), closing)


def _turned(sign: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[sign]


def _balanced(text: str) -> bool:
    depth = 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if depth < 0:
            return False
    return not depth
