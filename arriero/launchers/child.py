"""A process of ours whose output passes through, with its end kept to tell what went wrong."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence

from arriero.launchers.parent import signal_tree

_KEPT_BYTES = 16 << 10
_QUIET_S = 1.0  # for what a process that has ended wrote last; who inherited its output may live on


class Child:
    """Make it with `start`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._kept = bytearray()
        self._passing = asyncio.create_task(self._pass_through())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Raises OSError."""
        return cls(await asyncio.create_subprocess_exec(
            *command, env=dict(environment), stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=STDOUT,
            start_new_session=True,
        ))  # fmt: skip

    async def ended(self) -> int:
        """Its exit code, negative for a signal, once its output is known."""
        code = await self._process.wait()
        await asyncio.wait({self._passing}, timeout=_QUIET_S)
        return code

    def said(self) -> str:
        return self._kept.decode(errors="replace")

    def kill(self) -> None:
        """It and all that it has started. Idempotent."""
        if self._process.returncode is None:
            signal_tree(self._process.pid, signal.SIGKILL)

    async def _pass_through(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(1 << 16):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            self._kept += chunk
            del self._kept[:-_KEPT_BYTES]
