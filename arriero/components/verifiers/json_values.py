"""When two JSON values are the same."""

from __future__ import annotations

from typing import cast

_CLOSE = 1e-9  # relative, of numbers of which one has a decimal point


def same_json(a: object, b: object) -> bool:
    """Equal at every depth: True isn't 1, but 1 is 1.0, and floats agree to a relative 1e-9."""
    if isinstance(a, list) and isinstance(b, list):
        first, second = cast("list[object]", a), cast("list[object]", b)
        return len(first) == len(second) and all(map(same_json, first, second))
    if isinstance(a, dict) and isinstance(b, dict):
        one, other = cast("dict[str, object]", a), cast("dict[str, object]", b)
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float) and float in (type(a), type(b)):
        try:
            return a == b or abs(a - b) <= _CLOSE * max(1.0, abs(a), abs(b))
        except OverflowError:  # a whole number beyond all floats
            return False
    return a == b
