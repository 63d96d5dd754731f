"""Programs that nobody trusts: what they can't do, what stops them, and what the tests of a row find."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from arriero.components.rewards import Code, Limits
from arriero.components.verifiers.program import read_tests, sandbox_problem
from arriero.components.verifiers.sandbox import Isolation, Ran, SandboxError, SandboxLimits, run_program
from arriero.engine.errors import UserError
from arriero.schemas.messages import Outcome, Prompt, Score
from tests.verdicts import group, rollout, run, scores

WHY = {kind: sandbox_problem(SandboxLimits(isolation=kind)) for kind in ("namespaces", "seccomp")}
needs_sandbox = pytest.mark.skipif(bool(WHY["namespaces"]), reason=WHY["namespaces"] or "there is one")
LIMITS = SandboxLimits(time_s=20.0)


@pytest.fixture(params=["namespaces", "seccomp"])
def limits(request: pytest.FixtureRequest) -> SandboxLimits:
    kind: Isolation = request.param
    if WHY[kind]:
        pytest.skip(WHY[kind])
    return SandboxLimits(isolation=kind, time_s=20.0)


def ran(program: str, limits: SandboxLimits, stdin: str = "") -> Ran:
    return run_program(program, stdin, limits)


def said(found: Ran) -> str:
    return found.stdout.decode().strip()


def test_a_program_reads_its_input_and_writes_its_output(limits: SandboxLimits) -> None:
    found = ran("import json, math\nprint(math.sqrt(json.loads(input())), input())", limits, "16\nrest")
    assert (said(found), found.clean, found.why) == ("4.0 rest", True, "")
    failed = ran("import sys\nprint('a')\nsys.exit(3)", limits)
    assert (said(failed), failed.code, failed.clean) == ("a", 3, False)
    assert ran("1 / 0", limits).why == "exit code 1 ZeroDivisionError: division by zero"


def test_there_is_no_network(limits: SandboxLimits) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('in')"
        assert "PermissionError" in ran(program, limits).why
    assert "PermissionError" in ran("import socket\nsocket.socket(socket.AF_UNIX)", limits).why


def test_no_file_can_be_written_outside_of_an_empty_folder(limits: SandboxLimits, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for path in (str(tmp_path / "x"), str(Path(os.__file__).parent / "x.py"), "/x"):
        assert not ran(f"open({path!r}, 'w').write('x')", limits).clean
    assert list(tmp_path.iterdir()) == []


@needs_sandbox
def test_no_file_but_the_standard_library_can_be_seen(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret", encoding="ascii")
    for path in (str(secret), "/etc/passwd", "/proc/self/environ", __file__):
        assert "FileNotFoundError" in ran(f"print(open({path!r}).read())", LIMITS).why
    assert said(ran("import os\nprint(os.listdir('/tmp'), sorted(os.listdir('/dev')))", LIMITS)) == (
        "[] ['null', 'random', 'urandom', 'zero']"
    )
    assert said(ran("open('/tmp/a', 'w').write('mine')\nprint(open('/tmp/a').read())", LIMITS)) == "mine"


def test_nothing_of_the_environment_comes_in(limits: SandboxLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    assert "s3cret" not in said(ran("import os\nprint(dict(os.environ))", limits))


def test_other_processes_are_out_of_reach(limits: SandboxLimits) -> None:
    found = ran(f"import os\nos.kill({os.getpid()}, 0)", limits)
    assert "PermissionError" in found.why or "ProcessLookupError" in found.why


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(1000)", "time"),
        ("while True: print('x' * 1000)", "output"),
        (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nwhile True: pass",
            "time",
        ),
    ],
)
def test_what_does_not_end_is_ended(program: str, end: str) -> None:
    if WHY["namespaces"]:
        pytest.skip(WHY["namespaces"])
    found = ran(program, SandboxLimits(time_s=1.0, output_kb=64))
    assert (found.end, found.clean) == (end, False)
    assert found.why == f"over its limit of {end}"
    assert len(found.stdout) < 1 << 20


@pytest.mark.parametrize(
    "program", ["bytearray(1 << 30)", "[0] * (1 << 28)", "x = 'a' * 10**6\nwhile True: x += x"]
)
def test_memory_has_a_limit(program: str, limits: SandboxLimits) -> None:
    assert ran(program, limits).why == "exit code 1 MemoryError"


@needs_sandbox
def test_processes_and_disk_have_limits() -> None:
    count = (
        "import os, time\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0: time.sleep(1000)\n"
        "        n += 1\nexcept BlockingIOError: print(n, flush=True)\nos._exit(0)"
    )
    assert 0 < int(said(ran(count, SandboxLimits(time_s=20.0, processes=5)))) < 5
    fill = "for i in range(100):\n    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
    assert "OSError" in ran(fill, SandboxLimits(time_s=20.0, disk_mb=4)).why


@pytest.mark.parametrize("number", [272, 165, 101, 321, 425])  # unshare, mount, ptrace, bpf, io_uring_setup
def test_calls_that_only_an_escape_needs_are_refused(number: int, limits: SandboxLimits) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("these numbers are those of x86_64")
    program = (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        f"print(l.syscall({number}, 0, 0, 0, 0), ctypes.get_errno())"
    )
    assert said(ran(program, limits)) == "-1 1"


def test_the_installed_packages_are_there_only_if_asked_for() -> None:
    if WHY["namespaces"]:
        pytest.skip(WHY["namespaces"])
    program = "import pydantic_core\nprint('in')"
    assert "ModuleNotFoundError" in ran(program, LIMITS).why
    assert said(ran(program, SandboxLimits(time_s=30.0, memory_mb=2048, packages=True))) == "in"


def test_without_a_sandbox_nothing_runs_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="no sandbox for darwin"):
        run_program("print(1)", "", LIMITS)
    monkeypatch.undo()
    starved = SandboxLimits(memory_mb=1)
    assert "sandbox" in sandbox_problem(starved)
    with pytest.raises(UserError, match="sandbox"):
        Code(sandbox=starved).prepare()


ADD: dict[str, Any] = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
ECHO: dict[str, Any] = {"inputs": ["3\n1 2 3\n", "0\n"], "outputs": ["6", "0\n"]}
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0"
GOOD = "def add(a, b):\n    return a + b"


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nDone."


def verdict_of(code: str, tests: JsonValue, reward: Code | None = None, **row: Any) -> Score:
    prompt = Prompt(text="?", metadata={"tests": tests, **row})
    return (reward or Code(sandbox=LIMITS)).score(prompt, rollout(fenced(code)))


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "row", "right"),
    [
        (GOOD, ADD, {}, True),
        (
            f"class Solution:\n    {GOOD.replace('(a', '(self, a').replace(chr(10), chr(10) + '    ')}",
            ADD,
            {},
            True,
        ),
        (GOOD.replace("+", "-"), ADD, {}, False),
        ("n = int(input())\nprint(sum(map(int, input().split())) if n else 0)", ECHO, {}, True),
        ("print(6)", ECHO, {}, False),
        (GOOD, ASSERTIONS, {}, True),
        (GOOD.replace("+", "*"), ASSERTIONS, {}, False),
        (GOOD, json.dumps(ASSERTIONS), {}, True),
        (GOOD, CHECK, {"entry_point": "add"}, True),
        (GOOD.replace("+", "-"), CHECK, {"entry_point": "add"}, False),
    ],
)
def test_the_tests_of_a_row_decide(code: str, tests: JsonValue, row: dict[str, Any], right: bool) -> None:
    found = verdict_of(code, tests, **row)
    assert found.outcome is (Outcome.OK if right else Outcome.WRONG), found.detail


@needs_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "import os\ndef add(a, b):\n    os._exit(0)",
        "import sys\nsys.exit(0)",
        "def add(a, b):\n    print(3)\n    print([1, 2])\n    raise SystemExit(0)",
        "print(3)\nprint('all tests passed')\nquit()",
        "def add(a, b):\n    return True",
        "import sys\nprint(sys.stdin.read())\nsys.exit(0)",
        "def add(a, b): return",
        "def add(a, b) return 3",
        "while True: pass",
    ],
)
@pytest.mark.parametrize("tests", [ADD, ASSERTIONS], ids=["calls", "assertions"])
def test_exiting_early_or_printing_earns_nothing(code: str, tests: JsonValue) -> None:
    reward = Code(sandbox=SandboxLimits(time_s=2.0))
    assert verdict_of(code, tests, reward).outcome is Outcome.WRONG


@needs_sandbox
def test_partial_credit_is_the_share_of_results() -> None:
    half = "def add(a, b):\n    return 3"
    assert verdict_of(half, ADD).value == 0.0
    found = verdict_of(half, ADD, Code(partial=True, sandbox=LIMITS))
    assert (found.value, found.outcome) == (0.5, Outcome.WRONG)


def test_a_response_without_a_block_is_wrong() -> None:
    prompt = Prompt(text="?", metadata={"tests": ADD})
    found = Code().score(prompt, rollout(GOOD))
    assert (found.outcome, found.detail) == (Outcome.WRONG, "no Python block")


@pytest.mark.parametrize("tests", ["", [], {}, {"inputs": [1], "outputs": []}, {"inputs": [], "outputs": []}])
def test_a_row_without_tests_is_set_aside(tests: JsonValue) -> None:
    # An empty list of tests is passed by every program.
    why = Code().unscorable(Prompt(text="?", metadata={"tests": tests}, row=4))
    assert why.startswith("row 4: ")


@needs_sandbox
def test_a_row_whose_own_solution_fails_is_set_aside() -> None:
    reward = Code(solution_field="solution", sandbox=LIMITS)
    assert reward.unscorable(Prompt(text="?", metadata={"tests": ADD, "solution": GOOD})) == ""
    bad = Prompt(text="?", metadata={"tests": ADD, "solution": fenced(GOOD.replace("+", "-"))})
    assert "its solution fails: test 1" in reward.unscorable(bad)
    assert "has no solution" in reward.unscorable(Prompt(text="?", metadata={"tests": ADD}))


@needs_sandbox
async def test_slow_programs_are_wrong_and_do_not_disturb_the_others() -> None:
    reward = Code(sandbox=SandboxLimits(time_s=3.0), limits=Limits(time_s=60.0))
    record = group(fenced(GOOD), fenced("while True: pass"), "", fenced(GOOD), metadata={"tests": ADD})
    found = await scores(reward, record)
    assert [s.outcome.value for s in found] == ["ok", "wrong", "wrong", "ok"]
    assert found[1].detail == "test 1: over its limit of time"


async def test_a_sandbox_that_cannot_be_had_ends_the_run() -> None:
    with pytest.raises(UserError, match=r"code can't run in a worker: .*sandbox"):
        await run(Code(sandbox=SandboxLimits(memory_mb=1)), group("x", metadata={"tests": ADD}))


def test_no_more_tests_are_read_than_asked_for() -> None:
    (calls,) = read_tests(json.dumps({**ADD, "inputs": [[1, 1]] * 30, "outputs": [2] * 30}), "", 4)
    assert calls.size == 4
    assert len(read_tests(json.dumps(["assert True"] * 30), "", 4)) == 4
