"""When two answers are the same, by what they are. The first kind that fits decides.

| kind             | same                                                                                  |
|------------------|---------------------------------------------------------------------------------------|
| equal spelling   | always                                                                                |
| words            | letter by letter, without case, article and brackets                                  |
| with `\\ldots`    | only by equal spelling                                                                |
| digits of a base | same digits, same base; the base may be left out of one                               |
| number           | exactly; a decimal and a fraction that isn't whole to a relative 1e-6                  |
| several values   | the same number of different ones, in any order (comma, and, or, `\\pm`, `\\{\\}`)      |
| interval         | same ends, same brackets; `a < x \\le b` and `x \\in (a, b]` are intervals, unions too  |
| tuple, matrix    | entry by entry, in order                                                              |
| `name = value`   | the value, if only one side has a name and the other no `=`, or both the same         |
| `a = b = c`      | if each of them is the answer                                                         |
| formula          | by value: `symbolic.equal`                                                            |
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from arriero.components.verifiers import symbolic, units
from arriero.components.verifiers.latex import is_spelled, normal, plain, words
from arriero.components.verifiers.quantity import number
from arriero.components.verifiers.structure import (
    Bracketed,
    Interval,
    alternatives,
    bracketed,
    chained,
    expanded,
    intervals,
    matrix,
    named,
)  # fmt: skip

_BASE = re.compile(r"(\d+)_\{?(\d+)\}?")
_FRACTION = re.compile(r"(-?)(\d*)\\frac\{(-?\d+)\}\{(-?\d+)\}")
_CLOSE = Fraction(1, 10**6)
_DEPTH = 6
MOST_VALUES = 64
_ANY = "7919.5"  # compared with a gold answer only to see whether that can be read


def same_answer(gold: str, answer: str) -> bool:
    """Whether `answer` is `gold`. Raises symbolic.Unreadable if `gold` can't be read."""
    if units.differ(gold, answer):
        return False
    return _same(normal(gold), normal(plain(answer) if "\\" not in answer else answer), 0)


@lru_cache(maxsize=8192)
def unreadable(gold: str) -> str:
    """Why nothing can be compared with `gold`; empty if something can."""
    text = normal(gold)
    if not re.search(r"\w", text):
        return "it has neither letters nor digits"
    try:
        parts = expanded(alternatives(text))
        for part in parts:
            _same(part, _ANY, 0)
        return f"it has over {MOST_VALUES} values" if len(parts) > MOST_VALUES else ""
    except symbolic.Unreadable as error:
        return f"it can't be read: {error}"


def _same(gold: str, answer: str, depth: int) -> bool:
    if not gold or not answer or depth > _DEPTH:
        return False
    if gold.replace(" ", "") == answer.replace(" ", ""):
        return True
    if is_spelled(gold) or is_spelled(answer):
        return words(gold) == words(answer) != ""
    if r"\ldots" in gold or r"\ldots" in answer:
        return False
    if (based := _same_base(gold, answer)) is not None:
        return based
    left, right = exact(gold), exact(answer)
    if left is not None and right is not None:
        return _same_number(left, right, gold, answer)
    return _same_structure(gold, answer, depth)


def _same_structure(gold: str, answer: str, depth: int) -> bool:
    wanted, got = intervals(gold), intervals(answer)
    if wanted and got and (wanted.stated or got.stated):
        return _same_intervals(wanted.parts, got.parts, depth)
    wants, gots = expanded(alternatives(gold)), expanded(alternatives(answer))
    if len(wants) > MOST_VALUES or len(gots) > MOST_VALUES:
        return False
    if len(wants) > 1 or len(gots) > 1:
        return _same_set(wants, gots, depth)
    first, second = bracketed(wants[0]), bracketed(gots[0])
    if first or second:
        return bool(first and second and _same_brackets(first, second, depth))
    rows, others = matrix(wants[0]), matrix(gots[0])
    if rows or others:
        return _same_rows(rows, others, depth)
    (name, value), (other, second_value) = named(wants[0]), named(gots[0])
    unnamed = "" if name and other else gots[0] if name else wants[0]
    if (name or other) and (not name or not other or name == other) and "=" not in unnamed:
        if (value, second_value) != (wants[0], gots[0]):
            return _same(value, second_value, depth + 1)
    elif wants[0] != gold or gots[0] != answer:
        return _same(wants[0], gots[0], depth + 1)
    if "=" not in wants[0] and len(sides := chained(gots[0])) > 1:
        return all(_same(wants[0], side, depth + 1) for side in sides)
    if r"\text" in gots[0] and r"\text" not in wants[0]:  # the parser skips words: "6 (or 7)" would be 6
        return False
    return symbolic.equal(wants[0], gots[0])


def exact(text: str) -> Fraction | None:
    """The value of a plain number or a fraction of integers; None for anything else."""
    if found := _FRACTION.fullmatch(text):
        top, bottom = int(found[3]), int(found[4])
        if not bottom:
            return None
        value = Fraction(int(found[2] or 0)) + Fraction(top, bottom)
        return -value if found[1] else value
    return number(text)


def _same_number(a: Fraction, b: Fraction, gold: str, answer: str) -> bool:
    if a == b or ("." in gold) == ("." in answer) or 1 in (a.denominator, b.denominator):
        return a == b
    return abs(a - b) <= _CLOSE * max(abs(a), abs(b))


def _same_base(gold: str, answer: str) -> bool | None:
    first, second = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if first is None and second is None:
        return None
    if first and second:
        return (first[1].lstrip("0"), first[2]) == (second[1].lstrip("0"), second[2])
    digits, other = (first, answer) if first else (second, gold)
    assert digits is not None
    return digits[1].lstrip("0") == other.lstrip("0")


def _same_set(wants: list[str], gots: list[str], depth: int) -> bool:
    """Whether each has a partner on the other side; what stands there twice counts once."""
    wants, gots = _distinct(wants, depth), _distinct(gots, depth)
    if len(wants) != len(gots):
        return False
    left = list(gots)
    for want in wants:
        partner = next((g for g in left if _same(want, g, depth + 1)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _distinct(items: list[str], depth: int) -> list[str]:
    found: list[str] = []
    for item in items:
        if not any(_same_or_unreadable(f, item, depth) for f in found):
            found.append(item)
    return found


def _same_or_unreadable(first: str, second: str, depth: int) -> bool:
    try:
        return _same(first, second, depth + 1)
    except symbolic.Unreadable:
        return False


def _same_brackets(first: Bracketed, second: Bracketed, depth: int) -> bool:
    if (first.opening, first.closing, len(first.parts)) != (
        second.opening,
        second.closing,
        len(second.parts),
    ):
        return False
    return all(_same(a, b, depth + 1) for a, b in zip(first.parts, second.parts, strict=True))


def _same_rows(rows: list[list[str]], others: list[list[str]], depth: int) -> bool:
    if [len(r) for r in rows] != [len(r) for r in others]:
        return False
    pairs = zip(rows, others, strict=True)
    return all(_same(a, b, depth + 1) for r, o in pairs for a, b in zip(r, o, strict=True))


def _same_intervals(first: list[Interval], second: list[Interval], depth: int) -> bool:
    if len(first) != len(second):
        return False
    return all(
        (a.opening, a.closing) == (b.opening, b.closing)
        and _same(a.low, b.low, depth + 1)
        and _same(a.high, b.high, depth + 1)
        for a, b in zip(first, second, strict=True)
    )
