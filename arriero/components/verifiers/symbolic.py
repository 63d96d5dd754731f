"""Equality of two formulas, by math-verify's parser and by numbers.

math-verify rounds to six digits after the point, so that 2^{-99} equals 2^{-98} for it, and takes formulas
for different that are equal where both are real. Here two formulas are equal if they are at random places
(negative ones too) where both are real; at least three such places are needed. There, what is made of whole
numbers is compared exactly (`exact`), and of anything else the difference is followed to 300 digits. Decimals
are taken for rounded: beside something exact to 1e-6, beside decimals and whole numbers to 1e-10. Equations
are equal if one is a multiple of the other.

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

from arriero.components.verifiers.exact import rational
from arriero.engine.errors import UserError

_CHARS = 600
_PLACES = 8
_NESTED = 8  # brackets in each other: with every one the parser may try twice as much
_EXACT, _FLOAT, _ROUNDED = 1e-200, 1e-10, 1e-6
_MOST_BITS = 1 << 20  # before or behind the point of a number
_DIGITS, _MOST_DIGITS = 30, 300  # of a difference; of the numbers that it is followed to


class Unreadable(ValueError):
    """Text that is no formula, or one that isn't evaluated."""


def equal(gold: str, answer: str) -> bool:
    """Whether two formulas in normal spelling have the same value. Raises Unreadable if `gold` has none."""
    want = parsed(gold)
    try:
        got = parsed(answer)
    except Unreadable:
        return False
    try:
        return _same(want, got, _tolerance(gold, answer, want, got))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # whatever sympy meets in what it parsed: nothing equal was found
        return False


def _tolerance(gold: str, answer: str, want: Any, got: Any) -> float:
    decimals = _has_decimal(gold), _has_decimal(answer)
    if not any(decimals):
        return _EXACT
    whole = rational(got if decimals[0] else want)
    if all(decimals) or (whole is not None and whole.denominator == 1):
        return _FLOAT
    return _ROUNDED


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
    depth = deepest = nested = 0
    stack: list[bool] = []
    for i, c in enumerate(text):
        if c in "{([":
            power = i > 0 and text[i - 1] == "^"
            stack.append(power)
            depth += power
            deepest, nested = max(deepest, depth), max(nested, len(stack))
        elif c in "})]" and stack:
            depth -= stack.pop()
        elif c == "^" and text[i + 1 : i + 2] not in ("{", "("):
            deepest = max(deepest, depth + 1)
    if deepest >= 3 or text.count("^") > 60:
        return "a tower of powers"
    if nested > _NESTED or text.count("|") > 4 * _NESTED:
        return f"over {_NESTED} brackets in each other"
    if re.search(r"\^\s*[{(]?\s*-?\d{5,}|\d{5,}\s*!|![\s)}\]]*!", text):
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
    if not (names := _names(want, got)):
        return bool(_equal_numbers(want, got, tolerance))
    agreed = 0
    for at in _places(names):
        same = _equal_numbers(_at(want, at), _at(got, at), tolerance, real=True)
        if same is False:
            return False
        agreed += same is True
    return agreed >= 3


def _same_equation(want: Any, got: Any, tolerance: float) -> bool:
    """Whether the one is a constant multiple of the other: a b' = a' b, at any two places."""
    if want == got:
        return True
    try:
        first, second = want.lhs - want.rhs, got.lhs - got.rhs
    except TypeError:
        return False
    base: tuple[Any, Any] | None = None
    agreed = 0
    for at in _places(_names(first, second)):
        a, b = _at(first, at), _at(second, at)
        if not _value(a) or not _value(b):
            continue
        base = base or (a, b)
        if not _equal_numbers(a * base[1], base[0] * b, tolerance):
            return False
        agreed += 1
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


def _at(expression: Any, at: dict[str, Any]) -> Any:
    return expression.xreplace({s: at[str(s)] for s in expression.free_symbols})


def _equal_numbers(a: Any, b: Any, tolerance: float, *, real: bool = False) -> bool | None:
    """Whether they differ by at most a relative `tolerance`; None if one of them has no (real) value."""
    one, other = rational(a), rational(b)
    if tolerance == _EXACT and one is not None and other is not None:
        return one == other
    first, second = _value(a), _value(b)
    if first is None or second is None:
        return None
    if real and any(abs(v.imag) > _FLOAT * abs(v) for v in (first, second)):
        return None
    apart = _value(a - b)
    return apart is not None and bool(abs(apart) <= tolerance * max(abs(first), abs(second)))


def _value(number: Any) -> Any:
    """A finite mpmath number (its exponent may be large: 1/2004! isn't 0); None if there is none."""
    mpmath = _library("mpmath")

    try:
        found = mpmath.mpc(number.evalf(_DIGITS, maxn=_MOST_DIGITS)._to_mpmath(100))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # sympy on what a model wrote: RecursionError, TypeError, ...
        return None
    if not mpmath.isfinite(found) or (found and abs(mpmath.mag(found)) > _MOST_BITS):
        return None
    return found


def _library(name: str) -> Any:
    # As Any: neither sympy nor math-verify has types.
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name} isn't installed; pip install 'arriero[verifiers]'") from error


def _has_decimal(text: str) -> bool:
    return re.search(r"\.\d", text) is not None
