"""Runs a Python program that nobody trusts: no network, no files but the standard library's, hard limits.

| what              | by namespaces (default)               | by seccomp alone                      |
|-------------------|---------------------------------------|---------------------------------------|
| network           | an empty namespace, no sockets        | no sockets                            |
| files             | the interpreter's, read-only, and an  | readable as to an ordinary user, none |
|                   | empty /tmp                            | can be written                        |
| other processes   | out of sight                          | in sight, but no signals to them      |
| its own processes | at most `processes`                   | none; threads                         |
| memory, processor | `memory_mb`, `time_s` of each process | the same                              |
| time, output      | `time_s`, `output_kb`, then SIGKILL   | the same                              |

Where the kernel doesn't allow it, nothing runs: `SandboxError` says what was refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked

Isolation = Literal["namespaces", "seccomp"]
End = Literal["exit", "time", "output"]

_JAIL = Path(__file__).with_name("jail.py")
_GRACE_S = 10.0  # for the interpreter to start on a busy machine


class SandboxError(Exception):
    """The sandbox can't be had here: nothing ran."""


@checked(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SandboxLimits:
    """Hard limits of one program; memory and processor time are those of each of its processes."""

    time_s: PositiveFloat = 5.0
    memory_mb: PositiveInt = 512
    processes: PositiveInt = 8
    disk_mb: PositiveInt = 16
    output_kb: PositiveInt = 256
    isolation: Isolation = "namespaces"  # the least that is accepted
    packages: bool = False  # the installed ones can be imported, read-only


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a program ended: by itself with `code` (128 + n after signal n), or stopped."""

    end: End
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def clean(self) -> bool:
        """It ended by itself, without an error."""
        return self.end == "exit" and self.code == 0

    @property
    def why(self) -> str:
        """What went wrong, in a line; empty if nothing."""
        if self.end != "exit":
            return f"over its limit of {self.end}"
        last = self.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return "" if self.code == 0 else f"exit code {self.code} {last[:200]}".strip()


def run_program(source: str, stdin: str, limits: SandboxLimits) -> Ran:
    """The program's end and output. Raises SandboxError."""
    if sys.platform != "linux":
        raise SandboxError(f"there is no sandbox for {sys.platform}; run rewards that need one on Linux")
    program, given = _in_memory(source), _in_memory(stdin)
    status_read, status_write = os.pipe()
    asked = {
        "namespaces": limits.isolation == "namespaces", "memory_mb": limits.memory_mb,
        "time_s": limits.time_s, "processes": limits.processes, "disk_mb": limits.disk_mb,
        "packages": limits.packages,
    }  # fmt: skip
    flags = ["-I", "-B"] if limits.packages else ["-I", "-B", "-S"]
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, str(_JAIL), str(status_write), str(program), json.dumps(asked)],
            stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(status_write, program),
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "", "OPENBLAS_NUM_THREADS": "1"}, cwd="/",
            start_new_session=True,
        )  # fmt: skip
    finally:
        for descriptor in (program, given, status_write):
            os.close(descriptor)
    try:
        _confined(process, status_read)
        return _watched(process, limits)
    finally:
        os.close(status_read)
        _kill(process)


def _confined(process: subprocess.Popen[bytes], status: int) -> None:
    """Returns when the program starts. Raises SandboxError if it can't."""
    deadline, said = time.monotonic() + _GRACE_S + 20, b""
    while True:
        ready, _, _ = select.select([status], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(status, 1000) if ready else b""
        said += data
        if said == b"ok":
            return
        if not data:
            break
    if not said:
        process.kill()
        error = process.stderr.read() if process.stderr else b""
        said = b"it didn't start: " + error[-300:]
    raise SandboxError(" ".join(said.decode(errors="replace").split()))


def _watched(process: subprocess.Popen[bytes], limits: SandboxLimits) -> Ran:
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + limits.time_s
    end: End
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    open_ones = set(outputs)
    end = "exit"
    while open_ones:
        ready, _, _ = select.select(list(open_ones), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            end = "time"
            break
        for descriptor in ready:
            data = os.read(descriptor, 1 << 16)
            outputs[descriptor] += data
            if not data:
                open_ones.discard(descriptor)
        if sum(map(len, outputs.values())) > limits.output_kb << 10:
            end = "output"
            break
    if end == "exit":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        end = "exit" if process.poll() is not None else "time"
    _kill(process)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    out, err = (bytes(o) for o in outputs.values())
    if end == "exit" and code == 128 + signal.SIGXCPU:
        end = "time"
    return Ran(end=end, code=code, stdout=out, stderr=err)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _in_memory(text: str) -> int:
    descriptor = os.memfd_create("arriero")
    os.write(descriptor, text.encode(errors="surrogateescape")) if text else None
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
