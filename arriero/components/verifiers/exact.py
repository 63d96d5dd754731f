"""The exact value of a sympy number that is made of whole numbers, within bounds: sympy itself has none."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from math import comb, factorial
from typing import Any

_MOST_BITS = 1 << 18  # of numerator and denominator together
_MOST_FACTORIAL = 20_000


class _Open(Exception):
    """Not made of whole numbers alone, or too large."""


def rational(number: Any) -> Fraction | None:
    """The value of whole numbers joined by + - * / powers ! and binomials; None for anything else, and for
    what has more than about 80,000 digits on the way.
    """
    try:
        return _value(number)
    except (_Open, ZeroDivisionError, RecursionError):
        return None


def _value(number: Any) -> Fraction:
    if number.is_Rational:
        return Fraction(int(number.p), int(number.q))
    name = type(number).__name__
    if name not in _JOINED:
        raise _Open
    return _JOINED[name]([_value(a) for a in number.args])


def _sum(parts: list[Fraction]) -> Fraction:
    return reduce(lambda a, b: _bounded(a + b), parts)


def _product(parts: list[Fraction]) -> Fraction:
    return reduce(lambda a, b: _bounded(a * b), parts)


def _power(parts: list[Fraction]) -> Fraction:
    base, exponent = parts
    if exponent.denominator != 1 or abs(exponent) * _bits(base) > _MOST_BITS:
        raise _Open
    return base ** int(exponent)


def _factorial(parts: list[Fraction]) -> Fraction:
    return Fraction(factorial(_natural(parts[0])))


def _binomial(parts: list[Fraction]) -> Fraction:
    return Fraction(comb(_natural(parts[0]), _natural(parts[1])))


_JOINED: dict[str, Callable[[list[Fraction]], Fraction]] = {
    "Add": _sum, "Mul": _product, "Pow": _power, "factorial": _factorial, "binomial": _binomial,
}  # fmt: skip


def _natural(value: Fraction) -> int:
    if value.denominator != 1 or not 0 <= value <= _MOST_FACTORIAL:
        raise _Open
    return int(value)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MOST_BITS:
        raise _Open
    return value
