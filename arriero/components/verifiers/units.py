"""Units behind a number: which ones are known to differ. What isn't known isn't compared."""

from __future__ import annotations

import re

_NAMES = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard",
    "mi": "mi mile", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week",
    "month": "month", "year": "yr year", "dollar": "dollar usd", "cent": "cent", "euro": "euro eur",
    "mph": "mph", "l": "l liter litre", "ml": "ml milliliter millilitre", "percent": "percent",
    "degree": "degree", "radian": "radian rad",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_BEHIND = re.compile(
    r"[\d})]\s*(?:\\ |~|\\,)*(?:\\(?:text|mbox|mathrm|rm)\s*\{\s*([^{}]*?)\s*\}|([A-Za-z][A-Za-z .]*?))"
    r"(?:\s*\^\s*\{?([23])\}?)?\s*\.?\$?$"
)
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def differ(first: str, second: str) -> bool:
    """Whether both answers have a known unit, and not the same."""
    one, other = unit(first), unit(second)
    return bool(one and other and one != other)


def unit(text: str) -> str:
    """The known unit of an answer, with its power (`cm2`); empty if there is none."""
    text = text.strip()
    if re.match(r"^\$?\s*\\?\$\s*\d", text) and "\\$" in text:
        return "dollar"
    if re.search(r"\d\s*\\?%\$?$", text):
        return "percent"
    if re.search(r"\d\s*(?:\^\s*\{?\s*\\circ\s*\}?|\u00b0)\$?$", text):
        return "degree"
    found = _BEHIND.search(text)
    if found is None:
        return ""
    words = re.sub(r"[.\s]+", " ", (found[1] or found[2]).lower()).split()
    power = found[3] or ""
    if words and words[0] in _POWERS:
        power, words = _POWERS[words[0]], words[1:]
    if len(words) != 1:
        return ""
    name = _UNITS.get(words[0]) or _UNITS.get(words[0].removesuffix("s"), "")
    return name + power if name else ""
