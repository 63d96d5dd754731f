"""The stacks of replicas on this machine, by py-spy: read from outside, whatever the process does."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from arriero.launchers.vitals import Vitals

_BOUND_S = 5.0  # for one process
_MOST = 4  # processes that are looked at; the stacks of more say the same


def stacks(vitals: Vitals, keys: Iterable[str]) -> str:
    """What each of `keys` ("<role>-<replica>-<rank>") does, thread by thread, or why that isn't known."""
    wanted = [*dict.fromkeys(keys)]
    parts = [f"stack of {key}:\n{_stack(vitals, key)}" for key in wanted[:_MOST]]
    if left := wanted[_MOST:]:
        parts.append(f"stacks of {', '.join(left)} were left out")
    return "\n".join(parts)


def _stack(vitals: Vitals, key: str) -> str:
    status = vitals.pulses[key].status
    if status.host != socket.gethostname():
        return f"  it runs on {status.host}; there: py-spy dump --pid {status.pid}"
    if (program := find_py_spy()) is None:
        return "  py-spy isn't there: pip install 'arriero[doctor]'"
    command = [program, "dump", "--nonblocking", "--pid", str(status.pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    except subprocess.TimeoutExpired:
        return f"  py-spy had no answer within {_BOUND_S:g} s"
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines()
        return f"  py-spy can't read process {status.pid}: {why[-1] if why else done.returncode}"
    # The first lines name the process and the interpreter.
    return "\n".join(f"  {line}" for line in done.stdout.split("\n\n", 1)[-1].splitlines() if line.strip())


def find_py_spy() -> str | None:
    """The program, on PATH or beside the interpreter."""
    folders = (sysconfig.get_path("scripts"), str(Path(sys.executable).parent))
    return shutil.which("py-spy") or next((f for d in folders if (f := shutil.which("py-spy", path=d))), None)
