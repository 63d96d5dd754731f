"""Equality of two formulas, by math-verify's parser and by numbers.

math-verify rounds to six digits after the point, so that 2^{-99} equals 2^{-98} for it, and takes formulas
for different that are equal where both are real. Here two formulas are equal if their values agree, to a
relative 1e-10, at random places (negative ones too) where both are real; at least three such places are
needed. Decimals are taken for rounded: 1e-6. Equations are equal if one is a multiple of the other.

Some inputs keep the parser, or the evaluation of a power, busy for ever. The obvious ones are refused; the
rest is what the worker's limits are for.
"""

from __future__ import annotations

import importlib
import logging
import random
import re
from functools import lru_cache
from typing import Any

from arriero.engine.errors import UserError

_CHARS = 600
_PLACES = 8
_EXACT, _ROUNDED = 1e-10, 1e-6


class Unreadable(ValueError):
    """Text that is no formula, or one that isn't evaluated."""


def equal(gold: str, answer: str) -> bool:
    """Whether two formulas in normal spelling have the same value. Raises Unreadable if `gold` has none."""
    want = parsed(gold)
    try:
        got = parsed(answer)
    except Unreadable:
        return False
    rounded = _ROUNDED if _has_decimal(gold) or _has_decimal(answer) else _EXACT
    try:
        return _same(want, got, rounded)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # whatever sympy meets in what it parsed: nothing equal was found
        return False


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """A sympy object. Raises Unreadable."""
    if why := too_large(text):
        raise Unreadable(why)
    math_verify = _library("math_verify")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it prints whole responses
    try:
        # No time limit of its own: it uses SIGALRM, which other code may use too; the worker has one.
        found: list[Any] = math_verify.parse(
            f"\\boxed{{{text}}}", [math_verify.LatexExtractionConfig()], fallback_mode="no_fallback",
            parsing_timeout=None,  # documented as the way to switch it off
        )  # fmt: skip
    except Exception as error:  # whatever the parser meets in a model's text
        raise Unreadable(f"{type(error).__name__}") from error
    objects: list[Any] = [o for o in found if not isinstance(o, str)]
    if not objects:
        raise Unreadable("no formula")
    return objects[0]


def too_large(text: str) -> str:
    """Why a formula isn't evaluated; empty if it is."""
    if len(text) > _CHARS:
        return f"over {_CHARS} characters"
    depth = deepest = 0
    stack: list[bool] = []
    for i, c in enumerate(text):
        if c in "{(":
            power = i > 0 and text[i - 1] == "^"
            stack.append(power)
            depth += power
            deepest = max(deepest, depth)
        elif c in "})" and stack:
            depth -= stack.pop()
        elif c == "^" and text[i + 1 : i + 2] not in ("{", "("):
            deepest = max(deepest, depth + 1)
    if deepest >= 3 or text.count("^") > 60:
        return "a tower of powers"
    if re.search(r"\^\s*[{(]?\s*-?\d{5,}|\d{5,}\s*!|!\s*!\s*!", text):
        return "a number too large to evaluate"
    return ""


def _same(want: Any, got: Any, tolerance: float) -> bool:
    sympy = _library("sympy")

    if isinstance(want, sympy.Equality) != isinstance(got, sympy.Equality):
        return False
    if isinstance(want, sympy.Equality):
        return _same_equation(want, got, tolerance)
    if isinstance(want, sympy.core.relational.Relational) or isinstance(
        got, sympy.core.relational.Relational
    ):
        return bool(type(want) is type(got) and want.args == got.args)
    if not (isinstance(want, sympy.Expr) and isinstance(got, sympy.Expr)):
        return bool(type(want) is type(got) and want == got)
    return _same_values(want, got, tolerance)


def _same_values(want: Any, got: Any, tolerance: float) -> bool:
    names = _names(want, got)
    if not names:
        pair = _value(want, {}), _value(got, {})
        return pair[0] is not None and pair[1] is not None and _close(pair[0], pair[1], tolerance)
    agreed = 0
    for at in _places(names):
        a, b = _value(want, at), _value(got, at)
        if a is None or b is None or abs(a.imag) > tolerance * abs(a) or abs(b.imag) > tolerance * abs(b):
            continue
        if not _close(a, b, tolerance):
            return False
        agreed += 1
    return agreed >= 3


def _same_equation(want: Any, got: Any, tolerance: float) -> bool:
    """Whether the one is a constant multiple of the other."""
    if want == got:
        return True
    try:
        first, second = want.lhs - want.rhs, got.lhs - got.rhs
    except TypeError:
        return False
    names = _names(first, second)
    ratio: Any = None
    agreed = 0
    for at in _places(names):
        a, b = _value(first, at), _value(second, at)
        if a is None or b is None or a == 0 or b == 0:
            continue
        if ratio is not None and not _close(a / b, ratio, max(tolerance, 1e-9)):
            return False
        ratio, agreed = a / b, agreed + 1
    return agreed >= 3


def _names(first: Any, second: Any) -> list[str]:
    # By name: the parser makes symbols of one name with different assumptions, which sympy takes for two.
    return sorted({str(s) for s in first.free_symbols | second.free_symbols})


def _places(names: list[str]) -> list[dict[str, Any]]:
    sympy = _library("sympy")

    draw = random.Random(len(names))  # the same places every time
    spread = [(0.1, 0.9), (-0.9, -0.1), (1.1, 3.7), (-3.7, -1.1)]
    return [
        {name: sympy.Rational(round(draw.uniform(*spread[k % 4]) * 997), 997) for name in names}
        for k in range(3 * _PLACES)
    ]


def _value(expression: Any, at: dict[str, Any]) -> Any:
    """A finite mpmath number (without limit of its exponent: 1/2004! isn't 0); None if there is none."""
    mpmath = _library("mpmath")

    try:
        here = {s: at[str(s)] for s in expression.free_symbols}
        found = mpmath.mpc(expression.xreplace(here).evalf(30)._to_mpmath(100))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # sympy on what a model wrote: RecursionError, TypeError, ...
        return None
    return found if mpmath.isfinite(found) else None


def _close(a: Any, b: Any, tolerance: float) -> bool:
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _library(name: str) -> Any:
    # As Any: neither sympy nor math-verify has types.
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} isn't installed; pip install 'arriero[verifiers]'") from error


def _has_decimal(text: str) -> bool:
    return re.search(r"\.\d", text) is not None
