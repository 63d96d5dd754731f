"""Numbers as people write them, exactly: `$70,000`, `1 000`, `29.00`, `3/4`, `1 1/2`, `50%`, `-2.5e3`.

The policy: a currency sign, a percent sign, a degree sign and a unit behind a number aren't compared (a
percentage is the number of percent); separators of thousands stand before exactly three digits.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MOST_CHARS = 400
_DIGITS = r"\d{1,3}(?:[,\u00a0\u202f\u2009 ]\d{3})+|\d+"
NUMBER = rf"(?:(?:{_DIGITS})(?:\.\d+)?|\.\d+)"
_SCALE = r"(?:\s*(?:[eE]|[x×*]\s*10\s*\^)\s*(?P<exponent>[+-]?\d{1,3}))?"
_WHOLE = re.compile(
    rf"(?P<sign>[-+\u2212]?)\s*(?:[$€£¥]\s*)?(?P<inner>[-\u2212]?){{0,1}}(?:"
    rf"(?P<mixed>\d+)\s+(?P<mixed_top>\d+)\s*/\s*(?P<mixed_bottom>\d+)"
    rf"|(?P<top>{NUMBER})\s*/\s*(?P<bottom>{NUMBER})"
    rf"|(?P<plain>{NUMBER}){_SCALE})"
)
IN_TEXT = re.compile(
    rf"(?<![\w.])[-+\u2212]?\s?[$€£¥]?\s?[-\u2212]?(?:{NUMBER})(?:\s*/\s*\d+(?![\d.,]*\d))?(?![\d])"
)


def number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else; None for anything else."""
    text = text.strip()
    if not text or len(text) > _MOST_CHARS:
        return None
    found = _WHOLE.fullmatch(text)
    if found is None:
        return None
    if found["mixed"]:
        value = _quotient(found["mixed_top"], found["mixed_bottom"])
        value = None if value is None else Fraction(found["mixed"]) + value
    elif found["top"]:
        value = _quotient(found["top"], found["bottom"])
    else:
        value = _plain(found["plain"])
        if found["exponent"]:
            value *= Fraction(10) ** int(found["exponent"])
    if value is None:
        return None
    negative = (found["sign"] in "-\u2212" and found["sign"] != "") != (found["inner"] != "")
    return -value if negative else value


def measured(text: str) -> Fraction | None:
    """The value of a number with a unit, a percent sign or a full stop behind it; None if it isn't one."""
    text = text.strip().strip("*_`\"'").strip()
    text = re.sub(r"(?<=[\d%])[.!]+$", "", text)
    text = re.sub(r"(?<=[\d\s])(?:%|°)$|(?<=\d)\s*(?:percent|degrees)$", "", text, flags=re.I)
    if (value := number(text)) is not None:
        return value
    unit = re.fullmatch(r"(.*?\d)\s*[A-Za-z][A-Za-z /².-]{0,40}", text)
    return number(unit.group(1)) if unit else None


def _plain(text: str) -> Fraction:
    return Fraction(re.sub(r"[^\d.]", "", text))


def _quotient(top: str, bottom: str) -> Fraction | None:
    below = _plain(bottom)
    return _plain(top) / below if below else None
