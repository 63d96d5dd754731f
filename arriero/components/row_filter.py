"""Which rows are used: an expression over their fields, as Python writes it.

`0.1 <= pass_rate <= 0.9 and len(question) < 2000 and subject in ("algebra", "geometry")`. Names are fields;
there are comparisons, and/or/not, arithmetic, x if c else y, [...] and the functions of `FUNCTIONS`, nothing
else: no attributes, no other calls.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from types import CodeType
from typing import Any

from arriero.components.formats import Row
from arriero.engine.errors import UserError, one_line


def _words(text: object) -> int:
    return len(str(text).split())


FUNCTIONS: Mapping[str, Any] = {
    "abs": abs, "float": float, "int": int, "len": len, "lower": str.lower, "max": max, "min": min,
    "str": str, "words": _words,
}  # fmt: skip
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub,
    ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt,
    ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Tuple,
    ast.List, ast.IfExp, ast.Call,
)  # fmt: skip


class RowFilter:
    """A compiled expression; ValueError, saying what isn't understood, for one that is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError as error:
            raise ValueError(f"where={text!r} is no expression: {error.msg}") from error
        for node in ast.walk(tree):
            _check(node, text)
        called = {
            n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        self._fields = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - called
        self._code: CodeType = compile(tree, "<where>", "eval")

    def __call__(self, row: Row) -> bool:
        """Whether the row is used. Raises UserError for a field it doesn't have, or can't be compared so."""
        if missing := sorted(self._fields - row.values.keys()):
            near = difflib.get_close_matches(missing[0], row.values, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(list(row.values)[:12])}"
            raise UserError(f"{row.where}: where={self._text!r}: the row has no field {missing[0]!r}; {hint}")
        names: dict[str, object] = {"__builtins__": {}, **FUNCTIONS}
        names |= {name: row.values[name] for name in self._fields}
        try:
            return bool(eval(self._code, names))  # noqa: S307  # only what `_check` let through
        except Exception as error:
            raise UserError(
                f"{row.where}: where={self._text!r}: {type(error).__name__}: {one_line(error)}"
            ) from error


def _check(node: ast.AST, text: str) -> None:
    if not isinstance(node, _ALLOWED):
        raise ValueError(f"where={text!r}: {type(node).__name__} isn't allowed; see the documentation")
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else "?"
        if name not in FUNCTIONS or node.keywords:
            raise ValueError(f"where={text!r}: {name}() isn't known; there are {', '.join(FUNCTIONS)}")
