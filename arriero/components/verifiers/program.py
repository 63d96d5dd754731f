"""`Code`: a program that passes the row's tests, run in the sandbox.

What a test expects stays outside of the sandbox wherever it can: the program's output, or what its function
returned as JSON, is compared here. Assertions can't be: they run beside the response. One that exits early or
prints what it likes gains nothing there either, but one that means to can tamper with them.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from pydantic import JsonValue, PositiveInt
from pydantic.dataclasses import dataclass as checked

from arriero.components.verifiers.extraction import conclusion
from arriero.components.verifiers.json_values import same_json
from arriero.components.verifiers.reward import STRICT, Canary, Isolated, Limits, no_verdict, verdict
from arriero.components.verifiers.sandbox import Ran, SandboxError, SandboxLimits, run_program
from arriero.engine.errors import UserError
from arriero.schemas.messages import Outcome, Prompt, Rollout, Score

_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.S | re.I)
# The response runs first; then the call is read, which it can't have seen before.
_CALL = """
import json as _json, sys as _sys
_lines = _sys.stdin.read().splitlines()
_holder = Solution() if {name!r} not in globals() and "Solution" in globals() else None
_call = globals()[{name!r}] if _holder is None else getattr(_holder, {name!r})
for _line in _lines:
    print("\\n" + {mark!r} + _json.dumps(_call(*_json.loads(_line)), default=list), flush=True)
"""
_ASSERT = """
{tests}
print("\\n" + {mark!r})
"""


@dataclass(frozen=True)
class Test:
    """One run: what stands behind the response's code, what it reads, and what it must give.

    With a `mark`, `want` are JSON values, one for each line that starts with it (none: the mark alone is
    wanted); without, `want` is the whole output.
    """

    behind: str
    stdin: str
    want: tuple[str, ...]
    mark: str = ""

    @property
    def size(self) -> int:
        """How many results it tests."""
        return max(1, len(self.want))


@checked(frozen=True, kw_only=True, config=STRICT)
class Code(Isolated):
    """1 if the last Python block of the response passes all tests; with `partial`, else the share it passes.

    `tests_field` of the row (if that has none, the prompt's answer) holds, as JSON or its text,
    `{"inputs": [...], "outputs": [...]}` for programs that read and write text; the same with `"fn_name"` for
    a function, inputs being its arguments; or a list of assertions, or their text (`entry_point` of the row
    names what a `check` function in it is given). `solution_field` names a right solution: where that fails,
    the row is set aside. A program over its limits is `wrong`; without a sandbox the reward raises UserError
    at once.
    """

    kind: Literal["code"] = "code"
    tests_field: str = "tests"
    solution_field: str = ""
    partial: bool = False
    most_tests: PositiveInt = 20  # the first of each row
    limits: Limits = field(default_factory=lambda: Limits(time_s=60.0))
    sandbox: SandboxLimits = field(default_factory=SandboxLimits)

    def score(self, prompt: Prompt, rollout: Rollout) -> Score:
        blocks = _FENCE.findall(conclusion(rollout.text))
        if not blocks:
            return verdict(False, "no Python block")
        tests = self._tests(prompt)
        try:
            return self._judged(str(blocks[-1]), tests)
        except SandboxError as error:
            return no_verdict(f"sandbox: {error}")

    def unscorable(self, prompt: Prompt) -> str:
        """A row without tests that can be read, or whose own solution fails them."""
        try:
            tests = self._tests(prompt)
        except UserError as error:
            return f"row {prompt.row}: {error}"
        if not self.solution_field:
            return ""
        solution = prompt.metadata.get(self.solution_field)
        if not isinstance(solution, str):
            return f"row {prompt.row}: field {self.solution_field!r} has no solution"
        fenced = _FENCE.findall(solution)
        found = self._judged(str(fenced[-1]) if fenced else solution, tests)
        return "" if found.outcome is Outcome.OK else f"row {prompt.row}: its solution fails: {found.detail}"

    def prepare(self) -> None:
        """Raises UserError if the sandbox can't be had here."""
        if why := sandbox_problem(self.sandbox):
            raise UserError(why)

    def canaries(self) -> Sequence[Canary]:
        tests: dict[str, JsonValue] = {"fn_name": "double", "inputs": [[3], [0]], "outputs": [6, 0]}
        prompt = Prompt(text="?", answer=json.dumps(tests), metadata={self.tests_field: tests})
        right = "```python\ndef double(x):\n    return 2 * x\n```"
        wrong = (
            right.replace("2 * x", "x * x"), "", "```python\nprint(6); print(0); exit(0)\n```",
            "```python\nimport os\ndef double(x):\n    os._exit(0)\n```",
        )  # fmt: skip
        return (
            [Canary(text=t, right=t == right, prompt=prompt) for t in (right, *wrong)]
            if not self.solution_field
            else []
        )

    def _judged(self, source: str, tests: Sequence[Test]) -> Score:
        """Over all tests within most of the worker's own limit, so that slowness is a verdict."""
        ends, passed, first = time.monotonic() + 0.8 * self.limits.time_s, 0, ""
        total = sum(t.size for t in tests)
        for number, test in enumerate(tests, start=1):
            left_s = min(self.sandbox.time_s, ends - time.monotonic())
            if left_s <= 0:
                first = first or f"test {number}: over its limit of time"
                break
            ran = run_program(source + "\n" + test.behind, test.stdin, replace(self.sandbox, time_s=left_s))
            held = passed_of(test, ran)
            passed += held
            if held < test.size:
                first = first or f"test {number}: {ran.why or 'another result'}"
                if not self.partial:
                    break
        if passed == total:
            return verdict(True)
        return Score(value=passed / total if self.partial else 0.0, outcome=Outcome.WRONG, detail=first)

    def _tests(self, prompt: Prompt) -> Sequence[Test]:
        """At least one. Raises UserError."""
        found = prompt.metadata.get(self.tests_field, prompt.answer)
        entry = prompt.metadata.get("entry_point")
        given = found if isinstance(found, str) else json.dumps(found)
        return read_tests(given, entry if isinstance(entry, str) else "", self.most_tests)


def passed_of(test: Test, ran: Ran) -> int:
    """How many of its results a run gave."""
    output = ran.stdout.decode(errors="replace")
    if not test.mark:
        return int(ran.clean and _lines(output) == _lines(test.want[0]))
    got = [line.removeprefix(test.mark) for line in output.split("\n") if line.startswith(test.mark)]
    if not test.want:
        return int(bool(got) and ran.clean)
    return sum(_same(g, w) for g, w in zip(got, test.want, strict=False))


@lru_cache(maxsize=256)
def read_tests(given: str, entry: str = "", most: int = 20) -> tuple[Test, ...]:
    """The tests of a row, all calls of a function as one. Raises UserError if it has none."""
    try:
        found: JsonValue = json.loads(given)
    except ValueError:
        found = given
    if isinstance(found, dict):
        return _with_outputs(found, most)
    if isinstance(found, list) and found and all(isinstance(f, str) for f in found):
        return tuple(_asserting(str(f)) for f in found[:most])
    if isinstance(found, str) and found.strip():
        return (_asserting(f"{found}\ncheck({entry})" if entry and "def check" in found else found),)
    raise UserError(f"no tests in {given[:80]!r}; inputs and outputs, or assertions, are needed")


def sandbox_problem(limits: SandboxLimits) -> str:
    """Why programs can't be run here within `limits`; empty if they can."""
    probe = 'import math\ntry:\n    import socket\n    socket.socket()\nexcept OSError:\n    print("shut")'
    try:
        ran = run_program(
            probe, "", SandboxLimits(isolation=limits.isolation, time_s=60.0, memory_mb=limits.memory_mb)
        )
    except SandboxError as error:
        remedy = (
            "allow user namespaces, or set sandbox.isolation to seccomp: files can then be read"
            if limits.isolation == "namespaces"
            else "the kernel must have seccomp"
        )
        return f"no sandbox by {limits.isolation}: {error}; {remedy}"
    return (
        ""
        if ran.clean and ran.stdout.strip() == b"shut"
        else f"the sandbox doesn't work: {ran.why or ran.stdout!r}"
    )


def _with_outputs(found: Mapping[str, JsonValue], most: int) -> tuple[Test, ...]:
    inputs, outputs, name = found.get("inputs"), found.get("outputs"), found.get("fn_name") or ""
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise UserError("tests need lists of inputs and outputs, as many of the one as of the other")
    inputs, outputs = inputs[:most], outputs[:most]
    if not name:
        pairs = zip(inputs, outputs, strict=True)
        return tuple(Test(behind="", stdin=_text(i), want=(_text(o),)) for i, o in pairs)
    mark = secrets.token_hex(16)
    calls = [json.dumps(i if isinstance(i, list) else [i]) for i in inputs]
    behind = _CALL.format(name=str(name), mark=mark)
    return (Test(behind=behind, stdin="\n".join(calls), want=tuple(map(json.dumps, outputs)), mark=mark),)


def _asserting(code: str) -> Test:
    mark = secrets.token_hex(16)
    return Test(behind=_ASSERT.format(tests=code, mark=mark), stdin="", want=(), mark=mark)


def _text(value: JsonValue) -> str:
    if isinstance(value, list):
        return "\n".join(_text(v) for v in value)
    return value if isinstance(value, str) else json.dumps(value)


def _lines(text: str) -> list[str]:
    """Without what no judge looks at: white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _same(got: str, want: str) -> bool:
    try:
        return same_json(json.loads(got), json.loads(want))
    except (ValueError, RecursionError):
        return False
