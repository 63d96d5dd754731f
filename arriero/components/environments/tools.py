"""Tools and how they are called: a calculator, Python in the sandbox.

Without a chat template a call is `<calculator>2 + 3</calculator>`, and its answer `<result>5</result>`. With
one it is `<tool_call>{"name": "calculator", "arguments": {"text": "2 + 3"}}</tool_call>`, the form that Qwen,
Hermes and others are trained on, and its answer a message of the role tool; the template is given the tools'
schemas.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias, cast

from pydantic import ConfigDict, Field, JsonValue, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.environments.environment import Tool
from arriero.components.verifiers.sandbox import SandboxLimits, run_program

STRICT = ConfigDict(extra="forbid")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MOST_DIGITS = 200
Number: TypeAlias = int | float
_BINARY: Final[Mapping[type[ast.operator], Callable[[Number, Number], object]]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: cast("object", a**b),
}  # fmt: skip
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Number], object]]] = {
    ast.UAdd: lambda a: a,
    ast.USub: lambda a: -a,
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Calculator:
    """The value of an arithmetic expression: numbers, brackets, + - * / // % **."""

    kind: Literal["calculator"] = "calculator"
    name: str = "calculator"
    describe: str = "gives the value of an arithmetic expression, such as (2 + 3) * 4"

    def call(self, text: str) -> str:
        """ValueError for what is no arithmetic, or has more than 200 digits."""
        if len(text) > 1000:
            raise ValueError("the expression is longer than 1000 characters")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, RecursionError) as error:
            raise ValueError(f"{text.strip()!r} is no arithmetic expression") from error
        value = _value(tree.body)
        return f"{value:.12g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Python:
    """What a Python program prints, run in the sandbox; the last line of its error if it fails."""

    kind: Literal["python"] = "python"
    name: str = "python"
    describe: str = "runs a Python program and gives what it prints"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    most_characters: PositiveInt = 2000  # of what is given back

    def call(self, text: str) -> str:
        """Raises SandboxError where programs can't be confined."""
        ran = run_program(text.strip("\n"), "", self.limits)
        out = ran.stdout.decode(errors="replace").rstrip()
        told = out if ran.clean else f"{out}\nerror: {ran.why}".strip()
        if len(told) > self.most_characters:
            told = told[: self.most_characters] + " ..."
        return told


AnyTool: TypeAlias = Annotated[Calculator | Python, Field(discriminator="kind")]


@plain_dataclass(frozen=True, kw_only=True)
class Call:
    """A call that the policy made; `problem` says why it can't be done."""

    name: str
    text: str
    problem: str = ""


@plain_dataclass(frozen=True)
class Toolbox:
    """The tools of an environment, and the form in which they are called; `chat`: with a chat template."""

    tools: Sequence[Tool]
    chat: bool

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which a turn ends, since a result must follow."""
        if not self.tools:
            return ()
        return ("</tool_call>",) if self.chat else tuple(f"</{tool.name}>" for tool in self.tools)

    @property
    def schemas(self) -> list[JsonValue]:
        """The tools as a chat template shows them."""
        text: JsonValue = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        return [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.describe, "parameters": text},
            }
            for t in self.tools
        ]

    @property
    def manual(self) -> str:
        """How the tools are called, for a prompt without a template."""
        lines = [f"<{t.name}>...</{t.name}> {t.describe}" for t in self.tools]
        return "\n".join([*lines, "The answer stands in <result>...</result>."]) if lines else ""

    def calls(self, text: str) -> list[Call]:
        """The calls in a turn, in order; without a template only the last one, at which the turn ended."""
        if not self.tools:
            return []
        if self.chat:
            return [_parsed(found) for found in _CALL.findall(text)]
        for tool in self.tools:
            opened, closed = f"<{tool.name}>", f"</{tool.name}>"
            if text.rstrip().endswith(closed) and opened in text:
                inside = text.rstrip().removesuffix(closed).rpartition(opened)[2]
                return [Call(name=tool.name, text=inside)]
        return []

    def answer(self, calls: Sequence[Call]) -> str:
        """The results as the policy reads them."""
        results = [self._result(call) for call in calls]
        return "\n".join(results) if self.chat else "\n".join(f"<result>{r}</result>" for r in results)

    def _result(self, call: Call) -> str:
        tool = next((t for t in self.tools if t.name == call.name), None)
        if call.problem or tool is None:
            return f"error: {call.problem or f'there is no tool {call.name}'}"
        try:
            return tool.call(call.text)
        except Exception as error:  # noqa: BLE001  # a wrong call is the policy's: it is told, and goes on
            return f"error: {str(error)[:200]}"


def _parsed(found: str) -> Call:
    try:
        given = cast("object", json.loads(found))
    except ValueError:
        return Call(name="", text="", problem="a call must be JSON")
    match given:
        case {"name": str(name), "arguments": {"text": str(text)}}:
            return Call(name=name, text=text)
        case _:
            return Call(name="", text="", problem='a call is {"name": ..., "arguments": {"text": ...}}')


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_value(inner)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and (abs(b) > _MOST_DIGITS or abs(a) > 10**_MOST_DIGITS):
                raise ValueError("the power is too large")
            return _bounded(_BINARY[type(op)](a, b))
        case _:
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic")


def _bounded(value: object) -> Number:
    if not isinstance(value, int | float):
        raise ValueError("the value isn't a real number")
    if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
        raise ValueError(f"the value has more than {_MOST_DIGITS} digits")
    return value
